"""Fine-tuning methods by name: each is a set of `fairseq-train` flags. docs/adding_a_method.md shows how to add one."""

import difflib
from dataclasses import dataclass
from importlib.metadata import entry_points

from fairseq_icl.errors import UserError

ENTRY_POINT_GROUP = "fairseq_icl.methods"


@dataclass(frozen=True)
class Method:
    """A way to fine-tune on the demonstrations: what `fairseq-train` is told beyond data, model and learning rate."""

    name: str
    help: str
    flags: tuple[str, ...] = ()
    """Flags of `fairseq-train`; empty for a method that trains nothing."""
    compares: tuple[str, str] | None = None
    """Two methods whose fine-tuned models are compared with each other instead of with ICL."""

    @property
    def trains(self) -> bool:
        """Whether the method has a fine-tuned model of its own."""
        return bool(self.flags)

    @property
    def trained(self) -> tuple[str, ...]:
        """The methods whose fine-tuned models a cell of this method needs: its own, the two it compares, or none."""
        return self.compares or ((self.name,) if self.trains else ())


_methods: dict[str, Method] = {}
_entry_points_read = False


def register_method(method: Method) -> Method:
    """Make `method` known by its name; a second, different method of the same name is refused."""
    known = _methods.setdefault(method.name, method)
    if known != method:
        raise UserError(f"method {method.name}: registered twice with different flags; rename one of them")
    return method


for _method in (
    Method("gd", "vanilla fine-tuning: fairseq's own cross_entropy", ("--criterion", "cross_entropy")),
    Method("lcgd", "layer-causal fine-tuning", ("--criterion", "layer_causal_ce")),
    Method(
        "linearized", "vanilla fine-tuning of the linearized model", ("--criterion", "cross_entropy", "--linearize")
    ),
    Method(
        "linearized_lcgd",
        "layer-causal fine-tuning of the linearized model",
        ("--criterion", "layer_causal_ce", "--linearize"),
    ),
    Method("alpha", "SimAM_delta between vanilla and layer-causal fine-tuning", compares=("gd", "lcgd")),
    Method("none", "no fine-tuning: ZSL and ICL only"),
):
    register_method(_method)


def method_names() -> list[str]:
    """Names of all methods, those of installed packages included."""
    global _entry_points_read
    if not _entry_points_read:
        for point in entry_points(group=ENTRY_POINT_GROUP):
            register_method(point.load())
        _entry_points_read = True
    return sorted(_methods)


def get_method(name: str) -> Method:
    """The method called `name`."""
    if name not in method_names():
        close = difflib.get_close_matches(name, method_names(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(method_names())}"
        raise UserError(f"method={name}: unknown method; {hint}")
    return _methods[name]
