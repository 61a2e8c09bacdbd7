"""What a claim is tested on: values by seed, example and layer, of a results folder or of the authors' own runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fairseq_icl.errors import UserError
from fairseq_icl.files import reason_of
from fairseq_icl.replication.report.published import authors_runs, inits_of
from fairseq_icl.replication.report.run import Run

NO_EXAMPLE = -1
Seed = tuple[int, int]
"""Seed and permutation of a run."""


@dataclass(frozen=True)
class Sample:
    """One metric on one dataset. Seeds see the same examples, so a value has a seed, an example and a layer."""

    seeds: tuple[Seed, ...]
    examples: np.ndarray  # (N,) positions in the validation set; empty if only means are known
    values: np.ndarray  # (S, N, L), or (S, 1, L) of means; NaN where not defined (a quotient leaves examples out)


class Evidence(Protocol):
    """Where samples come from."""

    datasets: Sequence[str]

    def sample(self, term: dict[str, Any], dataset: str) -> Sample | None:
        """The sample of a claim's term ({metric, method, init}) on a dataset; None if there is none."""


class RunEvidence:
    """The plain cells of one model of a results folder, example by example."""

    def __init__(self, run: Run, model: str, metrics: Sequence[str]) -> None:
        cells = run.planned[(run.planned["model"] == model) & (run.planned["variant"] == "") & run.planned["finished"]]
        self.cells = cells.drop_duplicates(["init", "dataset", "method", "seed", "permutation"])
        self.datasets: Sequence[str] = list(self.cells["dataset"].drop_duplicates())
        self.groups: dict[tuple[str, str, str], dict[Seed, str]] = {}
        for cell in self.cells.itertuples():
            group = self.groups.setdefault((cell.dataset, cell.method, cell.init), {})
            group[int(cell.seed), int(cell.permutation)] = cell.key
        self.run, self.model, self.metrics = run, model, sorted(metrics)
        self._values: dict[str, dict[str, pd.DataFrame]] = {}
        self._means = dict(list(run.values[run.values["metric"].isin(self.metrics)].groupby("key")))

    def sample(self, term: dict[str, Any], dataset: str) -> Sample | None:
        """As `Evidence` says."""
        for init in inits_of(term.get("init", "pretrained")):
            place = (dataset, term.get("method", "gd"), init)
            if place in self.groups:
                keys = self.groups[place]
                seeds = {seed: self._read(key).get(term["metric"]) for seed, key in keys.items()}
                return _joined({seed: values for seed, values in seeds.items() if values is not None})
        return None

    def _path(self, key: str) -> Path:
        return self.run.cell_folder(self.model, key) / "results.parquet"

    def _read(self, key: str) -> dict[str, pd.DataFrame]:
        """Metric -> (examples, layers) of one cell."""
        if key not in self._values:
            self._values[key] = read_examples(self._path(key), self.metrics)
            known = self._means.get(key, self.run.values.iloc[:0])
            for metric in set(known["metric"]) - set(self._values[key]):  # without examples it still has its mean
                self._values[key][metric] = _mean_row(known[known["metric"] == metric])
        return self._values[key]


def read_examples(path: Path, metrics: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Metric -> values, a row an example and a column a layer (one column, -1, if it has none)."""
    try:
        table = pq.read_table(
            path,
            columns=["metric", "layer", "example", "value"],
            filters=pc.field("metric").isin(list(metrics)) & pc.field("example").is_valid(),
            read_dictionary=["metric"],
        )
        frame = table.set_column(1, "layer", pc.fill_null(table["layer"], -1)).to_pandas()
    except (pa.ArrowException, OSError, LookupError, ValueError, TypeError) as error:
        raise UserError(f"{path}: damaged, or not a file of results ({reason_of(error)})") from error
    groups = frame.groupby("metric", observed=True, sort=False)
    return {str(metric): _grid(rows) for metric, rows in groups}


def _grid(rows: pd.DataFrame) -> pd.DataFrame:
    """(example, layer, value) rows -> a row an example, a column a layer."""
    layers, example = np.unique(rows["layer"]), rows["example"].to_numpy(np.int64)
    if len(rows) % len(layers) == 0 and (rows["layer"].to_numpy().reshape(-1, len(layers)) == layers).all():
        # As it is written, unless some value is not defined: layers within examples.
        values = rows["value"].to_numpy(np.float64).reshape(-1, len(layers))
        return pd.DataFrame(values, example[:: len(layers)], layers)
    return rows.pivot(index="example", columns="layer", values="value")


def _mean_row(rows: pd.DataFrame) -> pd.DataFrame:
    """The means of one metric of one cell as a single row, a column a layer."""
    layered = rows[rows["layer"].notna()].drop_duplicates("layer").sort_values("layer")
    rows = rows.iloc[:1] if layered.empty else layered
    return pd.DataFrame([rows["value"].to_numpy(np.float64)], [NO_EXAMPLE])


def _joined(found: dict[Seed, pd.DataFrame]) -> Sample | None:
    if not found:
        return None
    first, *others = found.values()
    examples = first.index.to_numpy(np.int64)
    if all(np.array_equal(examples, values.index) for values in others):
        values = np.stack([values.to_numpy(np.float64) for values in found.values()])
    else:  # of a quotient, every seed has its own examples
        examples = np.unique(np.concatenate([values.index.to_numpy(np.int64) for values in found.values()]))
        values = np.stack([values.reindex(examples).to_numpy(np.float64) for values in found.values()])
    return Sample(tuple(found), examples[examples != NO_EXAMPLE], values)


class AuthorsEvidence:
    """The authors' runs: means by seed and layer without examples, fp16 where there is fp16.

    Rec2FTP is known by its counts, which are as good as the examples themselves.
    """

    def __init__(self) -> None:
        plain = authors_runs()[authors_runs()["clip_norm"] == 0]
        self.datasets: Sequence[str] = list(plain["dataset"].drop_duplicates())
        self.groups = dict(list(plain.groupby(["metric", "method", "init", "dataset"])))

    def sample(self, term: dict[str, Any], dataset: str) -> Sample | None:
        """As `Evidence` says."""
        place = (term.get("method", "gd"), inits_of(term.get("init", "pretrained"))[0], dataset)
        if term["metric"] == "rec2ftp":
            return self._counted("f2t_both", "f2t_ft", place)
        rows = self.groups.get((term["metric"], *place))
        if rows is None:
            return None
        rows = rows[(rows["precision"] == rows["precision"].min()) & rows["layer"].notna()]  # fp16 before fp32
        return _joined(
            {
                (int(seed), int(permutation)): pd.DataFrame(
                    [one.sort_values("layer")["value"].to_numpy()], index=[NO_EXAMPLE]
                )
                for (seed, permutation), one in rows.groupby(["seed", "permutation"])
            }
        )

    def _counted(self, numerator: str, denominator: str, place: tuple[str, str, str]) -> Sample | None:
        parts = [self.groups.get((metric, *place)) for metric in (numerator, denominator)]
        if parts[0] is None or parts[1] is None:
            return None
        merged = parts[0].merge(parts[1], on=["seed", "permutation", "precision"])
        merged = merged[merged["precision"] == merged["precision"].min()]
        values = {
            (int(row.seed), int(row.permutation)): pd.DataFrame(np.arange(int(row.value_y)) < row.value_x, dtype=float)
            for row in merged.itertuples()
        }
        return _joined(values)

    @cached_property
    def runs(self) -> int:
        """How many runs there are."""
        names = ["dataset", "method", "init", "seed", "permutation", "precision", "source"]
        return len(authors_runs().drop_duplicates([*names, "clip_norm"]))
