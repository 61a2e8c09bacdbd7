"""Every setting of the instrument, once: its type, choices, default, the paper's value, help, and what it affects.

Flags of `fairseq-train` and `fairseq-validate`, keys of `fairseq-icl replicate`, arguments of the Python functions,
the keys under which results are stored, the audit's variants and the table in docs/protocol.md are made from this
file, or are checked against it. A new setting is one field of `Settings`.

A setting with a `paper` value is a place where the authors' code and the papers' text differ: its default is what the
authors ran, `paper` what the text says, and `reading` ("authors" or "paper") chooses for all of them at once.
"""

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin

from fairseq_icl.errors import UserError

QUERIES, CONTEXT, FINETUNING = "queries", "context", "finetuning"
WEIGHTS, TRAINING, RECORDING, METRICS = "weights", "training", "recording", "metrics"
PROMPTS = (QUERIES, CONTEXT, FINETUNING)
"""What a setting may affect: three kinds of token sequences; the model before training; training; what is recorded."""
OBSERVED = {
    "zsl": (QUERIES, WEIGHTS, RECORDING),
    "icl": (QUERIES, WEIGHTS, RECORDING, CONTEXT),
    "ft": (QUERIES, WEIGHTS, RECORDING, FINETUNING, TRAINING),
}
"""What the observation of each condition (ZSL, ICL, FT) depends on."""
READINGS = ("authors", "paper")
FLAG_OF_TASK, FLAG_OF_FAIRSEQ = "task", "fairseq"
"""Where a flag stands: on our task, or on fairseq itself; otherwise it is the name of a criterion."""


@dataclass(frozen=True)
class Setting:
    """What is known of one setting."""

    name: str
    kind: type
    default: Any
    help: str
    affects: tuple[str, ...]
    optional: bool = False
    choices: tuple[str, ...] = ()
    paper: Any = None
    low: float | None = None
    high: float | None = None
    pattern: str = ".*"
    """Regular expression of the texts allowed, which all can be printed."""
    flag_of: tuple[str, ...] = (FLAG_OF_TASK,)
    """The task, fairseq, or the criterions that have a flag of this name."""
    only_if: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """Stage -> another setting and those of its values with which this one affects the stage; not here: always."""

    def check(self, value: Any) -> Any:
        """`value` as the setting's type; a UserError that names setting, value and what is allowed otherwise."""
        if value is None and self.optional:
            return None
        problem, number = "", f"{'' if self.kind is float else 'whole '}number"
        numbers: Any = Real if self.kind is float else Integral
        if self.choices:
            if not isinstance(value, str) or value not in self.choices:
                problem = f"choose from {', '.join(self.choices)}"
        elif self.kind is str:
            if isinstance(value, int | float) and not isinstance(value, bool):
                value = str(value)  # a limit or a layer, typed as the number it is
            if not isinstance(value, str) or not value.strip() or not value.isprintable():
                problem = "must be a text that is not empty, in one line"
            elif "${" in value or value == "???":
                problem = "must be a plain text, without ${...}"
            elif not re.fullmatch(self.pattern, value):
                problem = f"must be {self.help.rpartition(': ')[2]}"
        elif isinstance(value, bool) or not isinstance(value, numbers) or not abs(value) <= sys.float_info.max:
            problem = f"must be a {number}"
        elif self.low is not None and value < self.low:
            problem = f"must be at least {self.low:g}"
        elif self.high is not None and value > self.high:
            problem = f"must be at most {self.high:g}"
        if problem:
            raise UserError(f"{self.name}={shown(value)}: {problem}")
        return self.kind(value)  # numpy's numbers become Python's, whose text is the same everywhere

    def is_flag_of(self, *components: str) -> bool:
        """Whether one of the components has a flag of this name."""
        return not {*components}.isdisjoint(self.flag_of)


def setting(affects: tuple[str, ...], default: Any, **facts: Any) -> Callable[[str], Any]:
    """A field of `Settings`: what it affects, its default, what else `Setting` says of it; and then its help text."""
    return lambda text: field(default=default, metadata={"help": text, "affects": affects, **facts})


_weights, _training = partial(setting, (WEIGHTS,)), partial(setting, (TRAINING,))
_without_flag = partial(setting, (TRAINING,), flag_of=())
_recording, _metrics = (partial(setting, (stage,), flag_of=("icl_similarity",)) for stage in (RECORDING, METRICS))


def shown(value: Any) -> str:
    """A value as messages show it: in one line, and not without end."""
    try:
        text = " ".join(str(value).split())
    except (ValueError, RecursionError):  # a number of thousands of digits, a list that holds itself
        text = f"({type(value).__name__})"
    return text if len(text) <= 80 else f"{text[:80]}..."


FROM_TRAIN_ROWS = {QUERIES: ("queries", ("train",))}
SWITCH = {
    "only_if": {
        CONTEXT: ("switch_labels", ("demonstrations", "both")),
        FINETUNING: ("switch_labels", ("finetuning", "both")),
    }
}
Init = Literal["pretrained", "untrained", "trained-embeddings", "layer-norms"]
INITS = get_args(Init)


@dataclass(frozen=True)
class Settings:
    """All settings of one run, checked and complete. The defaults are what the authors ran, if that is one value."""

    num_demonstrations: int = setting(PROMPTS, 32, low=0, only_if=FROM_TRAIN_ROWS)("number of demonstrations k")
    seed: int = setting(
        (*PROMPTS, WEIGHTS),
        1,
        low=0,
        high=2**32 - 1,
        flag_of=(FLAG_OF_FAIRSEQ,),
        only_if=FROM_TRAIN_ROWS | {WEIGHTS: ("init", INITS[1:])},
    )("seed of the draw of demonstrations, of their permutations and of random weights")
    permutation: int = setting((CONTEXT, FINETUNING), 0, high=999)(
        "index of the permutation of the demonstrations (0: see permutation_zero; negative: none); the authors: 0-4"
    )
    queries: Literal["validation", "train"] = setting(PROMPTS, "validation")(
        "rows that are asked about: those of the validation split, or those of the train split that are not among the "
        "demonstrations (to choose a learning rate without looking at the validation split)"
    )
    # A bare number is a slip: the k, or a row.
    demonstrations: str = setting(PROMPTS, "first", pattern=r".*[^\d\s.+-].*", only_if=FROM_TRAIN_ROWS)(
        "which rows of the train file are demonstrations: first (the first k of the shuffled file, as the authors), "
        "balanced (the first of each class, as many of one as of another), or a file of row numbers, one in a line, "
        "from 0, of which the first k are taken in the file's order"
    )
    limit: int | None = setting((QUERIES,), None, low=1)(
        "score only the first N validation examples (after shuffle and cap)"
    )
    max_validation: int = setting(PROMPTS, 2000, low=1)("cap of the validation set; the authors keep 2000 rows")
    curve_examples: int = _metrics(0, low=0, flag_of=())(
        "also measure after each demonstration, ICL with so many against fine-tuning after so many, on the first N "
        "validation examples (0: not at all)"
    )
    missing_class: Literal["warn", "refuse", "ignore"] = setting((CONTEXT,), "warn")(
        "what to do if no demonstration in the prompt has one of the labels; the authors do not look"
    )
    separator: Literal["model", "eos", "newline"] = setting((CONTEXT,), "model")(
        "what closes a demonstration in the prompt: what the model was trained with (EOS for fairseq's models, a line "
        "break for most others), EOS, or a line break"
    )
    init: Init = _weights("pretrained")(  # noqa: RUF009 - a field
        "weights: pretrained; untrained (nothing kept from the checkpoint); trained-embeddings (embeddings and the "
        "layers' layer norms kept: the second paper's 'trained embeddings'); layer-norms (only the layers' layer norms "
        "kept: its 'no training')"
    )
    perturbation: int = _weights(0, low=0, high=2**32 - 1)(
        "move every weight of the model by one unit in the last place before anything else, in directions drawn from "
        "this number (0: not at all): how much of a result is rounding"
    )
    attention: Literal["softmax", "linear"] = _weights("softmax")(
        "the model's own attention, or linear: softmax and scale omitted, as in the papers' relaxation"
    )
    precision: Literal["fp32", "fp16", "bf16"] = _weights("fp32")(
        "numbers in which everything is computed and recorded: fp32; fp16, as the authors' runs (fp32 master weights "
        "and a dynamic loss scale in fine-tuning); bf16 (the same without a loss scale)"
    )
    device: Literal["cpu", "cuda"] = _weights("cpu", flag_of=())(
        "what computes the model: cpu or cuda, a GPU (by default replicate takes a GPU if there is one)"
    )
    lr: float | None = _training(None, low=0, flag_of=(FLAG_OF_FAIRSEQ,))("learning rate")
    clip_norm: float = _training(0.0, low=0, flag_of=(FLAG_OF_FAIRSEQ,))(
        "clip the gradient of all layers together to this norm; 0: no clipping"
    )
    layer_clip: Literal["none", "norm", "max"] = _training("none")(
        "limit every layer's gradient: its norm, or its largest component"
    )
    layer_clip_value: str | None = _training(None)(
        "the limit: one value, one per layer (comma-separated), from:FILE (a file of --record-gradients), or in "
        "replicate the name of a method whose recorded norms are the limits"
    )
    layer_step: Literal["rate", "equal"] = _training("rate")(
        "how long a layer's step is: what the learning rate makes of its gradient, or the relative size "
        "layer_step_size in every layer (normalised gradient descent)"
    )
    layer_step_size: float | None = _training(None, low=1e-12)(
        "with layer_step=equal: |dW| / |W| of what learns in a layer, at every step"
    )
    gradient_norms: Literal["trained", "all"] = _training("trained")(
        "whose gradients are recorded: of what learns, or also of all parameters of a layer, summed over tokens, as in "
        "the second paper's heat maps (not in linearized training)"
    )
    train_parameters: str = _training("self_attn.k_proj,self_attn.v_proj")(
        "comma-separated parts of the names of the parameters that learn; lora: the key and value projections in a "
        "random subspace of rank lora_rank, without biases"
    )
    layers: str | None = _training(
        None, pattern=r"similar|\s*\d+\s*(-\s*\d*)?\s*", flag_of=("layer_causal_ce", "short_circuit_ce")
    )(
        "layer-causal training: layers that get a loss; short_circuit: the one after which the model is cut; "
        "shallow_gd: layers that have a function; vectors: the one they are put at (default: chosen on train rows). "
        "Counted from 0: one (3), a range (0-11), from one up (2-), or similar (the range whose heads the method moves "
        "most as ICL does, on selection_rows of the train split; it trains twice)"
    )
    shallow: Literal["linear", "kernel", "ridge"] = _without_flag("linear")(
        "what shallow_gd learns in every layer: a matrix, a function of a kernel (see kernel), or ridge regression on "
        "label embeddings (1 / lr is then the weight of its penalty)"
    )
    kernel: Literal["softmax", "rbf", "linear"] = _without_flag("softmax")(
        "shallow=kernel: softmax of the products with the demonstrations, radial (rbf, as wide as the demonstrations "
        "are apart), or the product itself (linear)"
    )
    shallow_steps: int = _without_flag(1, low=0)("steps of shallow_gd: how often all demonstrations are learnt from")
    shallow_batch: Literal["full", "one"] = _without_flag("full")(
        "a step of shallow_gd learns from all demonstrations together, or from one after the other"
    )
    shallow_step: Literal["plain", "preconditioned", "gd++"] = _without_flag("plain")(
        "steps of shallow_gd: plain, preconditioned (Ahn et al. 2023), or gd++ (von Oswald et al. 2023: inputs are "
        "transformed after every step)"
    )
    vector_heads: int = _without_flag(10, low=1)(
        "function_vector: how many heads, those of the largest indirect effect"
    )
    selection_rows: int = _without_flag(16, low=1)(
        "task_vector, function_vector and layers=similar: rows of the train split, none of them demonstrations, on "
        "which heads and layers are chosen"
    )
    align_epochs: int = _without_flag(20, low=0)(
        "align_then_train: how often the demonstrations are gone through to reproduce ICL's attention outputs, before "
        "fine-tuning begins"
    )
    lora_rank: int = _training(8, low=1)(
        "train_parameters=lora: rank of what is added to the key and value projections"
    )
    switch_labels: Literal["none", "demonstrations", "finetuning", "both"] = setting(
        (CONTEXT, FINETUNING), "none", **SWITCH
    )("where demonstrations get false labels")
    switch_fraction: float = setting((CONTEXT, FINETUNING), 1.0, low=0, high=1, **SWITCH)(
        "share of the demonstrations whose label is switched"
    )
    switch_seed: int | None = setting((CONTEXT, FINETUNING), None, low=0, high=2**32 - 1, **SWITCH)(
        "seed of the switching (default: the run's seed)"
    )
    position: Literal["option0", "query", "gold"] = _recording("option0", paper="query")(
        "token whose activations are compared: label of option 0, last query token, gold label"
    )
    head_outputs: Literal["skipped", "recorded"] = _recording("skipped")(
        "whether the output of every head is recorded too, before the output projection: adds sim_aou_heads"
    )
    loss_on: Literal["all", "label"] = setting((FINETUNING,), "all", paper="label")(
        "tokens that carry the fine-tuning loss"
    )
    finetuning_order: Literal["drawn", "icl"] = setting((FINETUNING,), "drawn", paper="icl")(
        "order of fine-tuning: drawn anew, or that of the ICL prompt"
    )
    finetuning_demonstrations: Literal["all", "fitting"] = setting((FINETUNING,), "all", paper="fitting")(
        "fine-tune on all k demonstrations or on those that fit into the ICL prompt"
    )
    biases: Literal["trained", "frozen"] = _training("trained", paper="frozen")(
        "whether biases of the trained projections learn"
    )
    random_update: Literal["uniform", "gaussian"] = _metrics("uniform", paper="gaussian")(
        "the random update that sim_aou_random compares with"
    )
    attention_similarity: Literal["scores", "probabilities"] = _metrics("scores", paper="probabilities")(
        "compare attention before the softmax or after it"
    )
    final_norm: Literal["lost", "kept"] = _weights("lost", paper="kept", only_if={WEIGHTS: ("init", INITS[2:])})(
        "final layer norm of the baselines trained-embeddings and layer-norms"
    )
    permutation_zero: Literal["identity", "drawn"] = setting((CONTEXT, FINETUNING), "identity", paper="drawn")(
        "what permutation index 0 means: no permutation, or the first one drawn"
    )
    # The paper's update rule gives every layer its own full step, which is what adding the losses does.
    layer_loss: Literal["sum", "mean"] = _training("sum", paper="sum", flag_of=("layer_causal_ce",))(
        "add the layer-causal losses of the layers, or average them"
    )
    layer_causal_point: Literal["layer", "attention", "attention_output"] = _training(
        "layer", paper="attention_output", flag_of=("layer_causal_ce",)
    )(
        "where a layer's loss is taken: on its output, on the residual stream right after its attention, or on the "
        "attention's output alone"
    )
    softmax_gradient: Literal["kept", "stopped"] = _training("kept", paper="kept")(
        "the derivative through the attention weights; stopped: the loss reaches values alone, queries and keys learn "
        "nothing"
    )
    step_per: Literal["demonstration", "token"] = _training("demonstration", paper="token")(
        "one optimizer step per demonstration or per scored token"
    )

    def __post_init__(self) -> None:
        for name, known in SETTINGS.items():
            object.__setattr__(self, name, known.check(getattr(self, name)))

    @classmethod
    def of(cls, reading: str = "authors", **given: Any) -> "Settings":
        """The settings of a reading with those in `given` over them; a value of None leaves the reading's value."""
        check_reading(reading)
        unknown = [name for name in given if name not in SETTINGS]
        if unknown:
            raise UserError(f"{shown(unknown[0])}: unknown setting; {nearest(unknown[0], SETTINGS)}")
        values = {name: known.paper for name, known in READING.items()} if reading == "paper" else {}
        return cls(**values | {name: value for name, value in given.items() if value is not None})

    def relevant_to(self, stages: Sequence[str]) -> "Settings":
        """These settings with all at its default that makes no difference to what these stages make."""
        idle = {}
        for name, known in SETTINGS.items():
            others = [known.only_if.get(stage) for stage in stages if stage in known.affects]
            if not any(other is None or getattr(self, other[0]) in other[1] for other in others):
                idle[name] = known.default
        return replace(self, **idle)


def _declared(entry: Field[Any]) -> Setting:
    """A field of `Settings` as a `Setting`: `X | None` may be None, a Literal has choices."""
    kinds: tuple[Any, ...] = get_args(entry.type) or (entry.type,)
    is_choice = get_origin(entry.type) is Literal
    facts = {"choices": kinds} if is_choice else {"optional": type(None) in kinds}
    return Setting(entry.name, str if is_choice else kinds[0], entry.default, **facts, **entry.metadata)


SETTINGS: dict[str, Setting] = {entry.name: _declared(entry) for entry in fields(Settings)}
"""All settings by name."""
OF_TRAINING: dict[str, Setting] = {name: known for name, known in SETTINGS.items() if known.affects == (TRAINING,)}
"""Those that make a difference to fine-tuned models and to nothing else."""
READING: dict[str, Setting] = {name: known for name, known in SETTINGS.items() if known.paper is not None}
"""Those in which the authors' code and the papers' text (may) differ."""
check_reading = Setting("reading", str, READINGS[0], "", (), choices=READINGS).check
"""The name of a reading, or an error."""


def nearest(word: Any, known: Iterable[str]) -> str:
    """A hint for a misspelt word: the nearest known one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(str(word), names, n=1)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(names)}"


def equal_step_size(settings: Settings) -> float | None:
    """The relative size that every layer's step is to have; None: whatever the learning rate makes of it."""
    if settings.layer_step == "equal" and settings.layer_step_size is None:
        raise UserError("layer_step=equal: needs layer_step_size=SIZE (|dW| / |W| of a step, for instance 0.001)")
    if settings.layer_step != "equal" and settings.layer_step_size is not None:
        raise UserError("layer_step_size: needs layer_step=equal")
    return settings.layer_step_size
