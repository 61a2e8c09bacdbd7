"""What the benchmark times as our way gives the numbers that the package's functions give, to the bit."""

from dataclasses import fields
from pathlib import Path

import pandas as pd
import pytest
import torch

from benchmarks import authors
from benchmarks.scoring import run_batches, score_all
from benchmarks.shapes import Shape, model_of, random_prompts
from benchmarks.training import TrainingSteps, samples_of
from benchmarks.whole import run_ours
from fairseq_icl.api import compare, fine_tuned, observe
from fairseq_icl.models import Model
from fairseq_icl.observing import Observation, Observer
from fairseq_icl.observing.layout import plan_batches
from fairseq_icl.observing.observation import concatenate
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.results import read_results
from fairseq_icl.training.fine_tuning import own_copy_of_what_learns

SHAPE = Shape("test", layers=2, width=32, heads=2, ffn=128, vocabulary=500)


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of(SHAPE)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return random_prompts(SHAPE, num_demonstrations=6, num_queries=40)


def assert_same_bits(one: Observation, other: Observation) -> None:
    for field in (field for field in fields(Observation) if field.compare):
        a, b = getattr(one, field.name), getattr(other, field.name)
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        assert same, field.name


@pytest.mark.parametrize("in_context", [False, True])
def test_scoring_is_what_observe_gives(model: Model, prompts: Prompts, in_context: bool) -> None:
    observer = Observer(model, prompts, in_context=in_context)
    first, second = concatenate(run_batches(observer)), concatenate(run_batches(observer))
    order = [index for batch in plan_batches(prompts.queries) for index in batch]
    expected = observe(model, prompts, in_context=in_context).take(order)
    assert len(expected) == 40
    assert_same_bits(first, expected)
    assert_same_bits(second, expected)  # with the prefix kept from the first time


@pytest.mark.parametrize(("part", "method"), [("ft", "gd"), ("lcgd", "lcgd"), ("linearized", "linearized")])
def test_single_steps_are_what_fine_tuned_does(model: Model, prompts: Prompts, part: str, method: str) -> None:
    with own_copy_of_what_learns(model.lm):
        steps = TrainingSteps(model, part, learning_rate=0.2)
        for sample in samples_of(prompts.finetuning):
            steps.step(sample)
        mine = {name: tensor.detach().clone() for name, tensor in steps.learner.named_parameters()}
    with fine_tuned(model, prompts, method, lr=0.2) as tuned:
        assert tuned.weights is not None
        assert len(tuned.weights) == 4 * SHAPE.layers
        for name, tensor in tuned.weights.items():
            assert bool(tensor.any())
            assert torch.equal(mine[name], tensor), name


def test_authors_way_can_run_under_fine_tuned_weights(model: Model, prompts: Prompts) -> None:
    with fine_tuned(model, prompts, lr=0.2) as tuned:
        seen = observe(tuned, prompts, limit=2)
        records = score_all(tuned, prompts.queries[:2], prompts.start)
    for option_logprobs, record in zip(seen.option_logprobs, records, strict=True):
        torch.testing.assert_close(option_logprobs, torch.tensor(record["option_scores"]))


def test_pipeline_writes_what_compare_gives(model: Model, prompts: Prompts, tmp_path: Path) -> None:
    run_ours(model, prompts, tmp_path)
    zsl, icl = observe(model, prompts), observe(model, prompts, in_context=True)
    with fine_tuned(model, prompts, lr=authors.LEARNING_RATE, record_queries=False) as tuned:
        table = compare(prompts, zsl, icl, observe(tuned, prompts))
    written, _ = read_results(tmp_path / "results.parquet")
    pd.testing.assert_frame_equal(written, table.astype(written.dtypes.to_dict()), check_exact=True)
