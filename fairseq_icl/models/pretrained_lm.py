"""The model `pretrained_lm`: a decoder whose architecture and weights both come from files."""

import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqDecoder, FairseqLanguageModel, register_model
from fairseq.models.transformer import TransformerDecoder
from torch import Tensor, nn

from fairseq_icl.errors import UserError
from fairseq_icl.models.attention import ORDINARY, rule_of, set_rule, trained_rule
from fairseq_icl.models.checkpoints import (
    build_model,
    is_finite,
    language_model_config,
    read_checkpoint,
    saved_model_options,
)
from fairseq_icl.models.hugging_face import HFModel
from fairseq_icl.models.hugging_face.weights import Keep, check_files, load_weights
from fairseq_icl.models.transformers_lm import load_folder
from fairseq_icl.settings import Settings

Result = TypeVar("Result")

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The setting `precision` in torch's words."""
EMBEDDINGS = ("embed_tokens.", "output_projection.", "embed_positions.")
LAYER_NORMS = ("self_attn_layer_norm.", "final_layer_norm.")
FINAL_NORM = "layer_norm."
LINEARIZED_MARK = "linearized"
"""Key in a checkpoint's model state which says that its tensors are deltas, not weights."""
MAPPED_BYTES = 2**28
"""How much of a checkpoint may be in memory beside the model while it is loaded."""


@dataclass
class PretrainedLMConfig(FairseqDataclass):
    """No options of its own: the checkpoint says everything, and the task says which checkpoint."""


def call_with_weights(model: nn.Module, weights: Mapping[str, Tensor], function: Callable[[], Result]) -> Result:
    """What `function`, which uses `model`, computes while the model's parameters of these names have these values."""
    caller = nn.Module()  # torch puts weights into the parts of a module, and calls that
    caller.model, caller.forward = model, function
    return torch.func.functional_call(caller, {f"model.{name}": value for name, value in weights.items()}, ())


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
        dtype, chosen = DTYPES[settings.precision], {"init": settings.init, "final_norm": settings.final_norm}
        where = device if settings.init == "pretrained" else "cpu"
        decoder = load_decoder(source, dictionary, seed=settings.seed, dtype=dtype, device=where, **chosen).to(dtype)
        for name, parameter in decoder.named_parameters():
            if dtype != torch.float32 and not is_finite(parameter):
                said = f"precision={settings.precision}: {name} has weights too large for it"
                raise UserError(f"{said}; use precision=bf16 or fp32")
        perturb(decoder, settings.perturbation)  # after rounding, which would undo it
        if settings.attention == "linear":
            set_rule(decoder, replace(rule_of(decoder.layers[0].self_attn), linear=True))
        return cls(decoder)

    @property
    def trained_names(self) -> list[str]:
        """Names of the parameters that learn."""
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def evaluate(self, function: Callable[[], Result], weights: Mapping[str, Tensor] | None = None) -> Result:
        """What `function`, which runs the decoder, computes; with `weights`, under those in place of its own."""
        return function() if weights is None else call_with_weights(self, weights, function)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PretrainedLM":
        """torch's .half() and .to(device) go through here; what is remembered of the base must follow."""
        self.base_state = {name: fn(tensor) for name, tensor in self.base_state.items()}
        super()._apply(fn, recurse)
        return self

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
        state, trained = super().state_dict(*args, **kwargs), set(self.trained_names)
        return {name: tensor for name, tensor in state.items() if name in trained}

    def load_state_dict(
        self, state_dict: dict[str, Tensor], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> None:
        """Put fine-tuned weights over the base ones, which are remembered."""
        parameters = dict(self.named_parameters())
        if LINEARIZED_MARK in state_dict:
            raise UserError("the checkpoint is of a linearized model: add --linearize")
        before = {name: parameters[name].detach().clone() for name in state_dict if name in parameters}
        put_weights(state_dict, parameters)
        self.base_state = before


@torch.no_grad()
def put_weights(weights: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
    """Put fine-tuned weights into their places, if they are of the base model's names and shapes, and finite."""
    for name, tensor in weights.items():
        if name not in parameters:
            raise UserError(f"the checkpoint trained {name}, which the base model does not have")
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise UserError(f"{name} is no tensor of weights in the checkpoint: it is damaged or was altered")
        if tensor.shape != parameters[name].shape:
            shapes = f"{tuple(tensor.shape)} in the checkpoint and {tuple(parameters[name].shape)} in the base model"
            raise UserError(f"{name} has the shape {shapes}: it was trained from another model")
        if not is_finite(tensor):
            raise UserError(f"{name} holds NaN or infinite values in the checkpoint: train again with a lower --lr")
    for name, tensor in weights.items():
        parameters[name].copy_(tensor)


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
        if path.fairseq_config is None:
            check_files(path.weight_files())
            return load_folder(path.folder, dictionary, init, final_norm, seed, dtype, device)
        load: Callable[..., None] = load_weights
        config, rule = path.fairseq_config, ORDINARY
    else:
        state = read_checkpoint(path)
        config = language_model_config(state, path)
        check_vocabulary(state["model"], dictionary, path)
        rule = trained_rule(saved_model_options(state, path), path)
        load = _load_weights
        del state  # the file's mapping with all its pages in memory; see _load_weights
    decoder = build_model(config, dictionary, None if init == "pretrained" else seed).decoder
    set_rule(decoder, rule)
    if init == "pretrained":
        load(decoder, path, lambda name: True, dtype, device)
    elif init != "untrained":
        parts = LAYER_NORMS + (EMBEDDINGS if init == "trained-embeddings" else ())
        if final_norm == "lost":
            decoder.layer_norm = None
        else:
            parts += (FINAL_NORM,)
        # `layers.3.fc1.weight` is judged by `fc1.weight`, the decoder's own parameters by their whole names.
        own = partial(re.sub, r"^layers\.\d+\.", "")
        load(decoder, path, lambda name: own(name).startswith(parts), torch.float32, "cpu")
    return decoder


def check_vocabulary(weights: Mapping[str, Tensor], dictionary: Dictionary, path: str | Path) -> None:
    """The dictionary must have exactly as many symbols as the checkpoint has embeddings."""
    name = "embed_tokens.weight"
    embeddings = weights.get(f"decoder.{name}", weights.get(name))
    if embeddings is None:
        raise UserError(f"{path}: no decoder.embed_tokens.weight among its weights: not a fairseq language model")
    if len(embeddings) != len(dictionary):
        raise UserError(
            f"{path}: the model has {len(embeddings):,} token embeddings, but the dictionary has {len(dictionary):,} "
            f"symbols (4 special ones included): use the dict.txt that came with this checkpoint (--dict)"
        )


@torch.no_grad()
def _load_weights(
    decoder: TransformerDecoder, path: str | Path, keep: Keep, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Put the weights of a checkpoint that `keep` accepts into the decoder, and insist on completeness.

    The pages of a mapped file count as memory once they were read, until the mapping is let go: so the file is mapped
    anew after every few tensors, and a model needs its size in the precision asked for and little more.
    """
    target, source = decoder.state_dict(keep_vars=True), _renamed_weights(decoder, path)
    own = {name for name in target if keep(name) and not name.endswith("_float_tensor")}
    missing, unexpected = sorted(own - set(source)), sorted(filter(keep, set(source) - set(target) - {"version"}))
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
        tensor, place = source[name], target[name]
        if place.shape != tensor.shape:
            shapes = f"has the shape {tuple(tensor.shape)}, its architecture says {tuple(place.shape)}"
            raise UserError(f"{path}: decoder.{name} {shapes}")
        if not tensor.is_floating_point():
            raise UserError(f"{path}: decoder.{name} holds {tensor.dtype}, not weights; get a sound copy of the model")
        place.data = tensor.to(device, dtype, copy=True)  # what it had before was never written: it took no memory
        if not is_finite(tensor):  # what does not fit into its precision is told in other words
            raise UserError(f"{path}: decoder.{name} holds NaN or infinite weights; get a sound copy of the model")
        read += tensor.nbytes
        if read > MAPPED_BYTES and zipfile.is_zipfile(path):
            del tensor
            read, source = 0, _renamed_weights(decoder, path)


def _renamed_weights(decoder: TransformerDecoder, path: str | Path) -> dict[str, Tensor]:
    """The weights in a checkpoint under the decoder's own names."""
    saved = read_checkpoint(path)["model"]
    weights = {f"decoder.{name.removeprefix('decoder.')}": tensor for name, tensor in saved.items()}
    if "decoder.layer_norm.weight" in weights:
        # Without fairseq's marker of decoders with a final layer norm, its upgrade of old formats would remove it.
        weights.setdefault("decoder.version", torch.tensor([3.0]))
    decoder.upgrade_state_dict_named(weights, "decoder")
    return {name.removeprefix("decoder."): tensor for name, tensor in weights.items()}


@torch.no_grad()
def perturb(model: nn.Module, draw: int) -> None:
    """Move every weight that is not zero one unit in the last place up or down, at random from `draw`; 0: not at all.

    So one sees how much of a result is rounding, which other threads, another device or another library change, and
    which fine-tuning at the papers' rates amplifies (experiment=stability). Weights that two modules share move once.
    """
    if draw:
        generator = torch.Generator().manual_seed(draw)
        for parameter in model.parameters():
            up = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.bool).to(parameter.device)
            towards = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
            parameter.copy_(torch.where(parameter == 0, parameter, torch.nextafter(parameter, towards)))
