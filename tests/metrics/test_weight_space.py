"""The head matrices act as linear attention does, and updates are compared head by head."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairseq_icl.metrics import weight_space as ws

LAYERS, HEADS, WIDTH, TOKENS = 2, 2, 6, 4


@dataclass(frozen=True)
class Projections:
    """Key and value projections of all layers as fairseq keeps them: k = W_K x + b_K."""

    key_weight: Tensor  # (L, d, d)
    key_bias: Tensor  # (L, d)
    value_weight: Tensor  # (L, d, d)
    value_bias: Tensor  # (L, d)


def projections(seed: int = 0) -> Projections:
    generator = torch.Generator().manual_seed(seed)
    shapes = (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH), (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH)
    return Projections(*(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes))


def inputs(seed: int = 1, n: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, LAYERS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def head_matrices(x: Tensor, is_token: Tensor, p: Projections) -> Tensor:
    """inputs (n, L, T, d) of every layer -> (n, L, H, D, D)"""
    layers = []
    for layer in range(LAYERS):
        keys = x[:, layer] @ p.key_weight[layer].T + p.key_bias[layer]  # (n, T, d)
        values = x[:, layer] @ p.value_weight[layer].T + p.value_bias[layer]
        split = (part.unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2) for part in (keys, values))
        layers.append(ws.head_matrices(*split, is_token))
    return torch.stack(layers, dim=1)


ALL_TOKENS = torch.ones(3, TOKENS, dtype=torch.bool)


def test_the_matrix_of_a_head_acts_on_a_query_as_linear_attention():
    x, p = inputs(), projections()
    matrices = head_matrices(x, ALL_TOKENS, p)
    example, layer, head = 1, 1, 1
    part = slice(3, 6)  # the second head's dimensions
    query = torch.arange(3, dtype=torch.float64)
    keys = x[example, layer] @ p.key_weight[layer].T + p.key_bias[layer]
    values = x[example, layer] @ p.value_weight[layer].T + p.value_bias[layer]
    attended = sum(v[part] * (k[part] @ query) for v, k in zip(values, keys, strict=True))
    assert torch.allclose(matrices[example, layer, head] @ query, attended)


def test_padding_tokens_take_no_part():
    x = inputs()
    is_token = ALL_TOKENS.clone()
    is_token[:, 0] = False
    shorter = head_matrices(x[:, :, 1:], ALL_TOKENS[:, 1:], projections())
    assert torch.allclose(head_matrices(x, is_token, projections()), shorter)


def test_an_update_of_nothing_is_a_counted_zero_update():
    update = torch.zeros(3, LAYERS, HEADS, WIDTH // HEADS, WIDTH // HEADS)
    icl = head_matrices(inputs(2, n=1), ALL_TOKENS[:1], projections())[0]
    similarity = ws.sim_weights(ws.WeightUpdates(icl, update))
    assert (similarity.value == 0).all()
    assert (similarity.zero_updates == HEADS).all()


def test_finetuning_that_does_what_the_demonstrations_do_has_similarity_one():
    base = projections()
    icl = head_matrices(inputs(2, n=1), ALL_TOKENS[:1], base)[0]
    similarity = ws.sim_weights(ws.WeightUpdates(icl, (0.1 * icl).expand(3, *icl.shape)))
    assert torch.allclose(similarity.value, torch.ones(3, LAYERS, dtype=torch.float64))


def test_doubling_the_values_adds_the_zero_shot_matrix_once_more():
    base = projections()
    doubled = replace(base, value_weight=2 * base.value_weight, value_bias=2 * base.value_bias)
    before, after = (head_matrices(inputs(), ALL_TOKENS, weights) for weights in (base, doubled))
    assert torch.allclose(after - before, before)
