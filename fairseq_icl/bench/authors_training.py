"""The authors' way of fine-tuning, rewritten from docs/protocol.md: gradients of all weights, an update of k and v.

Vanilla and layer-causal steps run on the model itself; the linearized one needs its own copies of the weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_icl.bench.authors import whole_maps
from fairseq_icl.observing.prefix import positions_from

Sample = dict[str, Any]
LEARNING_RATE = 0.2
"""The papers' largest: time does not depend on it, and an update is far above the rounding of the weights."""
LINEARIZED_LIMIT = 4 * 2**30
"""Bytes of weights from which on the linearized model, with its copy, gradients and tangents, is not tried."""


@contextmanager
def all_weights_learn(model: nn.Module) -> Iterator[None]:
    """Inside, every weight receives a gradient."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.requires_grad_(True)
    model.zero_grad()
    try:
        yield
    finally:
        model.zero_grad()
        for parameter, learns in before.items():
            parameter.requires_grad_(learns)


def nll(decoder: nn.Module, logits: Tensor, target: Tensor) -> Tensor:
    """Sum of the negative log-likelihoods: logits (B, T, V), target (B, T)."""
    log_probs = decoder.get_normalized_probs((logits, None), log_probs=True)
    return F.nll_loss(log_probs.view(-1, log_probs.size(-1)), target.view(-1), ignore_index=1, reduction="sum")


def vanilla_loss(decoder: nn.Module, sample: Sample) -> Tensor:
    """Cross entropy of the decoder's output."""
    with whole_maps(decoder):
        logits = decoder(sample["net_input"]["src_tokens"])[0]
    return nll(decoder, logits, sample["target"])


def layer_causal_loss(decoder: nn.Module, sample: Sample) -> Tensor:
    """Cross entropies of all layers' outputs, added; the input of every layer is detached, all logits live at once."""
    outputs: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:])) for layer in decoder.layers]
    hooks += [layer.register_forward_hook(lambda _, __, result: outputs.append(result[0])) for layer in decoder.layers]
    try:
        with whole_maps(decoder):
            decoder.extract_features(sample["net_input"]["src_tokens"], None)
    finally:
        for hook in hooks:
            hook.remove()
    logits = [decoder.output_layer(decoder.layer_norm(output).transpose(0, 1)) for output in outputs]  # L x (B, T, V)
    return sum(nll(decoder, layer, sample["target"]) for layer in logits)


def step(
    model: nn.Module, sample: Sample, loss_of: Callable[[nn.Module, Sample], Tensor], learning_rate: float
) -> float:
    """One step of SGD on k and v, with the gradients of everything; returns the loss."""
    with all_weights_learn(model):
        loss = loss_of(model.decoder, sample)
        loss.backward()
        updated = [p for name, p in model.named_parameters() if "k_proj" in name or "v_proj" in name]
        sgd(updated, sample["ntokens"], learning_rate)
    return float(loss.detach())


def step_of(model: nn.Module, method: str, learning_rate: float = LEARNING_RATE) -> Callable[[Sample], float]:
    """The step of a method, a function from a sample to its loss before the step."""
    if method == "linearized":
        return Linearized(model, learning_rate).step
    loss_of = layer_causal_loss if method == "lcgd" else vanilla_loss
    return lambda sample: step(model, sample, loss_of, learning_rate)


@torch.no_grad()
def sgd(parameters: list[Tensor], num_tokens: int, learning_rate: float) -> None:
    """What fairseq's trainer does: gradients divided by the number of tokens, their norm taken, one plain SGD step."""
    gradients = [parameter.grad for parameter in parameters]
    torch._foreach_div_(gradients, float(num_tokens))
    torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
    torch._foreach_add_(parameters, gradients, alpha=-learning_rate)


class Linearized:
    """f(w0) + J(w0) (w - w0) by one forward-mode pass over all weights; training differentiates through it."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self.decoder = model.decoder
        self.base = {name: parameter.detach() for name, parameter in self.decoder.named_parameters()}
        self.weights = {name: parameter.clone().requires_grad_() for name, parameter in self.base.items()}

    def step(self, sample: Sample) -> float:
        """One step of SGD on k and v of the linearized model; returns the loss."""
        loss = nll(self.decoder, self.logits(sample["net_input"]["src_tokens"]), sample["target"])
        loss.backward()
        updated = [weight for name, weight in self.weights.items() if "k_proj" in name or "v_proj" in name]
        sgd(updated, sample["ntokens"], self.learning_rate)
        for weight in self.weights.values():
            weight.grad = None
        return float(loss.detach())

    def logits(self, tokens: Tensor) -> Tensor:
        """Linearized logits (B, T, V); what is recorded is linearized along with them."""
        differences = {name: weight - self.base[name] for name, weight in self.weights.items()}

        def run(weights: dict[str, Tensor]) -> tuple[Tensor, list[Any]]:
            with whole_maps(self.decoder) as seen, positions_from(self.decoder, 0):
                return torch.func.functional_call(self.decoder, weights, (tokens,))[0], seen

        (value, _), (tangent, _) = torch.func.jvp(run, (self.base,), (differences,))
        return value + tangent
