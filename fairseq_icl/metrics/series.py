"""The values of one metric over all examples seen, in whatever order and by whichever process."""

import numpy as np
from torch import Tensor

from fairseq_icl.metrics.registry import Outcome, Ratio, Similarity


class Series:
    """Values of one metric: numerator and denominator an example and layer, so that means and quotients are alike.

    A plain value has the denominator 1, or 0 if it is not finite. Reading a property sorts by example and drops
    repetitions, so the order of batches and examples seen twice (fairseq's padding of shards) do not matter.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: list[tuple[np.ndarray, ...]] = []
        self.is_ratio = self.is_per_layer = self.counts_zero_updates = False

    def append(self, example: Tensor, outcome: Outcome) -> None:
        """Take in a metric's outcome for examples (n,)."""
        zero_updates = None
        if isinstance(outcome, Ratio):
            numerator, denominator = (_columns(part) for part in outcome)
            self.is_ratio = True
        else:
            if isinstance(outcome, Similarity):
                outcome, zero_updates = outcome
                self.counts_zero_updates = True
            self.is_per_layer = outcome.ndim == 2
            value = _columns(outcome)
            denominator = np.isfinite(value).astype(np.float64)
            numerator = np.where(denominator > 0, value, 0.0)
        if len(numerator) != len(example):
            raise ValueError(f"{self.name}: {len(numerator)} values for {len(example)} examples")
        zeros = np.zeros(len(numerator)) if zero_updates is None else _columns(zero_updates).sum(1)
        self.parts.append((example.cpu().numpy(), numerator, denominator, zeros))

    def extend(self, other: "Series") -> None:
        """Take in another series of the same metric."""
        self.parts += other.parts
        self.is_ratio |= other.is_ratio
        self.is_per_layer |= other.is_per_layer
        self.counts_zero_updates |= other.counts_zero_updates

    @property
    def examples(self) -> np.ndarray:
        """(n,) positions in the validation set, ascending"""
        return self._column(0)

    @property
    def numerator(self) -> np.ndarray:
        """(n, layers), with one column if the metric has no layers"""
        return self._column(1)

    @property
    def denominator(self) -> np.ndarray:
        """(n, layers)"""
        return self._column(2)

    @property
    def zero_updates(self) -> np.ndarray:
        """(n,) cosines that were 0 by definition"""
        return self._column(3)

    @property
    def values(self) -> np.ndarray:
        """(n, layers) numerator / denominator, NaN where not defined"""
        numerator, denominator = self.numerator, self.denominator
        return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0)

    def _column(self, index: int) -> np.ndarray:
        if len(self.parts) > 1:
            joined = [np.concatenate(column) for column in zip(*self.parts, strict=True)]
            _, first = np.unique(joined[0], return_index=True)
            self.parts = [tuple(column[first] for column in joined)]
        elif len(self.parts) == 1 and not (np.diff(self.parts[0][0]) > 0).all():
            _, first = np.unique(self.parts[0][0], return_index=True)
            self.parts = [tuple(column[first] for column in self.parts[0])]
        return self.parts[0][index]


def _columns(values: Tensor) -> np.ndarray:
    """(n,) or (n, layers) -> (n, 1) or (n, layers) float64"""
    array = values.detach().double().cpu().numpy()
    return array.reshape(len(array), -1) if array.ndim == 1 else array
