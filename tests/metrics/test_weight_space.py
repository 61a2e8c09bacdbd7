"""The head matrices act as linear attention does, and updates are compared head by head."""

from dataclasses import replace

import torch

from fairseq_icl.metrics import weight_space as ws

LAYERS, HEADS, WIDTH, TOKENS = 2, 2, 6, 4


def projections(seed: int = 0) -> ws.Projections:
    generator = torch.Generator().manual_seed(seed)
    shapes = (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH), (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH)
    return ws.Projections(*(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes))


def inputs(seed: int = 1, n: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, LAYERS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


ALL_TOKENS = torch.ones(3, TOKENS, dtype=torch.bool)


def test_the_matrix_of_a_head_acts_on_a_query_as_linear_attention():
    x, p = inputs(), projections()
    matrices = ws.head_matrices(x, ALL_TOKENS, p, HEADS)
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
    shorter = ws.head_matrices(x[:, :, 1:], ALL_TOKENS[:, 1:], projections(), HEADS)
    assert torch.allclose(ws.head_matrices(x, is_token, projections(), HEADS), shorter)


def test_an_update_of_nothing_is_a_counted_zero_update():
    update = torch.zeros(3, LAYERS, HEADS, WIDTH // HEADS, WIDTH // HEADS)
    icl = ws.head_matrices(inputs(2, n=1), ALL_TOKENS[:1], projections(), HEADS)[0]
    similarity = ws.sim_weights(ws.WeightUpdates(icl, update))
    assert (similarity.value == 0).all()
    assert (similarity.zero_updates == HEADS).all()


def test_finetuning_that_does_what_the_demonstrations_do_has_similarity_one():
    base = projections()
    icl = ws.head_matrices(inputs(2, n=1), ALL_TOKENS[:1], base, HEADS)[0]
    similarity = ws.sim_weights(ws.WeightUpdates(icl, (0.1 * icl).expand(3, *icl.shape)))
    assert torch.allclose(similarity.value, torch.ones(3, LAYERS, dtype=torch.float64))


def test_doubling_the_values_adds_the_zero_shot_matrix_once_more():
    base = projections()
    doubled = replace(base, value_weight=2 * base.value_weight, value_bias=2 * base.value_bias)
    before, after = (ws.head_matrices(inputs(), ALL_TOKENS, weights, HEADS) for weights in (base, doubled))
    assert torch.allclose(after - before, before)
