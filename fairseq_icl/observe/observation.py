"""What one setting (ZSL, ICL or FT) showed on n examples: option scores and activations of the recorded token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Observation:
    """n examples, C options, L layers, H heads, width d, up to Q query tokens, context of P tokens. CPU, fp32."""

    row: Tensor  # (n,) row of the data file
    gold: Tensor  # (n,) index of the right option
    option_logprobs: Tensor  # (n, C) mean log-probability of the label's tokens; -inf where there is no such option
    prediction: Tensor  # (n,) first best option
    attention_output: Tensor  # (n, L, d) with output projection and bias, before the residual
    attention_row: Tensor  # (n, L, H, Q) scores before the softmax over the query tokens; zeros on the left
    query_length: Tensor  # (n,) how many of the Q columns, from the right, are real
    query_vector: Tensor  # (n, L, d) scaled by head_dim ** -0.5, heads concatenated
    context_row: Tensor | None = None  # (n, L, P) scores over the context, summed over the heads

    def __len__(self) -> int:
        return len(self.row)

    def take(self, index: Tensor | Sequence[int]) -> "Observation":
        """The chosen examples, in that order."""
        index = torch.as_tensor(index, dtype=torch.long)
        return Observation(**{name: None if value is None else value[index] for name, value in vars(self).items()})


def concatenate(observations: Sequence[Observation]) -> Observation:
    """Observations of the same setting joined; rows and options are filled up to the largest."""
    columns = max(part.attention_row.size(-1) for part in observations)
    options = max(part.option_logprobs.size(-1) for part in observations)
    joined = {}
    for name in Observation.__dataclass_fields__:
        values = [getattr(part, name) for part in observations]
        if name == "attention_row":
            values = [F.pad(value, (columns - value.size(-1), 0)) for value in values]
        if name == "option_logprobs":
            values = [F.pad(value, (0, options - value.size(-1)), value=-torch.inf) for value in values]
        joined[name] = None if values[0] is None else torch.cat(values)
    return Observation(**joined)
