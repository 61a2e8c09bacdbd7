"""The criterion `match_icl`: fairseq's skin of training/match_icl.py."""

from typing import Any

from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor, nn

from fairseq_icl.errors import UserError
from fairseq_icl.training.layer_causal import decoder_of
from fairseq_icl.training.match_icl import Targets, icl_targets, matching_losses

NAME = "match_icl"


@register_criterion(NAME, dataclass=FairseqDataclass)
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
        logging_output = {
            "loss": loss.detach().clone(),
            "ntokens": size,
            "nsentences": len(tokens),
            "sample_size": size,
        }
        for layer, layer_loss in enumerate(losses.detach()):
            logging_output[f"loss_layer_{layer}"] = layer_loss.sum()
        return loss, size, logging_output

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log `loss` and `loss_layer_l`: the missing share per token."""
        size = sum(log.get("sample_size", 0) for log in logging_outputs)
        for name in dict.fromkeys(name for log in logging_outputs for name in log if name.startswith("loss")):
            metrics.log_scalar(name, sum(log.get(name, 0) for log in logging_outputs) / size, size, round=4)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """True: every logged value is a sum over tokens."""
        return True
