"""The same numbers on a simulated GPU as on the CPU, and nothing on the way mixes devices."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import fairseq_icl as fi
from fairseq_icl.theory.on_decoder import run_on_decoder
from tests.gpu.conftest import OnGPUs
from tests.models.hf_reference import reference_model, save
from tests.world import World

TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
"""Of the largest number of a tensor: attention is another kernel there, and fine-tuning amplifies its rounding."""
METHODS = ["gd", "lcgd", "lcgd_sequential", "linearized", "linearized_lcgd", "match_icl"]
CASES = [*(("fp32", method) for method in METHODS), ("fp16", "gd"), ("fp16", "linearized"), ("bf16", "lcgd")]
FAMILIES = {"llama": {"num_key_value_heads": 2}, "gpt2": {}, "mistral window": {"sliding_window": 8}}

Numbers = tuple[list[dict[str, Tensor]], pd.DataFrame]


def pipeline(source: Path, world: World, precision: str, method: str) -> Numbers:
    """What the public functions give: observations of ZSL, ICL and FT, and the table."""
    model = fi.load_model(source, precision=precision, bpe=None)
    prompts = fi.build_prompts(model, str(world.spec), data=world.data, k=2, limit=3)
    zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    with fi.fine_tuned(model, prompts, method, lr=0.01) as tuned:
        ft = fi.observe(tuned, prompts)
    again = fi.observe(model, prompts).tensors()
    assert all(torch.equal(again[name], value) for name, value in zsl.tensors().items())
    return [seen.tensors() for seen in (zsl, icl, ft)], fi.compare(prompts, zsl, icl, ft)


def assert_same(found: Numbers, expected: Numbers, tolerance: float) -> None:
    """Observations and tables agree; which tokens are the most likely ones may be a matter of rounding."""
    for one, other in zip(found[0], expected[0], strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"top_tokens", "prediction"}:
            finite = other[name][other[name].isfinite()].double()
            scale = max(1.0, float(finite.abs().max()))
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=tolerance * scale, msg=name)
    assert set(found[1]["metric"]) == set(expected[1]["metric"])


@pytest.mark.parametrize(("precision", "method"), CASES)
def test_every_method_and_precision(on_gpus: OnGPUs, world: World, precision: str, method: str) -> None:
    expected = pipeline(world.model, world, precision, method)
    # match_icl steps with Adam, which makes whole steps of gradients that are nothing but rounding.
    tolerance = 0.2 if method == "match_icl" else TOLERANCE[precision]
    assert_same(on_gpus(pipeline, world.model, world, precision, method), expected, tolerance)


def table_on(device: str, saved: bytes) -> pd.DataFrame:
    """The table of the same observations, computed on a device."""
    prompts, *observations = pickle.loads(saved)
    return fi.compare(prompts, *(replace(seen, device=device) for seen in observations))


def test_metrics_are_computed_where_was_observed(on_gpus: OnGPUs, world: World) -> None:
    model = fi.load_model(world.model, bpe=None)
    prompts = replace(fi.build_prompts(model, str(world.spec), data=world.data, k=4, limit=6), spell=None)
    zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    with fi.fine_tuned(model, prompts, lr=0.01) as tuned:
        saved = pickle.dumps((prompts, zsl, icl, fi.observe(tuned, prompts)))
    found, expected = on_gpus(table_on, "cuda:1", saved, devices=2), table_on("cpu", saved)
    assert found["metric"].tolist() == expected["metric"].tolist()
    assert {"kendall_tokens", "sim_am_delta", "sim_aou_random_matched"} <= set(found["metric"])
    np.testing.assert_allclose(found["value"], expected["value"], atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_models(on_gpus: OnGPUs, world: World, tmp_path: Path, family: str) -> None:
    shape: dict[str, Any] = {"n_positions": 512} if family == "gpt2" else {"max_position_embeddings": 512}
    folder = save(
        reference_model(family, bos_token_id=0, eos_token_id=0, **shape | FAMILIES[family]), tmp_path / family
    )
    expected = pipeline(folder, world, "fp32", "gd")
    assert_same(on_gpus(pipeline, folder, world, "fp32", "gd"), expected, TOLERANCE["fp32"])


def theory_numbers(world: World) -> list[float]:
    """Every number of the statements on a decoder, in fp64: attention, implicit updates, fields."""
    decoder = fi.load_model(world.model, bpe=None).lm.decoder.double()
    records = run_on_decoder(decoder, (2,), [(2, 5, 6), (2, 5, 6, 7, 9)], [(8, 9), (5, 8)])
    by_layer = (number for record in records for layers in record.per_layer.values() for number in layers)
    return [number for record in records for number in (record.value, record.broken)] + [*by_layer]


def test_theory_runs_where_the_decoder_is(on_gpus: OnGPUs, world: World) -> None:
    assert on_gpus(theory_numbers, world) == pytest.approx(theory_numbers(world), rel=1e-9, abs=1e-12)
