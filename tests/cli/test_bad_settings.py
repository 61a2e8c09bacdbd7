"""Settings that cannot be meant, as typed: one clear line, exit code 2."""

from pathlib import Path

import pytest

from fairseq_icl.commands import replicate
from fairseq_icl.errors import UserError
from tests.commands import assert_one_clear_line, run
from tests.world import World

REPLICATE = ("replicate", "experiment=demo", "--quiet")


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("reading=bogus", "choose from authors, paper"),
        ("lr=true", "lr=True: must be a number"),
        ("lr=abc", "lr=abc: must be a number"),
        ("lr=-0.3", "at least 0"),
        ("clip_norm=-1", "clip_norm=-1: must be at least 0"),
        ("audit=abc", "audit=abc: must be true or false"),
        ("quiet=abc", "quiet=abc: must be true or false"),
        ("+bogus=1", "bogus: unknown key"),
        ("+hydra.bogus=1", "hydra"),
        ("epxeriment=demo", "epxeriment: no such key or setting; did you mean experiment?"),
        ("shots=3", "shots: no such key or setting; fairseq-icl replicate --help lists them"),
        ("vary=3", "vary=3: must be a mapping"),
        ("vary={lr:[]}", "vary.lr=[]"),
        ("variants={3:{lr:1}}", "variants.3"),
        ("num_demonstrations=0", "method gd has nothing to train on"),
        ("num_demonstrations=abc", "must be a whole number"),
        ("layers=abc", "must be one (3)"),
        ("layer_clip=norm", "needs layer_clip_value"),
        ("seed=[]", "seed=[]"),
        ("seed=[null]", "seed=None"),
        ("~clip_norm", "clip_norm: is missing"),
        ("model=3", "model=3: unknown model"),
        ("model.name=a/b", "file names"),
        ("model.name=", "file names"),
        ("+model.shape={layers:5,width:16,heads:2,ffn:32,vocabulary:10}", "leave the shape out"),
        ("paper=nope", "no number of demonstrations in nope"),
        ("data=/nowhere", "data=/nowhere: no such folder"),
        ("tables=[[a]]", "no such published table"),
        ("tables=[nope]", "no such published table"),
        ("skip=[{method:{a:1}}]", "must be a name"),
        ("plugins=[3]", "names of modules"),
        ("+published_settings.demo.demo_sentiment.k=abc", "must be a whole number"),
        ("+published_settings.demo=3", "published_settings.demo"),
        ("dataset=" + "x" * 300, "too long"),
    ],
)
def test_replicate(tmp_path: Path, word: str, part: str):
    with pytest.raises(UserError) as caught:
        replicate.main([*REPLICATE[1:], f"out={tmp_path / 'run'}", word])
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "run").glob("cells/*"))


def test_flags_may_stand_between_settings(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(
        replicate, "run_configuration", lambda config: seen.append(config)
    )  # a dry run measures the machine: slow
    assert replicate.main(["experiment=demo", "--dry-run", "model=demo"]) == 0
    assert (seen[0]["dry_run"], seen[0]["model"]["name"]) == (True, "demo")


def test_a_wrong_setting_is_one_line_of_the_command(tmp_path: Path):
    assert_one_clear_line(run("fairseq-icl", *REPLICATE, f"out={tmp_path}", "lr=abc"), "lr=abc: must be a number")


def test_a_model_without_tokenizer_files_is_one_line(world: World, tmp_path: Path):
    words = [f"model={world.model}", f"data={world.data}", f"dataset={world.spec}", f"out={tmp_path}", "seed=1", "lr=1"]
    result = run("fairseq-icl", "replicate", "experiment=demo", *words, "num_demonstrations=2", "init=pretrained")
    assert_one_clear_line(result, "encoder.json: no such file", "model.tokenizer=FOLDER")
    assert len(result.stderr.splitlines()) < 5  # warnings are on in tests


@pytest.mark.parametrize(
    ("flag", "value", "part"),
    [
        ("--num-demonstrations", "abc", "invalid int value"),
        ("--lr", "abc", "--lr"),
        ("--lr", "-0.3", "lr=-0.3: must be at least 0"),
        ("--loss-on", "bogus", "invalid choice"),
    ],
)
def test_flags_of_training(world: World, tmp_path: Path, flag: str, value: str, part: str):
    result = world.train(tmp_path, f"{flag}={value}")
    assert_one_clear_line(result, part)
    assert "usage:" not in result.text
    assert len(result.stderr.splitlines()) < 5
