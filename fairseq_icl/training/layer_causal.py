"""Layer-causal gradient descent: every decoder layer learns from its own logit-lens loss and from nothing above it.

    loss = sum_l  CE( U( layer_l( stop_gradient(x_l) ) ), target ),     U = final layer norm, then output projection

No gradient crosses a layer boundary, so the gradient of layer l depends on layers 0..l and on U alone; U is frozen.
Works on fairseq's stock `transformer_lm` decoder and its subclasses: hooks on the layers, no model class of its own.

**Cross entropy behind a frozen unembedding**, for many layers at once and without keeping any logits. The gradient of
one row's loss with respect to its features x is  U^T (softmax(U x) - onehot(target)), all that backward ever needs. The
forward pass goes over U once, some of the vocabulary at a time: logits, their exponentials and the product with U^T,
while both are in the processor's cache. Sums are scaled down whenever a larger logit turns up.

Why not `F.linear_cross_entropy`: its chunked path forms a sum over all rows, so the losses of single layers would need
one call a layer, and a product with the 30 rows of one layer is bound by reading U (51,200 x 768 floats) from memory.
On two busy CPU cores at that shape its own choice of chunks took 10 s for 12 layers, this file 0.5 s.

**Sequential updates** (method lcgd_sequential): a layer takes its step before the layer above sees its input.

    for every layer l, bottom first:
        x_l    = layer_{l-1}(x_{l-1}; its weights after the step)
        loss_l = CE( U( layer_l(x_l) ), target )
        w_l   <- step of the optimizer on the gradient of loss_l

`lcgd` computes all gradients at the weights before the update. Up to the inputs x_l the two are the same, so they agree
for a model of one layer and for the lowest layer of any model. Every layer runs twice in an update, once before its
step and once after it; what lies below is kept. A linearized model cannot keep anything, since first-order terms are
added to final results only: it runs all layers below again each time.

**Short-circuited fine-tuning** (method short_circuit) cuts the model after one layer, which learns there by ordinary
backpropagation: loss = CE( U( layer_l( ... layer_0(x) ) ), target ). Layers above the cut take no part and do not
change. The second paper motivates layer-causal descent by it: there every layer is such a cut, but for its own weights
alone. How the cut model answers is part of every observation (observing/layers.py).
"""

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from fairseq.optim import AMPOptimizer, FairseqOptimizer, FP16Optimizer, MemoryEfficientFP16Optimizer
from torch import Tensor, nn
from torch.nn.functional import pad

from fairseq_icl.errors import UserError
from fairseq_icl.models.attention import replaced_forward
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.observing.probe import detached
from fairseq_icl.training.gradients import GradientControl

LOGITS_AT_A_TIME = 2**21  # about so many are alive: 8 MB. Twice as many, or half, take as long.
LEAST_BLOCK = 1024  # symbols of the vocabulary at a time, however many rows there are: products with fewer are slow
ROW_MULTIPLE = 16  # rows are padded to this: CPU kernels take half as long again where they fill no vector register


def layer_losses(
    model: Any, decoder: Any, layers: range, point: str, target: Tensor, padding: int, **net_input: Any
) -> Tensor:
    """losses[l, n] of the chosen layers on the n scored tokens of a batch, in nats: (layers, tokens).

    `target` (batch, length) is `padding` where nothing is scored; `net_input` is what the model is called with.
    """
    scored = target.ne(padding)

    def features() -> tuple[Tensor, ...]:  # layers x (tokens, dim)
        with layer_states(decoder, layers, point) as states:
            # Through `model` and not `decoder`: DistributedDataParallel sets up its reduction in its own forward.
            model(**net_input, features_only=True)
        return tuple(before_unembedding(decoder, states[layer].transpose(0, 1)[scored]) for layer in layers)

    evaluate = getattr(model, "evaluate", lambda function: function())  # a linearized model adds first-order terms
    return unembedding_losses(decoder.output_projection.weight, target[scored], evaluate(features))


def decoder_of(model: Any) -> Any:
    """The decoder inside `model`, however often the model is wrapped for data parallel training."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model.decoder


def check_decoder(decoder: Any, layers: str | None, point: str = "layer", what: str = "layer-causal training") -> range:
    """The layers that get a loss; a UserError if this decoder cannot be trained layer by layer as asked."""
    head = decoder.output_projection
    if decoder.adaptive_softmax is not None or not isinstance(head, nn.Linear) or head.bias is not None:
        raise UserError(
            f"{what}: the model's output layer is not one plain matrix (adaptive softmax?); "
            "use --criterion cross_entropy (gd)"
        )
    if point == "attention" and any(getattr(layer, "parallel_residual", False) for layer in decoder.layers):
        raise UserError(
            "layer_causal_point=attention: in this model no state between attention and MLP can be read (often they "
            "run side by side); use layer_causal_point=layer or attention_output"
        )
    return parse_layers(layers, len(decoder.layers))


def parse_layers(text: str | None, num_layers: int) -> range:
    """`3` -> range(3, 4), `2-5` -> range(2, 6), `2-` -> range(2, num_layers), None -> every layer."""
    if text is None:
        return range(num_layers)
    if text == "similar":
        raise UserError("layers=similar: not of this command (but of replicate and fine_tuned); give a range (0-11)")
    match = re.fullmatch(r"\s*(\d+)\s*(?:(-)\s*(\d+)?)?\s*", text)
    if match is None:
        raise UserError(f"layers={text}: not a layer (3), a range (0-11) or a lower end (2-)")
    start, dash, end = match.groups()
    first = int(start)
    last = int(end) if end is not None else num_layers - 1 if dash else first
    if not first <= last < num_layers:
        raise UserError(f"layers={text}: the model has layers 0-{num_layers - 1}; give a range inside")
    return range(first, last + 1)


def one_layer_of(layers: str, num_layers: int, what: str) -> int:
    """The layer that the setting `layers` names, where there can only be one; `what` says in the error of what."""
    chosen = parse_layers(layers, num_layers)
    if len(chosen) > 1:
        raise UserError(f"layers={layers}: {what}; give one of 0-{num_layers - 1}")
    return chosen[0]


@contextmanager
def layer_states(decoder: Any, layers: range, point: str) -> Iterator[dict[int, Tensor]]:
    """While open, cut the graph before every layer; the dict fills with the states (length, batch, dim) of `layers`.

    `point` is the layer's output, the residual stream right after attention, or attention's own output.
    """
    states: dict[int, Tensor] = {}

    def keep(index: int, module: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        shown = args if output is None else output
        states[index] = shown[0] if isinstance(shown, tuple) else shown

    with ExitStack() as hooks:
        for index, layer in enumerate(decoder.layers):
            hooks.enter_context(layer.register_forward_pre_hook(lambda _, args: (detached(args[0]), *args[1:])))
            see = partial(keep, index)
            if index not in layers:
                # Or DistributedDataParallel would find this layer's parameters in the output and wait for gradients.
                hook = layer.register_forward_hook(lambda _, __, output: (detached(output[0]), *output[1:]))
            elif point != "attention":
                hook = (layer if point == "layer" else layer.self_attn).register_forward_hook(see)
            elif layer.normalize_before:
                hook = layer.final_layer_norm.register_forward_pre_hook(see)
            else:
                hook = layer.self_attn_layer_norm.register_forward_hook(see)
            hooks.enter_context(hook)
        yield states


def before_unembedding(decoder: Any, x: Tensor) -> Tensor:
    """What the output projection reads: x (tokens, dim) after the final layer norm (if the model has one), frozen."""
    for module in (decoder.layer_norm, decoder.project_out_dim):
        if module is not None:
            frozen = {name: parameter.detach() for name, parameter in module.named_parameters()}
            x = torch.func.functional_call(module, frozen, (x,))
    return x


def unembedding_losses(unembedding: Tensor, target: Tensor, features: tuple[Tensor, ...]) -> Tensor:
    """losses[l, n] = cross_entropy(unembedding @ features[l][n], target[n]) in fp32 (fp64 for fp64 features).

    unembedding: (vocabulary, dim), gets no gradient; target: (tokens,); features: a (tokens, dim) of each layer.
    """
    return cast(Tensor, _UnembeddingLosses.apply(unembedding.detach(), target, *features))


class _UnembeddingLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unembedding: Tensor, target: Tensor, *features: Tensor) -> Tensor:
        count = len(features) * len(target)
        rows = pad(torch.cat(features), (0, 0, 0, -count % ROW_MULTIPLE))  # (n, dim): count and padding
        targets, columns = pad(target.repeat(len(features)), (0, -count % ROW_MULTIPLE)), rows.t()  # (n,), (dim, n)
        exact = torch.promote_types(rows.dtype, torch.float32)
        largest = rows.new_full((len(rows),), -math.inf, dtype=exact)
        total, target_scores = torch.zeros_like(largest), torch.zeros_like(largest)
        means = rows.new_zeros(columns.shape, dtype=exact) if any(ctx.needs_input_grad) else None  # total * U^T softmax
        size = min(len(unembedding), max(LEAST_BLOCK, LOGITS_AT_A_TIME // max(len(rows), 1)))
        space = rows.new_empty(size, len(rows))
        for start in range(0, len(unembedding), size):
            # The vocabulary comes first: with few rows both products are a fifth faster on CPU in this layout.
            block = unembedding[start : start + size]  # (symbols, dim)
            scores = torch.mm(block, columns, out=space[: len(block)]).to(exact)  # (symbols, n)
            place = targets - start
            found = scores.gather(0, place.clamp(0, len(block) - 1).unsqueeze(0)).squeeze(0)
            target_scores = torch.where((place >= 0) & (place < len(block)), found, target_scores)
            before, largest = largest, torch.maximum(largest, scores.amax(0))
            shrink = (before - largest).exp()
            weights = scores.sub_(largest).exp_()  # in place
            total = total * shrink + weights.sum(0)
            if means is not None:
                means.mul_(shrink).add_(torch.mm(block.t(), weights.to(rows.dtype)))
        if means is not None:
            ctx.save_for_backward(means.div_(total).t().sub(unembedding[targets]).to(rows.dtype)[:count])
        return (total.log() + largest - target_scores)[:count].view(len(features), len(target))

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        layers, tokens = grad_losses.shape
        # A tensor of its own for each layer, not a view: it is freed as soon as that layer has used it.
        parts = zip(gradient.view(layers, tokens, -1), grad_losses.unsqueeze(-1), strict=True)
        return None, None, *((part * grad).to(gradient.dtype) for part, grad in parts)


def skipped(layers: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """While open, these layers of a decoder give back what they get."""
    return replaced_forward({layer: lambda _: lambda x, *_, **__: (x, None, None) for layer in layers})


def sequential_step(
    sample: dict[str, Any],
    model: Any,
    criterion: Any,
    optimizer: FairseqOptimizer,
    update_num: int,
    control: GradientControl,
) -> tuple[Tensor, int, dict[str, Any]]:
    """The task's `train_step`: backward, and a step of all layers but the last, which fairseq's trainer steps with."""
    if isinstance(optimizer, FP16Optimizer | MemoryEfficientFP16Optimizer | AMPOptimizer):
        raise UserError("--sequential: one layer's step cannot be taken alone in half precision; use precision=fp32")
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise UserError("--sequential: updates are of one demonstration each; train in one process")
    model.train()
    model.set_num_updates(update_num)
    every, layers = list(model.decoder.layers), criterion.check_decoder(model.decoder)
    inputs: dict[int, Tensor] = {}  # layer -> what it received in an earlier pass, (T, B, d): the highest is begun with

    def look(index: int, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return inputs.setdefault(index, args[0].detach()), *args[1:]

    total, logged = torch.zeros(()), dict[str, Any]()
    for layer in layers:
        first = max(inputs, default=0)
        with skipped(every[:first] + every[layer + 1 :]), ExitStack() as hooks:
            for index in range(first, layer + 1) if not isinstance(model, LinearizedLM) else ():
                hooks.enter_context(every[index].register_forward_pre_hook(partial(look, index)))
            loss, sample_size, logs = criterion(model, sample, only=layer)
        optimizer.backward(loss)
        total, logged = total + loss.detach().cpu(), logged | logs
        if layer != layers[-1]:
            control.check_finite(optimizer, float(loss.detach()), sample["rows"])
            optimizer.multiply_grads(1.0 / sample_size)
            control.before_step(optimizer, update_num, (sample["rows"], 0.0, sample_size), last=False)
            optimizer.step()
            optimizer.zero_grad()
    return total, sample_size, logged | {"loss": total.clone()}
