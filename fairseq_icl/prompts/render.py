"""Row -> texts: what stands before the label, and the label text, for every option."""

from collections.abc import Mapping
from dataclasses import dataclass

from fairseq_icl.prompts.catalogue import PLACEHOLDER, DatasetSpec
from fairseq_icl.prompts.readers import Row


@dataclass(frozen=True)
class Rendered:
    """A row as texts. Classification options share one input text; other tasks may have one an option."""

    row: int
    options: tuple[tuple[str, str], ...]
    """(input text, label text) of every option."""
    gold: int


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with every `{name}` replaced by its value, once: braces inside a value stay as they are."""
    return PLACEHOLDER.sub(lambda found: values[found[1]], template)


def render(spec: DatasetSpec, row: Row) -> Rendered:
    """The texts of one row. A label text is a word or an option preceded by exactly one space, as the authors do."""
    options = []
    for option in row.options:
        values = {**row.texts, "option": option}
        options.append((fill(spec.template, values), " " + fill(spec.options_label, values).strip()))
    return Rendered(row.index, tuple(options), row.gold)
