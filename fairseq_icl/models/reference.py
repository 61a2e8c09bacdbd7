"""A model's numbers held against others: those of transformers' own code, or those of another device."""

from typing import Any

import torch
from fairseq.models import FairseqDecoder
from torch import Tensor

from fairseq_icl.models.hugging_face import HFModel

TOLERANCE = 1e-3
"""In nats. Two ways of transformers itself to compute attention (eager, sdpa) differ by 1e-4 on long prompts."""
TEXT = " ".join(f"Review {n}: the film of {1900 + 7 * n} was {('dull', 'great', 'long')[n % 3]}." for n in range(24))


@torch.no_grad()
def difference_from_transformers(model: HFModel, decoder: FairseqDecoder) -> tuple[float, str]:
    """(largest difference, in nats, of a token's log-probability in a long text, which transformers it was)."""
    from fairseq_icl.models.transformers_lm import import_transformers, read_config

    transformers = import_transformers(model.folder)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        model.folder, config=read_config(model.folder), dtype=torch.float32, local_files_only=True,
        trust_remote_code=False, attn_implementation="eager",
    ).eval()  # fmt: skip
    rows = [model.bos, *model.encode_line(TEXT)][: model.positions]
    tokens = torch.tensor([[model.vocabulary.order[row] for row in rows]])
    expected = _of_next(other(tokens).logits, tokens)
    own = _of_next(decoder(torch.tensor([rows]))[0], torch.tensor([rows]))
    return float((own - expected).abs().max()), f"transformers {transformers.__version__}"


def _of_next(logits: Any, tokens: Tensor) -> Tensor:
    """Log-probability of every token but the first: logits (1, T, V), tokens (1, T) -> (T - 1,)"""
    return logits[0, :-1].float().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
