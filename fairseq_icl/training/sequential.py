"""Sequential layer-causal updates: a layer takes its step before the layer above sees its input.

    for every layer l, bottom first:
        x_l    = layer_{l-1}(x_{l-1}; its weights after the step)
        loss_l = CE( U( layer_l(x_l) ), target )
        w_l   <- step of the optimizer on the gradient of loss_l

`lcgd` computes all gradients at the weights before the update. Up to the inputs x_l the two are the same, so they agree
for a model of one layer and for the lowest layer of any model.

Every layer runs twice in an update, once before its step and once after it; what lies below is kept. A linearized model
cannot keep anything, since first-order terms are added to final results only: it runs all layers below again each time.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from fairseq.optim import AMPOptimizer, FairseqOptimizer, FP16Optimizer, MemoryEfficientFP16Optimizer
from torch import Tensor, nn

from fairseq_icl.errors import UserError
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.training.gradients import GradientControl
from fairseq_icl.training.layer_causal import skipped


def sequential_step(
    sample: dict[str, Any],
    model: Any,
    criterion: Any,
    optimizer: FairseqOptimizer,
    update_num: int,
    control: GradientControl,
) -> tuple[Tensor, int, dict[str, Any]]:
    """Backward and a step of each layer but the topmost, whose gradient is left for fairseq's trainer to step with.

    Takes and returns what the task's `train_step` does: the loss, the sample size, and what to log.
    """
    if isinstance(optimizer, FP16Optimizer | MemoryEfficientFP16Optimizer | AMPOptimizer):
        raise UserError("--sequential: one layer's step cannot be taken alone in half precision; use precision=fp32")
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise UserError("--sequential: updates are of one demonstration each; train in one process")
    model.train()
    model.set_num_updates(update_num)
    layers = criterion.check_decoder(model.decoder)
    inputs = None if isinstance(model, LinearizedLM) else dict[int, Tensor]()
    total, logged = torch.zeros(()), dict[str, Any]()
    for layer in layers:
        with one_layer(model.decoder, layer, inputs):
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


@contextmanager
def one_layer(decoder: Any, layer: int, inputs: dict[int, Tensor] | None) -> Iterator[None]:
    """While open, the decoder runs as far as `layer`, and no layer that `inputs` make unnecessary.

    `inputs` (layer -> its input, (T, B, d)) hold what earlier passes of the same batch saw, and take in what this one
    sees: the highest of them is where it begins. None: keep nothing, begin at the bottom.
    """
    first, layers = max(inputs or {0: None}), list(decoder.layers)

    def look(index: int, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return None if inputs is None else (inputs.setdefault(index, args[0].detach()), *args[1:])

    with skipped(layers[:first] + layers[layer + 1 :]), ExitStack() as stack:
        for index in range(first, layer + 1):
            stack.enter_context(layers[index].register_forward_pre_hook(partial(look, index)))
        yield
