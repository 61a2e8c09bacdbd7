"""The tidy table of results, its file with what made it written inside (Parquet, or CSV), and its provenance.

One row per value. `example` is missing in means over examples, `layer` in values that are not of one layer; `low` and
`high` are the 95 % bootstrap interval of a mean over examples. No file contains a time or a machine's name: the same
run writes the same bytes. Nothing here needs torch or fairseq.
"""

import io
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fairseq_icl import __version__
from fairseq_icl.errors import UserError
from fairseq_icl.files import reason_of, sha256_of, write_atomically

COLUMNS = {"dataset": "str", "seed": "int64", "permutation": "int64", "method": "str", "init": "str", "metric": "str"}
COLUMNS |= {"layer": "Int64", "example": "Int64", "value": "float64", "low": "Float64", "high": "Float64"}
"""Columns of the table and their pandas types; those with a capital letter may be missing."""

METADATA_KEY = b"fairseq_icl"
CURVE_COLUMNS = {"demonstrations": "int64", "metric": "str", "value": "float64", "low": "float64", "high": "float64"}
"""Columns of the curves over the demonstrations and their types; training/dynamics.py makes them."""
LENGTH_RATIO = "length_ratio_"  # NAME: beside a cosine, how long its second vector is in units of the first
CSV_COMMENT = "# fairseq_icl "


def write_results(path: str | Path, table: pd.DataFrame, provenance: Mapping[str, Any]) -> None:
    """Write the table and its provenance, completely or not at all: CSV if the name ends in .csv, else Parquet.

    In a CSV file the provenance is the first line, a comment: pandas.read_csv(path, comment="#") skips it.
    """
    path = Path(path)
    table = table[list(COLUMNS)].astype(COLUMNS)
    if table["value"].isna().any():
        raise ValueError("a table must not contain undefined values: leave the row out and count it")
    described = json.dumps(provenance, sort_keys=True, default=str)
    if path.suffix == ".csv":
        rows = table.to_csv(index=False, lineterminator="\n")
        write_atomically(path, f"{CSV_COMMENT}{described}\n{rows}")
    else:
        arrow = pa.Table.from_pandas(table, preserve_index=False)
        arrow = arrow.replace_schema_metadata({METADATA_KEY: described.encode()})
        write_atomically(path, lambda new: pq.write_table(arrow, new, compression="zstd", write_page_checksum=True))


def read_results(path: str | Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """What a results file holds.

    Args:
        path: `results.parquet` of a cell, or what `fairseq-icl score --results` wrote (.parquet or .csv).

    Returns:
        The table, as `compare` returns it, and its provenance: configuration, versions, checkpoints, machine.

    Example:
        ```python
        table, provenance = read_results("RUN/results.parquet")
        ```
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such results file")
    try:
        if path.suffix == ".csv":
            first, _, rest = path.read_text(encoding="utf-8").partition("\n")
            described = first.removeprefix(CSV_COMMENT) if first.startswith(CSV_COMMENT) else None
            missing = {column: [""] for column, kind in COLUMNS.items() if kind[0].isupper()}
            table = pd.read_csv(io.StringIO(rest), dtype=COLUMNS, keep_default_na=False, na_values=missing)
        else:
            arrow = _read_parquet(path)
            described = (arrow.schema.metadata or {}).get(METADATA_KEY)
            table = arrow.to_pandas()
    except (pa.ArrowException, OSError, UnicodeDecodeError, pd.errors.ParserError, ValueError) as error:
        raise UserError(f"{path}: not a results file, or damaged [{str(error).splitlines()[0]}]") from error
    if described is None or list(table.columns) != list(COLUMNS):
        raise UserError(f"{path}: not a results file of fairseq_icl")
    return table.astype(COLUMNS), json.loads(described)


def _read_parquet(path: Path, columns: Sequence[str] | None = None, rows: pc.Expression | None = None) -> pa.Table:
    """The chosen columns and rows of a results file; what is not chosen stays on disk."""
    try:
        return pq.read_table(path, columns=columns, filters=rows, page_checksum_verification=True)
    except (pa.ArrowException, OSError, LookupError, ValueError, TypeError) as error:
        raise UserError(f"{path}: damaged, or not a file of results ({reason_of(error)})") from error


def read_means(path: Path) -> pd.DataFrame:
    """The means over examples in a results file: metric, layer, value, low, high."""
    table = _read_parquet(path, ["metric", "layer", "value", "low", "high"], pc.field("example").is_null())
    return table.to_pandas().astype({"layer": "Int64", "low": "float64", "high": "float64"})


def read_examples(path: Path, metrics: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Metric -> values of single examples, a row an example and a column a layer (one column, -1, if it has none)."""
    chosen = pc.field("metric").isin(list(metrics)) & pc.field("example").is_valid()
    table = _read_parquet(path, ["metric", "layer", "example", "value"], chosen)
    frame = table.set_column(1, "layer", pc.fill_null(table["layer"], -1)).to_pandas()
    return {str(metric): _grid(rows) for metric, rows in frame.groupby("metric", sort=False)}


def _grid(rows: pd.DataFrame) -> pd.DataFrame:
    """(example, layer, value) rows -> a row an example, a column a layer."""
    last, example = int(rows["layer"].max()), rows["example"].to_numpy(np.int64)
    layers = np.arange(last + 1) if last >= 0 else np.array([-1])  # one that has no value has a column all the same
    if len(rows) % len(layers) == 0 and (rows["layer"].to_numpy().reshape(-1, len(layers)) == layers).all():
        # As it is written, unless some value is not defined: layers within examples.
        values = rows["value"].to_numpy(np.float64).reshape(-1, len(layers))
        return pd.DataFrame(values, example[:: len(layers)], layers)
    return rows.pivot(index="example", columns="layer", values="value").reindex(columns=layers)


def means(table: pd.DataFrame, layers: bool = False) -> pd.DataFrame:
    """The rows of a table that are means over examples, and counts.

    Args:
        table: Of `compare` or `read_results`.
        layers: The means of single layers, in place of those over all layers.

    Returns:
        The rows without `example`.

    Example:
        ```python
        means(table).set_index("metric")["value"]
        ```
    """
    single_layer = table["layer"].notna()
    return table[table["example"].isna() & (single_layer if layers else ~single_layer)]


def provenance(
    config: Mapping[str, Any],
    checkpoints: Mapping[str, str | Path] | None = None,
    *,
    precision: str = "fp32",
    device: Any = "cpu",
) -> dict[str, Any]:
    """What made a table: configuration, versions, commit, and the SHA-256 of each named checkpoint.

    And what rounding depends on, which fine-tuning at the papers' rates amplifies: threads, device and precision.
    """
    versions = {"fairseq_icl": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "fairseq", "fairseq-fixed"):
        with suppress(PackageNotFoundError):  # one of fairseq and fairseq-fixed is there, not both
            versions[name] = version(name)
    machine: dict[str, Any] = {}
    if torch := sys.modules.get("torch"):  # where nothing was computed there is nothing to say
        from fairseq_icl.devices import describe_device

        machine = {"threads": torch.get_num_threads(), **describe_device(device), "precision": precision}
    return {
        "config": dict(config),
        "checkpoints": {name: sha256_of(path) for name, path in (checkpoints or {}).items()},
        "versions": versions,
        "machine": machine,
        "git": _git_state(Path(__file__).parent.parent),
    }


def _git_state(package: Path) -> dict[str, Any] | None:
    """Commit of the package's repository and whether the package was changed since; None if none tracks the package."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # the repository may be that of who installed it in a .venv
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.CalledProcessError):
        return None


def write_curve(path: Path, curve: pd.DataFrame) -> None:
    """Write a curve over the demonstrations as Parquet."""
    arrow = pa.Table.from_pandas(curve.astype(CURVE_COLUMNS), preserve_index=False)
    write_atomically(path, lambda unfinished: pq.write_table(arrow, unfinished, write_page_checksum=True))


def read_curve(path: Path) -> pd.DataFrame:
    """What `write_curve` wrote."""
    try:
        return pq.read_table(path, columns=list(CURVE_COLUMNS), page_checksum_verification=True).to_pandas()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path}: damaged, or not a file of curves") from error


def text_table(lines: Sequence[Sequence[object]], *, names: int | None = None) -> str:
    """Lines of cells, the first being the head, as text: columns padded to their widest cell.

    The first `names` columns stand to the left, the others to the right; by default those to the left whose cells
    below the head are text.
    """
    cells = [[f"{x:,}" if isinstance(x, int) else str(x) for x in line] for line in lines]
    padded = []
    for number, column in enumerate(zip(*cells, strict=True)):
        width, is_text = max(map(len, column)), all(isinstance(line[number], str) for line in lines[1:])
        at_left = is_text if names is None else number < names
        padded.append([cell.ljust(width) if at_left else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


NONE = -1  # stands for a missing layer or example until the table is made


class Rows:
    """Blocks of rows (metric, layer, example, value, low, high)."""

    def __init__(self) -> None:
        self.blocks: list[tuple[Any, ...]] = []

    def add(
        self, metric: str, value: Any, low: Any = np.nan, high: Any = np.nan, *, layer: Any = NONE, example: Any = NONE
    ) -> None:
        """A row for every defined value: a number, those of layers, or of examples and layers (n, L).

        The other columns are of a shape that goes with it: layers (L,), examples (n, 1).
        """
        value = np.asarray(value, dtype=np.float64)
        defined = ~np.isnan(value)
        if defined.any():
            columns = (np.broadcast_to(column, value.shape)[defined] for column in (layer, example, value, low, high))
            self.blocks.append((metric, *columns))

    def frame(self, **identity: str | int) -> pd.DataFrame:
        """All rows as a table, with the same `identity` columns (dataset, seed, ...) in each, in front."""
        sizes = [len(block[3]) for block in self.blocks]
        names, *columns = map(list, zip(*self.blocks, strict=True))
        self.blocks.clear()  # the parts of a column go as soon as it is joined: the table is the largest thing there is
        layer, example, value, low, high = (np.concatenate(columns.pop(0)) for _ in range(5))
        table: dict[str, Any] = {
            "metric": pd.Series(names).array.repeat(sizes),
            "layer": pd.arrays.IntegerArray(layer, layer == NONE),
            "example": pd.arrays.IntegerArray(example, example == NONE),
            "value": value,
            "low": pd.array(low, dtype="Float64"),
            "high": pd.array(high, dtype="Float64"),
        }
        return pd.DataFrame(identity | table)
