"""Attention to training tokens: do ICL and FT lean on the same demonstrations, and on the same tokens in them?

In linear attention, fine-tuning acts as attention to the training tokens with weight q_train . q (the first paper,
section 4). So, per layer, over the T demonstration tokens that both sides saw:

    FT side:  softmax_t( q_ft . q_t )    q_ft = query vector under FT, q_t = query vector of token t during training
    ICL side: softmax_t( score_t )       score_t = pre-softmax attention to token t in the prompt, heads summed

A demonstration's weight is the sum over its tokens. Recall is the share of the ICL side's top k that the FT side's
top k contains; Kendall is tau-b of the two weight vectors, as in scipy.stats.kendalltau. Everything is (n, L).

The authors pair tokens by place, which is right only if both sides saw the same demonstrations in the same order;
`TrainingTokens.align` pairs them by row, so permutations and truncated prompts are compared correctly too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fairseq_icl.metrics import Observation, Similarity, metric
from fairseq_icl.metrics.vectors import remembered, uniform

ROWS = 50  # examples in a matrix product, always: filled up, it gives each the same bits in any company
BLOCK = 8  # numbers that `_inversions` compares pair by pair
PAIRS = 2**26  # that a GPU compares at once


@dataclass(frozen=True)
class TrainingTokens:
    """The T demonstration tokens that fine-tuning and the ICL prompt share, and where to find each of them."""

    queries: Tensor  # (L, T, d) scaled query vectors recorded during training, BOS left out
    demonstration: Tensor  # (T,) which demonstration a token belongs to, 0 .. D-1
    context_position: Tensor  # (T,) its position in the ICL context
    top_examples: int = 5
    top_tokens: int = 100

    def on(self, device: torch.device | str) -> "TrainingTokens":
        """The same on another device."""
        names = ("queries", "demonstration", "context_position")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @classmethod
    def align(
        cls, training: Mapping[int, Tensor], context_rows: Sequence[int], context_spans: Sequence[tuple[int, int]]
    ) -> "TrainingTokens":
        """Pair recorded training tokens with prompt tokens by dataset row, in the order of the prompt.

        Args:
            training: Dataset row -> query vectors (L, tokens, d) of its training sequence, BOS included.
            context_rows: Dataset row of each demonstration of the prompt.
            context_spans: (start, end) of each demonstration in the context, without its closing EOS.
        """
        shared = [
            (row, training[row][:, 1:], torch.arange(*span))
            for row, span in zip(context_rows, context_spans, strict=True)
            if row in training
        ]
        if not shared:
            raise ValueError("no demonstration is in both the fine-tuning data and the prompt")
        for row, queries, positions in shared:
            if queries.size(1) != len(positions):
                raise ValueError(f"row {row}: {queries.size(1)} tokens in training, {len(positions)} in the prompt")
        demonstration = [torch.full_like(positions, number) for number, (_, _, positions) in enumerate(shared)]
        _, recorded, places = zip(*shared, strict=True)
        return cls(torch.cat(recorded, dim=1), torch.cat(demonstration), torch.cat(places))

    @property
    def used_tops(self) -> tuple[int, int]:
        """k of the recall of tokens and of examples: all of them if there are fewer (the authors fail there)."""
        sizes = len(self.demonstration), int(self.demonstration.max()) + 1
        return min(self.top_tokens, sizes[0]), min(self.top_examples, sizes[1])


@dataclass(frozen=True)
class TrainingAttention:
    """Weights of n examples on the T tokens and D demonstrations, on the ICL side and on the FT side."""

    example: Tensor  # (n,) position in the validation set
    icl_tokens: Tensor  # (n, L, T)
    ft_tokens: Tensor  # (n, L, T)
    icl_examples: Tensor  # (n, L, D)
    ft_examples: Tensor  # (n, L, D)
    top_tokens: int
    top_examples: int

    @classmethod
    def of(cls, example: Tensor, icl: Observation, ft: Observation, training: TrainingTokens) -> "TrainingAttention":
        """Both sides of examples (n,) observed under ICL and FT."""
        tokens = icl_weights(icl, training), finetuning_weights(ft, training)
        icl_examples, ft_examples = (per_demonstration(weights, training) for weights in tokens)
        return cls(example, *tokens, icl_examples, ft_examples, *training.used_tops)

    def weights_on(self, of: str) -> tuple[Tensor, Tensor, int]:
        """Weights of ICL and of FT on "tokens" or on "examples" (demonstrations), and the k of their recall."""
        if of == "tokens":
            return self.icl_tokens, self.ft_tokens, self.top_tokens
        return self.icl_examples, self.ft_examples, self.top_examples


def finetuning_weights(ft: Observation, training: TrainingTokens) -> Tensor:
    """softmax_t(q_ft . q_t): (n, L, T) float64

    In the first layer a word at the same place in two demonstrations has the same query vector, so exact ties are
    common. Rounding the products to float32 keeps them ties: in float64 the order of summation would break them.
    """
    n = len(ft)
    queries = pad(ft.query_vector, (0, 0, 0, 0, 0, -n % ROWS))  # the order of a product's sums depends on its rows
    scores = ft.query_vector.new_empty(len(queries), *training.queries.shape[:2])  # (n or a few more, L, T)
    for layer, keys in enumerate(training.queries.unbind()):  # (T, d): a float64 copy of one layer at a time
        keys = keys.double().T
        for start in range(0, n, ROWS):
            rows = slice(start, start + ROWS)
            scores[rows, layer] = (queries[rows, layer].double() @ keys).float()
    return scores[:n].double().softmax(-1)


def icl_weights(icl: Observation, training: TrainingTokens) -> Tensor:
    """softmax_t(score_t): (n, L, T) float64, as the authors have it: what underflows in float32 would be tied."""
    if icl.context_row is None:
        raise ValueError("the ICL observation has no context_row: observe attention to the demonstrations")
    return icl.context_row[..., training.context_position].double().softmax(-1)


def per_demonstration(weights: Tensor, training: TrainingTokens) -> Tensor:
    """Token weights added up within each demonstration: (n, L, T) -> (n, L, D) float64"""
    demonstrations = int(training.demonstration.max()) + 1
    total = torch.zeros(*weights.shape[:-1], demonstrations, dtype=torch.float64, device=weights.device)
    return total.index_add_(-1, training.demonstration, weights.double())


@metric("recall_examples", conditions=(), needs=("attention",), of="examples")
@metric("recall_tokens", conditions=(), needs=("attention",))
def recall(attention: TrainingAttention, of: str = "tokens") -> Tensor:
    """|top k tokens of ICL & top k tokens of FT| / k; `recall_examples`: of demonstrations."""
    icl, ft, k = attention.weights_on(of)
    return (top_k(icl, k) & top_k(ft, k)).double().sum(-1) / k


@metric("kendall_examples", conditions=(), needs=("attention",), of="examples")
@metric("kendall_tokens", conditions=(), needs=("attention",))
def kendall_of(attention: TrainingAttention, of: str = "tokens") -> Similarity:
    """tau-b(ICL token weights, FT token weights); `kendall_examples`: of demonstrations."""
    icl, ft, _ = attention.weights_on(of)
    return kendall(icl, ft)


@metric("recall_examples_random", conditions=(), needs=("attention",), of="examples")
@metric("recall_tokens_random", conditions=(), needs=("attention",))
def recall_random(attention: TrainingAttention, of: str = "tokens") -> Tensor:
    """Share of k tokens (demonstrations) drawn with replacement that lie in the top k of ICL; expectation k / T."""
    weights, _, k = attention.weights_on(of)
    layers, size = weights.shape[1:]
    drawn = (uniform(attention.example, (layers, k), f"recall {of}") * size).long()  # (n, L, k)
    return top_k(weights, k).gather(-1, drawn).double().mean(-1)


@metric("kendall_examples_random", conditions=(), needs=("attention",), of="examples")
@metric("kendall_tokens_random", conditions=(), needs=("attention",))
def kendall_random(attention: TrainingAttention, of: str = "tokens") -> Similarity:
    """tau-b(ICL token (demonstration) weights, uniform random weights); expectation 0."""
    weights, _, _ = attention.weights_on(of)
    return kendall(weights, uniform(attention.example, tuple(weights.shape[1:]), f"kendall {of}"))


def top_k(weights: Tensor, k: int) -> Tensor:
    """Whether each weight is among the k largest of its row; of equal weights the first wins. (..., T) -> (..., T)"""
    smallest = weights.topk(k, dim=-1).values[..., -1:]
    larger, equal = weights > smallest, weights == smallest
    free = k - larger.sum(-1, keepdim=True)
    return larger | (equal & (equal.cumsum(-1) <= free))


def kendall(a: Tensor, b: Tensor) -> Similarity:
    """tau-b = (concordant - discordant) / sqrt(pairs untied in a * pairs untied in b) along the last dimension.

    (..., T), (..., T) -> (...). Defined as 0, and counted, where all of a or all of b is tied.

    Sorted by a, and by b where a is tied, the discordant pairs are the inversions of b (Knight 1966); all other
    numbers follow from counting ties. In numpy, whose sorting is ten times as fast as torch's; GPUs compare all pairs.
    """
    if a.is_cuda:
        return _kendall_by_pairs(a, b)
    shape, size = a.shape[:-1], a.shape[-1]
    (rank_a, tied_a), (rank_b, tied_b) = _ranked(a), _ranked(b)
    bits = size.bit_length()
    both = (rank_a << bits) | rank_b  # sorting it sorts by a, then by b
    both.sort(axis=-1)
    discordant = torch.from_numpy(_inversions(both & (2**bits - 1))).double()
    pairs = size * (size - 1) / 2
    untied_a, untied_b = pairs - tied_a, pairs - tied_b
    comparable = untied_a + untied_b - pairs + _tied_pairs(both)  # tied in neither
    return _tau(comparable - 2 * discordant, untied_a, untied_b, shape)


def _tau(agreement: Tensor, untied_a: Tensor, untied_b: Tensor, shape: Sequence[int]) -> Similarity:
    norm = torch.sqrt(untied_a * untied_b)
    all_tied = norm == 0
    value = agreement / torch.where(all_tied, 1.0, norm)
    return Similarity(value.reshape(shape), all_tied.long().reshape(shape))


def _kendall_by_pairs(a: Tensor, b: Tensor) -> Similarity:
    """The same by its definition, T^2 signs a row."""
    sums = []
    some = max(1, PAIRS // a.size(-1) ** 2)
    for part in zip(a.flatten(0, -2).split(some), b.flatten(0, -2).split(some), strict=True):
        in_a, in_b = ((rows[:, :, None] - rows[:, None, :]).sign().flatten(1).float() for rows in part)  # (rows, T * T)
        sums.append(torch.stack([signs.double().sum(-1) / 2 for signs in (in_a * in_b, in_a.abs(), in_b.abs())]))
    agreement, untied_a, untied_b = torch.cat(sums, dim=1)
    return _tau(agreement, untied_a, untied_b, a.shape[:-1])


@remembered(3)
def _ranked(weights: Tensor) -> tuple[np.ndarray, Tensor]:
    """Ranks (rows, T), equal for equal values and without gaps, and how many pairs are tied, (rows,)"""
    values = weights.reshape(-1, weights.size(-1)).numpy()
    order = values.argsort(axis=-1)
    ordered = np.take_along_axis(values, order, -1)
    steps = np.zeros(values.shape, dtype=np.int32 if values.shape[-1] < 2**15 else np.int64)
    np.cumsum(ordered[:, 1:] != ordered[:, :-1], axis=-1, out=steps[:, 1:])
    rank = np.empty_like(steps)
    np.put_along_axis(rank, order, steps, -1)
    return rank, _tied_pairs(ordered)


def _tied_pairs(ordered: np.ndarray) -> Tensor:
    """Number of pairs of equal values in sorted rows: (rows, T) -> (rows,)"""
    place = np.arange(ordered.shape[-1])
    begins = np.ones(ordered.shape, dtype=bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = np.maximum.accumulate(np.where(begins, place, 0), axis=-1)  # where the value's equals begin
    return torch.from_numpy((place - first).sum(-1)).double()


def _inversions(numbers: np.ndarray) -> np.ndarray:
    """Number of pairs i < j with numbers[i] > numbers[j], of numbers 0 .. T - 1: (rows, T) -> (rows,)

    Pairs within blocks are compared one by one; then blocks are merged two by two. Sorted, with what came from the
    right behind its equals, a number from the right that moved up by m places has passed m larger ones on the left.
    """
    rows, size = numbers.shape
    width, whole = BLOCK, max(BLOCK, 1 << (size - 1).bit_length())
    filled = np.full((rows, whole), size, dtype=numbers.dtype)
    filled[:, :size] = numbers
    blocks = filled.reshape(rows, -1, width)
    inverted = (blocks[..., :, None] > blocks[..., None, :]) & np.triu(np.ones((width, width), dtype=bool), 1)
    counts = np.einsum("rbij->r", inverted.view(np.int8), dtype=np.int64)
    while width < whole:
        place = np.arange(2 * width)
        merged = (filled.reshape(-1, 2 * width) << 1) | (place >= width).astype(filled.dtype)  # the last bit: the right
        merged.sort(axis=-1)
        ends = (merged & 1).astype(np.float64) @ place.astype(np.float64)  # (blocks,) the sum of their new places
        counts += (place[width:].sum() - ends).astype(np.int64).reshape(rows, -1).sum(-1)
        filled, width = merged >> 1, 2 * width
    return counts
