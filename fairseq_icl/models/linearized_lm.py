"""The first-order expansion of a language model in its trained parameters: f_lin = f(w0) + J(w0) (w - w0).

The trained parameters of this model are the differences delta = w - w0. They start at zero and have the names of the
weights themselves (`decoder.layers.0.self_attn.k_proj.weight`), so that optimizers, checkpoints and records of
gradients need not know. The pretrained weights w0 are in memory once.

Everything is obtained by `evaluate(fn)`, which runs `fn` twice:

    tangent pass   weights are the dual numbers w0 + ε delta, no graph: J delta of every tensor that fn returns
    value pass     weights have the value w0 and pass their gradient on to delta: f(w0), to the bit

and adds the two. J delta has the same derivative in delta, J, as the value pass has, so backward through the value
pass alone is the whole gradient: one vector-Jacobian product at w0 with the loss gradient taken at f_lin. No graph of
the tangents is kept, and memory is that of ordinary fine-tuning plus the tangents of what fn returns.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from fairseq.models import FairseqDecoder
from fairseq.modules import FairseqDropout, LayerDropModuleList
from fairseq.modules.checkpoint_activations import unwrap_checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fairseq_icl.compat.models import replaced, replaced_linear
from fairseq_icl.errors import UserError
from fairseq_icl.models.pretrained_lm import LINEARIZED_MARK, PretrainedLM, Result, call_with_weights, put_weights

_linear = functional.linear


class BaseWithGradientToDelta(torch.autograd.Function):
    """w0 + (delta - stop_gradient(delta)) without its copies: the value is w0, the gradient goes to delta."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, delta: Tensor) -> Tensor:
        return base.view_as(base)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


class LinearizedLM(PretrainedLM):
    """f(w0) + J(w0) delta of a decoder-only fairseq model; the parameters in `trained_names` become the deltas."""

    def __init__(self, decoder: FairseqDecoder, trained_names: Iterable[str]) -> None:
        # Activation checkpointing would run layers again after their weights have been put back, so it is undone.
        super().__init__(unwrap_checkpoint(decoder))
        self._in_pass = False
        parameters, names = dict(self.named_parameters(remove_duplicate=False)), list(trained_names)
        unknown = [name for name in names if name not in parameters]
        if unknown:
            first = next(iter(parameters))
            raise UserError(f"--train-parameters: no parameter {unknown[0]!r}; the first of the model is {first!r}")
        name_of = {id(parameters[name]): name for name in reversed(names)}  # of tied weights the first
        self._names = list(reversed(name_of.values()))
        deltas: dict[str, nn.Parameter] = {}
        self.requires_grad_(False)
        for name in self._names:
            path, _, attribute = name.rpartition(".")
            weight = parameters[name].detach()
            # A buffer follows .half() and .to(device) with its module; checkpoints hold the deltas only.
            self.get_submodule(path).register_buffer(f"{attribute}_base", weight, persistent=False)
            deltas[name] = nn.Parameter(torch.zeros_like(weight))
        for module in self.modules():
            for attribute, held in module._parameters.items():
                if id(held) in name_of:
                    module._parameters[attribute] = deltas[name_of[id(held)]]
        # Every module on the way to a trained parameter says so if it is run while it holds a delta.
        for path in {name.rsplit(".", depth)[0] for name in self._names for depth in range(1, name.count(".") + 1)}:
            self.get_submodule(path).register_forward_pre_hook(self._check_in_pass)

    @classmethod
    def around(cls, model: PretrainedLM) -> "LinearizedLM":
        """The expansion around `model`, sharing its weights: modules are copied, parameters are not."""
        shared = {id(tensor): tensor for tensor in [*model.decoder.parameters(), *model.decoder.buffers()]}
        return cls(copy.deepcopy(model.decoder, shared), model.trained_names)

    def evaluate(self, function: Callable[[], Result], weights: Mapping[str, Tensor] | None = None) -> Result:
        """What `function` returns (tensors in any nesting of lists, tuples and dicts) for f_lin: value plus JVP.

        It runs twice, so it must do the same both times and compute all that depends on the weights itself: a tensor
        kept from an earlier call has no tangent. Inside, the modules and their weights are used as ever. `weights` are
        deltas to use in place of the model's own.
        """
        if self._in_pass:
            return function()
        _refuse_randomness(self)
        deltas = self._deltas() if weights is None else weights
        moved = any(bool(delta.any()) for delta in deltas.values())
        # The tangents come first: at their peak of memory the graph of the value pass is not there yet.
        tangents = self._tangents(function, deltas) if moved else None
        straight_through = BaseWithGradientToDelta.apply
        values = self._pass({n: straight_through(self.get_buffer(f"{n}_base"), deltas[n]) for n in deltas}, function)
        if tangents is None:
            return values
        leaves, structure = tree_flatten(values)
        return tree_unflatten([_add(*pair) for pair in zip(leaves, tangents, strict=True)], structure)

    def forward(self, src_tokens: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Linearized logits (batch, tokens, vocabulary), with the linearized rest of what the decoder returns."""
        return self._run(self.decoder, src_tokens, **kwargs)

    def extract_features(self, src_tokens: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Linearized features (batch, tokens, width), with the linearized rest of what the decoder returns."""
        return self._run(self.decoder.extract_features, src_tokens, **kwargs)

    def _run(self, function: Callable[..., Result], src_tokens: Tensor, **kwargs: Any) -> Result:
        if kwargs.get("incremental_state") is not None and not self._in_pass:
            raise RuntimeError("a linearized model keeps no incremental state between calls: it runs each call twice")
        return self.evaluate(lambda: function(src_tokens, **kwargs))

    @property
    def trained_names(self) -> list[str]:
        """Names of the deltas, which are those of the weights they are added to."""
        return list(self._names)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The deltas, and a mark that they are deltas."""
        return super().state_dict(*args, **kwargs) | {LINEARIZED_MARK: torch.ones(1)}

    def load_state_dict(
        self, state_dict: dict[str, Tensor], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> None:
        """Take over the deltas of a linearized checkpoint."""
        if LINEARIZED_MARK not in state_dict:
            raise UserError("the checkpoint was trained without --linearize; load it without --linearize")
        own = self._deltas()
        zeros = {name: delta.new_zeros(()).expand(delta.shape) for name, delta in own.items()}  # take no memory
        deltas = zeros | state_dict
        del deltas[LINEARIZED_MARK]
        for name in deltas:
            if name not in own:
                raise UserError(f"the checkpoint trained {name}, this model does not; use its --train-parameters")
        put_weights(deltas, own)
        self.base_state = zeros  # where the expansion is the pretrained model itself

    def _tangents(self, function: Callable[[], Any], deltas: Mapping[str, Tensor]) -> list[Tensor | None]:
        """J delta of each leaf that `function` returns; None for a leaf that does not depend on the deltas."""
        # Inference mode would drop the tangents without a word. Of the attention kernels only MATH has forward AD.
        with torch.inference_mode(False), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(self.get_buffer(f"{name}_base"), deltas[name]) for name in deltas}
            try:
                with replaced_linear(dual_linear):
                    leaves = tree_leaves(self._pass(duals, function))
            except NotImplementedError as error:
                kinds = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in self.trained_names})
                reason = str(error).splitlines()[0]
                raise UserError(
                    f"--linearize: no forward derivative with respect to {', '.join(kinds)} ({reason}); "
                    "train other parameters (--train-parameters) or leave out --linearize"
                ) from error
            real = [leaf if isinstance(leaf, Tensor) and leaf.is_floating_point() else None for leaf in leaves]
            return [None if leaf is None else forward_ad.unpack_dual(leaf).tangent for leaf in real]

    def _pass(self, weights: Mapping[str, Tensor], function: Callable[[], Result]) -> Result:
        """Run `function` with these tensors in the places of the deltas."""
        with replaced(self, _in_pass=True):
            return call_with_weights(self, weights, function)

    def _deltas(self) -> dict[str, Tensor]:
        return {name: self.get_parameter(name) for name in self._names}

    def _check_in_pass(self, module: nn.Module, inputs: Any) -> None:
        if not self._in_pass:
            raise RuntimeError(f"{type(module).__name__} of a linearized model runs only inside model.evaluate(fn)")


def _refuse_randomness(model: nn.Module) -> None:
    """The value pass and the tangent pass must be of the same function: no dropout of any kind."""
    for name, module in model.named_modules():
        dropout = isinstance(module, FairseqDropout | nn.Dropout) and module.p > 0
        always = getattr(module, "apply_during_inference", False)
        layer_drop = isinstance(module, LayerDropModuleList) and module.p > 0
        quant_noise = "fairseq.modules.quant_noise" in {h.__module__ for h in module._forward_pre_hooks.values()}
        if (module.training and (dropout or layer_drop or quant_noise)) or (dropout and always):
            kind = "dropout" if dropout else "LayerDrop" if layer_drop else "quantization noise"
            raise UserError(f"--linearize: {name} applies {kind} while training; a linearized model needs it to be 0")


def _add(value: Any, tangent: Tensor | None) -> Any:
    """value + tangent; an error where only the tangent is not finite."""
    if tangent is None:
        return value
    tangent = tangent.to(value.dtype)
    if not bool(torch.isfinite(tangent).all()) and bool((torch.isfinite(value) & ~torch.isfinite(tangent)).any()):
        remedy = "use precision=bf16 or fp32" if tangent.dtype == torch.float16 else "lower --lr"
        raise UserError(f"--linearize: the first-order term is not finite in {tangent.dtype}; {remedy}")
    return value + tangent


def dual_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b with the tangent dx Wᵀ + x dWᵀ + db, of which only the terms that exist are computed.

    Where only one of x and W has a tangent, torch's forward differentiation fills the other one up with zeros and
    multiplies by them. Most weights of a linearized model are frozen, so a third of its tangent pass would be that.
    On CUDA the layer norm of half numbers keeps its statistics in fp32, and so are the tangents that come out of it.
    """
    (x, dx), (w, dw) = forward_ad.unpack_dual(input), forward_ad.unpack_dual(weight)
    b, db = (None, None) if bias is None else forward_ad.unpack_dual(bias)
    value = _linear(x, w, b)
    terms = [_linear(dx.to(x.dtype), w)] if dx is not None else []
    if dw is not None:
        terms.append(_linear(x, dw, db))
    elif db is not None:
        terms.append(db.expand_as(value))
    return forward_ad.make_dual(value, sum(terms[1:], terms[0])) if terms else value
