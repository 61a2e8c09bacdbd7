"""What each head puts out at the observed token: recorded if wanted, and compared head by head."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fairseq_icl as fi
from fairseq_icl.metrics.attention_outputs import sim_aou_heads
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing import Observation
from fairseq_icl.observing.probe import attention_modules
from fairseq_icl.observing.saved import load_observations, save_observations
from fairseq_icl.results.collector import compare
from tests.models.tiny_transformers import tiny_decoder
from tests.observing.tiny import as_model, make_prompts, make_queries, tiny_model

KINDS = ("fairseq", "llama", "gpt_neox")
QUERIES = make_queries("multi", count=4)
PROMPTS = make_prompts(QUERIES, position="gold", head_outputs="recorded")


def lm_of(kind: str) -> PretrainedLM:
    return tiny_model() if kind == "fairseq" else PretrainedLM(tiny_decoder(kind)).eval()


def conditions(kind: str, **record: str) -> list[Observation]:
    """ZSL, ICL, and FT: other keys and values."""
    base, tuned = lm_of(kind), lm_of(kind)
    torch.manual_seed(1)
    for name, parameter in tuned.named_parameters():
        if "out_proj" not in name and "o_proj" not in name and "attention.dense" not in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    models = ((base, False), (base, True), (tuned, False))
    return [fi.observe(as_model(lm), PROMPTS, in_context=icl, **record) for lm, icl in models]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_projected_and_added_up_the_updates_of_heads_are_that_of_the_attention_output(kind: str):
    zsl, *others = conditions(kind)
    for other in others:
        update = other.head_output - zsl.head_output  # (n, L, H, D)
        for layer, module in enumerate(attention_modules(lm_of(kind).decoder)):
            weight = module.out_proj.weight.unflatten(1, update.shape[2:])  # (d, H, D)
            by_head = torch.einsum("nhe,dhe->nhd", update[:, layer], weight)
            expected = other.attention_output[:, layer] - zsl.attention_output[:, layer]
            assert expected.abs().max() > 1e-2
            torch.testing.assert_close(by_head.sum(1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_metric_is_the_cosine_of_the_updates_of_whole_runs(kind: str):
    seen = conditions(kind, record="heads")
    z, one, other = (each.activations.heads[:, :, :, 0].double() for each in seen)  # (n, L, H, D)
    expected = torch.cosine_similarity(one - z, other - z, dim=-1)
    ours = sim_aou_heads(*seen)
    torch.testing.assert_close(ours.value, expected, rtol=0, atol=1e-4)
    table = compare(PROMPTS, *seen)
    means = table[table["example"].isna() & table["layer"].notna()]
    by_head = {f"sim_aou_heads_{head}": values for head, values in enumerate(expected.mean(0).T)}
    assert set(means["metric"][means["metric"].str.fullmatch(r"sim_aou_heads_\d+")]) == set(by_head)
    for name, values in [*by_head.items(), ("sim_aou_heads", expected.mean((0, 2)))]:
        found = means[means["metric"] == name].sort_values("layer")["value"].to_numpy(float)
        np.testing.assert_allclose(found, values.numpy(), atol=1e-4)


def test_recording_heads_changes_nothing_else_and_is_left_out_by_default(tmp_path: Path):
    model = as_model(tiny_model())
    plain = fi.observe(model, make_prompts(QUERIES, position="gold"))
    wanted = fi.observe(model, PROMPTS)
    assert plain.head_output is None
    assert wanted.tensors().keys() - plain.tensors().keys() == {"head_output"}
    assert all(torch.equal(value, wanted.tensors()[name]) for name, value in plain.tensors().items())
    assert not table_has_heads(plain)
    assert table_has_heads(wanted)
    save_observations(tmp_path / "seen.safetensors", {"zsl": wanted})
    assert torch.equal(load_observations(tmp_path / "seen.safetensors")[1]["zsl"].head_output, wanted.head_output)


def table_has_heads(seen: Observation) -> bool:
    return "zero_updates_sim_aou_heads" in set(compare(PROMPTS, seen, seen, seen)["metric"])


def test_a_linearized_model_shows_no_heads_and_the_metric_is_left_out(caplog: pytest.LogCaptureFixture):
    lm = LinearizedLM.around(tiny_model())
    moved = as_model(lm).under({name: torch.full_like(lm.get_parameter(name), 0.1) for name in lm.trained_names})
    base, tuned = fi.observe(as_model(tiny_model()), PROMPTS), fi.observe(moved, PROMPTS)
    assert base.head_output is not None
    assert tuned.head_output is None
    assert "sim_aou_heads is left out" in caplog.text
    assert "zero_updates_sim_aou_heads" not in set(compare(PROMPTS, base, base, tuned)["metric"])
