"""The yardstick is right: what the benchmark runs as the authors' way gives the numbers that their code gave."""

import json

import numpy as np
import pytest
from fairseq.data import Dictionary

from benchmarks import authors
from benchmarks.shapes import sequence
from benchmarks.training import samples_of
from fairseq_icl.models.pretrained_lm import PretrainedLM, load_decoder
from fairseq_icl.prompts.encoding import Query
from tests.conftest import SET_A

TASK = "tiny2"
METHODS = {"ft": "vanilla", "lcgd": "layer_causal", "linearized": "linearized"}


@pytest.fixture
def model() -> PretrainedLM:
    dictionary = Dictionary.load(str(SET_A / "model" / "dict.txt"))
    return PretrainedLM(load_decoder(SET_A / "model" / "model.pt", dictionary)).eval()


def golden_tokens() -> dict:
    return json.loads((SET_A / "tokens" / f"{TASK}_p0.json").read_text())


def queries_and_context(setting: str, number: int) -> tuple[list[Query], list[int]]:
    """The first golden queries, rebuilt from the stored sequences of their options."""
    stored = golden_tokens()[setting]
    length = stored["context_len"] if isinstance(stored["context_len"], int) else stored["context_len"][0]
    queries = []
    for row in range(number):
        options = stored["src_tokens"][2 * row : 2 * row + 2]
        text = tuple(options[0][length:-1])
        labels = tuple((option[-1],) for option in options)
        queries.append(Query(row, stored["labels"][2 * row], (text, text), labels))
    return queries, stored["src_tokens"][0][:length]


@pytest.mark.parametrize(("setting", "name"), [("zs", f"{TASK}_zs"), ("icl", f"{TASK}_p0_icl")])
def test_scoring_gives_the_golden_records(model: PretrainedLM, setting: str, name: str) -> None:
    queries, context = queries_and_context(setting, number=4)
    with np.load(SET_A / "records" / f"{name}.npz") as stored:
        for row, query in enumerate(queries):
            record = authors.score(model, query, context)
            close = {"rtol": 1e-4, "atol": 1e-5}
            np.testing.assert_allclose(record["option_scores"], stored["option_scores"][row], **close)
            np.testing.assert_allclose(record["hidden"], stored["self_attn_out"][row], **close)
            length = stored["query_len"][row]
            np.testing.assert_allclose(record["attention"], stored["attn_map"][row][..., -length:], **close)
            np.testing.assert_allclose(record["context_attention"], stored["attn_map_ctx"][row], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_finetuning_gives_the_golden_losses(model: PretrainedLM, method: str) -> None:
    learning_rate = json.loads((SET_A / "model" / "config.json").read_text())["lr"]
    learning_rate = learning_rate[TASK] if isinstance(learning_rate, dict) else learning_rate
    tokens = golden_tokens()["ft"]["src_tokens"]
    samples = samples_of([sequence(row, tuple(text[1:])) for row, text in enumerate(tokens)])
    step = authors.step_of(model, method, learning_rate)
    with np.load(SET_A / "ft" / f"{TASK}_p0_{METHODS[method]}.npz") as stored:
        np.testing.assert_allclose([step(sample) for sample in samples], stored["step_loss_sum"], rtol=1e-5)


def test_metrics_read_what_scoring_wrote(model: PretrainedLM, tmp_path) -> None:
    queries, context = queries_and_context("icl", number=3)
    files = {name: tmp_path / f"{name}.jsonl" for name in ("zsl", "icl", "ft")}
    for name, before in (("zsl", [0]), ("icl", context), ("ft", context)):
        authors.score_to_file(model, queries, before, files[name])
    metrics = authors.metrics_from_files(**files)
    assert metrics["sim_aou"] == pytest.approx(1)  # "ft" moved exactly as ICL did
    assert metrics["sim_am_delta"] == pytest.approx(1)
    assert metrics["accuracy_icl"] == metrics["accuracy_ft"]
