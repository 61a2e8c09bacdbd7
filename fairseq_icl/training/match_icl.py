"""How similar to ICL could fine-tuning become? At least so: keys and values trained to do what ICL does.

    h_l   attention output of layer l at a token of a demonstration, read as a query of its own: BOS input label
    t_l   the same of the base model when the demonstration follows the prompt of all others, as queries do in ICL
    loss  mean over layers of  |h_l - t_l|^2 / mean |z_l - t_l|^2,     z_l = h_l before any training

so the loss is the share of ICL's change that is not reproduced: about 1 at the start, 0 for perfect imitation.
Gradients run through the whole model. A demonstration is left out of its own prompt: after one that holds its answer
ICL copies, which it cannot do for a query. What the method reaches on queries that it was not trained on is a lower
bound of what keys and values could reach, beside which `gd` and `lcgd`, which see labels and not activations, are to be
read.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.observing.layout import Packed
from fairseq_icl.observing.prefix import features_on_prefix, positions_from, run_prefix, supports_prefix
from fairseq_icl.observing.probe import at_least_single, attention_outputs
from fairseq_icl.prompts.build import Prompts


class Targets(NamedTuple):
    """What ICL does at the demonstrations, without their BOS."""

    outputs: dict[int, Tensor]  # row of the train file -> (layers, tokens, d)
    scale: Tensor  # (layers,) mean squared length of the change that ICL makes


@torch.no_grad()
def icl_targets(model: Any, prompts: Prompts) -> Targets:
    """The targets for the demonstrations of `prompts`, from the weights that `model` had before fine-tuning."""
    if len(prompts.context) == len(prompts.start) or len(prompts.context_rows) < 2:
        raise UserError("match_icl: no demonstration is in the prompt of another; give at least two")
    longest = max(prompts.finetuning, key=lambda sequence: len(sequence.tokens))
    room = model.decoder.max_positions() - len(prompts.context)
    if len(longest.tokens) - len(prompts.start) > room:
        raise UserError(
            f"match_icl: demonstration {longest.row} (row of the train file) has {len(longest.tokens)} tokens, and the "
            f"prompt leaves room for {max(room, 0)} after it; lower num_demonstrations"
        )
    was_training = model.training
    model.eval()
    decoder, base = model.decoder, model.base_state or None
    spans = dict(zip(prompts.context_rows, prompts.context_spans, strict=True))
    outputs, changes = dict[int, Tensor](), []
    for sequence in prompts.finetuning:
        tokens = torch.tensor([sequence.tokens], device=next(model.parameters()).device)
        # The prompt without this demonstration, and without the EOS that closes it.
        start, end = spans.get(sequence.row, (len(prompts.context), len(prompts.context)))
        own, context = tokens[:, len(prompts.start) :], (*prompts.context[:start], *prompts.context[end + 1 :])
        after = model.evaluate(partial(_in_context, decoder, context, own), base)
        alone = model.evaluate(partial(_alone, decoder, tokens), base)[:, len(prompts.start) :]
        outputs[sequence.row] = after
        changes.append((after - alone).double().square().sum(-1))  # (layers, tokens)
    model.train(was_training)
    scale = torch.cat(changes, dim=1).mean(1)  # (layers,)
    if not bool((scale > 0).all()):
        raise UserError("match_icl: ICL changes nothing in a layer of this model, so there is nothing to reproduce")
    return Targets(outputs, scale)


def _in_context(decoder: Any, context: tuple[int, ...], own: Tensor) -> Tensor:
    """(layers, tokens, d): attention outputs of the sequence (1, T), without its BOS, after the context."""
    if not supports_prefix(decoder):
        whole = torch.cat([torch.tensor([context], device=own.device), own], dim=1)
        return _alone(decoder, whole)[:, len(context) :]
    prefix = run_prefix(decoder, context)
    with attention_outputs(decoder) as outputs:
        features_on_prefix(decoder, Packed.of(own.tolist()), prefix)
    return torch.stack([output[0] for output in outputs])


def _alone(decoder: Any, tokens: Tensor) -> Tensor:
    """(layers, tokens, d): attention outputs of the sequence (1, T)."""
    with attention_outputs(decoder) as outputs, positions_from(decoder, 0):
        decoder.extract_features(tokens, None)
    return torch.stack([output[:, 0] for output in outputs])


def matching_losses(
    model: Any, decoder: Any, targets: Targets, rows: Sequence[int], tokens: Tensor, scored: Tensor
) -> Tensor:
    """losses[l, n]: the share of ICL's change in layer l that is missing at the n scored tokens. (layers, n)

    `tokens` (B, T) are the sequences of the demonstrations `rows`, BOS first; `scored` (B, T - 1) marks those after it.
    """

    def outputs() -> tuple[Tensor, ...]:
        with attention_outputs(decoder) as seen:
            model(tokens, features_only=True)
        return tuple(output.transpose(0, 1)[:, 1:][scored] for output in seen)  # layers x (n, d)

    found = getattr(model, "evaluate", lambda function: function())(outputs)  # a linearized model: first-order terms
    places = [marks.nonzero().flatten() for marks in scored]
    wanted = torch.cat([targets.outputs[row][:, place] for row, place in zip(rows, places, strict=True)], dim=1)
    missing = at_least_single(torch.stack(found) - wanted).square().sum(-1)  # (layers, n)
    return missing / targets.scale.to(missing)[:, None]
