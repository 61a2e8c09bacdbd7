"""Results: the tidy table, its file with everything that made it written inside (Parquet, or CSV), and its provenance.

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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fairseq_icl import __version__
from fairseq_icl.errors import UserError
from fairseq_icl.files import sha256_of, write_atomically
from fairseq_icl.results.bootstrap import Estimate

COLUMNS: dict[str, str] = {
    "dataset": "str",
    "seed": "int64",
    "permutation": "int64",
    "method": "str",
    "init": "str",
    "metric": "str",
    "layer": "Int64",
    "example": "Int64",
    "value": "float64",
    "low": "Float64",
    "high": "Float64",
}
"""Columns of the table and their pandas types; those with a capital letter may be missing."""

METADATA_KEY = b"fairseq_icl"
GRADIENT_COLUMNS = (
    "step",
    "demonstration",
    "layer",
    "parameter",
    "norm",
    "loss_sum",
    "sample_size",
    "update",
    "weight",
    "whole_layer",
)
"""Columns of a gradient record; training/gradient_record.py makes it and says what they mean."""
OLDER_GRADIENT_COLUMNS = (GRADIENT_COLUMNS[:-1], GRADIENT_COLUMNS[:-3])
"""Those of records made before whole layers were looked at, and before steps were."""
GRADIENT_METADATA = b"fairseq_icl_gradients"
CURVE_COLUMNS = ("demonstrations", "metric", "value", "low", "high")
"""Columns of the curves over the demonstrations; training/dynamics.py makes them."""
LENGTH_RATIO = "length_ratio_"
"""Beginning of the name of what stands beside a cosine: how long its second vector is in units of the first."""
CSV_COMMENT = "# fairseq_icl "
VERSIONS_OF = ("torch", "numpy", "fairseq", "fairseq-fixed")


def write_results(path: str | Path, table: pd.DataFrame, provenance: Mapping[str, Any]) -> None:
    """Write the table and its provenance, completely or not at all: CSV if the name ends in .csv, else Parquet.

    In a CSV file the provenance is the first line, a comment: pandas.read_csv(path, comment="#") skips it.
    """
    path = Path(path)
    table = table[list(COLUMNS)].astype(COLUMNS)
    if table["value"].isna().any():
        raise ValueError("a table must not contain undefined values: leave the row out and count it")
    described = json.dumps(provenance, sort_keys=True, default=str)
    content = io.BytesIO()
    if path.suffix == ".csv":
        rows = table.to_csv(index=False, lineterminator="\n")
        content.write(f"{CSV_COMMENT}{described}\n{rows}".encode())
    else:
        arrow = pa.Table.from_pandas(table, preserve_index=False)
        arrow = arrow.replace_schema_metadata({METADATA_KEY: described.encode()})
        pq.write_table(arrow, content, compression="zstd", write_page_checksum=True)
    write_atomically(path, content.getbuffer())


def read_results(path: str | Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """(table, provenance) of a file that `write_results` wrote."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such results file")
    try:
        if path.suffix == ".csv":
            first, _, rest = path.read_text(encoding="utf-8").partition("\n")
            described = first.removeprefix(CSV_COMMENT) if first.startswith(CSV_COMMENT) else None
            table = pd.read_csv(io.StringIO(rest), dtype=COLUMNS, keep_default_na=False, na_values=_MISSING)
        else:
            arrow = pq.read_table(path, page_checksum_verification=True)
            described = (arrow.schema.metadata or {}).get(METADATA_KEY)
            table = arrow.to_pandas()
    except (pa.ArrowException, OSError, UnicodeDecodeError, pd.errors.ParserError, ValueError) as error:
        raise UserError(f"{path}: not a results file, or damaged [{str(error).splitlines()[0]}]") from error
    if described is None or list(table.columns) != list(COLUMNS):
        raise UserError(f"{path}: not a results file of fairseq_icl")
    return table.astype(COLUMNS), json.loads(described)


_MISSING = {column: [""] for column, kind in COLUMNS.items() if kind[0].isupper()}


def means(table: pd.DataFrame, layers: bool = False) -> pd.DataFrame:
    """The rows that are means over examples and layers (or, with `layers`, the means of single layers), and counts."""
    single_layer = table["layer"].notna()
    return table[table["example"].isna() & (single_layer if layers else ~single_layer)]


def provenance(
    config: Mapping[str, Any], checkpoints: Mapping[str, str | Path] | None = None, *, precision: str = "fp32"
) -> dict[str, Any]:
    """What made a table: configuration, versions, commit, and the SHA-256 of each named checkpoint."""
    return {
        "config": dict(config),
        "checkpoints": {name: sha256_of(path) for name, path in (checkpoints or {}).items()},
        "versions": {"fairseq_icl": __version__, "python": platform.python_version(), **_versions()},
        "machine": _machine(precision),
        "git": _git_state(Path(__file__).parent.parent),
    }


def _machine(precision: str) -> dict[str, Any]:
    """What rounding depends on: threads, device and precision. Fine-tuning at the papers' rates amplifies rounding."""
    torch = sys.modules.get("torch")  # where nothing was computed there is nothing to say
    if torch is None:
        return {}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu {platform.machine()}"
    return {"threads": torch.get_num_threads(), "device": device, "precision": precision}


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS_OF:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # one of fairseq and fairseq-fixed is there, not both
            continue
    return found


def _git_state(package: Path) -> dict[str, Any] | None:
    """Commit of the package's repository and whether the package was changed since; None if it is not in one.

    A package installed into someone else's repository (a .venv in it) is not tracked there: that commit is not ours.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.CalledProcessError):
        return None


def read_gradient_record(path: str | Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """(table, description of the model) of a file that --record-gradients or a replication wrote."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; make it with --record-gradients")
    try:
        table = pq.read_table(path)
        described = (table.schema.metadata or {}).get(GRADIENT_METADATA)
        if described is None or tuple(table.column_names) not in (GRADIENT_COLUMNS, *OLDER_GRADIENT_COLUMNS):
            raise UserError(f"{path}: not a gradient record; make it with --record-gradients")
        record = table.to_pandas(ignore_metadata=True).reindex(columns=list(GRADIENT_COLUMNS))
        return record, dict(json.loads(described))
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not a Parquet file, or damaged; make it with --record-gradients") from error


def write_curve(path: Path, curve: pd.DataFrame) -> None:
    """Write a curve over the demonstrations as Parquet."""
    kinds = {"demonstrations": "int64", "metric": "str", "value": "float64", "low": "float64", "high": "float64"}
    arrow = pa.Table.from_pandas(curve.astype(kinds), preserve_index=False)
    write_atomically(path, lambda unfinished: pq.write_table(arrow, unfinished, write_page_checksum=True))


def read_curve(path: Path) -> pd.DataFrame:
    """What `write_curve` wrote."""
    try:
        return pq.read_table(path, columns=list(CURVE_COLUMNS), page_checksum_verification=True).to_pandas()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path}: damaged, or not a file of curves") from error


def heatmap_matrix(record: pd.DataFrame, column: str = "norm") -> np.ndarray:
    """(steps, layers): l2 norm of each layer's whole gradient (or of another column) at each step."""
    groups = record.assign(square=record[column] ** 2).groupby(["step", "layer"])["square"]
    return np.sqrt(groups.sum(min_count=1).unstack("layer").sort_index().to_numpy())


def step_size_matrix(record: pd.DataFrame) -> np.ndarray | None:
    """(steps, layers): relative size |dW| / |W| of each layer's step; None for a record without steps."""
    if record["update"].isna().any():
        return None
    return heatmap_matrix(record, "update") / heatmap_matrix(record, "weight")


def whole_layer_matrix(record: pd.DataFrame) -> np.ndarray | None:
    """(steps, layers): l2 norm of the gradient of all parameters of a layer, summed over tokens; None: not recorded."""
    if record["whole_layer"].isna().any():
        return None
    return record.groupby(["step", "layer"])["whole_layer"].first().unstack("layer").sort_index().to_numpy()


def text_table(lines: Sequence[Sequence[object]], *, names: int | None = None) -> str:
    """Lines of cells, the first being the head, as text: columns padded to their widest cell.

    The first `names` columns stand to the left, the others to the right; by default those to the left whose cells
    below the head are text.
    """
    cells = [[f"{x:,}" if isinstance(x, int) else str(x) for x in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = [
        column < names if names is not None else all(isinstance(line[column], str) for line in lines[1:])
        for column in range(len(widths))
    ]
    padded = [
        "  ".join(x.ljust(w) if at_left else x.rjust(w) for x, w, at_left in zip(line, widths, left, strict=True))
        for line in cells
    ]
    return "\n".join(line.rstrip() for line in padded)


NONE = -1  # stands for a missing layer or example until the table is made


class Rows:
    """Blocks of rows (metric, layer, example, value, low, high)."""

    def __init__(self) -> None:
        self.blocks: list[tuple[str, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def add_count(self, metric: str, count: float) -> None:
        """A number of examples, cosines or tokens."""
        self._add(metric, NONE, NONE, np.array([float(count)]))

    def add_mean(self, metric: str, estimate: Estimate) -> None:
        """The mean over examples (and layers)."""
        self._add(metric, NONE, NONE, *(np.atleast_1d(part) for part in estimate))

    def add_means(self, metric: str, estimate: Estimate) -> None:
        """The mean over examples of each layer."""
        self._add(metric, np.arange(len(estimate.value)), NONE, *estimate)

    def add_examples(self, metric: str, examples: np.ndarray, values: np.ndarray, per_layer: bool = False) -> None:
        """One row an example (n,) and column of values (n, layers)."""
        layers = np.arange(values.shape[1]) if per_layer else np.array([NONE])
        self._add(metric, np.tile(layers, len(examples)), np.repeat(examples, values.shape[1]), values.ravel())

    def frame(self, **identity: str | int) -> pd.DataFrame:
        """All rows as a table, with the same `identity` columns (dataset, seed, ...) in each, in front."""
        sizes = [len(block[3]) for block in self.blocks]
        names, *columns = map(list, zip(*self.blocks, strict=True))
        self.blocks.clear()  # the parts of a column go as soon as it is joined: the table is the largest thing there is
        layer, example, value, low, high = (np.concatenate(columns.pop(0)) for _ in range(5))
        frame = pd.DataFrame(
            {
                "metric": np.repeat(np.array(names, dtype=object), sizes),
                "layer": pd.array(layer, dtype="Int64"),
                "example": pd.array(example, dtype="Int64"),
                "value": value,
                "low": pd.array(low, dtype="Float64"),
                "high": pd.array(high, dtype="Float64"),
            }
        )
        for name in ("layer", "example"):
            frame.loc[frame[name] == NONE, name] = pd.NA
        for place, (name, content) in enumerate(identity.items()):
            frame.insert(place, name, content)
        return frame

    def _add(
        self,
        metric: str,
        layer: np.ndarray | int,
        example: np.ndarray | int,
        value: np.ndarray,
        low: np.ndarray | None = None,
        high: np.ndarray | None = None,
    ) -> None:
        missing = np.full(len(value), np.nan)
        low, high = missing if low is None else low, missing if high is None else high
        columns = (np.broadcast_to(layer, value.shape), np.broadcast_to(example, value.shape), value, low, high)
        defined = ~np.isnan(value)
        if defined.any():
            self.blocks.append((metric, *(column[defined] for column in columns)))
