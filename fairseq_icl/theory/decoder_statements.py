"""The statements on a real model, as records for the page; seconds for a small model and some tens of queries."""

from collections.abc import Sequence

from torch import Tensor, nn

from fairseq_icl.theory.on_decoder import attention_change, implicit_updates
from fairseq_icl.theory.statements import DAI, DHERIN, Record


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
        ),
    ]


def _per_layer(values: Tensor) -> str:
    return " ".join(f"{value:.2f}" for value in values.tolist())
