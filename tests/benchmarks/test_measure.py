"""Measuring itself."""

import torch

from benchmarks.measure import gemm_rate, interleave, peak_bytes_of
from benchmarks.shapes import SHAPES, random_prompts


def test_ways_take_turns() -> None:
    calls: list[str] = []
    best = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
    assert calls == ["a", "b"] * 3
    assert all(seconds >= 0 for seconds in best.values())


def test_peak_memory_counts_what_was_freed_again() -> None:
    size = 64 * 2**20

    def allocate_and_free() -> None:
        torch.ones(size // 4)

    assert 0.9 * size < peak_bytes_of(allocate_and_free) < 1.5 * size


def test_matrix_products_have_a_rate() -> None:
    assert 1e8 < gemm_rate(SHAPES["tiny"], rows=64) < 1e14


def test_published_shapes_are_those_of_the_model_configurations() -> None:
    assert SHAPES["125m"].sizes() == {"layers": 12, "width": 768, "heads": 12, "ffn": 3072, "vocabulary": 51200}
    assert {name: shape.vocabulary for name, shape in SHAPES.items() if name != "tiny"} == {
        "125m": 51200,
        "355m": 51200,
        "1.3b": 51200,
    }


def test_prompts_have_the_lengths_asked_for() -> None:
    prompts = random_prompts(SHAPES["125m"], num_demonstrations=32, num_queries=200)
    assert 24 < (len(prompts.context) - 1) / 32 - 1 < 28
    lengths = [len(query.inputs[0]) + 1 for query in prompts.queries]
    assert 28 < sum(lengths) / len(lengths) < 32
    assert all(query.single_token for query in prompts.queries)
    spans = [prompts.context[start:end] for start, end in prompts.context_spans]
    assert spans == [sequence.tokens[1:] for sequence in prompts.finetuning]
