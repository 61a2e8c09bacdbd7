"""Layer-causal gradient descent: every decoder layer learns from its own logit-lens loss and from nothing above it.

    loss = sum_l  CE( U( layer_l( stop_gradient(x_l) ) ), target ),     U = final layer norm, then output projection

No gradient crosses a layer boundary, so the gradient of layer l depends on layers 0..l and on U alone; U is frozen.
Works on fairseq's stock `transformer_lm` decoder and its subclasses: hooks on the layers, no model class of its own.
"""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Optional  # fairseq's parser knows Optional[X], not X | None

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from omegaconf import II
from torch import Tensor, nn

from fairseq_icl.criterions.unembedding_loss import unembedding_losses
from fairseq_icl.errors import UserError
from fairseq_icl.reading import CHOICES, Reading


@dataclass
class LayerCausalCrossEntropyConfig(FairseqDataclass):
    layer_causal_point: Optional[ChoiceEnum(list(CHOICES["layer_causal_point"]))] = field(
        default=None,
        metadata={
            "help": "where a layer's loss is taken: on its output (what the authors ran), or on the residual stream "
            "right after its attention (how the paper's formula reads). Default: what --reading says"
        },
    )
    layers: Optional[str] = field(
        default=None,
        metadata={"help": "layers that get a loss, counted from 0: one (3), a range (0-11) or from one up (2-)"},
    )
    layer_loss: Optional[ChoiceEnum(list(CHOICES["layer_loss"]))] = field(
        default=None,
        metadata={"help": "add the losses of the layers, or average them. Default: what --reading says"},
    )
    sentence_avg: bool = II("optimization.sentence_avg")


@register_criterion("layer_causal_ce", dataclass=LayerCausalCrossEntropyConfig)
class LayerCausalCrossEntropy(FairseqCriterion):
    """The sum (or mean) over layers of each layer's logit-lens cross entropy."""

    def __init__(
        self,
        task: Any,
        layer_causal_point: str | None = None,
        layers: str | None = None,
        layer_loss: str | None = None,
        sentence_avg: bool = False,
    ) -> None:
        super().__init__(task)
        reading = getattr(task, "reading", Reading())
        self.point = str(layer_causal_point or reading.layer_causal_point)
        self.layer_loss = str(layer_loss or reading.layer_loss)
        self.layers = layers
        self.sentence_avg = sentence_avg

    def check_decoder(self, decoder: nn.Module) -> range:
        """The layers that get a loss; a UserError if this decoder cannot be trained layer by layer as asked."""
        head = decoder.output_projection
        if decoder.adaptive_softmax is not None or not isinstance(head, nn.Linear) or head.bias is not None:
            raise UserError(
                "--criterion layer_causal_ce: the model's output layer is not one plain matrix "
                "(adaptive softmax?); use --criterion cross_entropy"
            )
        return parse_layers(self.layers, len(decoder.layers))

    def forward(self, model: nn.Module, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """The loss, the sample size that divides its gradient, and what to log (in nats, summed over tokens)."""
        decoder = decoder_of(model)
        layers = self.check_decoder(decoder)
        scored = sample["target"].ne(self.padding_idx)  # (batch, length)

        def features() -> tuple[Tensor, ...]:
            with layer_states(decoder, layers, self.point) as states:
                # Through `model` and not `decoder`: DistributedDataParallel sets up its reduction in its own forward.
                model(**sample["net_input"], features_only=True)
            return tuple(_before_unembedding(decoder, states[layer].transpose(0, 1)[scored]) for layer in layers)

        evaluate = getattr(model, "evaluate", None)  # of the linearized model: value plus first-order change
        per_layer = evaluate(features) if evaluate is not None else features()  # layers x (tokens, dim)
        losses = unembedding_losses(decoder.output_projection.weight, sample["target"][scored], per_layer)
        per_token = losses.mean(0) if self.layer_loss == "mean" else losses.sum(0)  # (tokens,)
        if reduce:
            loss = per_token.sum()
        else:
            loss = per_token.new_zeros(scored.shape).masked_scatter(scored, per_token).view(-1)
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "loss": loss.detach().clone(),  # a copy: fairseq zeroes the loss of dummy batches in place
            "nll_loss": losses[-1].detach().sum(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": sample_size,
        }
        for layer, layer_losses in zip(layers, losses.detach(), strict=True):
            logging_output[f"loss_layer_{layer}"] = layer_losses.sum()
        return loss, sample_size, logging_output

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict]) -> None:
        """Log, in bits: `loss` (all layers), `loss_layer_l`, and of the top layer alone `nll_loss` and `ppl`."""
        sample_size = sum(log.get("sample_size", 0) for log in logging_outputs)
        ntokens = sum(log.get("ntokens", 0) for log in logging_outputs)
        names = dict.fromkeys(name for log in logging_outputs for name in log if name.startswith("loss_layer_"))
        for name, count in (("loss", sample_size), ("nll_loss", ntokens), *((name, ntokens) for name in names)):
            total = sum(log.get(name, 0) for log in logging_outputs)
            metrics.log_scalar(name, total / count / math.log(2), count, round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["nll_loss"].avg))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """True: every logged value is a sum over tokens."""
        return True


def decoder_of(model: nn.Module) -> nn.Module:
    """The decoder inside `model`, however often the model is wrapped for data parallel training."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model.decoder


def parse_layers(text: str | None, num_layers: int) -> range:
    """`3` -> range(3, 4), `2-5` -> range(2, 6), `2-` -> range(2, num_layers), None -> every layer."""
    if text is None:
        return range(num_layers)
    match = re.fullmatch(r"\s*(\d+)\s*(?:(-)\s*(\d+)?)?\s*", text)
    if match is None:
        raise UserError(f"--layers {text}: not a layer (3), a range (0-11) or a lower end (2-)")
    first, dash, last = match.groups()
    first = int(first)
    last = int(last) if last is not None else num_layers - 1 if dash else first
    if not first <= last < num_layers:
        raise UserError(f"--layers {text}: the model has layers 0-{num_layers - 1}; give a range inside")
    return range(first, last + 1)


@contextmanager
def layer_states(decoder: nn.Module, layers: range, point: str) -> Iterator[dict[int, Tensor]]:
    """While open, cut the graph before every layer; the dict fills with the states (length, batch, dim) of `layers`."""
    states: dict[int, Tensor] = {}
    with ExitStack() as hooks:
        for index, layer in enumerate(decoder.layers):
            hooks.enter_context(layer.register_forward_pre_hook(_cut_graph))
            if index in layers:
                hooks.enter_context(_observe(layer, point, states, index))
            else:
                # Or DistributedDataParallel would find this layer's parameters in the output and wait for gradients.
                hooks.enter_context(layer.register_forward_hook(_drop_graph))
        yield states


def _cut_graph(layer: nn.Module, args: tuple) -> tuple:
    # Passes without a graph have nothing to cut, and detach would drop the tangents of forward-mode differentiation.
    return (args[0].detach(), *args[1:]) if torch.is_grad_enabled() else args


def _drop_graph(layer: nn.Module, args: tuple, output: tuple) -> tuple:
    return (output[0].detach(), *output[1:]) if torch.is_grad_enabled() else output


def _observe(layer: nn.Module, point: str, states: dict[int, Tensor], index: int) -> torch.utils.hooks.RemovableHandle:
    """Hook that stores the layer's output or, for point `attention`, the residual stream right after attention."""
    if point == "layer":
        return layer.register_forward_hook(lambda _, __, output: states.update({index: output[0]}))
    if layer.normalize_before:
        return layer.final_layer_norm.register_forward_pre_hook(lambda _, args: states.update({index: args[0]}))
    return layer.self_attn_layer_norm.register_forward_hook(lambda _, __, output: states.update({index: output}))


def _before_unembedding(decoder: nn.Module, x: Tensor) -> Tensor:
    """What the output projection reads: x (tokens, dim) after the final layer norm (if the model has one), frozen."""
    for module in (decoder.layer_norm, decoder.project_out_dim):
        if module is not None:
            frozen = {name: parameter.detach() for name, parameter in module.named_parameters()}
            x = torch.func.functional_call(module, frozen, (x,))
    return x
