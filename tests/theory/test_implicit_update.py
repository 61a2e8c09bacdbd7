"""A context as a rank-one change of the MLP: exact for its block and its token, and for nothing else."""

from argparse import Namespace

import pytest
import torch
from fairseq.modules import TransformerDecoderLayer
from torch import Tensor, nn

from fairseq_icl.errors import UserError
from fairseq_icl.metrics.vectors import relative_error
from fairseq_icl.theory.implicit_update import (
    BlockUpdate,
    applied,
    block_update,
    implicit_update,
    joint_update,
    recorded_mlp,
)

WIDTH, HIDDEN, CONTEXT = 8, 20, 12


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def decoder_layer(norm_in_front: bool) -> nn.Module:
    torch.manual_seed(2)
    settings = Namespace(
        decoder_embed_dim=WIDTH,
        decoder_attention_heads=2,
        decoder_ffn_embed_dim=HIDDEN,
        decoder_normalize_before=norm_in_front,
        activation_fn="gelu",
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    )
    return TransformerDecoderLayer(settings, no_encoder_attn=True).double().eval()


def last_token(layer: nn.Module, tokens: Tensor) -> Tensor:
    """Causal pass over tokens (length, d); output at the last of them: (d,)"""
    future = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=tokens.dtype).triu(1)
    with torch.no_grad():
        return layer(tokens[:, None], self_attn_mask=future)[0][-1, 0]


def observed_update(layer: nn.Module, query: Tensor, context: Tensor) -> BlockUpdate:
    with recorded_mlp(layer) as (inputs, residuals):
        last_token(layer, query)
        last_token(layer, torch.cat([context, query]))
    return block_update(layer, [a[-1, 0] for a in inputs], [r[-1, 0] for r in residuals])


@pytest.mark.parametrize("norm_in_front", [True, False])
def test_decoder_layer_without_context_becomes_the_one_with_context(norm_in_front: bool) -> None:
    layer = decoder_layer(norm_in_front)
    query, context = draw(3, WIDTH), draw(CONTEXT, WIDTH, seed=1)
    update = observed_update(layer, query, context)
    with_context, before = last_token(layer, torch.cat([context, query])), last_token(layer, query)
    assert relative_error(before, with_context) > 0.05
    with applied(layer, update):
        assert relative_error(last_token(layer, query), with_context) < 1e-10
    assert torch.equal(last_token(layer, query), before)  # the layer is as it was
    with applied(layer, update, bias=False):  # the residual stream forgotten
        assert relative_error(last_token(layer, query), with_context) > 0.01


def test_update_of_one_token_does_not_serve_another() -> None:
    layer = decoder_layer(True)
    context = draw(CONTEXT, WIDTH, seed=1)
    update = observed_update(layer, draw(3, WIDTH), context)
    other = draw(3, WIDTH, seed=9)
    with applied(layer, update):
        assert relative_error(last_token(layer, other), last_token(layer, torch.cat([context, other]))) > 0.05


def test_update_is_of_rank_one_and_batched() -> None:
    weight, without, with_context = draw(HIDDEN, WIDTH), draw(4, WIDTH, seed=1), draw(4, WIDTH, seed=2)
    updates = implicit_update(weight, without, with_context)  # (4, HIDDEN, WIDTH)
    assert [torch.linalg.matrix_rank(update) for update in updates] == [1] * 4
    moved = torch.einsum("noi,ni->no", weight + updates, without)
    assert relative_error(moved, with_context @ weight.T) < 1e-10


def test_joint_update_serves_as_many_tokens_as_the_input_is_wide() -> None:
    weight = draw(HIDDEN, WIDTH)
    for tokens in (3, WIDTH, WIDTH + 4):
        without, with_context = draw(tokens, WIDTH, seed=1), draw(tokens, WIDTH, seed=2)
        update = joint_update(weight, without, with_context)
        error = relative_error(without @ (weight + update).T, with_context @ weight.T)
        assert error < 1e-10 if tokens <= WIDTH else error > 0.05
        assert torch.linalg.matrix_rank(update) == min(tokens, WIDTH)


def descended(weight: Tensor, without: Tensor, contexts: Tensor) -> Tensor:
    """W after K gradient steps of rate 1/|a_0|^2 on L_k(W) = trace(D_k^T W), by autograd."""
    current = weight
    for before, after in zip([without, *contexts[:-1]], contexts, strict=True):
        current = current.detach().requires_grad_()
        loss = (torch.outer(weight @ (before - after), without) * current).sum()
        current = current.detach() - torch.autograd.grad(loss, current)[0] / without.square().sum()
    return current


def test_growing_contexts_are_gradient_steps() -> None:
    weight, without = draw(HIDDEN, WIDTH), draw(WIDTH, seed=1)
    contexts = without + torch.cumsum(0.5 ** torch.arange(6)[:, None] * draw(6, WIDTH, seed=2), dim=0)
    updates = implicit_update(weight, without.expand_as(contexts), contexts)
    assert relative_error(weight + updates[-1], descended(weight, without, contexts)) < 1e-10
    assert (updates[-1] - updates[-2]).norm() < 0.2 * updates[0].norm()  # the contexts settle, so does the update
    reordered = descended(weight, without, contexts.flip(0))
    assert relative_error(reordered, weight + updates[-1]) > 0.01  # it ends where the last context ends


def test_what_has_no_update_is_refused() -> None:
    with pytest.raises(UserError, match="zero"):
        implicit_update(draw(HIDDEN, WIDTH), torch.zeros(WIDTH).double(), draw(WIDTH))
    with pytest.raises(UserError, match="no fc1"), recorded_mlp(nn.Linear(2, 2)):
        pass
