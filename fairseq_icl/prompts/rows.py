"""Which rows a split has, in which order: what shuffling by a seed, and so every result, depends on.

A row's line is its texts, its own options where it has any, and the number of the right one; the hash of a split is
that of all its lines. File format, label names and template do not count: the same rows as JSONL and as Parquet are
the same rows. The datasets' YAML files have the hashes of the files that the papers used, as far as they are known.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fairseq_icl.files import sha256_of
from fairseq_icl.prompts.catalogue import DatasetSpec
from fairseq_icl.prompts.readers import Row, Split, find_split

Likeness = Literal["same", "fitting", "unknown", "other"]
DOUBTFUL: tuple[Likeness, ...] = ("unknown", "other")
"""Results may differ from the papers' because of the rows."""


@dataclass(frozen=True)
class RowRecord:
    """What a result remembers of a split: how many rows it has, and the hash of the rows in order."""

    count: int
    sha256: str
    likeness: Likeness | None = None
    """How like those that the papers used, where that was looked at and something is known of them."""

    def as_dict(self) -> dict[str, Any]:
        """For files of results."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """A split beside the one that the papers used."""

    likeness: Likeness
    """same; fitting: as far as single rows are known; unknown: as many rows, no more is known; other."""
    text: str
    """The same for people."""

    @property
    def is_doubtful(self) -> bool:
        """Whether results may differ from the papers' because of the rows."""
        return self.likeness in DOUBTFUL


def record_rows(spec: DatasetSpec, rows: Sequence[Row]) -> RowRecord:
    """Number and hash of a split's rows, as `read_split` returns them."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(_line(spec, row))
    return RowRecord(len(rows), digest.hexdigest())


def hash_row(spec: DatasetSpec, row: Row) -> str:
    """Hash of a single row."""
    return hashlib.sha256(_line(spec, row)).hexdigest()


def _line(spec: DatasetSpec, row: Row) -> bytes:
    texts = [row.texts[name] for name in spec.fields]
    content = [texts, row.gold] if spec.has_classes else [texts, row.options, row.gold]
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def compare_rows(
    folder: Path, spec: DatasetSpec, split: Split, rows: Sequence[Row], record: RowRecord | None = None
) -> Comparison | None:
    """The rows of a split of the data in `folder` beside those that the papers used; None if nothing is known of them.

    The hub's own file is recognised by its checksum. `record`: of these rows, if it was made already.
    """
    known = spec.rows.get(split)
    if known is None:
        return None
    if len(rows) != known.count:
        return Comparison("other", f"not the papers' rows: {len(rows):,}, the papers' file has {known.count:,}")
    if known.sha256 and (record or record_rows(spec, rows)).sha256 == known.sha256:
        return Comparison("same", "row for row those of the papers")
    if (pinned := spec.hub and spec.hub.sha256.get(split)) and _sum_of_file(folder, spec, split) == pinned:
        return Comparison("same", "row for row those of the papers (the hub's own file)")
    if known.sha256:
        return Comparison("other", "not the papers' rows: as many, but other ones or in another order")
    for number, sha256 in known.single.items():
        if hash_row(spec, rows[number]) != sha256:
            return Comparison("other", f"not the papers' rows: as many, but row {number:,} is another one")
    if known.single:
        told = f"the {len(known.single)} that are known are in place"
        return Comparison("fitting", f"as many rows as the papers' file; {told}")
    return Comparison("unknown", "as many rows as the papers' file; whether they are in its order is not known")


def _sum_of_file(folder: Path, spec: DatasetSpec, split: Split) -> str | None:
    files = find_split(folder, spec, split)
    return sha256_of(files[0]) if len(files) == 1 else None
