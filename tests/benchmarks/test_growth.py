"""How cost grows: the sweeps, their exponents, the table and the picture."""

from pathlib import Path

import pytest
import torch

from benchmarks import growth
from benchmarks.growth import SWEEPS, first_layers, layer_points, measure_growth, validation_point
from benchmarks.report import BenchFindings
from benchmarks.shapes import Shape, model_of, random_prompts
from benchmarks.sweeps import VALIDATION, SweepPoint, by_sweep, exponent, exponents, plot, table
from fairseq_icl.models import Model
from fairseq_icl.observing import observe

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = Shape("test", layers=4, width=128, heads=4, ffn=512, vocabulary=6000)


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of(SHAPE)


@pytest.mark.parametrize("power", [-0.5, 0.0, 1.0, 2.0])
def test_exponent_is_that_of_a_power_law(power: float) -> None:
    x = [8, 16, 32, 64]
    assert exponent(x, [3 * value**power for value in x]) == pytest.approx(power)


def test_exponent_is_the_least_squares_slope() -> None:
    assert exponent([1, 2, 4], [1, 4, 1]) == pytest.approx(0)  # no line passes through these
    assert exponent([1, 2, 4], [1, 2, 2]) == pytest.approx(0.5)


def test_exponents_are_of_what_was_measured() -> None:
    points = [SweepPoint("classes", x, 800, None, 0.01 * x) for x in (2, 4, 8)]
    prefix, ours, *others = exponents(points)
    assert ours == pytest.approx(1)
    assert [prefix, *others] == [None] * 4


def test_exponents_of_validation_examples_are_of_the_cost_of_all() -> None:
    points = [SweepPoint(VALIDATION, x, 800, None, 0.01, compare=1 / x, memory=1000 * x) for x in (50, 100)]
    prefix, ours, authors, compare, memory = exponents(points)
    assert (prefix, authors) == (None, None)
    assert (ours, compare, memory) == pytest.approx((1, 0, 1))


def test_table_has_a_row_of_exponents_after_every_sweep() -> None:
    points = [SweepPoint("layers", x, 800, 0.1 * x, 0.01 * x**2) for x in (3, 6)]
    header, *rows = table(points + [SweepPoint("classes", x, 800, 0.1, 0.01, 0.4) for x in (2, 4)])
    assert [row[0] for row in rows] == [
        *("3 layers", "6 layers", "exponent: layers"),
        *("2 classes", "4 classes", "exponent: classes"),
    ]
    assert rows[2][2:4] == ["1.00", "2.00"]
    assert rows[3][5] == "40"
    assert {len(row) for row in rows} == {len(header)}


def test_labels_of_several_tokens_share_none() -> None:
    prompts = random_prompts(SHAPE, num_queries=2, num_options=5, label_tokens=3)
    labels = prompts.queries[0].labels
    assert [len(label) for label in labels] == [3] * 5
    assert len({token for label in labels for token in label}) == 15


def test_texts_do_not_depend_on_the_number_of_options() -> None:
    two, eight = (random_prompts(SHAPE, num_queries=3, num_options=number) for number in (2, 8))
    assert [query.inputs[0] for query in two.queries] == [query.inputs[0] for query in eight.queries]
    assert len(two.context) == len(eight.context)


def test_first_layers_are_a_model_of_its_own_and_only_for_a_while(model: Model) -> None:
    prompts = random_prompts(SHAPE, num_demonstrations=2, num_queries=3)
    before = observe(model, prompts, in_context=True)
    with first_layers(model, 1):
        shallow = observe(model, prompts, in_context=True)
    assert shallow.attention_output.shape == (3, 1, SHAPE.width)
    torch.testing.assert_close(shallow.attention_output, before.attention_output[:, :1])
    assert not torch.equal(shallow.option_logprobs, before.option_logprobs)
    assert torch.equal(observe(model, prompts, in_context=True).option_logprobs, before.option_logprobs)


def test_cost_is_measured_at_half_the_layers_again_and_again(model: Model) -> None:
    points = layer_points(SHAPE, model, rounds=1)
    assert [point.x for point in points] == [1, 2, 4]
    assert all(point.ours > 0 for point in points)


def test_validation_set_is_measured_in_a_process_of_its_own_and_hardly_needs_memory() -> None:
    few, many = validation_point(SHAPE, 100), validation_point(SHAPE, 700)
    assert (few.x, many.x) == (100, 700)
    for point in (few, many):
        assert point.sweep == VALIDATION
        assert point.ours > 0
        assert point.compare is not None
        assert point.compare > 0
        assert point.memory is not None
        assert 0 < point.memory < 2**30
    assert few.memory is not None
    assert many.memory is not None
    assert (many.memory - few.memory) / 600 < 1000 * growth.MEMORY_OF_AN_EXAMPLE * SHAPE.layers


def test_all_sweeps_are_measured_and_drawn(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def point(shape: Shape, examples: int) -> SweepPoint:
        return SweepPoint(VALIDATION, examples, 800, None, 0.1, compare=0.01, memory=2**20 * 100 + 50_000 * examples)

    monkeypatch.setattr(growth, "validation_point", point)
    findings = BenchFindings("tiny", "test")
    measure_growth(findings, SHAPE, model, rounds=1, quick=True)
    sweeps = by_sweep(findings.points)
    assert list(sweeps) == [*(sweep.name for sweep in SWEEPS), "layers", VALIDATION]
    for point_of in sweeps["demonstrations"]:
        assert point_of.ours > 0
        assert point_of.authors is not None
    (memory,) = (limit for limit in findings.limits if "validation example" in limit.what)
    assert memory.value == pytest.approx(50 / SHAPE.layers)
    assert memory.kept
    assert any("From 100 to 400 validation examples peak memory grows by 14 MiB, 50 kB" in n for n in findings.notes)
    plot(findings.points, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
