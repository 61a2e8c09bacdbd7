"""What a claim is tested on: values by seed, example and layer, of a results folder or of the authors' own runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd

from fairseq_icl.replication.report.displacement import AT_EQUAL_LENGTH, at_equal_length, sweeps
from fairseq_icl.replication.report.published import authors_runs, inits_of, zero_shot_errors
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
        self.displaced = at_equal_length(sweeps(run, model))
        named = pd.concat([self.cells["dataset"], self.displaced["dataset"]])
        self.datasets: Sequence[str] = list(named.drop_duplicates())
        self.groups: dict[tuple[str, str, str], dict[Seed, str]] = {}
        for cell in self.cells.itertuples():
            group = self.groups.setdefault((cell.dataset, cell.method, cell.init), {})
            group[int(cell.seed), int(cell.permutation)] = cell.key
        self.run, self.model, self.metrics = run, model, sorted(metrics)
        self._values: dict[str, dict[str, pd.DataFrame]] = {}
        self._means = dict(list(run.values[run.values["metric"].isin(self.metrics)].groupby("key")))

    def sample(self, term: dict[str, Any], dataset: str) -> Sample | None:
        """As `Evidence` says."""
        if term["metric"].endswith(AT_EQUAL_LENGTH):
            return self._displaced(term, dataset)
        for init in inits_of(term.get("init", "pretrained")):
            place = (dataset, term.get("method", "gd"), init)
            if place in self.groups:
                keys = self.groups[place]
                seeds = {seed: self._read(key).get(term["metric"]) for seed, key in keys.items()}
                return _joined({seed: values for seed, values in seeds.items() if values is not None})
        return None

    def _displaced(self, term: dict[str, Any], dataset: str) -> Sample | None:
        """A similarity where fine-tuning moves the model as far as ICL does, of the seeds that get there."""
        place = (dataset, "pretrained", term.get("method", "gd"))
        cells = self.displaced[(self.displaced[["dataset", "init", "method"]] == place).all(axis=1)]
        cells = cells[cells["by"] == cells["by"].max()]  # where rates and equal steps were swept, the rates
        values = cells[term["metric"].removesuffix(AT_EQUAL_LENGTH)].dropna()
        seeds = zip(cells.loc[values.index, "seed"], cells.loc[values.index, "permutation"], strict=True)
        return _joined(
            {(int(s), int(p)): pd.DataFrame([v], [NO_EXAMPLE]) for (s, p), v in zip(seeds, values, strict=True)}
        )

    def _read(self, key: str) -> dict[str, pd.DataFrame]:
        """Metric -> (examples, layers) of one cell."""
        if key not in self._values:
            self._values[key] = self.run.cell_folder(self.model, key).values(self.metrics)
            known = self._means.get(key, self.run.values.iloc[:0])
            for metric in set(known["metric"]) - set(self._values[key]):  # without examples it still has its mean
                self._values[key][metric] = _mean_row(known[known["metric"] == metric])
        return self._values[key]


def _mean_row(rows: pd.DataFrame) -> pd.DataFrame:
    """The means of one metric of one cell as a single row, a column a layer."""
    layered = rows[rows["layer"].notna()].drop_duplicates("layer").sort_values("layer")
    rows = rows.iloc[:1] if layered.empty else layered
    return pd.DataFrame([rows["value"].to_numpy(np.float64)], [NO_EXAMPLE])


def orders_joined(sample: Sample) -> Sample:
    """One value for every seed: a draw of demonstrations counts once, in however many orders it was shown."""
    drawn = np.array([seed for seed, _ in sample.seeds])
    kept = list(dict.fromkeys(drawn.tolist()))
    values = np.stack([defined_mean(sample.values[drawn == seed], 0) for seed in kept])
    return Sample(tuple((seed, 0) for seed in kept), sample.examples, values)


def defined_mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean over the defined values along an axis, NaN where there is none."""
    known = np.isfinite(values)
    total, number = np.where(known, values, 0.0).sum(axis), known.sum(axis)
    return np.divide(total, number, out=np.full(total.shape, np.nan), where=number > 0)


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

    Rec2FTP and its chance level are known by their counts, which are as good as the examples themselves.
    """

    def __init__(self) -> None:
        plain = authors_runs()[authors_runs()["clip_norm"] == 0]
        self.datasets: Sequence[str] = list(plain["dataset"].drop_duplicates())
        self.groups = dict(list(plain.groupby(["metric", "method", "init", "dataset"])))

    def sample(self, term: dict[str, Any], dataset: str) -> Sample | None:
        """As `Evidence` says."""
        place = (term.get("method", "gd"), inits_of(term.get("init", "pretrained"))[0], dataset)
        if term["metric"].startswith("rec2ftp"):
            return self._counted(term["metric"], place)
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

    def _counted(self, metric: str, place: tuple[str, str, str]) -> Sample | None:
        """The examples that are wrong zero-shot: mended by both first, then by FT alone, by ICL alone, by neither."""
        parts = [self.groups.get((f"f2t_{name}", *place)) for name in ("both", "ft", "icl")]
        if any(part is None for part in parts):
            return None
        keys = ["seed", "permutation", "precision"]
        both, ft, icl = (part.set_index(keys)["value"].astype(int) for part in parts if part is not None)
        example = np.arange(zero_shot_errors(place[2]))
        values: dict[Seed, pd.DataFrame] = {}
        for seed, permutation, precision in sorted(both.index):
            run = (seed, permutation, precision)
            mended = (example < both[run]) | ((example >= ft[run]) & (example < ft[run] + icl[run] - both[run]))
            known = np.where(example < ft[run], mended * 1.0, np.nan) if metric == "rec2ftp" else mended * 1.0
            values.setdefault((int(seed), int(permutation)), pd.DataFrame(known))  # fp16 before fp32
        return _joined(values)
