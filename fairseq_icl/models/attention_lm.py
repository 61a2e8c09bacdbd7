"""The model `attention_lm`: fairseq's `transformer_lm` with a choice of attention, to be trained from scratch.

    fairseq-train ... --user-dir fairseq_icl --arch attention_lm --attention momentum --momentum 0.5

All other flags, the initialisation and the names of the weights are those of `transformer_lm`. Its checkpoints carry
the choice in their options, and whatever loads a model in this package follows it.
"""

from dataclasses import dataclass, field
from typing import Any

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig

from fairseq_icl.models.attention import KINDS, set_rule, trained_rule


@dataclass
class AttentionLMConfig(TransformerLanguageModelConfig):
    """`transformer_lm` and two options."""

    attention: ChoiceEnum(list(KINDS)) = field(  # type: ignore[valid-type]
        default="softmax",
        metadata={"help": "softmax, or momentum: softmax and a decaying sum of the preceding values"},
    )
    # SGD's flag has the name --momentum too: hence another name in configurations and checkpoints.
    attention_momentum: float = field(
        default=0.0,
        metadata={
            "help": "eta of --attention momentum, above 0 and below 1: sum over i < t of eta^(t-i) v_i is added",
            "argparse_alias": "--momentum",
        },
    )


@register_model("attention_lm", dataclass=AttentionLMConfig)
class AttentionLM(TransformerLanguageModel):
    """A decoder-only transformer whose self-attention follows the rule that its options name."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "AttentionLM":
        """Called by fairseq for `--arch attention_lm`."""
        rule = trained_rule({name: getattr(args, name) for name in ("attention", "attention_momentum")})
        model: AttentionLM = super().build_model(args, task)
        set_rule(model.decoder, rule)
        return model
