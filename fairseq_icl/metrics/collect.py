"""From observations to the tidy table: every metric of every example, batch by batch, with no activation kept.

    collector = Collector(reading=reading)
    for batch in batches:
        collector.add(positions, zsl, icl, ft)
    table = collector.table(dataset="sst2", seed=2, permutation=0, method="gd", init="pretrained")

What is not defined has no row and is counted instead: `zero_updates_NAME` is the number of cosines that were set to 0
because one of the vectors was zero, `undefined_NAME` the number of values left out (a quotient over no example, or
activations that are not finite because training diverged).
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fairseq_icl.metrics.bootstrap import bootstrap_ratio, resampling_counts
from fairseq_icl.metrics.predictions import prediction_sets
from fairseq_icl.metrics.registry import Observation, default_names, get_metric
from fairseq_icl.metrics.rows import Rows
from fairseq_icl.metrics.series import Series
from fairseq_icl.metrics.training_attention import TrainingAttention, TrainingTokens
from fairseq_icl.metrics.weight_space import WeightUpdates
from fairseq_icl.reading import Reading

TRAINING_EXAMPLES = 100  # the authors look at attention to training tokens for the first 100 examples


class ByName(dict[str, Series]):
    """Series by name; one that is asked for and missing is begun."""

    def __missing__(self, name: str) -> Series:
        return self.setdefault(name, Series(name))


class Seen:
    """The values collected so far, by name. Small, and can be sent between processes."""

    def __init__(self) -> None:
        self.metrics = ByName()
        self.labels = ByName()
        self.sets = ByName()

    def extend(self, other: "Seen") -> None:
        """Take in what another has seen."""
        for mine, theirs in ((self.metrics, other.metrics), (self.labels, other.labels), (self.sets, other.sets)):
            for name, series in theirs.items():
                mine[name].extend(series)


class Collector:
    """Computes metrics as examples come in and keeps one number an example and layer.

    **Arguments**
    - `names`: metrics to compute, by default all that the given observations allow.
    - `reading`: decides what names such as `sim_am_delta` and `sim_aou_random` mean; by default the authors'.
    - `training`: training tokens, for the metrics on attention to them; computed for the first `training_examples`.
    - `seed`: of the bootstrap.
    """

    def __init__(
        self,
        names: Sequence[str] | None = None,
        reading: Reading | None = None,
        training: TrainingTokens | None = None,
        training_examples: int = TRAINING_EXAMPLES,
        seed: int = 0,
    ) -> None:
        self.metrics = {name: get_metric(name, reading) for name in names or default_names(reading)}
        self.training = training
        self.training_examples = training_examples
        self.seed = seed
        self.seen = Seen()

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
        """
        example = torch.as_tensor(example, dtype=torch.long)
        settings = {name: seen for name, seen in {"zsl": zsl, "icl": icl, "ft": ft}.items() if seen is not None}
        extras = {"example": example, "other_ft": other_ft, "weights": weights}
        extras["attention"] = self._training_attention(example, icl, ft)
        extras = {name: value for name, value in extras.items() if value is not None}
        for name, metric in self.metrics.items():
            if set(metric.settings) <= settings.keys() and set(metric.needs) <= extras.keys():
                observations = [settings[setting] for setting in metric.settings]
                outcome = metric.compute(*observations, **{extra: extras[extra] for extra in metric.needs})
                seen = extras["attention"].example if "attention" in metric.needs else example
                self.seen.metrics[name].append(seen, outcome)
        self._add_predictions(example, settings)

    def merge(self, other: "Collector | Seen") -> "Collector":
        """Take in what another collector, or that of another process (its `seen`), has seen; returns self."""
        self.seen.extend(other.seen if isinstance(other, Collector) else other)
        return self

    def table(
        self, dataset: str = "", seed: int = 0, permutation: int = 0, method: str = "none", init: str = "pretrained"
    ) -> pd.DataFrame:
        """The tidy table: for each metric its means (`example` missing), then one row an example and layer.

        Means have the columns `low` and `high`, the 95 % bootstrap interval over examples. A mean over all layers,
        and a metric that has none, has a missing `layer`. Metrics ending in `_f2t` are means over the examples that
        are wrong under ZSL and right under ICL and FT.
        """
        rows = Rows()
        for name, series in self.seen.metrics.items():
            self._add_metric(rows, name, series)
        for name, series in self.seen.labels.items():
            rows.add_examples(name, series.examples, series.values)
        for name, series in self.seen.sets.items():
            rows.add_count(name, series.values.sum())
        if "gold" in self.seen.labels:
            rows.add_count("examples", len(self.seen.labels["gold"].examples))
        if self.training is not None:
            rows.add_count("training_tokens", len(self.training.demonstration))
            rows.add_count("top_tokens", self.training.used_top_tokens)
            rows.add_count("top_examples", self.training.used_top_examples)
        return rows.frame(dataset=dataset, seed=seed, permutation=permutation, method=method, init=init)

    def _training_attention(
        self, example: Tensor, icl: Observation, ft: Observation | None
    ) -> TrainingAttention | None:
        """Attention to training tokens of those examples of the batch that are among the first `training_examples`."""
        chosen = torch.nonzero(example < self.training_examples).flatten()
        if self.training is None or ft is None or len(chosen) == 0:
            return None
        return TrainingAttention.of(example[chosen], icl.take(chosen), ft.take(chosen), self.training)

    def _add_predictions(self, example: Tensor, settings: dict[str, Observation]) -> None:
        for name, observation in settings.items():
            self.seen.labels[f"prediction_{name}"].append(example, observation.prediction)
        self.seen.labels["gold"].append(example, settings["zsl"].gold)
        if "ft" in settings:
            for name, members in prediction_sets(**settings)._asdict().items():
                self.seen.sets[name].append(example, members)

    def _add_metric(self, rows: Rows, name: str, series: Series) -> None:
        """Means, counts and single values of one metric."""
        values = series.values  # (n, layers) or (n, 1)
        self._add_means(rows, name, series, np.ones(len(series.examples), dtype=bool))
        rows.add_examples(name, series.examples, values, series.is_per_layer)
        if series.counts_zero_updates:
            rows.add_count(f"zero_updates_{name}", series.zero_updates.sum())
        if "both_f2t" in self.seen.sets and not series.is_ratio and not name.startswith("accuracy"):
            subset = self.seen.sets["both_f2t"]
            members = subset.examples[subset.values[:, 0] > 0]
            self._add_means(rows, f"{name}_f2t", series, np.isin(series.examples, members))

    def _add_means(self, rows: Rows, name: str, series: Series, chosen: np.ndarray) -> None:
        """The mean over the chosen examples, and over layers; nothing if there is no such example."""
        if not chosen.any():
            return
        counts = resampling_counts(int(chosen.sum()), self.seed)
        layers, overall = bootstrap_ratio(series.numerator[chosen], series.denominator[chosen], counts)
        rows.add_mean(name, overall)
        if series.is_per_layer:
            rows.add_means(name, layers)
        undefined = int(np.isnan(overall.value)) if series.is_ratio else int((series.denominator[chosen] == 0).sum())
        if undefined:
            rows.add_count(f"undefined_{name}", undefined)
