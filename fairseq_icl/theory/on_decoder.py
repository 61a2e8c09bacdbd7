"""The statements that can be asked of a real model, per layer: where they hold, and where softmax ends them.

Takes any decoder of fairseq's kind, or one of transformers whose layers have such parts: `layers[l].self_attn`,
`layers[l].fc1`, `fc2`, `normalize_before`, and `extract_features(tokens (B, T), None)`. A prompt is its tokens:

    zero-shot    start + query           what the model sees without demonstrations (start: usually <s>)
    in context   context + query         the context begins with `start` and ends with the last demonstration

and everything is observed at the last token of the query. The start tokens are there in both conditions (and the
same, nothing precedes them), so they count as the query's own. Use `decoder.double()` to see exact statements to 1e-10.
L layers, H heads, D their width, d = H D, n queries.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fairseq_icl.errors import UserError
from fairseq_icl.metrics.vectors import l2_norm, relative_error
from fairseq_icl.models.attention import relaxed
from fairseq_icl.observing.probe import queries_keys_values
from fairseq_icl.theory.dual_form import dot_product
from fairseq_icl.theory.implicit_update import applied, block_update, implicit_update, recorded_mlp
from fairseq_icl.theory.linear_attention import Explained, Heads, explain, softmax_change, weight_update
from fairseq_icl.theory.statements import DAI, DHERIN, Record

Ids = Sequence[int]  # of tokens
Seen = TypeVar("Seen")
Look = Callable[[Any, Tensor, Any], Seen]  # (module, its input, its output) -> what is kept of them
SHOWN_LAYERS = 8


class AttentionChange(NamedTuple):
    """How demonstrations change attention at the last token, against what dW_ICL q predicts; (L, H) each."""

    direct: Explained  # demonstrations come or go at equal queries and own tokens: what the statement speaks of
    share: Tensor  # mean attention that goes to demonstrations
    relaxed_error: float  # of (W_ZSL + dW_ICL) q against attention without softmax, largest over layers and queries


@torch.no_grad()
def attention_change(decoder: nn.Module, start: Ids, context: Ids, queries: Sequence[Ids]) -> AttentionChange:
    """Observe n queries (token ids) behind one context; at least two, or R^2 has nothing to vary over."""
    if list(context[: len(start)]) != list(start) or len(context) == len(start):
        raise UserError("the context must begin with the start tokens and go on with demonstrations")
    rows, errors = [], []
    for query in tqdm(queries, desc="attention", unit="query", disable=None):
        for both in _heads(decoder, [*context, *query]):
            demonstrations = Heads(*(part[:, len(start) : len(context)] for part in both))
            own = Heads(*(torch.cat([part[:, : len(start)], part[:, len(context) :]], dim=1) for part in both))
            last = both.query[:, -1:]  # (H, 1, D)
            seen = softmax_change(last, own, demonstrations)
            weights = weight_update(own.key, own.value) + weight_update(demonstrations.key, demonstrations.value)
            linear, whole = (dot_product(part.key, last) @ part.value for part in (demonstrations, both))
            errors.append(relative_error(last @ weights.transpose(1, 2), whole))
            rows.append((linear, seen.change, seen.share[..., None]))
    # (n L) x (H, 1, ...) -> (L, H, n, ...)
    linear, change, share = (
        torch.stack(part)[:, :, 0].unflatten(0, (len(queries), -1)).permute(1, 2, 0, 3)
        for part in zip(*rows, strict=True)
    )
    return AttentionChange(explain(change, linear), share[..., 0].mean(2), max(errors))


def _heads(decoder: nn.Module, sequence: Ids) -> list[Heads]:
    """Queries (unscaled), keys and values (H, T, D) of every layer, rotated where the model does so."""

    def look(module: Any, given: Tensor, _: Any) -> Heads:
        query, key, value = queries_keys_values(module, given)
        return Heads(query[0] / module.scaling, key[0], value[0])

    return _watched(decoder, [layer.self_attn for layer in _layers(decoder)], sequence, look)[0]


class RelaxedModel(NamedTuple):
    """The model whose attention is linear in every layer, beside the model itself, at the last token of n queries."""

    distance: float  # total variation between the two predictions of the next token, in context; mean over queries
    moved: float  # the same between the model itself in context and without demonstrations: what ICL changes
    agreement: float  # share of the queries whose likeliest next token is the same
    cosine: Tensor  # (L,) of the attention outputs of the two, mean over queries
    relative_error: Tensor  # (L,) |o_relaxed - o| / |o|, mean over queries


@torch.no_grad()
def relaxed_model(decoder: nn.Module, start: Ids, context: Ids, queries: Sequence[Ids]) -> RelaxedModel:
    """How far is the model without softmax and scale, which the papers reason about, from the model itself?

    The decoder itself, called with tokens (B, T), must return (logits (B, T, vocabulary), ...).
    """

    def prediction(sequence: Ids) -> tuple[Tensor, Tensor]:  # of the next token (V,); outputs (L, d)
        modules = [layer.self_attn for layer in _layers(decoder)]
        seen, result = _watched(decoder, modules, sequence, _last_output, whole=True)
        return result[0][0, -1].softmax(-1), torch.stack(seen)

    rows = []
    for query in tqdm(queries, desc="relaxed model", unit="query", disable=None):
        real, outputs = prediction([*context, *query])
        zero_shot, _ = prediction([*start, *query])
        with relaxed(decoder):
            linear, linear_outputs = prediction([*context, *query])
        distance, moved = ((other - real).abs().sum() / 2 for other in (linear, zero_shot))
        agrees = (linear.argmax() == real.argmax()).to(real.dtype)
        error = (linear_outputs - outputs).norm(dim=-1) / outputs.norm(dim=-1)
        rows.append((distance, moved, agrees, torch.cosine_similarity(linear_outputs, outputs, dim=-1), error))
    distance, moved, agrees, cosine, error = (torch.stack(part).mean(0) for part in zip(*rows, strict=True))
    return RelaxedModel(float(distance), float(moved), float(agrees), cosine, error)


class ImplicitUpdates(NamedTuple):
    """The implicit update of every block at one token, as its context grows through K stages."""

    error: Tensor  # (L,) relative error of the updated block without context against the block with the full context
    unmoved: Tensor  # (L,) the same without the update: how much the context changes the block's output
    rank: list[int]  # (L,) of dW for the full context
    norms: Tensor  # (L, K) |dW_k| / |W|
    updates: list[Tensor]  # L x (hidden, d), for the full context; compare with a fine-tuning update of fc1


def implicit_updates(decoder: nn.Module, start: Ids, contexts: Sequence[Ids], query: Ids) -> ImplicitUpdates:
    """Observe one query behind growing contexts (token ids, shortest first; each begins with `start`)."""
    if not contexts:
        raise UserError("no context given: the update is the difference that a context makes")
    sequences = [[*before, *query] for before in (start, *contexts)]
    layers = _layers(decoder)
    with torch.no_grad(), ExitStack() as stack:
        seen = [stack.enter_context(recorded_mlp(layer)) for layer in layers]
        outputs = [_watched(decoder, layers, sequence, _last_output)[0] for sequence in sequences]  # (K + 1) x L x (d,)
    rows = []
    shown = tqdm(zip(layers, seen, strict=True), desc="implicit updates", total=len(layers), disable=None)
    for index, (layer, recorded) in enumerate(shown):
        inputs, residuals = ([part.flatten(0, 1)[-1] for part in parts] for parts in recorded)
        update = block_update(layer, [inputs[0], inputs[-1]], [residuals[0], residuals[-1]])
        with torch.no_grad(), applied(layer, update):
            moved = _watched(decoder, layers, sequences[0], _last_output)[0]
        errors = (relative_error(before[index], outputs[-1][index]) for before in (moved, outputs[0]))
        weight = layer.fc1.weight.detach()
        path = implicit_update(weight, inputs[0], torch.stack(inputs[1:]))  # (K, hidden, d)
        rank = int(torch.linalg.matrix_rank(update.weights[0], rtol=1e-8))
        rows.append((*errors, rank, torch.stack([*map(l2_norm, path)]) / l2_norm(weight), update.weights[0]))
    error, unmoved, ranks, norms, updates = zip(*rows, strict=True)
    return ImplicitUpdates(torch.tensor(error), torch.tensor(unmoved), list(ranks), torch.stack(norms), list(updates))


def antisymmetric_share(jacobian: Tensor) -> float:
    """|(J - J^T) / 2|^2 / |J|^2 of (d, d): 0 for a gradient field, about 1/2 for a matrix without any symmetry"""
    return float((jacobian - jacobian.T).square().sum() / (4 * jacobian.square().sum()))


def update_fields(decoder: nn.Module, start: Ids, context: Ids, query: Ids) -> list[tuple[float, float]]:
    """Is ICL's update of the last token's state h, as a function of h, the gradient of anything? One pair a layer.

    u(h) is what the demonstrations' keys and values change in the output of attention to given keys and values, where
    the query is made of h. A pair is the antisymmetric share of its Jacobian, and the same after a random rotation of
    u, which keeps all lengths and no symmetry. At most `SHOWN_LAYERS` layers, spread over the model: a Jacobian has as
    many rows as the model is wide. h is the residual stream where the norm in front of attention is a part of the
    layer, as in fairseq, otherwise the output of that norm.
    """
    layers = _layers(decoder)
    chosen = [layers[int(i)] for i in torch.linspace(0, len(layers) - 1, min(len(layers), SHOWN_LAYERS)).round()]
    norms = [getattr(layer, "self_attn_layer_norm", None) if layer.normalize_before else None for layer in chosen]
    modules = [layer.self_attn if norm is None else layer for layer, norm in zip(chosen, norms, strict=True)]
    sequence = [*context, *query]
    with torch.no_grad():
        states = _watched(decoder, modules, sequence, lambda _, given, __: given[:, 0])[0]
    found = []
    for layer, norm, state in zip(chosen, norms, states, strict=True):
        field = partial(_update, layer.self_attn, norm, state, len(start), len(context))
        jacobian = torch.autograd.functional.jacobian(field, state[-1]).detach()
        noise = torch.randn(jacobian.shape, generator=torch.Generator().manual_seed(0), dtype=jacobian.dtype)
        rotation = torch.linalg.qr(noise)[0].to(jacobian)
        found.append((antisymmetric_share(jacobian), antisymmetric_share(rotation @ jacobian)))
    return found


def _update(module: Any, norm: nn.Module | None, others: Tensor, start: int, end: int, state: Tensor) -> Tensor:
    """u (d,) of the last token's `state` (d,) among `others` (T, d), the demonstrations being tokens start to end."""
    inputs = torch.cat([others[:-1], state[None]])[:, None]  # (T, 1, d)
    query, key, value = (part[0] for part in queries_keys_values(module, inputs if norm is None else norm(inputs)))
    key, value = key.detach(), value.detach()  # the state asks; what it is asked for is given, its own included
    own = Heads(query, *(torch.cat([part[:, :start], part[:, end:]], dim=1) for part in (key, value)))
    shown = Heads(query, key[:, start:end], value[:, start:end])
    change = softmax_change(query[:, -1:], own, shown, scale=1.0).change  # queries are scaled already
    return nn.functional.linear(change.flatten(), module.out_proj.weight)


def run_on_decoder(decoder: nn.Module, start: Ids, contexts: Sequence[Ids], queries: Sequence[Ids]) -> list[Record]:
    """The statements on one decoder, as records for the page; seconds for a small model and some tens of queries.

    `contexts` grow, the full one last; the implicit update is taken at the last token of the first query.
    """
    change = attention_change(decoder, start, contexts[-1], queries)
    linear = relaxed_model(decoder, start, contexts[-1], queries)
    updates = implicit_updates(decoder, start, contexts, queries[0])
    shares, controls = torch.tensor(update_fields(decoder, start, contexts[-1], queries[0])).T
    cosine, r2 = change.direct.cosine.mean(1), change.direct.r2.mean(1)
    return [
        Record(
            "On this model's own keys and values: linear attention to demonstrations is a change of weights.",
            DAI,
            f"largest relative error of (W_ZSL + dW_ICL) q over layers and {len(queries)} queries, without softmax",
            change.relaxed_error,
            "the model's softmax; dW_ICL q scaled by the best factor of each head. R^2 per layer, mean over heads: "
            f"{_per_layer(r2)}; cosine: {_per_layer(cosine)}",
            float(change.direct.scaled_error.mean()),
            per_layer={
                "attention to demonstrations": change.share.mean(1).tolist(),
                "cosine of ICL's change and dW_ICL q": cosine.tolist(),
                "R^2 of ICL's change on dW_ICL q": r2.tolist(),
            },
        ),
        Record(
            "How far is this model from the one without softmax and scale that the papers reason about?",
            DAI,
            f"total variation between the two next-token predictions in context, {len(queries)} queries; the same "
            f"likeliest token in {linear.agreement:.0%}. Attention outputs per layer, cosine: "
            f"{_per_layer(linear.cosine)}; |difference| / |output|: {_per_layer(linear.relative_error)}",
            linear.distance,
            "for comparison: how far demonstrations move the model itself",
            linear.moved,
            kind="question",
            per_layer={
                "cosine of relaxed and real attention": linear.cosine.tolist(),
                "|relaxed - real| / |real|": linear.relative_error.tolist(),
            },
        ),
        Record(
            "On this model's own blocks: a context is a rank-one update of the MLP's first matrix.",
            DHERIN,
            f"largest relative error over {len(updates.rank)} blocks; rank {max(updates.rank)}, |dW| / |W| per layer: "
            f"{_per_layer(updates.norms[:, -1])}",
            float(updates.error.max()),
            "no update (smallest change over the blocks)",
            float(updates.unmoved.min()),
            per_layer={"|dW| / |W| of the implicit update": updates.norms[:, -1].tolist()},
        ),
        Record(
            "Does ICL descend a loss of the state? Then its update would be a gradient field, its Jacobian symmetric.",
            "derived here (docs/theory.md)",
            f"antisymmetric share of the Jacobian's square, mean over {len(shares)} layers: {_per_layer(shares)}",
            float(shares.mean()),
            "for comparison: the update turned by a random rotation",
            float(controls.mean()),
            kind="question",
        ),
    ]


def _per_layer(values: Tensor) -> str:
    """Every layer's number, or of a deep model the smallest, the median and the largest."""

    def short(value: float) -> str:
        return f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"

    if len(values) <= SHOWN_LAYERS:
        return " ".join(map(short, values.tolist()))
    return f"{short(float(values.min()))} to {short(float(values.max()))}, median {short(float(values.median()))}"


def _layers(decoder: nn.Module) -> list[Any]:
    """The decoder's layers, as Any: their attributes (self_attn, fc1) are whatever the model's class made them."""
    layers = getattr(decoder, "layers", None)
    if layers is None or not all(hasattr(layer, "self_attn") and hasattr(layer, "fc1") for layer in layers):
        raise UserError(f"{type(decoder).__name__}: not a decoder of fairseq's kind (layers with self_attn and fc1)")
    return list(layers)


def _last_output(_: Any, __: Tensor, output: Any) -> Tensor:
    return output[0][-1, 0]


def _watched(
    decoder: Any, modules: Sequence[nn.Module], sequence: Ids, look: Look[Seen], whole: bool = False
) -> tuple[list[Seen], Any]:
    """What `look` sees of each module in a pass, and what the decoder returns: features, or with `whole` logits."""
    seen: list[Seen] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.append(look(module, (args or tuple(kwargs.values()))[0], output))

    tokens = torch.tensor([list(sequence)], device=next(decoder.parameters()).device)  # (1, T)
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        result = decoder(tokens) if whole else decoder.extract_features(tokens, None)
    if len(seen) != len(modules):
        raise UserError(f"saw {len(seen)} of the {len(modules)} layers of the decoder in a pass")
    return seen, result
