"""The statements that can be asked of a real model, per layer: where they hold, and where softmax ends them.

Takes any decoder of fairseq's kind, or one of transformers whose layers have such parts: `layers[l].self_attn`,
`layers[l].fc1`, `fc2`, `normalize_before`, and `extract_features(tokens (B, T), None)`. A prompt is its tokens:

    zero-shot    start + query           what the model sees without demonstrations (start: usually <s>)
    in context   context + query         the context begins with `start` and ends with the last demonstration

and everything is observed at the last token of the query. The start tokens are there in both conditions (and the
same, nothing precedes them), so they count as the query's own. Use `decoder.double()` to see exact statements to 1e-10.
L layers, H heads, D their width, d = H D, n queries.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from fairseq_icl.errors import UserError
from fairseq_icl.metrics.vectors import l2_norm, relative_error
from fairseq_icl.models.attention import relaxed
from fairseq_icl.observing.probe import queries_keys_values
from fairseq_icl.theory.implicit_update import (
    applied,
    block_update,
    numerical_rank,
    recorded_mlp,
    update_path,
)
from fairseq_icl.theory.linear_attention import (
    Explained,
    Heads,
    explain,
    relaxed_attention,
    softmax_attention,
    softmax_change,
    weight_update,
)


@dataclass(frozen=True)
class AttentionChange:
    """How demonstrations change attention at the last token, against what dW_ICL q predicts; (L, H) each."""

    direct: Explained  # demonstrations come or go at equal queries and own tokens: what the statement speaks of
    total: Explained  # in-context pass minus zero-shot pass: includes what lower layers have changed before
    share: Tensor  # mean attention that goes to demonstrations
    relaxed_error: float  # of (W_ZSL + dW_ICL) q against attention without softmax, largest over layers and queries


def attention_change(
    decoder: nn.Module, start: Sequence[int], context: Sequence[int], queries: Sequence[Sequence[int]]
) -> AttentionChange:
    """Observe n queries (token ids) behind one context; at least two, or R^2 has nothing to vary over."""
    if list(context[: len(start)]) != list(start) or len(context) == len(start):
        raise UserError("the context must begin with the start tokens and go on with demonstrations")
    with torch.no_grad():
        shown = tqdm(queries, desc="attention", unit="query", disable=None)
        per_query = [_change_at_last_token(decoder, start, context, query) for query in shown]
    linear, direct, total = (torch.stack([seen[part] for seen in per_query], dim=2) for part in range(3))
    share = torch.stack([seen[3] for seen in per_query]).mean(0)
    relaxed_error = max(float(seen[4].max()) for seen in per_query)
    return AttentionChange(explain(direct, linear), explain(total, linear), share, relaxed_error)


def _change_at_last_token(
    decoder: nn.Module, start: Sequence[int], context: Sequence[int], query: Sequence[int]
) -> tuple[Tensor, ...]:
    """Linear part, direct and total change (L, H, D), share (L, H), relaxed error (L,) of one query."""
    in_context, zero_shot = (_heads(decoder, [*before, *query]) for before in (context, start))
    rows = []
    for both, alone in zip(in_context, zero_shot, strict=True):
        demonstrations = Heads(*(part[:, len(start) : len(context)] for part in both))
        own = Heads(*(torch.cat([part[:, : len(start)], part[:, len(context) :]], dim=1) for part in both))
        last = both.query[:, -1:]  # (H, 1, D)
        seen = softmax_change(last, own, demonstrations)
        total = softmax_attention(last, both.key, both.value) - softmax_attention(
            alone.query[:, -1:], alone.key, alone.value
        )
        linear = relaxed_attention(last, demonstrations.key, demonstrations.value)
        weights = weight_update(own.key, own.value) + weight_update(demonstrations.key, demonstrations.value)
        error = relative_error(last @ weights.transpose(1, 2), relaxed_attention(last, both.key, both.value))
        rows.append((linear[:, 0], seen.change[:, 0], total[:, 0], seen.share[:, 0], torch.tensor(error)))
    return tuple(torch.stack(part) for part in zip(*rows, strict=True))


def _heads(decoder: nn.Module, sequence: Sequence[int]) -> list[Heads]:
    """Queries (unscaled), keys and values (H, T, D) of every layer, rotated where the model does so."""
    seen: list[Heads] = []

    def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        x = kwargs["query"] if "query" in kwargs else args[0]
        query, key, value = queries_keys_values(module, x)
        seen.append(Heads(query[0] / module.scaling, key[0], value[0]))

    modules = [layer.self_attn for layer in _layers(decoder)]
    with _hooked([module.register_forward_hook(look, with_kwargs=True) for module in modules]):
        _run(decoder, sequence)
    if len(seen) != len(modules):
        raise UserError(f"saw {len(seen)} attention blocks in a decoder of {len(modules)} layers")
    return seen


@dataclass(frozen=True)
class RelaxedModel:
    """The model whose attention is linear in every layer, beside the model itself, at the last token of n queries."""

    distance: float  # total variation between the two predictions of the next token, in context; mean over queries
    moved: float  # the same between the model itself in context and without demonstrations: what ICL changes
    agreement: float  # share of the queries whose likeliest next token is the same
    cosine: Tensor  # (L,) of the attention outputs of the two, mean over queries
    relative_error: Tensor  # (L,) |o_relaxed - o| / |o|, mean over queries


@torch.no_grad()
def relaxed_model(
    decoder: nn.Module, start: Sequence[int], context: Sequence[int], queries: Sequence[Sequence[int]]
) -> RelaxedModel:
    """How far is the model without softmax and scale, which the papers reason about, from the model itself?

    The decoder itself, called with tokens (B, T), must return (logits (B, T, vocabulary), ...).
    """
    rows = []
    for query in tqdm(queries, desc="relaxed model", unit="query", disable=None):
        real, outputs = _prediction(decoder, [*context, *query])
        zero_shot, _ = _prediction(decoder, [*start, *query])
        with relaxed(decoder):
            linear, linear_outputs = _prediction(decoder, [*context, *query])
        rows.append(
            (
                (linear - real).abs().sum() / 2,
                (zero_shot - real).abs().sum() / 2,
                (linear.argmax() == real.argmax()).to(real.dtype),
                torch.cosine_similarity(linear_outputs, outputs, dim=-1),
                (linear_outputs - outputs).norm(dim=-1) / outputs.norm(dim=-1),
            )
        )
    distance, moved, agreement, cosine, error = (torch.stack(part).mean(0) for part in zip(*rows, strict=True))
    return RelaxedModel(float(distance), float(moved), float(agreement), cosine, error)


def _prediction(decoder: nn.Module, sequence: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Probabilities of the next token (vocabulary,), and attention outputs at the last one (L, d)."""
    seen: list[Tensor] = []
    modules = [layer.self_attn for layer in _layers(decoder)]
    with _hooked([module.register_forward_hook(lambda _, __, out: seen.append(out[0][-1, 0])) for module in modules]):
        logits = decoder(_tokens(decoder, sequence))[0][0, -1]
    return logits.softmax(-1), torch.stack(seen)


@dataclass(frozen=True)
class ImplicitUpdates:
    """The implicit update of every block at one token, as its context grows through K stages."""

    error: Tensor  # (L,) relative error of the updated block without context against the block with the full context
    unmoved: Tensor  # (L,) the same without the update: how much the context changes the block's output
    rank: list[int]  # (L,) of dW for the full context
    norms: Tensor  # (L, K) |dW_k| / |W|
    increments: Tensor  # (L, K) |dW_k - dW_{k-1}| / |W|
    updates: list[Tensor]  # L x (hidden, d), for the full context; compare with a fine-tuning update of fc1


def implicit_updates(
    decoder: nn.Module, start: Sequence[int], contexts: Sequence[Sequence[int]], query: Sequence[int]
) -> ImplicitUpdates:
    """Observe one query behind growing contexts (token ids, shortest first; each begins with `start`)."""
    if not contexts:
        raise UserError("no context given: the update is the difference that a context makes")
    sequences = [[*before, *query] for before in (start, *contexts)]
    layers = _layers(decoder)
    with torch.no_grad(), ExitStack() as stack:
        seen = [stack.enter_context(recorded_mlp(layer)) for layer in layers]
        outputs = [_layer_outputs(decoder, sequence) for sequence in sequences]  # (K + 1) x (L, d)
    errors, unmoved, ranks, norms, increments, updates = [], [], [], [], [], []
    shown = tqdm(zip(layers, seen, strict=True), desc="implicit updates", total=len(layers), disable=None)
    for index, (layer, record) in enumerate(shown):
        inputs, residuals = ([part.flatten(0, 1)[-1] for part in parts] for parts in (record.inputs, record.residuals))
        update = block_update(layer, [inputs[0], inputs[-1]], [residuals[0], residuals[-1]])
        with torch.no_grad(), applied(layer, update):
            moved = _layer_outputs(decoder, sequences[0])[index]
        errors.append(relative_error(moved, outputs[-1][index]))
        unmoved.append(relative_error(outputs[0][index], outputs[-1][index]))
        weight = layer.fc1.weight.detach()
        path = update_path(weight, inputs[0], torch.stack(inputs[1:]))
        ranks.append(numerical_rank(update.first_weight))
        norms.append(path.norms / l2_norm(weight))
        increments.append(path.increments / l2_norm(weight))
        updates.append(update.first_weight)
    return ImplicitUpdates(
        torch.tensor(errors), torch.tensor(unmoved), ranks, torch.stack(norms), torch.stack(increments), updates
    )


def fine_tuned_updates(decoder: nn.Module, sequences: Sequence[Sequence[int]], lr: float) -> list[Tensor]:
    """What fine-tuning does to the same matrices: L x (hidden, d), the change of every fc1, trained together and alone.

    Plain SGD, one step per sequence (token ids), on the cross-entropy of all tokens but the first; the decoder itself,
    called with tokens, must return (logits (B, T, vocabulary), ...). The decoder is afterwards as it was. Compare with
    `ImplicitUpdates.updates` by `implicit_update.update_cosine`.
    """
    weights: list[nn.Parameter] = [layer.fc1.weight for layer in _layers(decoder)]
    before = [weight.detach().clone() for weight in weights]
    learned = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
    decoder.requires_grad_(False)
    for weight in weights:
        weight.requires_grad_(True)
    try:
        for sequence in sequences:
            tokens = _tokens(decoder, sequence)
            loss = F.cross_entropy(decoder(tokens)[0][0, :-1], tokens[0, 1:])
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.data.sub_(gradient, alpha=lr)
        return [weight.detach() - old for weight, old in zip(weights, before, strict=True)]
    finally:
        decoder.requires_grad_(False)
        for parameter in learned:
            parameter.requires_grad_(True)
        for weight, old in zip(weights, before, strict=True):
            weight.data.copy_(old)


def _layers(decoder: nn.Module) -> list[Any]:
    """The decoder's layers, as Any: their attributes (self_attn, fc1) are whatever the model's class made them."""
    layers = getattr(decoder, "layers", None)
    if layers is None or not all(hasattr(layer, "self_attn") and hasattr(layer, "fc1") for layer in layers):
        raise UserError(f"{type(decoder).__name__}: not a decoder of fairseq's kind (layers with self_attn and fc1)")
    return list(layers)


def _tokens(decoder: nn.Module, sequence: Sequence[int]) -> Tensor:
    """The sequence where the decoder is: (1, T)"""
    return torch.tensor([list(sequence)], device=next(decoder.parameters()).device)


def _run(decoder: nn.Module, sequence: Sequence[int]) -> None:
    cast(Any, decoder).extract_features(_tokens(decoder, sequence), None)


@contextmanager
def _hooked(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layer_outputs(decoder: nn.Module, sequence: Sequence[int]) -> list[Tensor]:
    """The output of every layer at the last token: L x (d,)"""
    seen: list[Tensor] = []
    layers = _layers(decoder)
    with _hooked([layer.register_forward_hook(lambda _, __, out: seen.append(out[0][-1, 0])) for layer in layers]):
        _run(decoder, sequence)
    return seen
