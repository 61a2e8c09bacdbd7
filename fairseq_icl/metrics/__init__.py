"""Metrics by name: pure functions on the observations of ZSL, ICL and FT.

A new metric is one function under `@metric("name")`, in a module of this folder or in any installed package.

A metric takes the observations of the three settings of n examples and returns one of

- a tensor (n,) or (n, layers): one value an example, or one an example and layer;
- a `Similarity`: such values together with the number of cosines that were zero by definition;
- a `Ratio`: numerator and denominator (n,), for metrics such as RPA that are a quotient of sums over examples;
- a `Ranking`: the scores of every class and the right one, for the area under the ROC curve.

Values are averaged over examples, then over layers. docs/adding_a_metric.md walks through an example.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.settings import Settings

ENTRY_POINT_GROUP = "fairseq_icl.metrics"
SETTINGS = ("zsl", "icl", "ft")
EXTRAS = ("example", "attention", "other_ft", "weights")


class Observation(Protocol):
    """What a metric may look at: one setting (ZSL, ICL or FT) observed on n examples.

    L layers, H heads, d model width, C label options, Q longest query, P context length.
    """

    @property
    def option_logprobs(self) -> Tensor:
        """(n, C) mean log-probability of each label option, -inf where an example has fewer"""

    @property
    def label_prior(self) -> Tensor | None:
        """(n, C) log of each option's mean probability on inputs without content; None without classes"""

    @property
    def demonstration_logprob(self) -> Tensor | None:
        """(n,) mean log-probability of the tokens that fine-tuning would score; None unless `queries=train`"""

    @property
    def gold(self) -> Tensor:
        """(n,) index of the right option"""

    @property
    def prediction(self) -> Tensor:
        """(n,) index of the most likely option"""

    @property
    def attention_output(self) -> Tensor:
        """(n, L, d) output of the attention block at the observed position"""

    @property
    def attention_row(self) -> Tensor:
        """(n, L, H, Q) scores before the softmax over the query tokens, zeros on the left"""

    @property
    def query_length(self) -> Tensor:
        """(n,) how many entries of a row are query tokens"""

    @property
    def context_row(self) -> Tensor | None:
        """(n, L, P) scores over the context (ICL), summed over heads"""

    @property
    def query_vector(self) -> Tensor:
        """(n, L, d) scaled query vectors, heads concatenated"""

    @property
    def depth_scores(self) -> Tensor | None:
        """(n, L, C) score of each option after each layer; only differences between options count"""

    @property
    def top_tokens(self) -> Tensor | None:
        """(n, K) most likely next tokens where the label begins"""

    @property
    def top_logprobs(self) -> Tensor | None:
        """(n, K) log-probabilities of these tokens in the whole output distribution, largest first"""

    def __len__(self) -> int: ...

    def take(self, index: Any) -> "Observation":
        """The chosen examples, in that order."""


class Similarity(NamedTuple):
    """Mean cosines and how many of the cosines behind each were 0 because one of the vectors was zero.

    A cosine says nothing of lengths. Where the two vectors are things that were measured (the updates of ICL and FT,
    not a random direction), their `lengths` go with it: tables then have `length_ratio_NAME`, the second's length in
    units of the first's.
    """

    value: Tensor  # (n,) or (n, layers)
    zero_updates: Tensor  # same shape, counts
    lengths: tuple[Tensor, Tensor] | None = None  # of the first vector and of the second, same shape each


class Ratio(NamedTuple):
    """sum(numerator) / sum(denominator) over examples; undefined when the denominators sum to zero."""

    numerator: Tensor  # (n,)
    denominator: Tensor  # (n,)


class Ranking(NamedTuple):
    """Scores that should be higher where the class is the right one; their mean is the macro-averaged AUC."""

    scores: Tensor  # (n, classes)
    is_class: Tensor  # (n, classes) bool


Outcome = Tensor | Similarity | Ratio | Ranking
Function = TypeVar("Function", bound=Callable[..., Outcome])


@dataclass(frozen=True)
class Metric:
    """A named function of observations: which settings it is called with, in order, and which extras by keyword."""

    name: str
    compute: Callable[..., Outcome]
    settings: tuple[str, ...]
    needs: tuple[str, ...]
    reads: tuple[str, ...] = ()
    """Attributes of the observations that may be missing; without one of them the metric is left out."""

    def can_read(self, observations: Iterable[Observation]) -> bool:
        """Whether the observations have what it reads."""
        return all(getattr(seen, name, None) is not None for seen in observations for name in self.reads)


_metrics: dict[str, Metric] = {}
_loaded_entry_points = False


def metric(
    name: str, *, settings: Iterable[str] = SETTINGS, needs: Iterable[str] = (), reads: Iterable[str] = ()
) -> Callable[[Function], Function]:
    """Register a function as the metric `name` and return it unchanged.

    **Arguments**
    - `settings`: the observations the function takes, in order, out of zsl, icl and ft. A metric that does not take
      `ft` is also computed when a base checkpoint is scored alone.
    - `needs`: extras the function takes by keyword: `example` (n,) position of each example in the validation set,
      `attention` to training tokens (`training_attention.TrainingAttention`), `other_ft` (observation of a second
      fine-tuned model), `weights` (`weight_space.WeightUpdates`). Without one of them the metric is left out.
    - `reads`: attributes of the observations that not every observation has (`depth_scores`, `top_tokens`,
      `label_prior`); where one is missing the metric is left out.
    """
    settings, needs, reads = tuple(settings), tuple(needs), tuple(reads)
    for given, known in ((settings, SETTINGS), (needs, EXTRAS)):
        unknown = [word for word in given if word not in known]
        if unknown:
            raise ValueError(f"metric {name}: unknown {', '.join(unknown)}; choose from {', '.join(known)}")

    def register(compute: Function) -> Function:
        if name in BY_READING:
            raise ValueError(
                f"metric {name}: this name stands for {', '.join(name + e for e in BY_READING[name][1].values())}"
            )
        known = _metrics.get(name)
        if known is not None and _origin(known.compute) != _origin(compute):
            raise ValueError(f"metric {name} is registered twice: {_origin(known.compute)} and {_origin(compute)}")
        _metrics[name] = Metric(name, compute, settings, needs, reads)
        return compute

    return register


ATTENTION = {"scores": "_scores", "probabilities": "_softmax"}
RANDOM = {"uniform": "_uniform", "gaussian": "_gaussian"}
BY_READING: dict[str, tuple[str, dict[str, str]]] = {
    "sim_aou_random": ("random_update", RANDOM),
    "sim_aou_norm_random": ("random_update", RANDOM),
    "sim_am_before": ("attention_similarity", ATTENTION),
    "sim_am_after": ("attention_similarity", ATTENTION),
    "sim_am_delta": ("attention_similarity", ATTENTION),
    "alpha": ("attention_similarity", ATTENTION),
}
"""Names that mean one of several metrics: the setting that decides, and the ending for each value."""


def metric_names() -> list[str]:
    """Every name `get_metric` knows, those of installed packages last."""
    _load_entry_points()
    return [*BY_READING, *_metrics]


def default_names(settings: Settings | None = None) -> list[str]:
    """Every metric once: without the `_scores` and `_uniform` versions that a plain name stands for already."""
    repeated = {get_metric(name, settings).name for name in BY_READING}
    return [name for name in metric_names() if not (name in repeated and name.endswith(("_scores", "_uniform")))]


def get_metric(name: str, settings: Settings | None = None) -> Metric:
    """The metric of that name (under those settings; by default the authors'), or an error that lists the names."""
    _load_entry_points()
    full_name = name
    if name in BY_READING:
        field, endings = BY_READING[name]
        full_name += endings[getattr(settings or Settings(), field)]
    if full_name not in _metrics:
        raise UserError(f"metric {name!r} is not known; choose from {', '.join(metric_names())}")
    return _metrics[full_name]


def _origin(compute: Callable[..., Outcome]) -> str:
    return f"{compute.__module__}.{compute.__qualname__}"


def _load_entry_points() -> None:
    """Import what installed packages offer under the group `fairseq_icl.metrics`; importing registers it."""
    global _loaded_entry_points
    if _loaded_entry_points:
        return
    _loaded_entry_points = True
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        entry_point.load()


# Importing a module registers its metrics; at the end, because they take `metric` from here.
from fairseq_icl.metrics import (  # noqa: E402
    attention_maps,
    attention_outputs,
    depth,
    output_distributions,
    predictions,
    training_attention,
    weight_space,
)

__all__ = [
    "Metric",
    "Observation",
    "Ranking",
    "Ratio",
    "Similarity",
    "attention_maps",
    "attention_outputs",
    "depth",
    "get_metric",
    "metric",
    "metric_names",
    "output_distributions",
    "predictions",
    "training_attention",
    "weight_space",
]
