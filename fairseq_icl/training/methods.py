"""Methods by name: a set of `fairseq-train` flags, or an edit of states. docs/adding_a_method.md shows how to add one.

From a method and the settings of a run follow the options of `fairseq-train`, of which both the configuration that runs
in this process and the command line that does the same are made.
"""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import yaml

from fairseq_icl.compat.command_line import TASK
from fairseq_icl.errors import UserError
from fairseq_icl.models.files import ModelFiles
from fairseq_icl.models.state_edits import MakeEdit
from fairseq_icl.settings import FLAG_OF_FAIRSEQ, FLAG_OF_TASK, OF_TRAINING, SETTINGS, Setting, Settings, nearest
from fairseq_icl.training.shallow import shallow_gd
from fairseq_icl.training.vectors import function_vector, task_vector

ENTRY_POINT_GROUP = "fairseq_icl.methods"
PROTOCOL: dict[str, Any] = {  # what every run of the papers has in common, unless a method says otherwise
    "task": TASK,
    "arch": "pretrained_lm",
    "criterion": "cross_entropy",
    "optimizer": "sgd",
    "momentum": 0.0,
    "weight_decay": 0.0,
    "lr_scheduler": "fixed",
    "max_epoch": 1,
    "batch_size": 1,
    "update_freq": 1,
    "required_batch_size_multiple": 1,
    "num_workers": 0,
    "data_buffer_size": 0,
    "log_format": "none",
    "linearize": False,
    "sequential": False,
    "record_queries": True,
    "no_save": True,
    "disable_validation": True,
    "distributed_world_size": 1,  # fairseq's default is the number of GPUs: so many demonstrations would be one step
}
LOSS_SCALE: dict[str, Any] = {"fp16_init_scale": 4, "fp16_scale_window": 256}
"""The authors' in fp16: where the dynamic loss scale starts, and after how many updates without overflow it doubles."""
PRECISION: dict[str, dict[str, Any]] = {"fp32": {}, "fp16": {"fp16": True, **LOSS_SCALE}, "bf16": {"bf16": True}}
"""Options of fairseq's for each precision: its optimizer with fp32 master weights."""
RUN_THE_MODEL_ONCE = ("cross_entropy", "layer_causal_ce")  # and by its own pass: query vectors are recorded on the way
VANILLA, LAYER_CAUSAL = ("--criterion", "cross_entropy"), ("--criterion", "layer_causal_ce")


@dataclass(frozen=True)
class Method:
    """A way to learn from the demonstrations: what `fairseq-train` is told beyond data, model and learning rate.

    Or, with `edit`, a way that trains nothing: what is done to the model's states.
    """

    name: str
    help: str
    flags: tuple[str, ...] = ()
    """Flags of `fairseq-train`; of a method that edits states, settings in the same form (`--shallow kernel`)."""
    lr: float | None = None
    """Its own learning rate, where those of experiments do not fit (a loss of another kind); one that is given wins."""
    compares: tuple[str, str] | None = None
    """Two methods whose fine-tuned models are compared with each other instead of with ICL."""
    edit: MakeEdit | None = None
    """Of a method that trains nothing: makes its `StateEdit` of (model, prompts, settings)."""
    edit_reads: tuple[str, ...] = ()
    """The settings of training that `edit` reads."""
    first: str = ""
    """A method whose training, at its own learning rate and for `align_epochs`, comes before this one's."""
    reads_prompt: bool = False
    """Whether it learns from the ICL prompt too, and not from the fine-tuning sequences alone."""

    def __post_init__(self) -> None:
        """Refuse flags that say nothing, or that are not a method's to set."""
        for before, word in zip(("", *self.flags), self.flags, strict=False):
            if not isinstance(word, str) or not (word.startswith("--") or before.startswith("--")):
                raise UserError(f"method {self.name}: {word} follows no flag; write flags as ('--name', 'value', ...)")
        for name in self.options:
            if name in SETTINGS and name not in OF_TRAINING:
                raise UserError(f"method {self.name}: --{name.replace('_', '-')} is not of training; give {name}=VALUE")
        for name in (*self.edit_reads, *(self.options if self.edit is not None else ())):
            if name not in OF_TRAINING:
                raise UserError(f"method {self.name}: {name} is no setting of training; {nearest(name, OF_TRAINING)}")
        _ = self.settings

    @property
    def trains(self) -> bool:
        """Whether the method trains weights, by fairseq."""
        return bool(self.flags) and self.edit is None

    @property
    def trained(self) -> tuple[str, ...]:
        """The methods whose models a cell of this method needs: its own, the two it compares, or none."""
        return self.compares or ((self.name,) if self.trains or self.edit is not None else ())

    def reads(self, known: Setting) -> bool:
        """Whether a setting of training can matter to this method: fairseq's own loss knows none of other losses'."""
        if known.name == "selection_rows" and self.reads(SETTINGS["layers"]):  # layers=similar
            return True
        if self.edit is not None:
            return known.name in self.edit_reads
        if known.flag_of == ():
            return bool(self.first) and known.name == "align_epochs"
        own_loss = self.options.get("criterion", PROTOCOL["criterion"]) != PROTOCOL["criterion"]
        return own_loss or known.is_flag_of(FLAG_OF_TASK, FLAG_OF_FAIRSEQ)

    @property
    def options(self) -> dict[str, Any]:
        """The flags as options: ("--momentum", "0.9", "--linearize") -> {"momentum": 0.9, "linearize": True}."""
        options: dict[str, Any] = {}
        for word, following in zip(self.flags, (*self.flags[1:], "--"), strict=False):
            if word.startswith("--"):
                value = True if following.startswith("--") else yaml.safe_load(following)
                with suppress(TypeError, ValueError):  # YAML takes 1e-3 for a text
                    value = float(value) if isinstance(value, str) else value
                options[word[2:].replace("-", "_")] = value
        return options

    @property
    def settings(self) -> dict[str, Any]:
        """The settings among the options, checked: part of what is known of every model that the method trains."""
        try:
            return {n: SETTINGS[n].check(value) for n, value in self.options.items() if n in SETTINGS}
        except UserError as error:
            raise UserError(f"method {self.name}: {error}") from error


SHALLOW = ("lr", "layers", "shallow", "kernel", "shallow_steps", "shallow_batch", "shallow_step")
_built_in = (
    Method("gd", "vanilla fine-tuning: fairseq's own cross_entropy", VANILLA),
    Method("lcgd", "layer-causal fine-tuning", LAYER_CAUSAL),
    Method(
        "lcgd_sequential",
        "layer-causal fine-tuning in which every layer takes its step before the next one sees its input",
        (*LAYER_CAUSAL, "--sequential"),
    ),
    Method("linearized", "vanilla fine-tuning of the linearized model", (*VANILLA, "--linearize")),
    Method("linearized_lcgd", "layer-causal fine-tuning of the linearized model", (*LAYER_CAUSAL, "--linearize")),
    Method(
        "gd_full_batch",
        "vanilla fine-tuning in one step on all demonstrations, whose gradients are averaged over their tokens",
        (*VANILLA, "--update-freq", "1000000"),  # more than anyone has
    ),
    Method(
        "short_circuit",
        "vanilla fine-tuning of the model cut after one layer (layers=3; by default the last, which is gd)",
        ("--criterion", "short_circuit_ce"),
    ),
    Method(
        "match_icl",
        "keys and values trained to reproduce ICL's attention outputs: at least so much is possible",
        ("--criterion", "match_icl", "--optimizer", "adam", "--max-epoch", "20"),
        lr=0.001,
        reads_prompt=True,
    ),
    Method(
        "align_then_train",
        "match_icl first, then vanilla fine-tuning from there (Mishra et al. 2025, arXiv 2509.22621)",
        VANILLA,
        first="match_icl",
        reads_prompt=True,
    ),
    Method(
        "lora",
        "vanilla fine-tuning of keys and values in a random subspace of rank lora_rank",
        (*VANILLA, "--train-parameters", "lora"),
    ),
    Method(
        "shallow_gd",
        "descent on a shallow function of every layer's states, which adds to its attention output; no weight changes",
        lr=0.03,  # on the scale of the demo model's states; other models need a search
        edit=shallow_gd,
        edit_reads=SHALLOW,
    ),
    Method(
        "shallow_gd_kernel",
        "the same with a function of the softmax kernel, whose value is attention to the demonstrations",
        ("--shallow", "kernel"),
        lr=100.0,
        edit=shallow_gd,
        edit_reads=SHALLOW,
    ),
    Method(
        "task_vector",
        "the state of a demonstration prompt's last token, put in place at one layer (Hendel et al. 2023)",
        edit=task_vector,
        edit_reads=("layers", "selection_rows"),
        reads_prompt=True,
    ),
    Method(
        "function_vector",
        "mean outputs of the heads with the largest indirect effect, added at one layer (Todd et al. 2023)",
        edit=function_vector,
        edit_reads=("layers", "selection_rows", "vector_heads"),
        reads_prompt=True,
    ),
    Method("alpha", "SimAM_delta between vanilla and layer-causal fine-tuning", compares=("gd", "lcgd")),
    Method("none", "no fine-tuning: ZSL and ICL only"),
)
_methods = {method.name: method for method in _built_in}
_entry_points_read = False


def register_method(method: Method) -> Method:
    """Make a method known by its name and return it; a second, different method of the same name is refused.

    Example:
        ```python
        register_method(Method("adam", "fine-tuning by Adam", ("--optimizer", "adam"), lr=1e-3))
        ```
    """
    known = _methods.setdefault(method.name, method)
    if known != method:
        raise UserError(f"method {method.name}: registered twice with different flags; rename one of them")
    return method


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
        raise UserError(f"method={name}: unknown method; {nearest(str(name), method_names())}")
    return _methods[name]


def check_precision_of(method: Method, settings: Settings) -> None:
    """Refuse a method that half precision does not have, before a model is loaded."""
    if settings.precision != "fp32" and method.options.get("sequential"):
        raise UserError(
            f"method={method.name}: one layer's step cannot be taken alone in half precision; use precision=fp32, or "
            "leave the method out"
        )


def name_of_method(config: Mapping[str, Any], linearized: bool) -> str:
    """The method whose options are just those of a checkpoint's configuration (`cfg`), or these options in words."""
    known = [_methods[name] for name in method_names() if _methods[name].trains and not _methods[name].first]
    names = dict.fromkeys(name for method in known for name in method.options)
    found = {name: linearized if name == "linearize" else _saved_option(config, name) for name in names}
    for method in sorted(known, key=lambda method: -len(method.options)):  # what says more is named first
        said = {**PROTOCOL, **method.options, **method.settings}
        if all(said.get(name, found[name]) == found[name] for name in names):
            return method.name
    given = [f"{name}={value}" for name, value in found.items() if value != PROTOCOL.get(name) and value is not None]
    return " ".join([str(found["criterion"]), *(word for word in given if not word.startswith("criterion="))])


def _saved_option(config: Mapping[str, Any], name: str) -> Any:
    """The value of an option in a saved configuration, whichever section has it."""
    protocol = PROTOCOL.get(name)
    if name in ("criterion", "optimizer", "lr_scheduler"):
        section = config.get(name) or {}
        return section.get("_name", protocol) if isinstance(section, Mapping) else getattr(section, name, protocol)
    sections = [part if isinstance(part, Mapping) else getattr(part, "__dict__", {}) for part in config.values()]
    value = next((section[name] for section in sections if name in section), protocol)
    return value[0] if isinstance(value, list) and len(value) == 1 else value  # one value an epoch


def training_options(method: Method, settings: Settings, files: ModelFiles, data: str, dataset: str) -> dict[str, Any]:
    """The options of `fairseq-train`, by name, that fine-tune with `method` as the settings say."""
    named = {"data": data, "dataset": dataset, **files.options()}
    options = PROTOCOL | PRECISION[settings.precision] | named | method.options
    if options["optimizer"] != PROTOCOL["optimizer"] and "momentum" not in method.options:
        del options["momentum"]  # a flag of SGD's own
    components = (FLAG_OF_TASK, FLAG_OF_FAIRSEQ, options["criterion"])
    given = {known.name: getattr(settings, known.name) for known in SETTINGS.values() if known.is_flag_of(*components)}
    options |= given | method.options
    # A flag of False is one that is not given: not every criterion knows all of them.
    return {name: value for name, value in options.items() if value is not None and value is not False}


def training_command(options: Mapping[str, Any], **more: Any) -> str:
    """The command line that does the same as a run with these options in this process."""
    words = ["fairseq-train", "--user-dir", "fairseq_icl", str(options["data"])]
    for name, value in (dict(options) | more).items():
        if name != "data" and value is not False:
            flag = "--pretrained" if name == "base_model" else f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)
