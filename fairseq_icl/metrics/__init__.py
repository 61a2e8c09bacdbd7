"""Metrics by name: pure functions on the observations of ZSL, ICL and FT.

A new metric is one function under `@metric("name")`, in a module of this folder or in any installed package.

A metric takes the observations of the three conditions of n examples and returns one of

- a tensor (n,) or (n, layers): one value an example, or one an example and layer;
- a `Similarity`: such values together with the number of cosines that have no meaning; of (n, layers, heads) the table
  has the mean over heads as NAME and the means over examples of every head as NAME_0, NAME_1, ...;
- a `Ratio`: numerator and denominator (n,), for metrics such as RPA that are a quotient of sums over examples;
- a `Ranking`: the scores of every class and the right one, for the area under the ROC curve.

Values are averaged over examples, then over layers. docs/adding_a_metric.md walks through an example.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.settings import Settings

CONDITIONS = ("zsl", "icl", "ft")  # zero-shot, in context, fine-tuned: what a model is observed in
if TYPE_CHECKING:
    from fairseq_icl.observing.observation import Observation
else:
    Observation = Any  # metrics do without the modules that observe
EXTRAS = ("example", "attention", "other_ft", "weights")


class Similarity(NamedTuple):
    """Mean cosines, and how many of the cosines behind each have no meaning: of a zero vector, or of rounding.

    Where the two vectors are things that were measured (the updates of ICL and FT, not a random direction), their
    `lengths` go with it: tables then have `length_ratio_NAME`, the second's length in units of the first's.
    """

    value: Tensor  # (n,), (n, layers) or (n, layers, heads)
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


class Calibration(NamedTuple):
    """How sure each prediction is and whether it is right; together they have an expected calibration error."""

    confidence: Tensor  # (n,) between 0 and 1
    is_right: Tensor  # (n,) bool


Outcome = Tensor | Similarity | Ratio | Ranking | Calibration
Function = TypeVar("Function", bound=Callable[..., Outcome])


@dataclass(frozen=True)
class Metric:
    """A named function of observations: which conditions it is called with, in order, and which extras by keyword."""

    name: str
    compute: Callable[..., Outcome]
    conditions: tuple[str, ...]
    needs: tuple[str, ...]
    reads: tuple[str, ...] = ()  # attributes of observations that may be missing; without one it is left out
    title: str = ""  # in figures; by default its name
    unit: str = ""  # in which it is shown; shares are computed between 0 and 1, also those with the unit "percent"

    def can_read(self, observations: Iterable[Observation]) -> bool:
        """Whether the observations have what it reads."""
        return all(getattr(seen, name, None) is not None for seen in observations for name in self.reads)


_metrics: dict[str, Metric] = {}


def metric(
    name: str,
    *,
    conditions: Iterable[str] = CONDITIONS,
    needs: Iterable[str] = (),
    reads: Iterable[str] = (),
    title: str = "",
    unit: str = "",
    **given: Any,
) -> Callable[[Function], Function]:
    """Register a function, with the arguments in `given`, as the metric `name` and return it unchanged.

    Args:
        name: What tables call it.
        conditions: The observations the function takes, in order, out of zsl, icl and ft. A metric that does not take
            `ft` is also computed when a base checkpoint is scored alone.
        needs: Extras the function takes by keyword: `example` (n,) position of each example in the validation set,
            `attention` to training tokens (`training_attention.TrainingAttention`), `other_ft` (observation of a second
            fine-tuned model), `weights` (`weight_space.WeightUpdates`). Without one of them the metric is left out.
        reads: Attributes of the observations that not every observation has (`depth_scores`, `top_tokens`,
            `label_prior`, `head_output`); where one is missing the metric is left out.
        title: What stands at its axis in figures; by default its name.
        unit: "percent" shows a share as percent.
        given: Further arguments of the function, fixed here.

    Returns:
        A decorator. The function returns one value an example, (n,), or one an example and layer, (n, L).

    Example:
        ```python
        @metric("gold_gain", conditions=("zsl", "icl"))
        def gold_gain(zsl, icl):
            gain = icl.option_logprobs - zsl.option_logprobs  # (n, C)
            return gain.gather(1, icl.gold[:, None])[:, 0]  # (n,)
        ```
    """
    conditions, needs, reads = tuple(conditions), tuple(needs), tuple(reads)
    for words, known in ((conditions, CONDITIONS), (needs, EXTRAS)):
        unknown = [word for word in words if word not in known]
        if unknown:
            raise ValueError(f"metric {name}: unknown {', '.join(unknown)}; choose from {', '.join(known)}")

    def register(compute: Function) -> Function:
        if name in BY_READING:
            meant = ", ".join(name + ending for ending in BY_READING[name][1].values())
            raise ValueError(f"metric {name}: this name stands for {meant}")
        before = _metrics[name].compute if name in _metrics else compute
        origins = [f"{function.__module__}.{function.__qualname__}" for function in (before, compute)]
        if origins[0] != origins[1]:
            raise ValueError(f"metric {name} is registered twice: {' and '.join(origins)}")
        called = update_wrapper(partial(compute, **given), compute) if given else compute
        _metrics[name] = Metric(name, called, conditions, needs, reads, title, unit)
        return compute

    return register


def metric_of_each(
    name: str, *, conditions: Iterable[str] = CONDITIONS, title: str = "", **facts: Any
) -> Callable[[Function], Function]:
    """Register a function of one observation as NAME_zsl, NAME_icl and NAME_ft."""

    def register(compute: Function) -> Function:
        for condition in reversed(tuple(conditions)):
            own_title = f"{condition.upper()} {title}" if title else ""
            metric(f"{name}_{condition}", conditions=(condition,), title=own_title, **facts)(compute)
        return compute

    return register


BY_RANDOM_UPDATE = "random_update", {"uniform": "_uniform", "gaussian": "_gaussian"}
BY_ATTENTION = "attention_similarity", {"scores": "_scores", "probabilities": "_softmax"}
BY_READING = dict.fromkeys(("sim_aou_random", "sim_aou_norm_random"), BY_RANDOM_UPDATE)
BY_READING |= dict.fromkeys(("sim_am_before", "sim_am_after", "sim_am_delta", "alpha"), BY_ATTENTION)
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


def shown_as(name: str) -> tuple[str, str, float]:
    """(title, unit, factor) of a metric in figures and tables; of one that is not known here, its name alone."""
    try:
        known = get_metric(name)
    except UserError:  # of a package that is not installed
        return name, "", 1.0
    return known.title or name, known.unit, 100.0 if known.unit == "percent" else 1.0


@cache
def _load_entry_points() -> None:
    """Import what installed packages offer under the group `fairseq_icl.metrics`; importing registers it."""
    for entry_point in entry_points(group="fairseq_icl.metrics"):
        entry_point.load()


# Importing a module registers its metrics; at the end, because they take `metric` from here.
from fairseq_icl.metrics import attention_maps, attention_outputs, predictions, training_attention, weight_space  # noqa: E402
