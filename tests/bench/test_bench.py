"""The short benchmark: our way is faster than the authors' and gives the same numbers.

Only ratios are checked, with wide margins, and processor time is counted: the machine may be busy.
"""

from collections.abc import Iterator

import pytest
import torch

from fairseq_icl.bench.memory import peak_of
from fairseq_icl.bench.pipeline import measure_pipeline
from fairseq_icl.bench.report import Findings
from fairseq_icl.bench.scoring import measure_growth, measure_metrics, measure_scoring
from fairseq_icl.bench.shapes import Shape, random_model, random_prompts
from fairseq_icl.bench.training import check_training, measure_training
from fairseq_icl.models.pretrained_lm import PretrainedLM

SHAPE = Shape("test", layers=3, width=128, heads=4, vocabulary=6000)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """With one thread the benchmark counts processor time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> PretrainedLM:
    return random_model(SHAPE)


@pytest.fixture
def findings() -> Findings:
    return Findings("tiny", "test")


def value(findings: Findings, start: str) -> float:
    """The figure of the one limit whose text starts so."""
    (limit,) = [limit for limit in findings.limits if limit.what.startswith(start)]
    return limit.value


def test_scoring_in_context_is_faster_and_equal(findings: Findings, model: PretrainedLM) -> None:
    prompts = random_prompts(SHAPE, num_queries=60)
    measure_scoring(findings, SHAPE, model, prompts, ["zsl", "icl"], rounds=2, sample=2)
    assert value(findings, "ICL scoring, times faster") > 5
    assert value(findings, "ZSL scoring, largest relative difference") < 1e-5
    assert value(findings, "ICL scoring, largest relative difference") < 1e-5


def test_metrics_are_faster_and_their_files_smaller(findings: Findings, model: PretrainedLM) -> None:
    measure_metrics(findings, SHAPE, model, random_prompts(SHAPE, num_queries=30), rounds=2, sample=3)
    assert findings.rows[0].ratio > 2
    assert value(findings, "bytes written") < 0.1
    assert value(findings, "the same with --save-activations") < 0.12


def test_finetuning_steps_are_not_slower_and_equal(findings: Findings, model: PretrainedLM) -> None:
    methods = ["ft", "lcgd", "linearized"]
    check_training(findings, SHAPE, model, methods)
    measure_training(findings, SHAPE, model, methods, rounds=5)
    model.reset_to_base()
    assert value(findings, "vanilla weights") < 1e-4
    assert value(findings, "layer-causal weights") < 1e-4
    assert value(findings, "vanilla step, times faster") > 0.9
    assert value(findings, "layer-causal step, times faster") > 1.1
    assert value(findings, "layer-causal step, time over a vanilla step") < 4
    assert value(findings, "linearized step, time over a vanilla step") < 5


def test_whole_pipeline_is_faster_and_leaves_the_model_as_it_was(findings: Findings, model: PretrainedLM) -> None:
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    measure_pipeline(findings, SHAPE, model, random_prompts(SHAPE, num_queries=60), sample=2)
    assert value(findings, "whole pipeline") > 4
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_cost_of_a_query_hardly_grows_with_the_demonstrations(findings: Findings, model: PretrainedLM) -> None:
    measure_growth(findings, SHAPE, model, rounds=1)
    ours = {point.x: point.ours for point in findings.points if point.sweep == "demonstrations"}
    theirs = {point.x: point.authors for point in findings.points if point.sweep == "demonstrations"}
    assert theirs[64] / theirs[8] > 2 * ours[64] / ours[8]


def test_scoring_needs_less_memory() -> None:
    ours, authors = (peak_of(Shape("tiny", 4, 128, 4), "icl", way).above for way in ("ours", "authors"))
    assert ours < authors
