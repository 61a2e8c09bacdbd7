"""Observing queries: every number of the package that is read off a model passes through `Observer`."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from fairseq_icl.devices import within_memory
from fairseq_icl.errors import UserError
from fairseq_icl.models import Model
from fairseq_icl.models.attention import rule_of
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.state_edits import edited
from fairseq_icl.observing.activations import read_activations
from fairseq_icl.observing.layers import inner_features, last_feed_forward_at, scores_by_depth, states_at
from fairseq_icl.observing.layout import Layout, Packed, filled_up, lay_out, plan_batches
from fairseq_icl.observing.observation import Gathering, Observation
from fairseq_icl.observing.prefix import Prefix, features_on_prefix, positions_from, run_prefix, supports_prefix
from fairseq_icl.observing.probe import AttentionProbe, AttentionRecord, attention_modules
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.prompts.encoding import Query, finetuning_sequence

logger = logging.getLogger(__name__)

TOP_TOKENS = 10  # most likely next tokens that are kept: K of Shen et al. (2023)
AT_ONCE = 8  # demonstrations whose likelihood is computed together

Seen = tuple[Tensor, AttentionRecord, Tensor | None, Tensor | None]
"""Logits (R, V); record with scores over the tokens after the context (n, L, H, T); if wanted, scores over the context
(n, L, P) and features after each layer but the last (L - 1, R, d)."""


def observe(
    model: Model,
    prompts: Prompts,
    *,
    in_context: bool = False,
    progress: bool = False,
    limit: int | None = None,
    positions: Literal["all"] | Sequence[int] | None = None,
    record: str | Sequence[str] = (),
) -> Observation:
    """What `model` shows on every query of `prompts`, in their order.

    Args:
        model: Of `load_model`, or the fine-tuned one of `fine_tuned`.
        prompts: Of `build_prompts`; `prompts.settings.position` says which token's activations are recorded.
        in_context: After the demonstrations (ICL); otherwise after BOS alone. Either runs once for all queries, as do
            the tokens that all queries begin with.
        progress: Show a progress bar.
        limit: Only the first so many queries.
        positions: Also record these tokens of each prompt: `"all"`, or numbers from 0 (BOS), or from -1 back (the token
            that is observed anyway). Each prompt then runs a second time, whole; at most 2 GiB.
        record: What of them, one or several of "attention_output" (the default), "residual", "mlp", "heads" and
            "scores": the arrays of `Activations`.

    Returns:
        An observation of n = len(prompts.queries) examples, on the CPU in fp32; `activations` as asked for. What is
            large of it lies in a temporary file that goes with it, so memory grows little with n.

    Example:
        ```python
        zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
        icl.attention_output  # (n, layers, width), of one token
        some = fi.observe(model, prompts, in_context=True, limit=4, positions="all", record=("residual", "scores"))
        some.activations.residual  # (4, layers + 1, tokens, width)
        ```
    """
    queries = prompts.queries[:limit]
    if not queries:
        raise UserError(f"limit={limit}: there is no query to observe; give at least 1")
    asked = positions is not None or bool(record)
    activations = read_activations(model, prompts, queries, in_context, positions, record) if asked else None
    seen = observe_all(Observer(model, prompts, in_context=in_context), queries, progress)
    return replace(seen, activations=activations)


def observe_all(observer: "Observer", queries: Sequence[Query], progress: bool = False) -> Observation:
    """What the observer sees on all queries, in their order."""
    batches = plan_batches(queries)[::-1]  # the longest first: what is gathered is as wide as it will be
    shown = tqdm(batches, desc="ICL" if observer.in_context else "ZSL or FT", unit="batch", disable=not progress)
    gathering = Gathering(len(queries))
    for batch in shown:
        gathering.put(torch.tensor(batch), observer([queries[index] for index in batch]))
    return gathering.observation()


class Observer:
    """Observes queries of one set of prompts in one condition, while the weights stay; their stem is computed once."""

    def __init__(
        self,
        model: Model,
        prompts: Prompts,
        *,
        in_context: bool = False,
        context_row: bool | None = None,
        whole_prompt: bool = False,
        by_depth: bool = True,
        prefix: Prefix | None = None,
    ) -> None:
        """`context_row`: keep the scores over the context (default: in ICL). `whole_prompt`: share nothing.

        `by_depth`: also score the options after every layer. `prefix`: the context's keys and values, if known.
        """
        self.model, self.prompts = model, prompts
        self.context = prompts.context if in_context else prompts.start
        self.context_row = in_context if context_row is None else context_row
        self.in_context, self.by_depth, self.whole_prompt, self._given = in_context, by_depth, whole_prompt, prefix
        # The momentum behind the context itself is wanted too where there is any, and only the last one is kept.
        momentum = rule_of(attention_modules(model.lm.decoder)[0]).momentum
        self.opening = () if momentum else prompts.opening  # the tokens that all queries begin with, if they run once

    @cached_property
    def label_priors(self) -> dict[str, Tensor]:
        """(C,) log of each label's probability among the labels, over inputs without content; none without classes.

        Zhao et al.'s code takes the mean over the inputs first: one at which no label is likely then counts less.
        """
        if not self.prompts.content_free:
            return {}
        scores = self._observe(self.prompts.content_free).option_logprobs.double()
        after = scores.softmax(dim=1).mean(dim=0).log()
        first = scores.logsumexp(dim=0).log_softmax(dim=0)
        return {"label_prior": first.float(), "label_prior_normalised": after.float()}

    @cached_property
    @torch.no_grad()
    def stem(self) -> Prefix | None:
        """Keys and values of the context and the opening; None if this model's attention cannot run on them."""
        decoder, deltas = self.model.lm.decoder, self.model.weights
        if self.whole_prompt:
            return None
        # A prefix kept from an earlier pass would have no tangents in the linearized model.
        at_base = deltas is not None and not any(bool(delta.any()) for delta in deltas.values())
        if (isinstance(self.model.lm, LinearizedLM) and not at_base) or not supports_prefix(decoder):
            if self.prompts.settings.head_outputs == "recorded":
                logger.warning("head_outputs: this model does not show its heads; sim_aou_heads is left out")
            return None
        return self.model.evaluate(lambda: run_prefix(decoder, (*self.context, *self.opening), self._given))

    @property
    def prefix(self) -> Prefix | None:
        """Keys and values of the context alone."""
        return None if self.stem is None else self.stem.first(len(self.context))

    def __call__(self, queries: Sequence[Query]) -> Observation:
        """What the model shows on one batch of queries."""
        seen = self._observe(queries)
        priors: dict[str, Any] = {name: prior.repeat(len(seen), 1) for name, prior in self.label_priors.items()}
        return replace(seen, **priors)

    @torch.no_grad()
    @within_memory("observing")
    def _observe(self, queries: Sequence[Query]) -> Observation:
        """The same without the prior."""
        model, decoder = self.model, self.model.lm.decoder
        layout = lay_out(queries, self.prompts.settings.position)
        run = self._pass(layout)
        was_training = model.lm.training
        model.lm.eval()
        logits, record, context_scores, inner = model.evaluate(run)
        # The vocabulary's numbers stay on the device; what is read off them goes to the host.
        log_probs = decoder.get_normalized_probs((logits, None), log_probs=True).float()
        scores = layout.option_scores(log_probs)
        depth_scores = None if inner is None else scores_by_depth(model, layout, inner, scores)
        demonstration_logprob = self._demonstration_logprob(queries)
        model.lm.train(was_training)
        for query, bad in zip(queries, scores.isnan().any(dim=1).tolist(), strict=True):
            if bad:  # a prediction made of NaN would look like any other
                raise UserError(
                    f"row {query.row} (from 0) of the validation file is scored NaN: numbers overflow in the model; "
                    "take another checkpoint, or fine-tune with a lower --lr"
                )
        first = torch.full_like(layout.num_options, len(log_probs))  # (n,) rows of logits where option 0 begins
        first = first.scatter_reduce(0, layout.entry_query, layout.entry_logits, "amin")
        top = log_probs[first].topk(min(TOP_TOKENS, log_probs.size(1)), dim=1)
        return Observation(
            row=torch.tensor([query.row for query in queries]),
            gold=torch.tensor([query.gold for query in queries]),
            option_logprobs=scores,
            prediction=torch.from_numpy(scores.numpy().argmax(axis=1)),  # numpy promises the first one on ties
            attention_output=record.output.float().cpu(),
            attention_row=_right_aligned(record.scores.float().cpu(), layout.recorded_position + 1),
            query_length=layout.recorded_position + 1,
            query_vector=record.query.float().cpu(),
            head_output=None if record.heads is None else record.heads.float().cpu(),
            context_row=None if context_scores is None else context_scores.float().cpu(),
            depth_scores=depth_scores,
            top_tokens=top.indices.cpu(),
            top_logprobs=top.values.cpu(),
            training_queries=model.training_queries,
            method=model.method,
            init=model.init,
            precision=model.precision,
            device=str(log_probs.device),
            skipped_updates=model.skipped_updates,
            demonstration_logprob=demonstration_logprob,
        )

    def _pass(self, layout: Layout) -> Callable[[], Seen]:
        """What runs: on the stem only the tokens after it, packed; else whole prompts, by the decoder's own code."""
        decoder, edit, stem, start = self.model.lm.decoder, self.model.edit, self.stem, len(self.context)
        device = next(decoder.parameters()).device
        layout = layout if stem is None else layout.after(self.opening)
        places = [(layout.logit_sequence, layout.logit_position), (layout.recorded_sequence, layout.recorded_position)]
        places += [] if edit is None else [(layout.edited_sequence, layout.edited_position)]
        # To the device once for all layers: an index on the host would be copied, and waited for, wherever it is used.
        if stem is None:
            if edit is not None and edit.sees_heads:
                raise UserError("an edit of heads: this model's attention does not hand them over; use another model")
            tokens, past = layout.tokens(before=self.context).to(device), None
            indices = [(sequence.to(device), (position + start).to(device)) for sequence, position in places]
        else:
            packed = Packed.of(layout.sequences)
            rows = [packed.row(*place) for place in places]
            read = torch.cat(rows[:2]).unique().to(device)
            on_device = [row.to(device) for row in (*rows, packed.past(*places[1]))]
            *indices, past = [(row, torch.zeros_like(row)) for row in on_device]  # each token is a sequence of its own
        wanted, recorded, changed = indices[0], indices[1], indices[-1]
        wants_heads = stem is not None and self.prompts.settings.head_outputs == "recorded"

        def run() -> Seen:
            probe = AttentionProbe(decoder, *recorded, past, wants_heads)
            with (
                edited(decoder, edit, *changed) if edit else nullcontext(),
                probe,
                last_feed_forward_at(decoder, *wanted),
                states_at(decoder, *wanted) as states,
            ):
                if stem is not None:
                    features = features_on_prefix(decoder, packed, stem, read)
                else:
                    with positions_from(decoder, 0):
                        features = decoder.extract_features(tokens, None)[0]
            logits = decoder.output_layer(features[wanted])
            inner = inner_features(decoder, states) if self.by_depth else None
            record = probe.record()
            if stem is not None:
                own = torch.cat([stem.scores_by_head(record.query, start), record.scores], dim=3)
                over_context = stem.first(start).scores(record.query) if self.context_row else None
            else:
                own = record.scores[..., start:]
                over_context = record.scores[..., :start].sum(dim=2) if self.context_row else None
            return logits, record._replace(scores=own), over_context, inner

        return run

    def _demonstration_logprob(self, queries: Sequence[Query]) -> Tensor | None:
        """(n,): what the fine-tuning loss of each query with its right label is, negated; None unless it is wanted."""
        settings, decoder, edit = self.prompts.settings, self.model.lm.decoder, self.model.edit
        # A search asks of moved weights how labels and their ranking change, not the text.
        if settings.queries != "train" or settings.perturbation or self.context != self.prompts.start:
            return None
        sequences = [finetuning_sequence(query, query.gold, settings.loss_on, self.context) for query in queries]
        device, found = next(decoder.parameters()).device, torch.zeros(len(sequences))
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index].tokens))
        # A few of like length at a time: all tokens have a probability of every word of the dictionary.
        for start in range(0, len(order), AT_ONCE):
            places = order[start : start + AT_ONCE]
            given = filled_up([sequences[place].tokens for place in places]).to(device)
            scored = filled_up([sequences[place].scored for place in places])[:, 1:]
            inputs = [queries[place].inputs[queries[place].gold] for place in places]
            last = torch.tensor([len(self.context) + len(tokens) - 1 for tokens in inputs], device=device)
            first = torch.arange(len(last), device=device)

            def run(tokens: Tensor = given[:, :-1], first: Tensor = first, last: Tensor = last) -> Tensor:
                with edited(decoder, edit, first, last) if edit else nullcontext(), positions_from(decoder, 0):
                    return decoder(tokens)[0]

            log_probs = decoder.get_normalized_probs((self.model.evaluate(run), None), log_probs=True)
            of_tokens = log_probs.gather(2, given[:, 1:, None])[..., 0].float().cpu()
            found[places] = (of_tokens * scored).sum(1) / scored.sum(1)
        return found


def _right_aligned(scores: Tensor, lengths: Tensor) -> Tensor:
    """Each row's first `length` columns moved to the right end, zeros on the left: (n, L, H, Q), Q the longest."""
    columns = int(lengths.max())
    aligned = scores.new_zeros(*scores.shape[:-1], columns)
    for row, given, length in zip(aligned, scores, lengths.tolist(), strict=True):
        row[..., columns - length :] = given[..., :length]
    return aligned
