"""Rows of the tidy table, gathered in columns. A value that is not defined makes no row."""

import numpy as np
import pandas as pd

from fairseq_icl.metrics.bootstrap import Estimate

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
        columns = [np.concatenate(parts) for parts in zip(*(block[1:] for block in self.blocks), strict=True)]
        layer, example, value, low, high = columns
        frame = pd.DataFrame(
            {
                "metric": np.repeat([block[0] for block in self.blocks], sizes),
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
