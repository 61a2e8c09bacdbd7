"""Looking at things: prompts as text, short representations, a run as one frame."""

from pathlib import Path

import pytest

import fairseq_icl as fi
from fairseq_icl.errors import UserError
from fairseq_icl.files import DEMO_DATA
from fairseq_icl.prompts.build import build_prompts
from fairseq_icl.prompts.catalogue import find_spec
from tests.commands import run, succeeded


def test_prompts_as_text_and_short_representations():
    model = fi.load_model("demo")
    prompts = fi.build_prompts(model, "demo_sentiment", k=2, seed=1, limit=3)
    text = prompts.text(1)
    spec, query = prompts.spec, prompts.queries[1]
    assert text.startswith("ICL prompt, 2 demonstrations:\n")
    for number, word in enumerate(spec.label_words):
        assert f"option {number} {'*' if number == query.gold else ' '}  {word}" in text
    assert "fine-tuning sequence (row " in text
    words = text.splitlines()
    asked = words[words.index(f"query 1 (row {query.row} of its file; * is the right option):") + 1]
    assert model.writing.tokens(asked.strip()) == query.inputs[0]
    marked = prompts.text(1, boundaries=True)
    assert marked.replace("|", "") == text
    assert marked.count("|") > 20
    assert repr(prompts).startswith("Prompts(demo_sentiment: 3 queries, 2 demonstrations in a prompt of ")
    assert repr(model) == "Model(demo: 6 layers, pretrained, fp32)"
    assert repr(fi.observe(model, prompts)).startswith("Observation(3 examples, 2 options, 6 layers of width 128, acc")
    bare = build_prompts(find_spec("demo_sentiment", DEMO_DATA), DEMO_DATA, model.writing, prompts.settings)
    with pytest.raises(UserError, match=r"make them with fi.build_prompts"):
        bare.text()


def test_training_that_changes_no_answer_is_said(caplog: pytest.LogCaptureFixture):
    model = fi.load_model("demo")
    prompts = fi.build_prompts(model, "demo_sentiment", k=2, limit=4)
    zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    with fi.fine_tuned(model, prompts, method="lcgd", lr=1e-6) as tuned:
        table = fi.compare(prompts, zsl, icl, fi.observe(tuned, prompts))
    assert "lcgd changed no prediction: Rec2FTP and the like are undefined; a higher lr may change some" in caplog.text
    assert not table["value"].isna().any()
    assert "undefined_rec2ftp" in set(table["metric"])


def test_a_run_is_one_tidy_frame(tmp_path: Path):
    grid = ["k=1,2", "lr=0.1,0.3", "seed=1,2", "limit=4", "method=gd", "init=pretrained", "dataset=demo_sentiment"]
    succeeded(run("fairseq-icl", "replicate", "experiment=demo", *grid, f"out={tmp_path / 'run'}", "--quiet"))
    frame = fi.read_run(tmp_path / "run")
    assert {"model", "dataset", "method", "seed", "k", "lr", "metric", "layer", "value"} <= set(frame.columns)
    assert set(frame["model"]) == {"demo"}
    overall = frame[(frame["metric"] == "accuracy_icl") & frame["layer"].isna()]
    assert len(overall) == 8
    assert overall.pivot_table("value", "k", "lr").shape == (2, 2)
