"""Fetching: datasets from the Hugging Face hub, models from there or from the archives that fairseq published.

Nothing here is called unless the user asks for it by name: `fairseq-icl fetch`, `model=hub:NAME`, `data=hub`.
"""

HUB = "hub:"
"""Before the name of a model on the hub: hub:OWNER/NAME, or hub:OWNER/NAME@REVISION."""


def split_name(name: str) -> tuple[str, str | None]:
    """(repository, revision) of `hub:OWNER/NAME@REVISION`."""
    repository, _, revision = name.removeprefix(HUB).partition("@")
    return repository, revision or None
