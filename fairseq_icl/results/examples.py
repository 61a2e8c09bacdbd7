"""A few examples of a cell, for people to look at: where ICL and fine-tuning disagree most.

For each: the query, the predictions of ZSL, ICL and FT, and which demonstrations and which of their tokens ICL attends
to and fine-tuning, in its dual form, would (metrics/training_attention.py), layer by layer. JSON, small by design:
a bounded number of examples, weights in thousandths, and of the tokens only the heaviest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_icl.metrics import Observation
from fairseq_icl.metrics.training_attention import TrainingAttention, TrainingTokens
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.results.collector import training_tokens

KEPT = 6
TOP_TOKENS = 8
Spell = Callable[[Sequence[int]], list[str]]  # tokens -> the text of each


def most_disagreeing(prompts: Prompts, zsl: Any, icl: Any, ft: Any, spell: Spell, kept: int = KEPT) -> dict[str, Any]:
    """The `kept` examples whose predictions by ICL and by fine-tuning lie furthest apart, the furthest first."""
    scores = {name: seen.option_logprobs for name, seen in (("zsl", zsl), ("icl", icl), ("ft", ft))}
    probabilities = {name: of.double().softmax(1).nan_to_num() for name, of in scores.items()}  # (n, C) each
    distance = (probabilities["icl"] - probabilities["ft"]).abs().sum(1) / 2  # (n,) total variation
    chosen = distance.argsort(descending=True, stable=True)[:kept]
    training = training_tokens(prompts, ft.training_queries) if ft.training_queries else None
    weights = _weights(chosen, icl, ft, training) if training is not None else [{}] * len(chosen)
    examples = []
    for number, attention in zip(chosen.tolist(), weights, strict=True):
        query = prompts.queries[number]
        size = len(query.labels)
        shares = {name: [round(x, 4) for x in of[number, :size].tolist()] for name, of in probabilities.items()}
        texts, text = query.labels, query.inputs[0]
        if not query.shared_input:
            text, texts = (), tuple((*own, *label) for own, label in zip(query.inputs, query.labels, strict=True))
        example = {"row": query.row, "gold": query.gold, "disagreement": round(float(distance[number]), 4)}
        example |= {"query": "".join(spell(text)), "options": ["".join(spell(tokens)) for tokens in texts]}
        examples.append(example | {"probabilities": shares} | attention)
    shown = [spell(prompts.context[start:end]) for start, end in prompts.context_spans]
    if training is not None:  # the tokens that both sides saw
        shown = [[] for _ in range(int(training.demonstration.max()) + 1)]
        tokens = spell([prompts.context[position] for position in training.context_position.tolist()])
        for number, token in zip(training.demonstration.tolist(), tokens, strict=True):
            shown[number].append(token)
    return {"demonstrations": shown, "examples": examples}


def _weights(chosen: Tensor, icl: Observation, ft: Observation, training: TrainingTokens) -> list[dict[str, Any]]:
    """For each chosen example, by layer: thousandths on each demonstration, and the heaviest tokens (place, weight)."""
    seen = TrainingAttention.of(chosen, icl.take(chosen), ft.take(chosen), training)
    sides = {"icl": (seen.icl_examples, seen.icl_tokens), "ft": (seen.ft_examples, seen.ft_tokens)}
    found: list[dict[str, Any]] = [{} for _ in chosen]
    for side, (demonstrations, tokens) in sides.items():
        values, places = tokens.double().nan_to_num().sort(dim=-1, descending=True, stable=True)
        heaviest = torch.stack([places, _thousandths(values)], dim=-1)[:, :, :TOP_TOKENS]  # (n, L, top, 2)
        for example, shares, top in zip(found, _thousandths(demonstrations).tolist(), heaviest.tolist(), strict=True):
            example[side] = {"demonstrations": shares, "tokens": top}
    return found


def _thousandths(weights: Tensor) -> Tensor:
    return weights.mul(1000).nan_to_num().round().long()
