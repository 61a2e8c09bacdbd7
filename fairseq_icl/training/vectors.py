"""Task vectors and function vectors: the demonstrations as one vector, put into a model that does not see them.

    task vector       the state of the last token of the ICL prompt with a dummy query, after layer l, takes the place
                      of a query's own (Hendel et al. 2023, arXiv 2310.15916). The dummy is a row of the train split.
    function vector   v = sum over some heads (l, h) of O_lh a_lh is added to the state after layer l; a_lh the mean
                      output of the head at the last token of ICL prompts, O_lh its part of the output projection
                      (Todd et al. 2023, arXiv 2310.15213). The heads are those of the largest indirect effect:

    effect_lh = mean over prompts of  p(label; a_lh in the place of the head's output) - p(label)

with the prompt's demonstrations under labels of which so many are switched that they tell nothing. The layer l is the
one after which labels of train rows, without demonstrations, are most likely (a task vector never takes the last, where
it would give every query the same answer). All of it happens at the last token of an input alone: the tokens before it
run once, and the last one in as many versions at once as there are layers or heads.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_icl.errors import UserError
from fairseq_icl.models import Model
from fairseq_icl.models.state_edits import Recorder, StateEdit
from fairseq_icl.observing.prefix import run_edited, run_prefix, supports_prefix
from fairseq_icl.observing.probe import attention_modules
from fairseq_icl.prompts.build import Prompts, build_prompts
from fairseq_icl.prompts.encoding import Query, Tokens
from fairseq_icl.settings import Settings
from fairseq_icl.training.layer_causal import one_layer_of

logger = logging.getLogger(__name__)


class AtLayer(StateEdit):
    """Puts a vector in the place of the state after a layer, or adds it there."""

    def __init__(self, at: int, vector: Tensor, added: bool) -> None:
        self.at, self.vector, self.added = at, vector, added  # vector: (d,)

    def layer(self, layer: int, state: Tensor) -> Tensor:
        if layer != self.at:
            return state
        return state + self.vector if self.added else self.vector.expand_as(state)


class EachRowAtItsLayer(StateEdit):
    """Row r: the vector r, (L, d), at layer r: what every choice of the layer would do."""

    def __init__(self, vectors: Tensor, added: bool) -> None:
        self.vectors, self.added = vectors, added

    def layer(self, layer: int, state: Tensor) -> Tensor:
        changed = state.clone()
        changed[layer] = self.vectors[layer] + (state[layer] if self.added else 0)
        return changed


class EachRowAtItsHead(StateEdit):
    """Row 0 as it is; row 1 + l H + h: the output of head h of layer l replaced by `means` (L, H, D)."""

    def __init__(self, means: Tensor) -> None:
        self.means = means

    def heads(self, layer: int, heads: Tensor) -> Tensor:
        changed, every = heads.clone(), torch.arange(self.means.size(1))
        changed[1 + layer * len(every) + every, every] = self.means[layer].to(changed)
        return changed


def task_vector(model: Model, prompts: Prompts, settings: Settings) -> StateEdit:
    """The method of Hendel et al."""
    _check(model, prompts, "task_vector")
    dummy, *others = train_queries(model, prompts, settings, settings.selection_rows + 1)
    recorder = Recorder()
    list(label_logprobs(model, prompts.context, [dummy], recorder))
    states = recorder.stacked(recorder.states)[:, 0]  # (L, d)
    at = chosen_layer(model, prompts, settings, others, states, added=False)
    return AtLayer(at, states[at], added=False)


def function_vector(model: Model, prompts: Prompts, settings: Settings) -> StateEdit:
    """The method of Todd et al."""
    _check(model, prompts, "function_vector")
    queries = train_queries(model, prompts, settings, settings.selection_rows)
    means = mean_head_outputs(model, prompts.context, queries)
    effects = indirect_effects(model, context_that_tells_nothing(model, prompts), queries, means)
    heads = largest(effects, settings.vector_heads)
    vector = projected_sum(model, means, heads)
    at = chosen_layer(model, prompts, settings, queries, vector.expand(means.size(0), -1), added=True)
    logger.info("function_vector: heads %s, layer %d", ", ".join(f"{layer}.{head}" for layer, head in heads), at)
    return AtLayer(at, vector, added=True)


def _check(model: Model, prompts: Prompts, name: str) -> None:
    if not supports_prefix(model.lm.decoder):
        raise UserError(f"{name}: this model's attention cannot be observed as it needs; use gd or lcgd")
    if not prompts.context_rows:
        raise UserError(f"{name}: there is no demonstration in the prompt; raise num_demonstrations")


def train_queries(model: Model, prompts: Prompts, settings: Settings, number: int) -> tuple[Query, ...]:
    """Rows of the train split that are no demonstrations, as queries; the first are the same however many are taken."""
    asked = replace(settings, queries="train", max_validation=number, limit=number)
    queries = build_prompts(prompts.spec, prompts.data, model.writing, asked).queries
    if len(queries) < number:
        raise UserError(
            f"selection_rows={settings.selection_rows}: the train split of {prompts.spec.name} has only {len(queries)} "
            "rows beside the demonstrations; lower it"
        )
    room = model.lm.decoder.max_positions() - len(prompts.context)
    return tuple(query for query in queries if query.longest <= room) or queries[:1]


def context_that_tells_nothing(model: Model, prompts: Prompts) -> Tokens:
    """The prompt's demonstrations with as many labels switched as chance would get wrong."""
    options = max(len(query.labels) for query in prompts.queries)
    switched = replace(
        prompts.settings, switch_labels="demonstrations", switch_fraction=1 - 1 / options, missing_class="ignore"
    )
    return build_prompts(prompts.spec, prompts.data, model.writing, switched).context


def label_logprobs(
    model: Model, context: Tokens, queries: Sequence[Query], edit: StateEdit, versions: int = 1
) -> Iterator[Tensor]:
    """Of each query the log-probability of its right label's first token, (versions,): the edit sees a row for each."""
    decoder = model.lm.decoder
    prefix = model.evaluate(lambda: run_prefix(decoder, context))
    for query in queries:
        tokens, label = query.inputs[query.gold], query.labels[query.gold][0]

        def run(tokens: Tokens = tokens) -> Any:
            past = run_prefix(decoder, (*context, *tokens[:-1]), prefix)
            features = run_edited(decoder, past, [tokens[-1:]] * versions, edit)
            return decoder.get_normalized_probs((decoder.output_layer(features), None), log_probs=True)

        yield model.evaluate(run)[:, label].float()


def chosen_layer(
    model: Model, prompts: Prompts, settings: Settings, queries: Sequence[Query], vectors: Tensor, *, added: bool
) -> int:
    """The layer of the setting `layers`, or the one whose vector, (L, d), makes right labels most likely, zero-shot."""
    if settings.layers is not None:
        return one_layer_of(settings.layers, len(vectors), "a vector is put at one layer")
    edit = EachRowAtItsLayer(vectors, added)
    found = torch.stack(list(label_logprobs(model, prompts.start, queries, edit, len(vectors))))  # (queries, L)
    # In the place of the last layer's states a vector gives every query the same answer: no account of any.
    usable = len(vectors) if added else max(1, len(vectors) - 1)
    return int(found.double().mean(0)[:usable].argmax())


def mean_head_outputs(model: Model, context: Tokens, queries: Sequence[Query]) -> Tensor:
    """What each head puts out at the last token of queries after the context, on average: (L, H, D)."""
    recorder = Recorder(wants_heads=True)
    list(label_logprobs(model, context, queries, recorder))
    return recorder.stacked(recorder.head_outputs).mean(1)


def indirect_effects(model: Model, context: Tokens, queries: Sequence[Query], means: Tensor) -> Tensor:
    """How much likelier the right label becomes, on average, if one head puts out its mean, (L, H, D): (L, H)."""
    layers, heads, _ = means.shape
    found = label_logprobs(model, context, queries, EachRowAtItsHead(means), 1 + layers * heads)
    likely = torch.stack([log_probs.double().exp() for log_probs in found])  # (queries, 1 + L H)
    return (likely[:, 1:] - likely[:, :1]).mean(0).view(layers, heads)


def largest(effects: Tensor, number: int) -> list[tuple[int, int]]:
    """(layer, head) of the largest effects, (L, H)."""
    places = effects.flatten().argsort(descending=True, stable=True)[:number]
    return [divmod(place, effects.size(1)) for place in places.tolist()]


def projected_sum(model: Model, means: Tensor, heads: Sequence[tuple[int, int]]) -> Tensor:
    """Sum of what the output projections make of the heads' means, without bias: (d,)."""
    modules, total = attention_modules(model.lm.decoder), torch.zeros(())
    for layer, head in heads:
        projection = modules[layer].out_proj
        if not isinstance(projection, nn.Linear):
            raise UserError("function_vector: this model's output projection is not one matrix; use task_vector")
        part = projection.weight.unflatten(1, means.shape[1:])[:, head]  # (d, D)
        total = total.to(part) + part @ means[layer, head].to(part)
    return total.detach()
