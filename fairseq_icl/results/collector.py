"""From observations to the tidy table: `compare` for whole sets, `Collector` batch by batch with no activation kept.

What is not defined has no row and is counted instead: `zero_updates_NAME` is the number of cosines of updates that are
zero or below rounding, `undefined_NAME` the number of values left out (a quotient over no example, activations that are
not finite because training diverged, or nothing but such cosines). `labels_ft` is how many labels the fine-tuned model
gives: where it is 1, RPA and Rec2FTP are ICL's alone.

Beside every cosine NAME of two measured vectors stands `length_ratio_NAME`: their mean lengths over examples, the
second's (FT's) divided by the first's (ICL's). It has means only, no rows for single examples. So it is with the heads
of a metric that has values by head, NAME_0, NAME_1, ...; NAME is their mean.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fairseq_icl.devices import present_device, within_memory
from fairseq_icl.errors import UserError
from fairseq_icl.files import give_back_memory
from fairseq_icl.metrics import Calibration, Observation, Outcome, Ranking, Ratio, Similarity, default_names, get_metric
from fairseq_icl.metrics.predictions import prediction_sets
from fairseq_icl.metrics.training_attention import TrainingAttention, TrainingTokens
from fairseq_icl.metrics.vectors import mean_over_heads
from fairseq_icl.metrics.weight_space import WeightUpdates
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.results.bootstrap import bootstrap_auc, bootstrap_ece, bootstrap_ratio, resampling_counts
from fairseq_icl.results.table import LENGTH_RATIO, NONE, Rows
from fairseq_icl.settings import Settings

logger = logging.getLogger(__name__)

COMPARED = 50  # examples that metrics see at once: so their memory does not grow with the validation set


def compare(
    prompts: Prompts,
    zsl: Any,
    icl: Any,
    ft: Any | None = None,
    *,
    other_ft: Any | None = None,
    metrics: Sequence[str] | None = None,
    weights: WeightUpdates | None = None,
) -> pd.DataFrame:
    """Every metric on observations of the same queries, as a tidy table.

    Args:
        prompts: What was observed.
        zsl: What `observe` returned without demonstrations.
        icl: The same with `in_context=True`.
        ft: The same of the fine-tuned model; without it, the metrics that need none.
        other_ft: Of a second fine-tuned model; adds `alpha`, the SimAM_delta between the two.
        metrics: Names; by default all that the observations allow, but for `sim_weights`, which needs `weights`.
        weights: Implicit weight updates of ICL and those of FT (`fairseq_icl.observing.weight_updates`).

    Returns:
        A row for every metric, layer and example; columns dataset, seed, permutation, method, init, metric, layer,
            example, value, low, high. A mean over examples has no `example` but a 95 % bootstrap interval [low, high];
            a mean over layers, and what has none, has no `layer`. What is not defined is left out and counted as
            `undefined_METRIC`.

    Example:
        ```python
        table = fi.compare(prompts, zsl, icl, ft)
        means = table[table["example"].isna() & table["layer"].isna()].set_index("metric")["value"]
        ```
    """
    settings, given = prompts.settings, (zsl, icl, ft, other_ft)
    precisions = dict.fromkeys(getattr(seen, "precision", "fp32") for seen in given if seen is not None)
    if len(precisions) > 1:
        raise UserError(f"compare: observations in {' and '.join(precisions)}; observe all of them in one precision")
    collector = Collector(metrics, settings)
    recorded = getattr(ft, "training_queries", None)
    if recorded and any("attention" in metric.needs for metric in collector.metrics.values()):
        collector.training = training_tokens(prompts, recorded)
    for examples in torch.arange(len(zsl)).split(COMPARED):  # what metrics make in between is several times their input
        some = None if weights is None else replace(weights, ft=weights.ft[examples])
        start, stop = int(examples[0]), int(examples[-1]) + 1
        seen: list[Any] = [None if whole is None else whole.between(start, stop) for whole in given]
        collector.add(examples, *seen[:3], other_ft=seen[3], weights=some)
        for whole in given:
            if whole is not None:
                whole.release()
    give_back_memory()
    collector.skipped_updates = getattr(ft, "skipped_updates", 0)
    method = "none" if ft is None else ft.method
    return collector.table(prompts.spec.name, settings.seed, settings.permutation, method, zsl.init)


def training_tokens(prompts: Prompts, recorded: Mapping[int, Tensor]) -> TrainingTokens | None:
    """The demonstration tokens that fine-tuning and the prompt share, with their recorded query vectors.

    None, with a warning, where the two cannot be paired: labels of another length were switched in, or nothing fitted
    into the prompt. `recorded`: row of the train file -> (layers, tokens, width), BOS included.
    """
    try:
        return TrainingTokens.align(recorded, prompts.context_rows, prompts.context_spans)
    except ValueError as error:
        logger.warning("attention to training tokens is left out: %s", error)
        return None


Seen = dict[str, dict[str, "Series"]]  # values so far by group and name: small, and can be sent between processes


class Joined(NamedTuple):
    """All values of one metric, in ascending order of the examples and each example once."""

    examples: np.ndarray  # (n,) positions in the validation set
    numerator: np.ndarray  # (n, layers), with one column if the metric has no layers
    denominator: np.ndarray  # (n, layers)
    zero_updates: np.ndarray  # (n,) cosines that were 0 by definition


@dataclass
class Series:
    """Values of one metric: numerator and denominator an example and layer, so that means and quotients are alike.

    A plain value has the denominator 1, or 0 if it is not finite; a ranking has a column a class, its scores over
    whether the class is the right one.
    """

    parts: list[Joined] = field(default_factory=list)
    kind: type = Tensor  # of the metric's outcomes: a tensor, Similarity, Ratio, Ranking or Calibration
    is_per_layer: bool = False

    def append(self, example: Tensor, outcome: Outcome) -> None:
        """Take in a metric's outcome for examples (n,)."""
        self.kind, zero_updates = type(outcome), np.zeros(len(example))
        if isinstance(outcome, Similarity):
            zero_updates, outcome = _columns(outcome.zero_updates).sum(1), outcome.value
        if isinstance(outcome, Tensor):
            value, self.is_per_layer = _columns(outcome), outcome.ndim == 2
            denominator = np.isfinite(value).astype(np.float64)
            numerator = np.where(denominator > 0, value, 0.0)
        else:
            numerator, denominator = (_columns(part) for part in outcome)
            self.is_per_layer = self.kind is Ratio and outcome[0].ndim == 2
        self.parts.append(Joined(example.cpu().numpy(), numerator, denominator, zero_updates))

    def joined(self) -> Joined:
        """All parts. The order of batches and examples seen twice (fairseq's padding of shards) do not matter."""
        if len(self.parts) > 1 or not (np.diff(self.parts[0].examples) > 0).all():
            columns = [np.concatenate(column) for column in zip(*self.parts, strict=True)]
            _, first = np.unique(columns[0], return_index=True)
            self.parts = [Joined(*(column[first] for column in columns))]
        return self.parts[0]

    def values(self) -> np.ndarray:
        """(n, layers) numerator / denominator, NaN where not defined"""
        _, numerator, denominator, _ = self.joined()
        return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0)


def _columns(values: Tensor) -> np.ndarray:
    """(n,) or (n, layers) -> (n, 1) or (n, layers) float64"""
    array = values.detach().double().cpu().numpy()
    return array[:, None] if array.ndim == 1 else array


class Collector:
    """Computes metrics as examples come in and keeps one number an example and layer.

    Args:
        names: Metrics to compute, by default all that the given observations allow.
        settings: Decide what names such as `sim_am_delta` and `sim_aou_random` mean; by default the authors'.
        training: Training tokens, for the metrics on attention to them.
        training_examples: For how many of the first examples these are computed; the authors take 100.
    """

    def __init__(
        self,
        names: Sequence[str] | None = None,
        settings: Settings | None = None,
        training: TrainingTokens | None = None,
        training_examples: int = 100,
    ) -> None:
        self.metrics = {name: get_metric(name, settings) for name in names or default_names(settings)}
        self.training, self.training_examples = training, training_examples
        self.skipped_updates = 0
        self.seen: Seen = {group: {} for group in ("metrics", "lengths", "heads", "labels", "sets")}

    @within_memory("computing metrics")
    def add(
        self,
        example: Tensor | Sequence[int],
        zsl: Observation,
        icl: Observation,
        ft: Observation | None = None,
        *,
        other_ft: Observation | None = None,
        weights: WeightUpdates | None = None,
    ) -> None:
        """Take in one batch; `example` (n,) are positions in the validation set. An example added twice counts once.

        `other_ft` is the same examples under a second fine-tuned model (for alpha), `weights` their weight updates.
        Metrics are computed where the last of them was observed: on a GPU too.
        """
        example = torch.as_tensor(example, dtype=torch.long)
        device = present_device(getattr(zsl if ft is None else ft, "device", "cpu"))
        if device != "cpu":
            given: list[Any] = [zsl, icl, ft, other_ft, weights, self.training]
            given = [part if part is None else part.on(device) for part in given]
            zsl, icl, ft, other_ft, weights, self.training = given
            example = example.to(device)
        conditions = {name: seen for name, seen in {"zsl": zsl, "icl": icl, "ft": ft}.items() if seen is not None}
        attention, first = None, torch.nonzero(example < self.training_examples).flatten()
        if self.training is not None and ft is not None and len(first) == len(example):
            attention = TrainingAttention.of(example, icl, ft, self.training)
        elif self.training is not None and ft is not None and len(first):
            attention = TrainingAttention.of(example[first], icl.take(first), ft.take(first), self.training)
        extras: dict[str, Any] = {"example": example, "other_ft": other_ft, "weights": weights, "attention": attention}
        extras = {name: extra for name, extra in extras.items() if extra is not None}
        # Those of all conditions first: what the others need is found on their way, and remembered.
        for name, metric in sorted(self.metrics.items(), key=lambda item: -len(item[1].conditions)):
            if not (set(metric.conditions) <= conditions.keys() and set(metric.needs) <= extras.keys()):
                continue
            observations = [conditions[name] for name in metric.conditions]
            if metric.can_read(observations):
                outcome = metric.compute(*observations, **{extra: extras[extra] for extra in metric.needs})
                which = extras["attention"].example if "attention" in metric.needs else example
                self._put("metrics", name, which, outcome)
        for name, seen in conditions.items():
            self._put("labels", f"prediction_{name}", example, seen.prediction)
        self._put("labels", "gold", example, zsl.gold)
        for name, members in prediction_sets(zsl, icl, ft).items() if ft is not None else ():
            self._put("sets", name, example, members)

    def _put(self, group: str, name: str, example: Tensor, outcome: Outcome) -> None:
        """Take in what a metric makes of examples (n,): its values, those of single heads, and lengths."""
        if isinstance(outcome, Similarity) and outcome.value.ndim == 3:  # (n, layers, heads)
            for head, values in enumerate(outcome.value.unbind(2)):
                self._put("heads", f"{name}_{head}", example, values)
            outcome = mean_over_heads(outcome)
        size = len(outcome if isinstance(outcome, Tensor) else outcome[0])
        if size != len(example):
            raise ValueError(f"{name}: {size} values for {len(example)} examples")
        self.seen[group].setdefault(name, Series()).append(example, outcome)
        if isinstance(outcome, Similarity) and outcome.lengths is not None:
            # A quotient of sums; an example whose lengths are not finite takes no part.
            finite = outcome.lengths[0].isfinite() & outcome.lengths[1].isfinite()
            first, second = (torch.where(finite, length, 0.0) for length in outcome.lengths)
            self._put("lengths", name, example, Ratio(second, first))

    def merge(self, seen: Seen) -> "Collector":
        """Take in what another collector, perhaps of another process, has `seen`; returns self."""
        for group, found in seen.items():
            for name, series in found.items():
                own = self.seen[group].setdefault(name, Series(kind=series.kind, is_per_layer=series.is_per_layer))
                own.parts += series.parts
        return self

    def table(
        self, dataset: str = "", seed: int = 0, permutation: int = 0, method: str = "none", init: str = "pretrained"
    ) -> pd.DataFrame:
        """The tidy table: for each metric its means (`example` missing), then one row an example and layer.

        Means have the columns `low` and `high`, the 95 % bootstrap interval over examples. A mean over all layers,
        and a metric that has none, has a missing `layer`. Metrics ending in `_f2t` are means over the examples that
        are wrong under ZSL and right under ICL and FT.
        """
        rows, labels = Rows(), self.seen["labels"]
        for name in self.metrics:
            if name in self.seen["metrics"]:
                self._add_metric(rows, name, self.seen["metrics"][name])
        for name, series in self.seen["heads"].items():
            _add_means(rows, name, series)
        for name, series in labels.items():
            rows.add(name, series.values(), example=series.joined().examples[:, None])
        counts = {name: series.values().sum() for name, series in self.seen["sets"].items()}
        if "prediction_ft" in labels:
            counts["labels_ft"] = len(np.unique(labels["prediction_ft"].values()))
        if "gold" in labels:
            counts["examples"] = len(labels["gold"].joined().examples)
        if self.skipped_updates:
            counts["skipped_updates"] = self.skipped_updates
        if self.training is not None:
            counts["training_tokens"] = len(self.training.demonstration)
            counts["top_tokens"], counts["top_examples"] = self.training.used_tops
        for name, count in counts.items():
            rows.add(name, count)
        return rows.frame(dataset=dataset, seed=seed, permutation=permutation, method=method, init=init)

    def _add_metric(self, rows: Rows, name: str, series: Series) -> None:
        """Means, counts and single values of one metric."""
        examples, scores, is_class, zero_updates = series.joined()
        if series.kind in (Ranking, Calibration):  # it has a value for all examples together only
            counts = resampling_counts(len(examples))
            if series.kind is Ranking:
                whole = bootstrap_auc(scores, is_class > 0, counts)
            else:
                whole = bootstrap_ece(scores[:, 0], is_class[:, 0], counts)
            rows.add(name, *whole)
            if np.isnan(whole.value):
                rows.add(f"undefined_{name}", 1)
            return
        ratio, lengths = f"{LENGTH_RATIO}{name}", self.seen["lengths"].get(name)
        _add_means(rows, name, series, is_share=self.metrics[name].unit == "percent")
        _add_means(rows, ratio, lengths)
        values = series.values()
        layer = np.arange(values.shape[1]) if series.is_per_layer else NONE
        rows.add(name, values, layer=layer, example=examples[:, None])
        if series.kind is Similarity:
            rows.add(f"zero_updates_{name}", zero_updates.sum())
        if "both_f2t" in self.seen["sets"] and series.kind is not Ratio and not name.startswith("accuracy"):
            subset = self.seen["sets"]["both_f2t"]
            chosen = np.isin(examples, subset.joined().examples[subset.values()[:, 0] > 0])
            _add_means(rows, f"{name}_f2t", series, chosen)
            _add_means(rows, f"{ratio}_f2t", lengths, chosen)


def _add_means(
    rows: Rows, name: str, series: Series | None, chosen: np.ndarray | slice = slice(None), is_share: bool = False
) -> None:
    """The mean over the chosen examples, and over layers; nothing if there is no such example, or no series."""
    if series is None or len(series.joined().examples[chosen]) == 0:
        return
    examples, numerator, denominator, _ = (column[chosen] for column in series.joined())
    layers, overall = bootstrap_ratio(numerator, denominator, resampling_counts(len(examples)), is_share)
    rows.add(name, *overall)
    if series.is_per_layer:
        rows.add(name, *layers, layer=np.arange(len(layers.value)))
    undefined = int(np.isnan(overall.value)) if series.kind is Ratio else int((denominator == 0).sum())
    if undefined:
        rows.add(f"undefined_{name}", undefined)
