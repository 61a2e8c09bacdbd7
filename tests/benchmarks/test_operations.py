"""Operations counted by hand."""

import pytest
import torch

from benchmarks.operations import DecoderSizes, Work, like_feed_forward, operations, times

TINY = DecoderSizes.of(layers=2, width=4, heads=2, ffn=8, vocabulary=10)
LAYER = 4 * 4 * 4 + 2 * 4 * 8  # four projections of attention, two of the feed-forward block


def test_a_forward_pass_is_two_operations_a_weight_and_token() -> None:
    assert TINY.layer_weights == LAYER
    assert TINY.weights == 2 * LAYER + 10 * 4
    work = TINY.forward(rows=3, scores=3 * 5)
    assert work[3] == 2 * 3 * LAYER * 2
    assert work["attention"] == 2 * (2 * 15 * 4) * 2  # scores and weighted values, in two layers
    assert operations(work + TINY.unembedding(1)) == work[3] + work["attention"] + 2 * 10 * 4


def test_the_last_layer_is_counted_where_it_runs() -> None:
    whole, read = TINY.forward(rows=3, scores=15), TINY.forward(rows=3, scores=15, read=1)
    feed_forward, projection = 2 * (3 - 1) * 2 * 4 * 8, 2 * (3 - 2) * 4 * 4  # at one token, and at two
    assert whole[3] - read[3] == feed_forward + projection
    assert whole["attention"] - read["attention"] == 2 * (2 * 15 * 4) / 3
    assert {**whole, 3: 0, "attention": 0} == {**read, 3: 0, "attention": 0}


def test_a_step_is_forward_backward_and_the_gradients_of_what_learns() -> None:
    forward, scores = 2 * 3 * LAYER * 2, 4 * 4.5 * 4 * 2
    keys_and_values, head = 2 * 3 * 2 * 4 * 4 * 2, 2 * 3 * 10 * 4
    step = operations(TINY.training(3, 3, TINY.learning()))
    assert step == 2 * (forward + scores) + keys_and_values + 2 * head
    causal = operations(TINY.training(3, 2 * 3, TINY.learning()))  # a loss at each of the two layers
    assert causal - step == 2 * head
    linearized = operations(TINY.training(3, 3, TINY.learning(), linearized=True))
    assert linearized - step == 2 * (forward + scores) + 2 * head
    cut = operations(TINY.training(3, 3, TINY.learning(), layers=1))
    assert 2 * (cut - 2 * head) == step - 2 * head


def test_what_learns_is_named_as_in_the_settings() -> None:
    assert TINY.learning() == 2 * 4 * 4
    assert TINY.learning("self_attn.v_proj, fc1") == 4 * 4 + 4 * 8
    assert TINY.learning("layers") == 0  # not a matrix of a layer


def test_work_is_added_up_and_repeated() -> None:
    work = times(3, Work({8: 2.0, "logits": 1.0})) + Work({8: 1.0, 16: 5.0})
    assert work == Work({8: 7.0, 16: 5.0, "logits": 3.0})
    assert operations(work) == 12.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_to_be_timed_are_of_the_models_width(dtype: torch.dtype) -> None:
    flops, products = like_feed_forward(TINY, 3, torch.empty(0, dtype=dtype))
    assert flops == 2 * (2 * 3 * 4 * 8)
    assert len(products) == 4
    products[0]()
