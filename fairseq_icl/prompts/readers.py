"""Data files -> checked rows: JSONL, TSV, CSV and Parquet, in the field names of the Hugging Face versions.

Every row is checked when it is read, so that a bad one is reported with file and line before anything is computed.

Which rows a split has, in which order, is what shuffling by a seed, and so every result, depends on. A row's line is
its texts, its own options where it has any, and the number of the right one; the hash of a split is that of all its
lines. File format, label names and template do not count: the same rows as JSONL and as Parquet are the same rows. The
datasets' YAML files have the hashes of the files that the papers used, as far as they are known.
"""

import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow.parquet

from fairseq_icl.errors import UserError
from fairseq_icl.files import sha256_of
from fairseq_icl.prompts.catalogue import DatasetSpec, Split

SPLITS: tuple[Split, ...] = ("train", "valid")
Record = tuple[int, dict[str, Any]]  # line number in the file (row number in Parquet), fields


@dataclass(frozen=True, slots=True)
class Row:
    """One labelled row: its texts, the options it offers and which of them is right."""

    index: int  # position among the split's rows, before any shuffling
    path: Path
    where: str  # FILE:LINE, for messages
    texts: dict[str, str]
    options: tuple[str, ...]
    gold: int


def read_split(folder: Path, spec: DatasetSpec, split: Split) -> list[Row]:
    """All rows of a split in file order. UserError names file and line of the first bad row."""
    rows: list[Row] = []
    files = find_split(Path(folder), spec, split)
    for path in files:
        try:
            for line, fields in READERS[path.suffix](path, spec):
                rows.append(_check_row(spec, fields, len(rows), path, line))
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error}); check the file") from error
    if not rows:
        raise UserError(f"{files[0]}: no rows; the {split} split of {spec.name} needs at least one labelled row")
    return rows


def find_split(folder: Path, spec: DatasetSpec, split: Split) -> list[Path]:
    """The file of a split (several for Parquet in pieces); our name of the split goes before the Hugging Face one."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder that holds the data files")
    stems = tuple(dict.fromkeys((split, spec.splits[split])))
    for stem in stems:
        usual = (folder / spec.name / stem, folder / f"{spec.name}_{stem}", folder / stem)
        for base in (*usual, folder / spec.name / "data" / stem, folder / "data" / stem):
            for suffix in READERS:
                if (path := base.with_name(f"{base.name}{suffix}")).is_file():
                    return [path]
            if pieces := sorted(base.parent.glob(f"{escape(base.name)}-[0-9]*-of-[0-9]*.parquet")):
                return pieces
    missing = " or ".join(f"{spec.name}/{stem}.*" for stem in stems)
    raise UserError(
        f"{folder}: no file for the {split} split of {spec.name}; put {missing} there (.jsonl, .tsv, .csv or .parquet)"
    )


def has_files(folder: Path, name: str) -> bool:
    """Whether the folder seems to hold files of the dataset of that name."""
    return (folder / name).is_dir() or any(folder.glob(f"{escape(name)}_*.*"))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered non-blank lines. Only line feeds end a line: U+0085 and the like are part of a text."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
            if line.strip():
                yield number, line


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that stands twice is an error and not a choice of the last one."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return fields


def _read_jsonl(path: Path, spec: DatasetSpec) -> Iterator[Record]:
    for number, line in _lines(path):
        try:
            fields = json.loads(line, object_pairs_hook=_without_repetition)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not JSON ({error}); every line must be one JSON object") from error
        if not isinstance(fields, dict):
            raise UserError(f"{path}:{number}: not a JSON object; write {{{spec.columns[0]!r}: ...}} on every line")
        yield number, fields


def _read_tsv(path: Path, spec: DatasetSpec) -> Iterator[Record]:
    """Tab-separated without any quoting, as GLUE is written."""
    lines = _lines(path)
    names = next(lines, (0, ""))[1].split("\t")
    for number, line in lines:
        yield number, _columns(path, number, names, line.split("\t"))


def _read_csv(path: Path, spec: DatasetSpec) -> Iterator[Record]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            names = next(reader, [])
            for values in reader:
                if values:
                    yield reader.line_num, _columns(path, reader.line_num, names, values)
    except csv.Error as error:
        raise UserError(
            f"{path}:{reader.line_num}: not CSV ({error}); quote fields that hold commas or quotes"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason}); save the file as UTF-8") from error


def _columns(path: Path, number: int, names: list[str], values: list[str]) -> dict[str, str]:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{path}:1: the column {twice!r} stands twice; rename one of them")
    if len(values) != len(names):
        raise UserError(
            f"{path}:{number}: {len(values)} columns, but the header has {len(names)}; "
            f"the first line must name the columns and every line must have them all"
        )
    return dict(zip(names, values, strict=True))


def _read_parquet(path: Path, spec: DatasetSpec) -> Iterator[Record]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            present = [name for name in spec.columns if name in file.schema_arrow.names]
            batches = file.iter_batches(columns=present)
            rows = (batch.to_pylist() if present else [{}] * batch.num_rows for batch in batches)
            yield from enumerate(chain.from_iterable(rows), 1)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error}); download it again") from error


READERS = {".jsonl": _read_jsonl, ".tsv": _read_tsv, ".csv": _read_csv, ".parquet": _read_parquet}


def _check_row(spec: DatasetSpec, fields: dict[str, Any], index: int, path: Path, line: int) -> Row:
    where = f"{path}:{line}"
    texts = {name: _check_text(_value(fields, name, where), name, where) for name in spec.fields}
    for name, mark in spec.cut.items():
        before, found, after = texts[name].partition(mark)
        if not found:
            raise UserError(f"{where}: field {name!r} has no {mark!r} to cut it at; every row needs one")
        texts[f"{name}_before"], texts[f"{name}_after"] = before, after
    if spec.has_classes:
        options = spec.label_words
    elif isinstance(spec.options.source, str):
        options = _texts(fields, spec.options.source, where)
    else:
        options = tuple(_check_text(_value(fields, name, where), name, where) for name in spec.options.source)
    names = _texts(fields, spec.options.names, where) if spec.options.names else spec.label_names
    if names and len(names) != len(options):
        raise UserError(
            f"{where}: {len(names)} names in {spec.options.names!r} for {len(options)} options; they must pair"
        )
    gold = _gold(_value(fields, spec.label, where), names, len(options), where)
    return Row(index, path, where, texts, options, gold)


def _value(fields: dict[str, Any], path: str, where: str) -> Any:
    """The value at a dotted path (`choices.text`)."""
    value: Any = fields
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            has = f"the row has {', '.join(map(str, fields))}" if fields else "the row has none of the dataset's fields"
            raise UserError(f"{where}: field {path!r} is missing; {has}")
        value = value[key]
    return value


def _texts(fields: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = _value(fields, name, where)
    if not isinstance(value, list) or len(value) < 2:
        raise UserError(f"{where}: field {name!r} must be a list of two or more texts (use JSONL or Parquet for lists)")
    return tuple(_check_text(item, name, where) for item in value)


def _check_text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: field {name!r} is {type(value).__name__}, not text; put quotes around it")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise UserError(
            f"{where}: field {name!r} holds half a surrogate pair (\\ud800-\\udfff); write whole characters"
        )
    return value


def _gold(value: Any, names: tuple[str, ...], count: int, where: str) -> int:
    """The gold option's number from a label name, a number or a number written as text."""
    word = str(value).lower() if isinstance(value, bool) else str(value).strip()
    if word in names:
        return names.index(word)
    if value is None or word in ("", "-1"):
        raise UserError(f"{where}: the row has no label ({value!r}); use a labelled split")
    numbered = any(name.isdecimal() for name in names)
    if isinstance(value, float) and value.is_integer():
        word = str(int(value))
    if word.isascii() and word.isdecimal() and len(word) < 10 and not numbered and int(word) < count:
        return int(word)
    allowed = " or ".join(filter(None, ("" if numbered else f"0 to {count - 1}", ", ".join(names))))
    raise UserError(f"{where}: unknown label {word[:80]!r}; it must be {allowed}")


Likeness = Literal["same", "fitting", "unknown", "other"]
"""fitting: as far as single rows are known; unknown: as many rows, no more is known."""
DOUBTFUL: tuple[Likeness, ...] = ("unknown", "other")


@dataclass(frozen=True)
class RowRecord:
    """What a result remembers of a split: how many rows it has, and the hash of the rows in order."""

    count: int
    sha256: str
    likeness: Likeness | None = None  # to those that the papers used, where something is known of them


@dataclass(frozen=True)
class Comparison:
    """A split beside the one that the papers used."""

    likeness: Likeness
    text: str  # the same for people

    @property
    def is_doubtful(self) -> bool:
        """Whether results may differ from the papers' because of the rows."""
        return self.likeness in DOUBTFUL


def record_rows(spec: DatasetSpec, rows: Sequence[Row]) -> RowRecord:
    """Number and hash of rows, as `read_split` returns them."""
    digest = hashlib.sha256()
    for row in rows:
        own = [] if spec.has_classes else [row.options]
        line = [[row.texts[name] for name in spec.fields], *own, row.gold]
        digest.update(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    return RowRecord(len(rows), digest.hexdigest())


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
    files = find_split(folder, spec, split)
    if (pinned := spec.hub and spec.hub.sha256.get(split)) and [sha256_of(file) for file in files] == [pinned]:
        return Comparison("same", "row for row those of the papers (the hub's own file)")
    if known.sha256:
        return Comparison("other", "not the papers' rows: as many, but other ones or in another order")
    for number, sha256 in known.single.items():
        if record_rows(spec, [rows[number]]).sha256 != sha256:
            return Comparison("other", f"not the papers' rows: as many, but row {number:,} is another one")
    if not known.single:
        return Comparison("unknown", "as many rows as the papers' file; whether they are in its order is not known")
    told = f"as many rows as the papers' file; the {len(known.single)} that are known are in place"
    return Comparison("fitting", told)
