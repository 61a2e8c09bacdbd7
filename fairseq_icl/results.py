"""The results file: a tidy table with everything that made it written inside. Parquet, or CSV on demand.

One row a value. `example` is missing in means over examples, `layer` in values that are not of one layer; `low` and
`high` are the 95 % bootstrap interval of a mean over examples. No file contains a time or a machine's name: the same
run writes the same bytes.
"""

import io
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fairseq_icl import __version__
from fairseq_icl.errors import UserError
from fairseq_icl.metrics.bootstrap import bootstrap_mean

__all__ = ["COLUMNS", "across_seeds", "bootstrap_mean", "means", "provenance", "read_results", "write_results"]

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
        pq.write_table(arrow, content, compression="zstd")
    _write_atomically(path, content.getbuffer())


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
            arrow = pq.read_table(path)
            described = (arrow.schema.metadata or {}).get(METADATA_KEY)
            table = arrow.to_pandas()
    except (pa.ArrowException, UnicodeDecodeError, pd.errors.ParserError, ValueError) as error:
        raise UserError(f"{path}: not a results file, or damaged [{str(error).splitlines()[0]}]") from error
    if described is None or list(table.columns) != list(COLUMNS):
        raise UserError(f"{path}: not a results file of fairseq_icl")
    return table.astype(COLUMNS), json.loads(described)


_MISSING = {column: [""] for column, kind in COLUMNS.items() if kind[0].isupper()}


def means(table: pd.DataFrame, layers: bool = False) -> pd.DataFrame:
    """The rows that are means over examples and layers (or, with `layers`, the means of single layers), and counts."""
    single_layer = table["layer"].notna()
    return table[table["example"].isna() & (single_layer if layers else ~single_layer)]


def across_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Mean and sample standard deviation over runs (seed, permutation) of every mean over examples.

    Columns: dataset, method, init, metric, layer, mean, sd (missing for a single run), runs. The spread over seeds is
    kept apart from the bootstrap interval over examples: the two answer different questions.
    """
    averaged = table[table["example"].isna()]
    groups = averaged.groupby(["dataset", "method", "init", "metric", "layer"], dropna=False, sort=False)["value"]
    result = groups.agg(mean="mean", sd="std", runs="size").reset_index()
    return result.astype({"layer": "Int64", "sd": "Float64"})


def provenance(config: Mapping[str, Any], checkpoints: Mapping[str, str | Path] | None = None) -> dict[str, Any]:
    """What made a table: configuration, versions, commit, and the SHA-256 of each named checkpoint."""
    from fairseq_icl.checkpoints import sha256_of  # imports fairseq, which reading results does not need

    return {
        "config": dict(config),
        "checkpoints": {name: sha256_of(path) for name, path in (checkpoints or {}).items()},
        "versions": {"fairseq_icl": __version__, "python": platform.python_version(), **_versions()},
        "git": _git_state(Path(__file__).parent),
    }


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


def _write_atomically(path: Path, content: memoryview) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(unfinished, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(unfinished, path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); free some space or choose another place"
        ) from error
    finally:
        Path(unfinished).unlink(missing_ok=True)
