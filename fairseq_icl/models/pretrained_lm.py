"""The model `pretrained_lm`: a decoder whose architecture and weights both come from files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqDecoder, FairseqLanguageModel, register_model
from fairseq.models.transformer import TransformerDecoder
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import Tensor, nn

from fairseq_icl.compat.models import without_initialisation
from fairseq_icl.errors import UserError
from fairseq_icl.models.attention import Rule, rule_of, set_rule, trained_rule
from fairseq_icl.models.checkpoints import is_mapped, language_model_config, read_checkpoint, saved_model_options
from fairseq_icl.models.hugging_face import HFModel, xglm
from fairseq_icl.models.hugging_face.weights import check_files
from fairseq_icl.settings import Settings

Result = TypeVar("Result")

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The setting `precision` in torch's words."""
EMBEDDINGS = ("embed_tokens.", "output_projection.", "embed_positions.")
LAYER_NORMS = ("self_attn_layer_norm.", "final_layer_norm.")
FINAL_NORM = "layer_norm."
LINEARIZED_MARK = "linearized"
"""Key in a checkpoint's model state which says that its tensors are deltas, not weights."""
FINAL_NORM_VERSION = 3
"""fairseq's marker for decoders with a final layer norm; without it fairseq removes that norm while loading."""
MAPPED_BYTES = 2**28
"""How much of a checkpoint may be in memory beside the model while it is loaded."""


@dataclass
class PretrainedLMConfig(FairseqDataclass):
    """No options of its own: the checkpoint says everything, and the task says which checkpoint."""


class _Caller(nn.Module):
    """A module that calls a function: what `torch.func.functional_call` needs to hold weights for a function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Result]) -> Result:
        return function()


def call_with_weights(model: nn.Module, weights: Mapping[str, Tensor], function: Callable[[], Result]) -> Result:
    """What `function`, which uses `model`, computes while the model's parameters of these names have these values."""
    named = {f"model.{name}": tensor for name, tensor in weights.items()}
    result: Result = torch.func.functional_call(_Caller(model), named, (function,))
    return result


@register_model("pretrained_lm", dataclass=PretrainedLMConfig)
class PretrainedLM(FairseqLanguageModel):
    """A decoder that knows which of its weights learn and, once fine-tuned, what they were before."""

    def __init__(self, decoder: FairseqDecoder):
        super().__init__(decoder)
        self.base_state: dict[str, Tensor] = {}
        """Pretrained values of the weights that a fine-tuned checkpoint was put over; empty for a base model."""

    @classmethod
    def build_model(cls, cfg: PretrainedLMConfig, task: Any) -> "PretrainedLM":
        """Called by fairseq for `--arch pretrained_lm`; the task holds the checkpoint's path and `--init`."""
        if not hasattr(task.cfg, "base_model"):
            raise UserError("--arch pretrained_lm needs --task demonstration_prompting and --pretrained MODEL.pt")
        return cls.load(task.files.source, task.source_dictionary, task.settings)

    @classmethod
    def load(
        cls, source: Any, dictionary: Dictionary, settings: Settings, device: torch.device | str = "cpu"
    ) -> "PretrainedLM":
        """The model in `source`, as the settings that affect weights say (`init`, `seed`, `precision`, ...).

        A pretrained one is read to `device` at once, and needs no room on the host; others are drawn on the CPU.
        """
        decoder = load_decoder(
            source,
            dictionary,
            init=settings.init,
            final_norm=settings.final_norm,
            seed=settings.seed,
            dtype=DTYPES[settings.precision],
            device=device if settings.init == "pretrained" else "cpu",
        )
        round_to(decoder, settings.precision)
        perturb(decoder, settings.perturbation)  # after rounding, which would undo it
        if settings.attention == "linear":
            set_rule(decoder, replace(rule_of(decoder.layers[0].self_attn), linear=True))
        return cls(decoder)

    @property
    def trained_names(self) -> list[str]:
        """Names of the parameters that learn."""
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def evaluate(self, function: Callable[[], Result], weights: Mapping[str, Tensor] | None = None) -> Result:
        """What `function`, which runs the decoder, computes; with `weights`, under those in place of its own.

        The linearized model overrides this: whatever is observed is computed through it.
        """
        return function() if weights is None else call_with_weights(self, weights, function)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PretrainedLM":
        """torch's .half() and .to(device) go through here; what is remembered of the base must follow."""
        self.base_state = {name: fn(tensor) for name, tensor in self.base_state.items()}
        super()._apply(fn, recurse)
        return self

    @property
    def is_trained(self) -> bool:
        """Whether fine-tuned weights were put over the base; `base_state` leads back to it."""
        return bool(self.base_state)

    def freeze_all_but(self, parts: str, *, biases: bool) -> None:
        """Only parameters whose name contains one of the comma-separated `parts` learn; their biases on request."""
        wanted = [part.strip() for part in parts.split(",") if part.strip()]
        unknown = [part for part in wanted if not any(part in name for name, _ in self.named_parameters())]
        if unknown:
            raise UserError(f"train_parameters={parts}: no parameter of the model has {unknown[0]} in its name")
        for name, parameter in self.named_parameters():
            is_bias = name.endswith(".bias")
            parameter.requires_grad_(any(part in name for part in wanted) and (biases or not is_bias))
        if not self.trained_names:
            raise UserError(f"train_parameters={parts}: no parameter of the model has such a name, biases aside")

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """What was trained, and nothing else: the rest is in the base checkpoint, to which the task refers."""
        state = super().state_dict(*args, **kwargs)
        trained = set(self.trained_names)
        return {name: tensor for name, tensor in state.items() if name in trained}

    def load_state_dict(
        self, state_dict: dict[str, Tensor], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> None:
        """Put fine-tuned weights over the base ones, which are remembered."""
        parameters = dict(self.named_parameters())
        if LINEARIZED_MARK in state_dict:
            raise UserError("the checkpoint is of a linearized model: add --linearize")
        check_trained_weights(state_dict, parameters)
        self.base_state = {name: parameters[name].detach().clone() for name in state_dict}
        with torch.no_grad():
            for name, tensor in state_dict.items():
                parameters[name].copy_(tensor)


def check_trained_weights(weights: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
    """Refuse fine-tuned weights that are not tensors of the base model's names and shapes, or not finite."""
    for name, tensor in weights.items():
        if name not in parameters:
            raise UserError(f"the checkpoint trained {name}, which the base model does not have")
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise UserError(f"{name} is no tensor of weights in the checkpoint: it is damaged or was altered")
        if tensor.shape != parameters[name].shape:
            raise UserError(
                f"{name} has the shape {tuple(tensor.shape)} in the checkpoint and {tuple(parameters[name].shape)} in "
                "the base model: it was trained from another model"
            )
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{name} holds NaN or infinite values in the checkpoint: train again with a lower --lr")


def load_decoder(
    path: str | Path | HFModel,
    dictionary: Dictionary,
    *,
    init: str = "pretrained",
    final_norm: str = "kept",
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> FairseqDecoder:
    """The decoder of a checkpoint or folder, whole (`init="pretrained"`) or as one of the papers' baselines.

    `init` says what is taken from the checkpoint, the rest being fairseq's random initialisation from `seed`:
    nothing ("untrained"), the layer norms of the layers ("layer-norms"), or those and the embeddings
    ("trained-embeddings"). `final_norm="lost"` removes the final layer norm of the last two, as the authors' code
    does by accident: it drops fairseq's version marker together with the weights. A model without that norm stays
    as it is. Norms of queries and keys, which some families have, are none of the layers' own. What transformers runs
    is initialised as transformers does it. Whole ones are read in `dtype`, to `device`, at once; others are in fp32.
    """
    if isinstance(path, HFModel):
        if dictionary != path.dictionary:
            raise UserError(
                f"{path.folder}: the dictionary ({len(dictionary):,} symbols) is not the one of this folder "
                f"({len(path.dictionary):,}); leave out --dict"
            )
        if path.is_fairseqs:
            if init == "pretrained":
                return xglm.load_decoder(path, dictionary, dtype, device)
            return _load_xglm(path, dictionary, init, final_norm, seed)
        from fairseq_icl.models.transformers_lm import load_folder

        check_files(path.weight_files())
        return load_folder(path.folder, dictionary, init, final_norm, seed, dtype=dtype, device=device)
    state = read_checkpoint(path)
    config = language_model_config(state, path)
    weights = {name.removeprefix("decoder."): tensor for name, tensor in state["model"].items()}
    check_vocabulary(weights, dictionary, path)
    rule = trained_rule(saved_model_options(state, path), path)
    if init == "pretrained":
        with without_initialisation():
            decoder = _build(config, dictionary, rule)
        del state, weights  # the file's mapping with all its pages in memory; see _load_all
        _load_all(decoder, path, dtype, device)
        return decoder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        decoder = _build(config, dictionary, rule)
    if init != "untrained":
        _load_some(decoder, weights, LAYER_NORMS + (EMBEDDINGS if init == "trained-embeddings" else ()), path)
        if final_norm == "lost":
            decoder.layer_norm = None
        else:
            _load_some(decoder, weights, (FINAL_NORM,), path)
    return decoder


def _build(config: TransformerLanguageModelConfig, dictionary: Dictionary, rule: Rule) -> TransformerDecoder:
    vocabulary = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    decoder: TransformerDecoder = TransformerLanguageModel.build_model(config, vocabulary).decoder
    set_rule(decoder, rule)
    return decoder


def _load_xglm(model: HFModel, dictionary: Dictionary, init: str, final_norm: str, seed: int) -> FairseqDecoder:
    """A baseline of XGLM and dense LMs in its form."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        decoder = xglm.build_decoder(model, dictionary)
    if init != "untrained":
        parts = LAYER_NORMS + (EMBEDDINGS if init == "trained-embeddings" else ())
        if final_norm == "lost":
            decoder.layer_norm = None
        else:
            parts += (FINAL_NORM,)
        xglm.load_weights(decoder, model, keep=lambda name: _module_name(name).startswith(parts))
    return decoder


def round_to(decoder: nn.Module, precision: str) -> None:
    """Round the weights of a decoder to `precision`, in place, if they are not yet."""
    if precision == "fp32":
        return
    decoder.to(DTYPES[precision])
    for name, parameter in decoder.named_parameters():
        # Of the extremes: `isfinite` of all would take room for twice the largest tensor.
        if parameter.numel() and not bool(torch.stack(torch.aminmax(parameter)).isfinite().all()):
            raise UserError(f"precision={precision}: {name} has weights too large for it; use precision=bf16 or fp32")


def check_vocabulary(weights: dict[str, Tensor], dictionary: Dictionary, path: str | Path) -> None:
    """The dictionary must have exactly as many symbols as the checkpoint has embeddings."""
    if "embed_tokens.weight" not in weights:
        raise UserError(f"{path}: no decoder.embed_tokens.weight among its weights: not a fairseq language model")
    rows = len(weights["embed_tokens.weight"])
    if rows != len(dictionary):
        raise UserError(
            f"{path}: the model has {rows:,} token embeddings, but the dictionary has {len(dictionary):,} symbols "
            f"(4 special ones included): use the dict.txt that came with this checkpoint (--dict)"
        )


def _load_all(decoder: TransformerDecoder, path: str | Path, dtype: torch.dtype, device: torch.device | str) -> None:
    """Copy every weight and insist on completeness.

    The pages of a mapped file count as memory once they were read, until the mapping is let go: so the file is mapped
    anew after every few tensors, and a model needs its size in the precision asked for and little more.
    """
    target, source = decoder.state_dict(keep_vars=True), _renamed_weights(decoder, path)
    own = {name for name in target if not name.endswith("_float_tensor")}
    missing, unexpected = sorted(own - set(source)), sorted(set(source) - set(target) - {"version"})
    unexpected = [name for name in unexpected if not name.endswith(("_float_tensor", "embed_positions.weights"))]
    unexpected = [name for name in unexpected if not name.startswith("mevo_layer.")]  # of XGLM 4.5B, never used
    if missing or unexpected:
        raise UserError(
            f"{path}: the weights do not fit the architecture it names"
            + (f"; missing: {missing[0]} and {len(missing) - 1} more" if missing else "")
            + (f"; unknown: {unexpected[0]} and {len(unexpected) - 1} more" if unexpected else "")
        )
    read = 0
    for name in sorted(own - {"version"}):
        _copy(target[name], source[name], name, path, dtype, device)
        read += source[name].nbytes
        if read > MAPPED_BYTES and is_mapped(path):
            read, source = 0, _renamed_weights(decoder, path)


def _renamed_weights(decoder: TransformerDecoder, path: str | Path) -> dict[str, Tensor]:
    """The weights in a checkpoint under the decoder's own names."""
    saved = read_checkpoint(path)["model"]
    weights = {f"decoder.{name.removeprefix('decoder.')}": tensor for name, tensor in saved.items()}
    if "decoder.layer_norm.weight" in weights:
        # Files written without the marker would lose their final layer norm to fairseq's upgrade of old formats.
        weights.setdefault("decoder.version", torch.tensor([float(FINAL_NORM_VERSION)]))
    decoder.upgrade_state_dict_named(weights, "decoder")
    return {name.removeprefix("decoder."): tensor for name, tensor in weights.items()}


def _load_some(decoder: TransformerDecoder, weights: dict[str, Tensor], parts: tuple[str, ...], path: Any) -> None:
    """Copy the weights whose module is one of `parts` (of a layer, or of the decoder itself)."""
    for name, target in decoder.state_dict(keep_vars=True).items():
        if _module_name(name).startswith(parts) and name in weights:
            _copy(target, weights[name], name, path)


def _module_name(parameter: str) -> str:
    """`layers.3.fc1.weight` -> `fc1.weight`; the decoder's own parameters keep their names."""
    return ".".join(parameter.split(".")[2:]) if parameter.startswith("layers.") else parameter


@torch.no_grad()
def _copy(
    target: Tensor,
    source: Tensor,
    name: str,
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    if target.shape != source.shape:
        raise UserError(
            f"{path}: decoder.{name} has the shape {tuple(source.shape)}, its architecture says {tuple(target.shape)}"
        )
    if not source.is_floating_point():
        raise UserError(f"{path}: decoder.{name} holds {source.dtype}, not weights; get a sound copy of the model")
    if (target.device.type, target.dtype) == (torch.device(device).type, dtype):
        target.copy_(source)
    else:  # what the target had was never written: it took no memory
        target.data = source.to(device, dtype)
    if source.numel():  # not the target's: what does not fit into its precision is told in other words
        low, high = torch.aminmax(source)  # both are NaN if any value is
        if not (low.isfinite() and high.isfinite()):
            raise UserError(f"{path}: decoder.{name} holds NaN or infinite weights; get a sound copy of the model")


@torch.no_grad()
def perturb(model: nn.Module, draw: int) -> None:
    """Move every weight that is not zero one unit in the last place up or down, at random from `draw`; 0: not at all.

    So one sees how much of a result is rounding, which other threads, another device or another library change, and
    which fine-tuning at the papers' rates amplifies (experiment=stability). Weights that two modules share move once.
    """
    if draw:
        generator = torch.Generator().manual_seed(draw)
        for parameter in model.parameters():
            parameter.copy_(moved(parameter, generator))


def moved(weights: Tensor, generator: torch.Generator) -> Tensor:
    """The neighbours of the weights; zeros stay."""
    up = torch.randint(0, 2, weights.shape, generator=generator, dtype=torch.bool).to(weights.device)
    towards = torch.where(up, torch.inf, -torch.inf).to(weights.dtype)
    return torch.where(weights == 0, weights, torch.nextafter(weights, towards))
