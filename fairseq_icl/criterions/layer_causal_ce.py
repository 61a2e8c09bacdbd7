"""The criterions that train: fairseq's skin of training/layer_causal.py and training/match_icl.py."""

import math
from dataclasses import field, make_dataclass
from typing import Any

from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from omegaconf import II
from torch import Tensor, nn

from fairseq_icl.compat.command_line import flag, flags_of
from fairseq_icl.errors import UserError
from fairseq_icl.settings import Settings
from fairseq_icl.training.layer_causal import check_decoder, decoder_of, layer_losses, one_layer_of, skipped
from fairseq_icl.training.match_icl import Targets, icl_targets, matching_losses

NAME = "layer_causal_ce"
CUT = "short_circuit_ce"
SENTENCE_AVG = ("sentence_avg", bool, field(default=II("optimization.sentence_avg")))
FLAGS = [
    *flags_of(NAME),
    flag("sequential", bool, False, "every layer takes its step before the next one sees its input"),
    SENTENCE_AVG,
    ("clip_norm", float, field(default=II("optimization.clip_norm"))),
]
LayerCausalCrossEntropyConfig = make_dataclass("LayerCausalCrossEntropyConfig", FLAGS, bases=(FairseqDataclass,))
CUT_FLAGS = [*flags_of(CUT), SENTENCE_AVG]
ShortCircuitCrossEntropyConfig = make_dataclass("ShortCircuitCrossEntropyConfig", CUT_FLAGS, bases=(FairseqDataclass,))


@register_criterion(NAME, dataclass=LayerCausalCrossEntropyConfig)
class LayerCausalCrossEntropy(FairseqCriterion):
    """The sum (or mean) over layers of each layer's logit-lens cross entropy."""

    def __init__(
        self,
        task: Any,
        layer_causal_point: str | None = None,
        layers: str | None = None,
        layer_loss: str | None = None,
        sentence_avg: bool = False,
        sequential: bool = False,
        clip_norm: float = 0.0,
    ) -> None:
        super().__init__(task)
        settings = getattr(task, "settings", Settings())
        self.point = str(layer_causal_point or settings.layer_causal_point)
        self.layer_loss = str(layer_loss or settings.layer_loss)
        self.layers, self.sentence_avg = layers, sentence_avg
        self.sequential = sequential  # the task goes by `training.sequential`, not by `forward` on all layers at once
        if sequential and clip_norm > 0:
            raise UserError(
                "--clip-norm: needs the gradients of all layers at once, in sequential updates a layer has stepped "
                "before the next has one; use --layer-clip norm"
            )

    def check_decoder(self, decoder: Any) -> range:
        """The layers that get a loss; a UserError if this decoder cannot be trained layer by layer as asked."""
        return check_decoder(decoder, self.layers, self.point)

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True, only: int | None = None
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """The loss, the sample size that divides its gradient, and what to log (in nats, summed over tokens).

        `only`: the part of the loss that one layer adds.
        """
        decoder, target = decoder_of(model), sample["target"]
        chosen = self.check_decoder(decoder)
        layers = chosen if only is None else range(only, only + 1)
        losses = layer_losses(model, decoder, layers, self.point, target, self.padding_idx, **sample["net_input"])
        share = len(layers) / len(chosen)
        per_token = losses.mean(0) * share if self.layer_loss == "mean" else losses.sum(0)  # (tokens,)
        loss = per_token.sum()
        if not reduce:
            scored = target.ne(self.padding_idx)  # (batch, length)
            loss = per_token.new_zeros(scored.shape).masked_scatter(scored, per_token).view(-1)
        sample_size = target.size(0) if self.sentence_avg else sample["ntokens"]
        # The loss is a copy: fairseq zeroes that of dummy batches in place.
        logs = {"loss": loss.detach().clone(), "nll_loss": losses[-1].detach().sum(), "ntokens": sample["ntokens"]}
        logs |= {"nsentences": target.size(0), "sample_size": sample_size}
        logs |= {f"loss_layer_{layer}": own.sum() for layer, own in zip(layers, losses.detach(), strict=True)}
        return loss, sample_size, logs

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log, in bits: `loss` (all layers), `loss_layer_l`, and of the top layer alone `nll_loss` and `ppl`."""
        sample_size = sum(log.get("sample_size", 0) for log in logging_outputs)
        ntokens = sum(log.get("ntokens", 0) for log in logging_outputs)
        names = dict.fromkeys(name for log in logging_outputs for name in log if name.startswith("loss_layer_"))
        for name, count in (("loss", sample_size), ("nll_loss", ntokens), *((name, ntokens) for name in names)):
            total = sum(log.get(name, 0) for log in logging_outputs)
            metrics.log_scalar(name, total / count / math.log(2), count, round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["nll_loss"].avg))

    logging_outputs_can_be_summed = staticmethod(lambda: True)  # every logged value is a sum over tokens


@register_criterion(CUT, dataclass=ShortCircuitCrossEntropyConfig)
class ShortCircuitCrossEntropy(CrossEntropyCriterion):
    """fairseq's own loss on the logits that the model has after the layer `layers`."""

    def __init__(self, task: Any, sentence_avg: bool, layers: str | None = None) -> None:
        super().__init__(task, sentence_avg)
        self.layers = layers

    def check_decoder(self, decoder: Any) -> int:
        """The layer of the cut; a UserError if this decoder does not have it."""
        last = len(decoder.layers) - 1
        return (
            last if self.layers is None else one_layer_of(self.layers, last + 1, "a short circuit is after one layer")
        )

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """What fairseq's cross_entropy returns."""
        decoder = decoder_of(model)
        with skipped(list(decoder.layers)[self.check_decoder(decoder) + 1 :]):
            loss, sample_size, logs = super().forward(model, sample, reduce)
        return loss, sample_size, logs


@register_criterion("match_icl", dataclass=FairseqDataclass)
class MatchICL(FairseqCriterion):
    """The share of ICL's change of the attention outputs that is missing, mean over layers, sum over tokens."""

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self.targets: Targets | None = None

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """The loss, the number of tokens that divides its gradient, and what to log."""
        if "rows" not in sample:
            raise UserError("--criterion match_icl: trains on demonstrations; leave out the validation split")
        if self.targets is None:  # before the first step, from the weights as they are then
            self.targets = icl_targets(getattr(model, "module", model), self.task.prompts)
        tokens = sample["net_input"]["src_tokens"]  # (B, T)
        scored = sample["target"].ne(self.padding_idx)[:, :-1]  # (B, T - 1)
        losses = matching_losses(model, decoder_of(model), self.targets, sample["rows"], tokens, scored)
        loss, size = losses.mean(0).sum(), losses.size(1)
        logs = {"loss": loss.detach().clone(), "ntokens": size, "nsentences": len(tokens), "sample_size": size}
        logs |= {f"loss_layer_{layer}": layer_loss.sum() for layer, layer_loss in enumerate(losses.detach())}
        return loss, size, logs

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log `loss` and `loss_layer_l`: the missing share per token."""
        size = sum(log.get("sample_size", 0) for log in logging_outputs)
        for name in dict.fromkeys(name for log in logging_outputs for name in log if name.startswith("loss")):
            metrics.log_scalar(name, sum(log.get(name, 0) for log in logging_outputs) / size, size, round=4)

    logging_outputs_can_be_summed = staticmethod(lambda: True)  # every logged value is a sum over tokens
