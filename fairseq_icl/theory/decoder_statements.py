"""The statements on a real model, as records for the page; seconds for a small model and some tens of queries."""

from collections.abc import Sequence

from torch import Tensor, nn

from fairseq_icl.theory.on_decoder import attention_change, implicit_updates, relaxed_model
from fairseq_icl.theory.statements import DAI, DHERIN, Record

SHOWN_LAYERS = 8


def run_on_decoder(
    decoder: nn.Module, start: Sequence[int], contexts: Sequence[Sequence[int]], queries: Sequence[Sequence[int]]
) -> list[Record]:
    """The records of one decoder of fairseq's kind; give it as `decoder.double()`.

    Args:
        decoder: see `on_decoder`.
        start: token ids that precede a query without demonstrations, usually <s>.
        contexts: token ids of growing contexts, the full one last; each begins with `start`.
        queries: token ids of the queries; the implicit update is taken at the last token of the first one.
    """
    change = attention_change(decoder, start, contexts[-1], queries)
    linear = relaxed_model(decoder, start, contexts[-1], queries)
    updates = implicit_updates(decoder, start, contexts, queries[0])
    return [
        Record(
            "On this model's own keys and values: linear attention to demonstrations is a change of weights.",
            DAI,
            f"largest relative error of (W_ZSL + dW_ICL) q over layers and {len(queries)} queries, without softmax",
            change.relaxed_error,
            "the model's softmax; dW_ICL q scaled by the best factor of each head. R^2 per layer, mean over heads: "
            f"{_per_layer(change.direct.r2.mean(1))}; cosine: {_per_layer(change.direct.cosine.mean(1))}",
            float(change.direct.scaled_error.mean()),
            exact=True,
            per_layer={
                "attention to demonstrations": change.share.mean(1).tolist(),
                "cosine of ICL's change and dW_ICL q": change.direct.cosine.mean(1).tolist(),
                "R^2 of ICL's change on dW_ICL q": change.direct.r2.mean(1).tolist(),
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
            exact=False,
            is_claim=False,
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
            exact=True,
            per_layer={"|dW| / |W| of the implicit update": updates.norms[:, -1].tolist()},
        ),
    ]


def _per_layer(values: Tensor) -> str:
    """Every layer's number, or of a deep model the smallest, the median and the largest."""
    if len(values) <= SHOWN_LAYERS:
        return " ".join(map(_short, values.tolist()))
    return f"{_short(float(values.min()))} to {_short(float(values.max()))}, median {_short(float(values.median()))}"


def _short(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"
