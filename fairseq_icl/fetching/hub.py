"""The Hugging Face hub, by its own library (`pip install 'fairseq-icl[hub]'`): which files a repository has.

The library says what there is, with sizes and checksums, and adds the user's token; HF_ENDPOINT, HF_HUB_OFFLINE and
HF_TOKEN mean what they mean everywhere. The files come by `download`, which goes on after a cut.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from fairseq_icl.errors import UserError
from fairseq_icl.fetching.download import GIT, checksum_of, download, network_reason
from fairseq_icl.files import FULL, reason_of

Kind = Literal["model", "dataset"]
ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True)
class Repository:
    """A repository of the hub at one commit."""

    kind: Kind
    name: str
    commit: str
    files: dict[str, tuple[int | None, str | None]]
    """Path -> size and checksum, where known: sha256 of a large file, git's hash of a small one (marked `git:`)."""

    def has(self, path: str, place: Path) -> bool:
        """Whether the file is at `place` already."""
        _, wanted = self.files.get(path, (None, None))
        return wanted is not None and place.is_file() and checksum_of(place, wanted) == wanted

    def fetch(self, path: str, place: Path, *, pinned: str | None = None, quiet: bool = False) -> None:
        """Bring a file, unless it is there already. `pinned`: the sha256 that it must have, whatever the hub says."""
        if path not in self.files:
            page = address(self.kind, self.name, self.commit, "")
            raise UserError(f"{self.name}: no file {path} in it at {self.commit[:12]}; see {page}")
        if not self.has(path, place):
            token = _library().get_token()  # if the user has logged in
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            (size, checksum), url = self.files[path], address(self.kind, self.name, self.commit, path)
            download(url, place, size=size, checksum=pinned or checksum, headers=headers, quiet=quiet)


def endpoint() -> str:
    """Where the hub is."""
    return os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")


def address(kind: Kind, name: str, revision: str, path: str) -> str:
    """Where the hub has a file; for people as well, who may fetch it with a browser."""
    return f"{endpoint()}/{'datasets/' * (kind == 'dataset')}{name}/resolve/{quote(revision, safe='')}/{quote(path)}"


def open_repository(kind: Kind, name: str, revision: str | None, by_hand: str) -> Repository:
    """What the hub has at a revision (branch, tag, commit); `by_hand` says how to do without, if it cannot be asked."""
    ask = _library().HfApi(endpoint()).repo_info
    with _one_line(name, revision, by_hand):
        found = ask(name, repo_type=kind, revision=revision, files_metadata=True, timeout=30.0)
    files = {
        file.rfilename: (file.size, file.lfs.sha256 if file.lfs else file.blob_id and GIT + file.blob_id)
        for file in found.siblings or []
    }
    return Repository(kind, found.id, found.sha, files)


def fetch_to_cache(
    repository: Repository, name: str, revision: str | None, paths: Sequence[str], by_hand: str, *, quiet: bool = False
) -> Path:
    """The folder in the library's own cache that holds these files of the repository, fetched if they are not there."""
    library = _library()
    if quiet:
        library.utils.disable_progress_bars()
    bring = partial(library.hf_hub_download, endpoint=endpoint())
    for path in paths:
        with _one_line(repository.name, repository.commit, by_hand):
            place = Path(bring(name, path, revision=repository.commit))
        if not repository.has(path, place):
            raise UserError(f"{place}: damaged (its checksum is not the hub's); remove it and try again")
    # So the cache knows next time, without network, what `name`, which may be an old one, and `revision` mean.
    with _one_line(repository.name, revision, by_hand):
        return Path(bring(name, paths[0], revision=revision)).parent


def _library() -> Any:
    """huggingface_hub, or how to get it."""
    try:
        import huggingface_hub
    except ImportError as error:
        remedy = "pip install 'fairseq-icl[hub]' (or huggingface_hub)"
        raise UserError(f"the Hugging Face hub needs its library: {remedy}") from error
    return huggingface_hub


@contextmanager
def _one_line(name: str, revision: str | None, by_hand: str) -> Iterator[None]:
    """What the library raises, in one line that says what to do."""
    from huggingface_hub import errors

    known = {
        errors.GatedRepoError: "its owner asks to agree to terms; do so on its page, then: hf auth login",
        errors.RevisionNotFoundError: f"the hub has no revision {revision} of it; {by_hand}",
        errors.RepositoryNotFoundError: "the hub has no repository of that name, or it is private (hf auth login); "
        "give OWNER/NAME",
        errors.HFValidationError: "not a name of a repository on the hub; give OWNER/NAME",
        errors.OfflineModeIsEnabled: f"HF_HUB_OFFLINE is set, so the hub is not asked; unset it, or {by_hand}",
    }
    try:
        yield
    except Exception as error:
        for kind, message in known.items():
            if isinstance(error, kind):
                raise UserError(f"{name}: {message}") from error
        if isinstance(error, OSError) and error.errno in FULL:
            raise UserError(f"{name}: its files cannot be kept ({reason_of(error)}); free some space") from error
        fault: BaseException | None = error  # of a connection? The library's transport (httpx, ...) has its own kinds
        while not (fault is None or isinstance(fault, OSError) or type(fault).__module__.startswith("http")):
            fault = fault.__cause__
        if fault is None:
            raise
        raise UserError(f"{endpoint()}: cannot be reached ({network_reason(error)[:200]}); {by_hand}") from error


def cached_folder(name: str, revision: str | None, path: str) -> Path | None:
    """The folder with the file `path` of a model in the library's cache, if it is there; the hub is not asked."""
    found = _library().try_to_load_from_cache(name, path, revision=revision)
    return Path(found).parent if isinstance(found, str) else None
