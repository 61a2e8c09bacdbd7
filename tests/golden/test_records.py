"""Observing the golden model gives the authors' records: zero-shot, in-context and after fine-tuning."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_icl.models import Model
from fairseq_icl.models.files import ModelFiles
from fairseq_icl.models.pretrained_lm import PretrainedLM, load_decoder
from fairseq_icl.observing import Observation, Observer
from fairseq_icl.observing.layout import plan_batches
from fairseq_icl.observing.observation import concatenate
from fairseq_icl.prompts.build import Prompts
from tests.golden.folder import Golden

TOLERANCE = 1e-5
PARTS = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")


@cache
def model_of(root: Path) -> Model:
    folder = root / "model"
    decoder = load_decoder(folder / "model.pt", Golden(root).dictionary)
    return Model(PretrainedLM(decoder).eval(), ModelFiles("golden", folder / "model.pt", folder / "dict.txt"))


@pytest.fixture
def model(golden: Golden) -> Model:
    return model_of(golden.root)


@pytest.fixture
def prompts(golden: Golden, golden_case: tuple[str, int], golden_spec: Callable[[str], Path]) -> Prompts:
    return golden.prompts(*golden_case, golden_spec(golden_case[0]))


def assert_is_record(seen: Observation, path: Path) -> None:
    with np.load(path) as stored:
        expected = dict(stored)
    np.testing.assert_array_equal(seen.gold, expected["gold"])
    np.testing.assert_array_equal(seen.prediction, expected["pred"])
    np.testing.assert_array_equal(seen.query_length, expected["query_len"])
    close = {"rtol": TOLERANCE, "atol": TOLERANCE}
    np.testing.assert_allclose(seen.option_logprobs, expected["option_scores"], **close)
    np.testing.assert_allclose(seen.attention_output, expected["self_attn_out"], **close)
    if "attn_q" in expected:
        np.testing.assert_allclose(seen.query_vector, expected["attn_q"], **close)
    # Scores are sums of products of either sign: their rounding is that of the large ones, also where a sum is small.
    for found, scores in (
        (seen.attention_row, expected["attn_map"]),
        (seen.context_row, expected["attn_map_ctx"]),
    ):
        np.testing.assert_allclose(found, scores, rtol=0, atol=TOLERANCE * max(1, np.abs(scores).max()))


def test_zero_shot(golden: Golden, golden_case: tuple[str, int], model: Model, prompts: Prompts) -> None:
    seen = Observer(model, prompts, context_row=True)(prompts.queries)
    assert_is_record(seen, golden.root / "records" / f"{golden_case[0]}_zs.npz")


@pytest.mark.parametrize("way", ["whole prompt", "shared prefix", "shared prefix in batches"])
def test_in_context(way: str, golden: Golden, golden_case: tuple[str, int], model: Model, prompts: Prompts) -> None:
    task, permutation = golden_case
    observer = Observer(model, prompts, in_context=True, whole_prompt=way == "whole prompt")
    assert (observer.prefix is None) == (way == "whole prompt")
    if way == "shared prefix in batches":
        batches = plan_batches(prompts.queries, max_tokens=64)
        seen = concatenate([observer([prompts.queries[i] for i in batch]) for batch in batches])
        seen = seen.take(torch.argsort(torch.tensor([index for batch in batches for index in batch])))
    else:
        seen = observer(prompts.queries)
    assert_is_record(seen, golden.root / "records" / f"{task}_p{permutation}_icl.npz")


@pytest.mark.parametrize("method", ["vanilla", "layer_causal"])
def test_fine_tuned(method: str, golden: Golden, golden_case: tuple[str, int], model: Model, prompts: Prompts) -> None:
    """The authors' final weights, held by the model for a while, give their records; the base stays what it is."""
    case = "{}_p{}".format(*golden_case)
    trained = {
        f"decoder.layers.{layer}.self_attn.{part}": torch.tensor(weights)
        for part in PARTS
        for layer, weights in enumerate(np.load(golden.root / "ft" / f"{case}_{method}.npz")[f"final.{part}"])
    }
    seen = Observer(model.under(trained), prompts, context_row=True)(prompts.queries)
    assert_is_record(seen, golden.root / "records" / f"{case}_ftzs_{method}.npz")
    test_zero_shot(golden, golden_case, model, prompts)
