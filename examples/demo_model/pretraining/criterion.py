"""`demo_label_cross_entropy`: next-token cross-entropy on all label tokens and a share of the others."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics

from examples.demo_model.episodes import FORMATS

STEPS = (0, 1, 2, 4, 8, 16, 32)
"""accuracy_k4 is over the labels with 4 to 7 demonstrations before them, and so on."""


@dataclass
class DemoLabelCrossEntropyConfig(FairseqDataclass):
    text_share: float = field(default=0.1, metadata={"help": "share of the tokens that are not labels to train on"})


@register_criterion("demo_label_cross_entropy", dataclass=DemoLabelCrossEntropyConfig)
class DemoLabelCrossEntropy(FairseqCriterion):
    """Mean over labels of [label loss + losses of the few other tokens drawn for training].

    With all tokens in the loss a small model spends its capacity on guessing filler. Logits are made for the drawn
    tokens only, which saves most of the output layer's time.
    """

    def __init__(self, task, text_share: float) -> None:
        super().__init__(task)
        self.text_share = text_share

    def forward(self, model, sample, reduce=True):
        features = model(**sample["net_input"], features_only=True)[0]  # (rows, tokens, width)
        target, seen = sample["target"], sample["seen"]
        is_text = (seen < 0) & (target != self.padding_idx)
        if model.training:
            is_text &= torch.rand(target.shape) < self.text_share
        chosen = (seen >= 0) | is_text
        logits = model.decoder.output_layer(features[chosen])  # (chosen tokens, vocabulary)
        target, seen, demonstration = target[chosen], seen[chosen], sample["demonstration"][chosen]
        losses = F.cross_entropy(logits, target, reduction="none")
        label = seen >= 0
        correct = (logits.argmax(-1) == target).float()
        logging_output = {
            "loss": losses.sum().item(),
            "label_loss": losses[label].sum().item(),
            "text_loss": losses[~label].sum().item(),
            "labels": int(label.sum()),
            "texts": int((~label).sum()),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": int(label.sum()),
        }
        for index, name in enumerate(FORMATS):
            knowable = (seen >= 2) & (sample["format"][chosen] == index)
            logging_output[name] = int(knowable.sum())
            logging_output[f"{name}_correct"] = float(correct[knowable].sum())
        for low, high in zip(STEPS, (*STEPS[1:], 64), strict=True):
            at = (demonstration >= low) & (demonstration < high)
            logging_output[f"k{low}"] = int(at.sum())
            logging_output[f"k{low}_correct"] = float(correct[at].sum())
        return losses.sum(), logging_output["sample_size"], logging_output

    @staticmethod
    def reduce_metrics(logging_outputs) -> None:
        total = {key: sum(log[key] for log in logging_outputs) for key in logging_outputs[0]}

        def log(name: str, numerator: str, denominator: str) -> None:
            if total[denominator]:
                metrics.log_scalar(name, total[numerator] / total[denominator], total[denominator], round=3)

        log("loss", "loss", "labels")
        log("label_loss", "label_loss", "labels")
        log("text_loss", "text_loss", "texts")
        for name in FORMATS:
            log(f"accuracy_{name}", f"{name}_correct", name)
        for step in STEPS:
            log(f"accuracy_k{step}", f"k{step}_correct", f"k{step}")

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
