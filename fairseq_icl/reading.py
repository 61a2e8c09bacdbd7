"""Where the authors' code and the papers' text differ: one field a difference, two named readings of them all.

docs/protocol.md explains every field. The command line offers each as a flag of the same name (`--loss-on label`);
`--reading` chooses the defaults of all of them at once.
"""

from dataclasses import dataclass, fields
from typing import Literal

ReadingName = Literal["authors", "paper"]

CHOICES: dict[str, tuple[str, ...]] = {
    "position": ("option0", "query", "gold"),
    "loss_on": ("all", "label"),
    "finetuning_order": ("drawn", "icl"),
    "finetuning_demonstrations": ("all", "fitting"),
    "biases": ("trained", "frozen"),
    "random_update": ("uniform", "gaussian"),
    "attention_similarity": ("scores", "probabilities"),
    "final_norm": ("lost", "kept"),
    "permutation_zero": ("identity", "drawn"),
    "layer_loss": ("sum", "mean"),
    "layer_causal_point": ("layer", "attention"),
    "step_per": ("demonstration", "token"),
}
"""The values each difference can take; the first is what the authors ran."""

# The paper's update rule gives every layer its own full step, which is what adding the losses does: "sum" in both.
PAPER: dict[str, str] = {
    "position": "query",
    "loss_on": "label",
    "finetuning_order": "icl",
    "finetuning_demonstrations": "fitting",
    "biases": "frozen",
    "random_update": "gaussian",
    "attention_similarity": "probabilities",
    "final_norm": "kept",
    "permutation_zero": "drawn",
    "layer_loss": "sum",
    "layer_causal_point": "attention",
    "step_per": "token",
}


@dataclass(frozen=True)
class Reading:
    """One complete reading of the protocol. The defaults are what the authors ran."""

    position: str = "option0"
    """Token whose activations are compared: label token of option 0, last query token, or gold label token."""
    loss_on: str = "all"
    """Tokens of a demonstration that carry the fine-tuning loss."""
    finetuning_order: str = "drawn"
    """Order of fine-tuning: permutations drawn anew after those of the ICL prompt, or the ICL prompt's own order."""
    finetuning_demonstrations: str = "all"
    """Fine-tune on all k demonstrations, or on those that fit into the ICL prompt."""
    biases: str = "trained"
    """Whether the biases of the trained projections learn too."""
    random_update: str = "uniform"
    """The random baseline of SimAOU: uniform on [0, 1) (all positive) or standard normal."""
    attention_similarity: str = "scores"
    """Attention compared before the softmax (scores) or after it (probabilities over the query tokens)."""
    final_norm: str = "lost"
    """Final layer norm of the partly re-initialised baselines: removed by accident, or kept."""
    permutation_zero: str = "identity"
    """Permutation index 0: no permutation, or the first of the drawn ones."""
    layer_loss: str = "sum"
    """Layer-causal losses added over the layers, or averaged."""
    layer_causal_point: str = "layer"
    """Where a layer's logit-lens loss is taken: on its output, or on the residual stream after its attention."""
    step_per: str = "demonstration"
    """One optimizer step per demonstration, or one per scored token."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value not in CHOICES[field.name]:
                raise ValueError(f"{field.name}={value!r}: choose from {', '.join(CHOICES[field.name])}")

    @classmethod
    def of(cls, name: ReadingName = "authors", **overrides: str | None) -> "Reading":
        """The named reading with single differences overridden; an override of None leaves the reading's value."""
        values = {} if name == "authors" else dict(PAPER)
        values.update({key: value for key, value in overrides.items() if value is not None})
        return cls(**values)
