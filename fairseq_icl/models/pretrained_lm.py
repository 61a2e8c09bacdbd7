"""The model `pretrained_lm`: a fairseq decoder whose architecture and weights both come from a checkpoint file."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqLanguageModel, register_model
from fairseq.models.transformer import TransformerDecoder
from fairseq.models.transformer_lm import TransformerLanguageModel
from torch import Tensor

from fairseq_icl.checkpoints import language_model_config, read_checkpoint
from fairseq_icl.errors import UserError

logger = logging.getLogger(__name__)
Observed = TypeVar("Observed")

INITS = ("pretrained", "untrained", "trained-embeddings", "layer-norms")
EMBEDDINGS = ("embed_tokens.", "output_projection.", "embed_positions.")
LAYER_NORMS = ("self_attn_layer_norm.", "final_layer_norm.")
FINAL_NORM = "layer_norm."
LINEARIZED_MARK = "linearized"
"""Key in a checkpoint's model state which says that its tensors are deltas, not weights."""
FINAL_NORM_VERSION = 3
"""fairseq's marker for decoders with a final layer norm; without it fairseq removes that norm while loading."""


@dataclass
class PretrainedLMConfig(FairseqDataclass):
    """No options of its own: the checkpoint says everything, and the task says which checkpoint."""


@register_model("pretrained_lm", dataclass=PretrainedLMConfig)
class PretrainedLM(FairseqLanguageModel):
    """A stock fairseq decoder that knows which of its weights learn and what they were before."""

    def __init__(self, decoder: TransformerDecoder):
        super().__init__(decoder)
        self._base: dict[str, Tensor] = {}

    @classmethod
    def build_model(cls, cfg: PretrainedLMConfig, task: Any) -> "PretrainedLM":
        """Called by fairseq for `--arch pretrained_lm`; the task holds the checkpoint's path and `--init`."""
        if not hasattr(task.cfg, "base_model"):
            raise UserError("--arch pretrained_lm needs --task demonstration_prompting and --pretrained MODEL.pt")
        decoder = load_decoder(
            task.cfg.base_model,
            task.source_dictionary,
            init=str(task.cfg.init),
            final_norm=task.reading.final_norm,
            seed=task.cfg.seed,
        )
        return cls(decoder)

    @property
    def trained_names(self) -> list[str]:
        """Names of the parameters that learn."""
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def evaluate(self, function: Callable[[], Observed]) -> Observed:
        """What `function` computes with the current weights; the linearized model overrides this."""
        return function()

    def keep_base(self) -> None:
        """Remember the pretrained values of the weights that learn, so that `base_weights` can bring them back."""
        if not self._base:
            self._base = {n: p.detach().clone() for n, p in self.named_parameters() if p.requires_grad}

    @property
    def is_trained(self) -> bool:
        """Whether fine-tuned weights were put over the base."""
        return bool(self._base)

    @contextmanager
    def base_weights(self) -> Iterator[None]:
        """Inside, the model is the pretrained one: the weights that learn trade places with the remembered ones."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        parameters = dict(self.named_parameters())
        for name, base in self._base.items():
            parameter = parameters[name]
            base = base.to(parameter)  # --fp16 or a move to a GPU may have come after `keep_base`
            self._base[name], parameter.data = parameter.data, base

    def reset_to_base(self) -> None:
        """Undo fine-tuning."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name in self._base:
                    parameter.copy_(self._base[name])

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
        unknown = sorted(set(state_dict) - set(parameters))
        if unknown:
            raise UserError(f"the checkpoint trained {unknown[0]}, which the base model does not have")
        self._base = {name: parameters[name].detach().clone() for name in state_dict}
        with torch.no_grad():
            for name, tensor in state_dict.items():
                if tensor.shape != parameters[name].shape:
                    raise UserError(
                        f"{name} has the shape {tuple(tensor.shape)} in the checkpoint and "
                        f"{tuple(parameters[name].shape)} in the base model: it was trained from another model"
                    )
                parameters[name].copy_(tensor)


def load_decoder(
    path: str | Path,
    dictionary: Dictionary,
    *,
    init: str = "pretrained",
    final_norm: str = "kept",
    seed: int = 1,
) -> TransformerDecoder:
    """The checkpoint's decoder in fp32, whole (`init="pretrained"`) or as one of the papers' baselines.

    `init` says what is taken from the checkpoint, the rest being fairseq's random initialisation from `seed`:
    nothing ("untrained"), the layer norms of the layers ("layer-norms"), or those and the embeddings
    ("trained-embeddings"). `final_norm="lost"` removes the final layer norm of the last two, as the authors' code
    does by accident: it drops fairseq's version marker together with the weights.
    """
    state = read_checkpoint(path)
    config = language_model_config(state, path)
    weights = {name.removeprefix("decoder."): tensor for name, tensor in state["model"].items()}
    check_vocabulary(weights, dictionary, path)
    vocabulary = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    if init == "pretrained":
        with _without_initialisation():
            decoder = TransformerLanguageModel.build_model(config, vocabulary).decoder
        _load_all(decoder, weights, path)
        return decoder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        decoder = TransformerLanguageModel.build_model(config, vocabulary).decoder
    if init != "untrained":
        _load_some(decoder, weights, LAYER_NORMS + (EMBEDDINGS if init == "trained-embeddings" else ()), path)
        if final_norm == "lost":
            decoder.layer_norm = None
        else:
            _load_some(decoder, weights, (FINAL_NORM,), path)
    return decoder


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


def _load_all(decoder: TransformerDecoder, weights: dict[str, Tensor], path: str | Path) -> None:
    """Copy every weight, tensor by tensor (the source may be fp16 and memory-mapped), and insist on completeness."""
    prefixed = {f"decoder.{name}": tensor for name, tensor in weights.items()}
    if "decoder.layer_norm.weight" in prefixed:
        # Files written without the marker would lose their final layer norm to fairseq's upgrade of old formats.
        prefixed.setdefault("decoder.version", torch.tensor([float(FINAL_NORM_VERSION)]))
    decoder.upgrade_state_dict_named(prefixed, "decoder")
    target = decoder.state_dict(keep_vars=True)
    source = {name.removeprefix("decoder."): tensor for name, tensor in prefixed.items()}
    own = {name for name in target if not name.endswith("_float_tensor")}
    missing, unexpected = sorted(own - set(source)), sorted(set(source) - set(target) - {"version"})
    unexpected = [name for name in unexpected if not name.endswith(("_float_tensor", "embed_positions.weights"))]
    if missing or unexpected:
        raise UserError(
            f"{path}: the weights do not fit the architecture it names"
            + (f"; missing: {missing[0]} and {len(missing) - 1} more" if missing else "")
            + (f"; unknown: {unexpected[0]} and {len(unexpected) - 1} more" if unexpected else "")
        )
    for name in own - {"version"}:
        _copy(target[name], source[name], name, path)


def _load_some(decoder: TransformerDecoder, weights: dict[str, Tensor], parts: tuple[str, ...], path: Any) -> None:
    """Copy the weights whose module is one of `parts` (of a layer, or of the decoder itself)."""
    for name, target in decoder.state_dict(keep_vars=True).items():
        module = ".".join(name.split(".")[2:]) if name.startswith("layers.") else name
        if module.startswith(parts) and name in weights:
            _copy(target, weights[name], name, path)


@torch.no_grad()
def _copy(target: Tensor, source: Tensor, name: str, path: str | Path) -> None:
    if target.shape != source.shape:
        raise UserError(
            f"{path}: decoder.{name} has the shape {tuple(source.shape)}, its architecture says {tuple(target.shape)}"
        )
    target.copy_(source)
    if target.numel():
        low, high = torch.aminmax(target)  # both are NaN if any value is
        if not (low.isfinite() and high.isfinite()):
            raise UserError(f"{path}: decoder.{name} holds NaN or infinite weights; get a sound copy of the model")


@contextmanager
def _without_initialisation() -> Iterator[None]:
    """Skip the random initialisation of weights that are read from a file anyway: 20 s at 1.3B."""
    names = ("normal_", "uniform_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "constant_")
    originals = {name: getattr(torch.nn.init, name) for name in names}
    try:
        for name in names:
            setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.nn.init, name, original)
