"""A few examples of a cell, for people to look at: where ICL and fine-tuning disagree most.

For each: the query, the predictions of ZSL, ICL and FT, and which demonstrations and which of their tokens ICL attends
to and fine-tuning, in its dual form, would (metrics/training_attention.py), layer by layer. JSON, small by design:
a bounded number of examples, weights in thousandths, and of the tokens only the heaviest.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fairseq_icl.metrics import Observation
from fairseq_icl.metrics.training_attention import TrainingAttention, TrainingTokens
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.prompts.encoding import Query
from fairseq_icl.results.collector import training_tokens

KEPT = 6
TOP_TOKENS = 8
Spell = Callable[[Sequence[int]], list[str]]
"""Tokens -> the text of each."""


def most_disagreeing(prompts: Prompts, zsl: Any, icl: Any, ft: Any, spell: Spell, kept: int = KEPT) -> dict[str, Any]:
    """The `kept` examples whose predictions by ICL and by fine-tuning lie furthest apart, the furthest first."""
    probabilities = {name: _probabilities(seen) for name, seen in (("zsl", zsl), ("icl", icl), ("ft", ft))}
    distance = (probabilities["icl"] - probabilities["ft"]).abs().sum(1) / 2  # (n,) total variation
    chosen = distance.argsort(descending=True, stable=True)[:kept]
    training = training_tokens(prompts, ft.training_queries) if ft.training_queries else None
    weights = _weights(chosen, icl, ft, training) if training is not None else [{}] * len(chosen)
    examples = []
    for place, number in enumerate(chosen.tolist()):
        query = prompts.queries[number]
        size = len(query.labels)
        shares = {name: [round(x, 4) for x in of[number, :size].tolist()] for name, of in probabilities.items()}
        said = {"row": query.row, "gold": query.gold, "disagreement": round(float(distance[number]), 4)}
        examples.append(said | _text(query, spell) | {"probabilities": shares} | weights[place])
    return {"demonstrations": _demonstrations(prompts, training, spell), "examples": examples}


def _probabilities(seen: Observation) -> Tensor:
    """Share of each option among the options: (n, C)"""
    return seen.option_logprobs.double().softmax(1).nan_to_num()


def _text(query: Query, spell: Spell) -> dict[str, Any]:
    if query.shared_input:
        return {"query": "".join(spell(query.inputs[0])), "options": ["".join(spell(label)) for label in query.labels]}
    whole = [(*tokens, *label) for tokens, label in zip(query.inputs, query.labels, strict=True)]
    return {"query": "", "options": ["".join(spell(tokens)) for tokens in whole]}


def _demonstrations(prompts: Prompts, training: TrainingTokens | None, spell: Spell) -> list[list[str]]:
    """The tokens of each demonstration; of those that both sides saw, where there are weights."""
    if training is None:
        return [spell(prompts.context[start:end]) for start, end in prompts.context_spans]
    shown: list[list[str]] = [[] for _ in range(int(training.demonstration.max()) + 1)]
    tokens = spell([prompts.context[place] for place in training.context_position.tolist()])
    for number, token in zip(training.demonstration.tolist(), tokens, strict=True):
        shown[number].append(token)
    return shown


def _weights(chosen: Tensor, icl: Observation, ft: Observation, training: TrainingTokens) -> list[dict[str, Any]]:
    """For each chosen example, by layer: thousandths on each demonstration, and the heaviest tokens (place, weight)."""
    seen = TrainingAttention.of(chosen, icl.take(chosen), ft.take(chosen), training)
    sides = {"icl": (seen.icl_examples, seen.icl_tokens), "ft": (seen.ft_examples, seen.ft_tokens)}
    return [
        {
            side: {"demonstrations": _thousandths(demonstrations[place]), "tokens": _heaviest(tokens[place])}
            for side, (demonstrations, tokens) in sides.items()
        }
        for place in range(len(chosen))
    ]


def _thousandths(weights: Tensor) -> Any:
    return weights.mul(1000).nan_to_num().round().long().tolist()


def _heaviest(weights: Tensor) -> list[list[list[int]]]:
    """(L, T) -> for each layer the heaviest tokens as [place, thousandths]."""
    top = weights.double().nan_to_num().sort(dim=-1, descending=True, stable=True)
    places, values = top.indices[:, :TOP_TOKENS], _thousandths(top.values[:, :TOP_TOKENS])
    pairs = zip(places.tolist(), values, strict=True)
    return [[list(pair) for pair in zip(*layer, strict=True)] for layer in pairs]
