"""The short benchmark: every part has its rows and limits, our way gives the authors' numbers and leaves the model.

How fast it is, is measured by `python -m benchmarks` and not here: the machine may be busy.
"""

import re

import pytest
import torch

from benchmarks.measure import peak_of
from benchmarks.profile import measure_profile
from benchmarks.report import BenchFindings
from benchmarks.scoring import measure_metrics, measure_opening, measure_scoring
from benchmarks.shapes import SHAPES, Shape, model_of, random_prompts
from benchmarks.training import check_training, measure_training
from benchmarks.whole import Stopwatch, measure_pipeline
from fairseq_icl.models import Model

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = Shape("test", layers=3, width=128, heads=4, ffn=512, vocabulary=6000)


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of(SHAPE)


@pytest.fixture
def findings() -> BenchFindings:
    return BenchFindings("tiny", "test")


def value(findings: BenchFindings, start: str) -> float:
    """The figure of the one limit whose text starts so."""
    (limit,) = [limit for limit in findings.limits if limit.what.startswith(start)]
    return limit.value


def weights_of(model: Model) -> dict[str, torch.Tensor]:
    """A copy of all weights."""
    return {name: parameter.detach().clone() for name, parameter in model.lm.named_parameters()}


def assert_unchanged(model: Model, before: dict[str, torch.Tensor]) -> None:
    """The model has the weights it had, to the bit, and the same ones learn."""
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.lm.named_parameters())
    assert len(model.lm.trained_names) == 4 * SHAPE.layers  # weights and biases of k and v


def test_queries_that_begin_alike_are_held_against_none_shared(findings: BenchFindings, model: Model) -> None:
    measure_opening(findings, SHAPE, model, rounds=2)
    assert [row.what[:3] for row in findings.rows] == ["ZSL", "ICL"]
    assert all(row.ratio is not None for row in findings.rows)
    assert not findings.limits  # of published shapes alone


def test_the_profile_says_where_the_time_goes(findings: BenchFindings, model: Model) -> None:
    prompts = random_prompts(SHAPE, num_queries=30)
    measure_profile(findings, SHAPE, model, prompts)
    (note,) = findings.notes
    shares = [float(share) for share in re.findall(r"([\d.]+) %[,.]", note)]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert all(share > 0 for share in shares)


def test_scoring_in_context_is_timed_and_equal(findings: BenchFindings, model: Model) -> None:
    prompts = random_prompts(SHAPE, num_queries=60)
    measure_scoring(findings, SHAPE, model, prompts, ["zsl", "icl"], rounds=2, sample=2)
    assert value(findings, "ICL scoring, times faster") > 0
    assert value(findings, "ZSL scoring, largest relative difference") < 1e-5
    assert value(findings, "ICL scoring, largest relative difference") < 1e-5


def test_files_of_metrics_are_smaller(findings: BenchFindings, model: Model) -> None:
    measure_metrics(findings, SHAPE, model, random_prompts(SHAPE, num_queries=30), rounds=2, sample=3)
    assert findings.rows[0].ratio is not None
    assert value(findings, "bytes written") < 0.1
    assert value(findings, "the same with --save-activations") < 0.12


def test_finetuning_steps_are_timed_and_equal(findings: BenchFindings, model: Model) -> None:
    before = weights_of(model)
    methods = ["ft", "lcgd", "linearized"]
    check_training(findings, SHAPE, model, methods)
    measure_training(findings, SHAPE, model, methods, rounds=1)
    assert value(findings, "vanilla weights") < 1e-4
    assert value(findings, "layer-causal weights") < 1e-4
    for measured in ("vanilla step, times faster", "layer-causal step, times faster"):
        assert value(findings, measured) > 0
    for method in ("layer-causal", "linearized"):
        assert value(findings, f"{method} step, time over a vanilla step") > 0
    assert_unchanged(model, before)


def test_whole_pipeline_is_timed_and_leaves_the_model_as_it_was(findings: BenchFindings, model: Model) -> None:
    before = weights_of(model)
    measure_pipeline(findings, model, random_prompts(SHAPE, num_queries=60), sample=2)
    assert value(findings, "whole pipeline") > 0
    assert_unchanged(model, before)


def test_of_every_stage_the_best_run_counts() -> None:
    first, second = Stopwatch(), Stopwatch()
    first.seconds, second.seconds = {"ZSL": 2.0, "ICL": 5.0}, {"ZSL": 3.0, "ICL": 4.0}
    assert Stopwatch.best([first, second]).seconds == {"ZSL": 2.0, "ICL": 4.0}


def test_scoring_needs_less_memory() -> None:
    ours, authors = (peak_of(SHAPES["tiny"], "icl", way).above for way in ("ours", "authors"))
    assert ours < authors
