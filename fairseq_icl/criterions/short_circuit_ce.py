"""The criterion `short_circuit_ce`: fairseq's cross_entropy of the model cut after one layer."""

from dataclasses import field, make_dataclass
from typing import Any

from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.dataclass import FairseqDataclass
from omegaconf import II
from torch import Tensor, nn

from fairseq_icl.compat.command_line import flags_of
from fairseq_icl.training.layer_causal import decoder_of
from fairseq_icl.training.short_circuit import cut_after, layer_of_cut

NAME = "short_circuit_ce"
ShortCircuitCrossEntropyConfig = make_dataclass(
    "ShortCircuitCrossEntropyConfig",
    [*flags_of(NAME), ("sentence_avg", bool, field(default=II("optimization.sentence_avg")))],
    bases=(FairseqDataclass,),
)


@register_criterion(NAME, dataclass=ShortCircuitCrossEntropyConfig)
class ShortCircuitCrossEntropy(CrossEntropyCriterion):
    """fairseq's own loss on the logits that the model has after the layer `layers`."""

    def __init__(self, task: Any, sentence_avg: bool, layers: str | None = None) -> None:
        super().__init__(task, sentence_avg)
        self.layers = layers

    def check_decoder(self, decoder: Any) -> int:
        """The layer of the cut; a UserError if this decoder does not have it."""
        return layer_of_cut(self.layers, len(decoder.layers))

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """What fairseq's cross_entropy returns."""
        decoder = decoder_of(model)
        with cut_after(decoder, self.check_decoder(decoder)):
            loss, sample_size, logs = super().forward(model, sample, reduce)
        return loss, sample_size, logs
