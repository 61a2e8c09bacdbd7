"""The shipped model: small, loadable by stock fairseq, and really learning in context."""

import pytest
import torch
from fairseq.models.transformer_lm import TransformerLanguageModel

from examples.demo_model import DEMO_DATASETS
from examples.demo_model.evaluate import BOS, accuracy, finetune, load_model, tokenize_dataset
from examples.demo_model.tokenizer import Tokenizer
from fairseq_icl.files import DEMO_DATA, DEMO_MODEL
from fairseq_icl.prompts.catalogue import load_spec

TOKENIZER = DEMO_MODEL.parent / "sentencepiece.bpe.model"


@pytest.fixture(scope="module")
def model():
    return load_model(DEMO_MODEL)


def load_dataset(name):
    return tokenize_dataset(name, DEMO_DATA, Tokenizer(TOKENIZER))


def test_model_tokenizer_and_data_stay_below_six_megabytes():
    files = [path for folder in (DEMO_MODEL.parent, DEMO_DATA) for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 6_000_000


def test_checkpoint_holds_configuration_and_half_precision_weights_but_no_optimizer_state():
    state = torch.load(DEMO_MODEL, weights_only=True)
    assert set(state) == {"cfg", "model", "optimizer_history", "extra_state"}
    assert "optimizer" not in state["optimizer_history"][-1]
    assert {tensor.dtype for tensor in state["model"].values()} == {torch.float16}
    assert {"decoder.version", "decoder.layer_norm.weight", "decoder.layer_norm.bias"} <= set(state["model"])
    assert "/" not in f"{state['cfg']['checkpoint']['save_dir']}{state['cfg']['common']['user_dir']}"


def test_stock_fairseq_loads_the_checkpoint(monkeypatch):
    monkeypatch.chdir(DEMO_MODEL.parent)
    hub = TransformerLanguageModel.from_pretrained(
        str(DEMO_MODEL.parent), "model.pt", bpe="sentencepiece", sentencepiece_model=str(TOKENIZER)
    )
    assert hub.models[0].decoder.layer_norm is not None
    tokens = hub.encode("Review: the film was dull Sentiment:")
    assert hub.decode(tokens) == "Review: the film was dull Sentiment:"


@pytest.mark.parametrize("name", DEMO_DATASETS)
def test_model_learns_in_context_what_it_cannot_know_without(model, name):
    data = load_dataset(name)
    zsl = accuracy(model, data, [BOS], limit=40)
    icl = accuracy(model, data, data.context(16, seed=5), limit=40)
    assert icl >= zsl + 0.25
    assert icl >= 0.85


def test_untrained_model_stays_at_chance():
    untrained = load_model(DEMO_MODEL, untrained=True)
    data = load_dataset("demo_sentiment")
    assert abs(accuracy(untrained, data, data.context(16, seed=5), limit=100) - 0.5) < 0.15


def test_fine_tuning_keys_and_values_moves_accuracy(model):
    data = load_dataset("demo_sentiment")
    rate = load_spec(str(DEMO_DATA / "demo_sentiment.yaml")).papers["demo"]["learning_rate"]
    finetuned = finetune(model, data, k=32, seed=5, lr=rate)
    assert accuracy(finetuned, data, [BOS]) >= accuracy(model, data, [BOS]) + 0.15
    changed = {
        name
        for (name, before), after in zip(model.named_parameters(), finetuned.parameters(), strict=True)
        if not torch.equal(before, after)
    }
    assert changed
    assert all("k_proj" in name or "v_proj" in name for name in changed)
