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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, get_args

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
LARGEST = sys.float_info.max
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
    optional: bool
    choices: tuple[str, ...]
    paper: Any
    low: float | None
    high: float | None
    pattern: str
    """Regular expression of the texts allowed; "": any that can be printed."""
    flag_of: tuple[str, ...]
    """The task, fairseq, or the criterions that have a flag of this name."""
    only_if: Mapping[str, tuple[str, tuple[str, ...]]]
    """Stage -> another setting and those of its values with which this one affects the stage; not here: always."""

    def check(self, value: Any) -> Any:
        """`value` as the setting's type; a UserError that names setting, value and what is allowed otherwise."""
        if value is None and self.optional:
            return None
        if self.kind is str and not self.choices and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)  # a limit or a layer, typed as the number it is
        if problem := self._problem(value):
            raise UserError(f"{self.name}={shown(value)}: {problem}")
        return self.kind(value)  # numpy's numbers become Python's, whose text is the same everywhere

    def _problem(self, value: Any) -> str:
        """What is wrong with `value`; "" if nothing is."""
        if self.choices:
            known = isinstance(value, str) and value in self.choices
            return "" if known else f"choose from {', '.join(self.choices)}"
        if self.kind is str:
            if not isinstance(value, str) or not value.strip() or not value.isprintable():
                return "must be a text that is not empty, in one line"
            if "${" in value or value == "???":
                return "must be a plain text, without ${...}"
            return "" if re.fullmatch(self.pattern or ".*", value) else f"must be {self.help.rpartition(': ')[2]}"
        number = isinstance(value, Integral) or (self.kind is float and isinstance(value, Real))
        if isinstance(value, bool) or not number or not abs(value) <= LARGEST:  # not a number: neither
            return "must be a number" if self.kind is float else "must be a whole number"
        if self.low is not None and value < self.low:
            return f"must be at least {self.low:g}"
        return f"must be at most {self.high:g}" if self.high is not None and value > self.high else ""

    def is_flag_of(self, *components: str) -> bool:
        """Whether one of the components has a flag of this name."""
        return any(component in self.flag_of for component in components)


def setting(default: Any, text: str, affects: Iterable[str], **facts: Any) -> Any:
    """A field of `Settings`: default, help text, what it affects, and `choices`, `paper`, `low`, `high`, ..."""
    return field(default=default, metadata={"help": text, "affects": tuple(affects), **facts})


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
INITS = ("pretrained", "untrained", "trained-embeddings", "layer-norms")


@dataclass(frozen=True)
class Settings:
    """All settings of one run, checked and complete. The defaults are what the authors ran, if that is one value."""

    num_demonstrations: int = setting(32, "number of demonstrations k", PROMPTS, low=0, only_if=FROM_TRAIN_ROWS)
    seed: int = setting(
        1,
        "seed of the draw of demonstrations, of their permutations and of random weights",
        (*PROMPTS, WEIGHTS),
        low=0,
        high=2**32 - 1,
        flag_of=FLAG_OF_FAIRSEQ,
        only_if=FROM_TRAIN_ROWS | {WEIGHTS: ("init", INITS[1:])},
    )
    permutation: int = setting(
        0,
        "index of the permutation of the demonstrations (0: see permutation_zero; negative: none); the authors: 0-4",
        (CONTEXT, FINETUNING),
        high=999,
    )
    queries: str = setting(
        "validation",
        "rows that are asked about: those of the validation split, or those of the train split that are not among the "
        "demonstrations (to choose a learning rate without looking at the validation split)",
        PROMPTS,
        choices=("validation", "train"),
    )
    demonstrations: str = setting(
        "first",
        "which rows of the train file are demonstrations: first (the first k of the shuffled file, as the authors), "
        "balanced (the first of each class, as many of one as of another), or a file of row numbers, one in a line, "
        "from 0, of which the first k are taken in the file's order",
        PROMPTS,
        pattern=r".*[^\d\s.+-].*",  # a bare number is a slip: the k, or a row
        only_if=FROM_TRAIN_ROWS,
    )
    limit: int | None = setting(
        None, "score only the first N validation examples (after shuffle and cap)", (QUERIES,), low=1
    )
    max_validation: int = setting(2000, "cap of the validation set; the authors keep 2000 rows", PROMPTS, low=1)
    curve_examples: int = setting(
        0,
        "also measure after each demonstration, ICL with so many against fine-tuning after so many, on the first N "
        "validation examples (0: not at all)",
        (METRICS,),
        low=0,
        flag_of=(),
    )
    missing_class: str = setting(
        "warn",
        "what to do if no demonstration in the prompt has one of the labels; the authors do not look",
        (CONTEXT,),
        choices=("warn", "refuse"),
    )
    separator: str = setting(
        "model",
        "what closes a demonstration in the prompt: what the model was trained with (EOS for fairseq's models, a line "
        "break for most others), EOS, or a line break",
        (CONTEXT,),
        choices=("model", "eos", "newline"),
    )
    init: str = setting(
        "pretrained",
        "weights: pretrained; untrained (nothing kept from the checkpoint); trained-embeddings (embeddings and the "
        "layers' layer norms kept: the second paper's 'trained embeddings'); layer-norms (only the layers' layer norms "
        "kept: its 'no training')",
        (WEIGHTS,),
        choices=INITS,
    )
    perturbation: int = setting(
        0,
        "move every weight of the model by one unit in the last place before anything else, in directions drawn from "
        "this number (0: not at all): how much of a result is rounding",
        (WEIGHTS,),
        low=0,
        high=2**32 - 1,
    )
    attention: str = setting(
        "softmax",
        "the model's own attention, or linear: softmax and scale omitted, as in the papers' relaxation",
        (WEIGHTS,),
        choices=("softmax", "linear"),
    )
    precision: str = setting(
        "fp32",
        "numbers in which everything is computed and recorded: fp32; fp16, as the authors' runs (fp32 master weights "
        "and a dynamic loss scale in fine-tuning); bf16 (the same without a loss scale)",
        (WEIGHTS,),
        choices=("fp32", "fp16", "bf16"),
    )
    device: str = setting(
        "cpu",
        "what computes the model: cpu or cuda, a GPU (by default replicate takes a GPU if there is one)",
        (WEIGHTS,),
        choices=("cpu", "cuda"),
        flag_of=(),
    )
    lr: float | None = setting(None, "learning rate", (TRAINING,), low=0, flag_of=FLAG_OF_FAIRSEQ)
    clip_norm: float = setting(
        0.0,
        "clip the gradient of all layers together to this norm; 0: no clipping",
        (TRAINING,),
        low=0,
        flag_of=FLAG_OF_FAIRSEQ,
    )
    layer_clip: str = setting(
        "none",
        "limit every layer's gradient: its norm, or its largest component",
        (TRAINING,),
        choices=("none", "norm", "max"),
    )
    layer_clip_value: str | None = setting(
        None,
        "the limit: one value, one per layer (comma-separated), from:FILE (a file of --record-gradients), or in "
        "replicate the name of a method whose recorded norms are the limits",
        (TRAINING,),
    )
    layer_step: str = setting(
        "rate",
        "how long a layer's step is: what the learning rate makes of its gradient, or the relative size "
        "layer_step_size in every layer (normalised gradient descent)",
        (TRAINING,),
        choices=("rate", "equal"),
    )
    layer_step_size: float | None = setting(
        None, "with layer_step=equal: |dW| / |W| of what learns in a layer, at every step", (TRAINING,), low=1e-12
    )
    gradient_norms: str = setting(
        "trained",
        "whose gradients are recorded: of what learns, or also of all parameters of a layer, summed over tokens, as in "
        "the second paper's heat maps (not in linearized training)",
        (TRAINING,),
        choices=("trained", "all"),
    )
    train_parameters: str = setting(
        "self_attn.k_proj,self_attn.v_proj",
        "comma-separated parts of the names of the parameters that learn; lora: the key and value projections in a "
        "random subspace of rank lora_rank, without biases",
        (TRAINING,),
    )
    layers: str | None = setting(
        None,
        "layer-causal training: layers that get a loss; short_circuit: the one after which the model is cut; "
        "shallow_gd: layers that have a function; vectors: the one they are put at (default: chosen on train rows). "
        "Counted from 0: one (3), a range (0-11), from one up (2-), or similar (the range whose heads the method moves "
        "most as ICL does, on selection_rows of the train split; it trains twice)",
        (TRAINING,),
        pattern=r"similar|\s*\d+\s*(-\s*\d*)?\s*",
        flag_of=("layer_causal_ce", "short_circuit_ce"),
    )
    shallow: str = setting(
        "linear",
        "what shallow_gd learns in every layer: a matrix, a function of a kernel (see kernel), or ridge regression on "
        "label embeddings (1 / lr is then the weight of its penalty)",
        (TRAINING,),
        choices=("linear", "kernel", "ridge"),
        flag_of=(),
    )
    kernel: str = setting(
        "softmax",
        "shallow=kernel: softmax of the products with the demonstrations, radial (rbf, as wide as the demonstrations "
        "are apart), or the product itself (linear)",
        (TRAINING,),
        choices=("softmax", "rbf", "linear"),
        flag_of=(),
    )
    shallow_steps: int = setting(
        1, "steps of shallow_gd: how often all demonstrations are learnt from", (TRAINING,), low=0, flag_of=()
    )
    shallow_batch: str = setting(
        "full",
        "a step of shallow_gd learns from all demonstrations together, or from one after the other",
        (TRAINING,),
        choices=("full", "one"),
        flag_of=(),
    )
    shallow_step: str = setting(
        "plain",
        "steps of shallow_gd: plain, preconditioned (Ahn et al. 2023), or gd++ (von Oswald et al. 2023: inputs are "
        "transformed after every step)",
        (TRAINING,),
        choices=("plain", "preconditioned", "gd++"),
        flag_of=(),
    )
    vector_heads: int = setting(
        10, "function_vector: how many heads, those of the largest indirect effect", (TRAINING,), low=1, flag_of=()
    )
    selection_rows: int = setting(
        16,
        "task_vector, function_vector and layers=similar: rows of the train split, none of them demonstrations, on "
        "which heads and layers are chosen",
        (TRAINING,),
        low=1,
        flag_of=(),
    )
    align_epochs: int = setting(
        20,
        "align_then_train: how often the demonstrations are gone through to reproduce ICL's attention outputs, before "
        "fine-tuning begins",
        (TRAINING,),
        low=0,
        flag_of=(),
    )
    lora_rank: int = setting(
        8,
        "train_parameters=lora: rank of what is added to the key and value projections",
        (TRAINING,),
        low=1,
        flag_of=FLAG_OF_TASK,
    )
    switch_labels: str = setting(
        "none",
        "where demonstrations get false labels",
        (CONTEXT, FINETUNING),
        choices=("none", "demonstrations", "finetuning", "both"),
        **SWITCH,
    )
    switch_fraction: float = setting(
        1.0, "share of the demonstrations whose label is switched", (CONTEXT, FINETUNING), low=0, high=1, **SWITCH
    )
    switch_seed: int | None = setting(
        None, "seed of the switching (default: the run's seed)", (CONTEXT, FINETUNING), low=0, high=2**32 - 1, **SWITCH
    )
    position: str = setting(
        "option0",
        "token whose activations are compared: label of option 0, last query token, gold label",
        (RECORDING,),
        choices=("option0", "query", "gold"),
        paper="query",
        flag_of="icl_similarity",
    )
    head_outputs: str = setting(
        "skipped",
        "whether the output of every head is recorded too, before the output projection: adds sim_aou_heads",
        (RECORDING,),
        choices=("skipped", "recorded"),
        flag_of="icl_similarity",
    )
    loss_on: str = setting(
        "all", "tokens that carry the fine-tuning loss", (FINETUNING,), choices=("all", "label"), paper="label"
    )
    finetuning_order: str = setting(
        "drawn",
        "order of fine-tuning: drawn anew, or that of the ICL prompt",
        (FINETUNING,),
        choices=("drawn", "icl"),
        paper="icl",
    )
    finetuning_demonstrations: str = setting(
        "all",
        "fine-tune on all k demonstrations or on those that fit into the ICL prompt",
        (FINETUNING,),
        choices=("all", "fitting"),
        paper="fitting",
    )
    biases: str = setting(
        "trained",
        "whether biases of the trained projections learn",
        (TRAINING,),
        choices=("trained", "frozen"),
        paper="frozen",
    )
    random_update: str = setting(
        "uniform",
        "the random update that sim_aou_random compares with",
        (METRICS,),
        choices=("uniform", "gaussian"),
        paper="gaussian",
        flag_of="icl_similarity",
    )
    attention_similarity: str = setting(
        "scores",
        "compare attention before the softmax or after it",
        (METRICS,),
        choices=("scores", "probabilities"),
        paper="probabilities",
        flag_of="icl_similarity",
    )
    final_norm: str = setting(
        "lost",
        "final layer norm of the baselines trained-embeddings and layer-norms",
        (WEIGHTS,),
        choices=("lost", "kept"),
        paper="kept",
        only_if={WEIGHTS: ("init", INITS[2:])},
    )
    permutation_zero: str = setting(
        "identity",
        "what permutation index 0 means: no permutation, or the first one drawn",
        (CONTEXT, FINETUNING),
        choices=("identity", "drawn"),
        paper="drawn",
    )
    # The paper's update rule gives every layer its own full step, which is what adding the losses does.
    layer_loss: str = setting(
        "sum",
        "add the layer-causal losses of the layers, or average them",
        (TRAINING,),
        choices=("sum", "mean"),
        paper="sum",
        flag_of="layer_causal_ce",
    )
    layer_causal_point: str = setting(
        "layer",
        "where a layer's loss is taken: on its output, on the residual stream right after its attention, or on the "
        "attention's output alone",
        (TRAINING,),
        choices=("layer", "attention", "attention_output"),
        paper="attention_output",
        flag_of="layer_causal_ce",
    )
    softmax_gradient: str = setting(
        "kept",
        "the derivative through the attention weights; stopped: the loss reaches values alone, queries and keys learn "
        "nothing",
        (TRAINING,),
        choices=("kept", "stopped"),
        paper="kept",
    )
    step_per: str = setting(
        "demonstration",
        "one optimizer step per demonstration or per scored token",
        (TRAINING,),
        choices=("demonstration", "token"),
        paper="token",
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
        """These settings with all that makes no difference to the stages put to its default.

        Two runs with the same result share whatever these stages make.
        """
        idle = {}
        for name, known in SETTINGS.items():
            others = [known.only_if.get(stage) for stage in stages if stage in known.affects]
            if not any(other is None or getattr(self, other[0]) in other[1] for other in others):
                idle[name] = known.default
        return replace(self, **idle)


def _declared() -> dict[str, Setting]:
    """The fields of `Settings` as `Setting` objects."""
    declared = {}
    for entry in fields(Settings):
        facts: dict[str, Any] = {"choices": (), "paper": None, "low": None, "high": None, "pattern": ""}
        facts |= {"flag_of": FLAG_OF_TASK, "only_if": {}} | dict(entry.metadata)
        facts["flag_of"] = (facts["flag_of"],) if isinstance(facts["flag_of"], str) else facts["flag_of"]
        kinds = get_args(entry.type) or (entry.type,)
        optional = type(None) in kinds
        declared[entry.name] = Setting(entry.name, kinds[0], entry.default, optional=optional, **facts)
    return declared


SETTINGS: dict[str, Setting] = _declared()
"""All settings by name."""
OF_TRAINING: dict[str, Setting] = {name: known for name, known in SETTINGS.items() if known.affects == (TRAINING,)}
"""Those that make a difference to fine-tuned models and to nothing else."""
READING: dict[str, Setting] = {name: known for name, known in SETTINGS.items() if known.paper is not None}
"""Those in which the authors' code and the papers' text (may) differ."""


def check_reading(reading: Any) -> str:
    """The name of a reading, or an error."""
    if not isinstance(reading, str) or reading not in READINGS:
        raise UserError(f"reading={shown(reading)}: choose from {', '.join(READINGS)}")
    return str(reading)


def nearest(word: Any, known: Iterable[str]) -> str:
    """A hint for a misspelt word: the nearest known one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(str(word), names, n=1)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(names)}"
