"""Accuracy and log-probability by depth."""

from dataclasses import replace

import torch

from fairseq_icl.metrics.predictions import accuracy, accuracy_by_depth, logprob_by_depth
from fairseq_icl.observing.observation import Observation
from fairseq_icl.results.collector import Collector
from tests.metrics.observations import random_observation


def with_depth(observation: Observation, seed: int) -> Observation:
    inner = torch.randn(len(observation), 2, 3, generator=torch.Generator().manual_seed(seed))
    return replace(observation, depth_scores=torch.cat([inner, observation.option_logprobs[:, None]], dim=1))


def test_the_last_layer_is_the_model() -> None:
    seen = with_depth(random_observation(1), 1)
    assert torch.equal(accuracy_by_depth(seen)[:, -1], accuracy(seen))
    gold = seen.option_logprobs.double().log_softmax(-1).gather(1, seen.gold[:, None])[:, 0]
    torch.testing.assert_close(logprob_by_depth(seen)[:, -1], gold)


def test_missing_options_have_no_share() -> None:
    seen = random_observation(1, n=1, options=3)
    scores = torch.tensor([[[0.0, 0.0, -torch.inf]] * 3])
    values = logprob_by_depth(replace(seen, gold=torch.tensor([1]), depth_scores=scores))
    torch.testing.assert_close(values, torch.full((1, 3), 0.5).log().double())
    first = accuracy_by_depth(replace(seen, gold=torch.tensor([0]), depth_scores=scores))
    assert first.tolist() == [[1.0, 1.0, 1.0]]  # the first of equals, as the prediction


def test_observations_without_depth_have_no_values_by_depth() -> None:
    zsl, icl = with_depth(random_observation(1), 1), random_observation(2)
    collector = Collector()
    collector.add(range(6), zsl, icl)
    found = set(collector.table()["metric"])
    assert {"accuracy_by_depth_zsl", "logprob_by_depth_zsl"} <= found
    assert not {"accuracy_by_depth_icl", "logprob_by_depth_icl"} & found
