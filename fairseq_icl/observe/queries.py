"""Observe one batch of queries in one setting: option scores and the activations of the recorded token."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_icl.errors import UserError
from fairseq_icl.observe.layout import Layout, Position, lay_out
from fairseq_icl.observe.observation import Observation
from fairseq_icl.observe.prefix import Prefix, features_on_prefix, positions_from, run_prefix, supports_prefix
from fairseq_icl.observe.probe import AttentionProbe, AttentionRecord
from fairseq_icl.prompts.build import Query
from fairseq_icl.prompts.tokens import BOS


class PrefixCache:
    """The prefix of the last context asked for, so that it runs once for a whole validation set.

    One cache belongs to one set of weights: keep it only as long as the model does not change.
    """

    def __init__(self) -> None:
        self._context: tuple[int, ...] | None = None
        self._prefix: Prefix | None = None

    @torch.no_grad()
    def of(self, model: nn.Module, context: Sequence[int]) -> Prefix | None:
        """The prefix of `context`; None if this model's attention cannot run on one."""
        if tuple(context) != self._context:
            self._prefix = run_prefix(model.decoder, context) if supports_prefix(model.decoder) else None
            self._context = tuple(context)
        return self._prefix


@torch.no_grad()
def observe_queries(
    model: nn.Module,
    queries: Sequence[Query],
    *,
    context: Sequence[int] | None = None,
    prefix: Prefix | None = None,
    position: Position = "option0",
    context_row: bool = False,
) -> Observation:
    """What `model` shows on one batch of queries after `context` (BOS alone, that is zero-shot, when not given).

    With `prefix`, which must be the context's under the model's present weights, only the query tokens are run;
    without it the whole prompt is. `context_row` asks for the scores over the context as well.
    """
    context = (BOS,) if context is None else tuple(context)
    layout = lay_out(queries, position)
    if prefix is None:
        run = _whole_prompt(model.decoder, layout, context, context_row)
    else:
        run = _on_prefix(model.decoder, layout, prefix, context_row)
    logits, record, context_scores = _evaluate(model, run)
    log_probs = model.decoder.get_normalized_probs((logits, None), log_probs=True).float().cpu()
    scores = layout.option_scores(log_probs)
    _check_scores(scores, queries)
    return Observation(
        row=torch.tensor([query.row for query in queries]),
        gold=torch.tensor([query.gold for query in queries]),
        option_logprobs=scores,
        prediction=torch.from_numpy(scores.numpy().argmax(axis=1)),  # numpy promises the first one on ties
        attention_output=record.output.float().cpu(),
        attention_row=_right_aligned(record.scores.float().cpu(), layout.recorded_position + 1),
        query_length=layout.recorded_position + 1,
        query_vector=record.query.float().cpu(),
        context_row=None if context_scores is None else context_scores.float().cpu(),
    )


def _check_scores(scores: Tensor, queries: Sequence[Query]) -> None:
    """Refuse options scored NaN, (n, C): a prediction made from them would look like any other."""
    for query, row in zip(queries, scores.isnan().any(dim=1).tolist(), strict=True):
        if row:
            raise UserError(
                f"row {query.row} (from 0) of the validation file is scored NaN: numbers overflow in the model; "
                "take another checkpoint, or fine-tune with a lower --lr"
            )


Seen = tuple[Tensor, AttentionRecord, Tensor | None]
"""Logits (R, V); record with scores over the tokens after the context (n, L, H, T); if wanted, context (n, L, P)."""


def _evaluate(model: nn.Module, run: Callable[[], Seen]) -> Any:
    """The model's own evaluation (a linearized one adds first-order terms), or a plain call for stock models."""
    return model.evaluate(run) if hasattr(model, "evaluate") else run()


def _whole_prompt(
    decoder: nn.Module, layout: Layout, context: tuple[int, ...], context_row: bool
) -> Callable[[], Seen]:
    """The plain pass: context and query in one sequence, by the decoder's own code."""
    device = next(decoder.parameters()).device
    tokens = layout.tokens(before=context).to(device)
    start = len(context)

    def run() -> Seen:
        probe = AttentionProbe(decoder, layout.recorded_sequence, layout.recorded_position + start)
        with probe, positions_from(decoder, 0):
            features = decoder.extract_features(tokens, None)[0]
        logits = decoder.output_layer(features[layout.logit_sequence, layout.logit_position + start])
        record = probe.record()
        own = record._replace(scores=record.scores[..., start:])
        return logits, own, record.scores[..., :start].sum(dim=2) if context_row else None

    return run


def _on_prefix(decoder: nn.Module, layout: Layout, prefix: Prefix, context_row: bool) -> Callable[[], Seen]:
    """The shared-prefix pass: only the tokens after the context."""
    tokens = layout.tokens().to(next(decoder.parameters()).device)

    def run() -> Seen:
        with AttentionProbe(decoder, layout.recorded_sequence, layout.recorded_position) as probe:
            features = features_on_prefix(decoder, tokens, prefix)
        logits = decoder.output_layer(features[layout.logit_sequence, layout.logit_position])
        record = probe.record()
        return logits, record, prefix.scores(record.query) if context_row else None

    return run


def _right_aligned(scores: Tensor, lengths: Tensor) -> Tensor:
    """Each row's first `length` columns moved to the right end, zeros on the left: (n, L, H, Q), Q the longest."""
    columns = int(lengths.max())
    aligned = scores.new_zeros(*scores.shape[:-1], columns)
    for row, given, length in zip(aligned, scores, lengths.tolist(), strict=True):
        row[..., columns - length :] = given[..., :length]
    return aligned
