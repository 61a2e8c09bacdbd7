"""The plan in words: what differs is shown, and its cost is said, about."""

from fairseq_icl.commands.replicate import run_configuration
from fairseq_icl.replication.estimate import Probe, describe, duration
from fairseq_icl.replication.plan import expand
from tests.replication.test_run import planned
from tests.replication.toy_run import configuration, run

WORDS = ("experiment=deutch2024", "method=gd,lcgd", "init=pretrained")


def test_a_dry_run_shows_every_value_that_differs_and_writes_nothing(world, tmp_path, capsys):
    out = tmp_path / "run"
    run_configuration(configuration(world, out, *WORDS, "k=1,2", "lr=0.1,0.2", "limit=4,6", "dry_run=true"))
    said = capsys.readouterr().out
    assert not out.exists()
    head, *rows = [line.split() for line in said.splitlines() if line.startswith(("init", "pretrained"))]
    assert head[:6] == ["init", "dataset", "method", "num_demonstrations", "lr", "limit"]
    assert {tuple(row[2:6]) for row in rows} == {
        (method, k, lr, limit) for method in ("gd", "lcgd") for k in "12" for lr in ("0.1", "0.2") for limit in "46"
    }
    assert "from a probe" in said
    assert "GiB of memory" in said


def test_finished_cells_tell_how_long_the_others_take(world, tmp_path):
    out = run(world, tmp_path / "run", *WORDS)
    config = configuration(world, out, *WORDS, "seed=3,4")
    said = describe(config, expand(config), world.data)
    assert "from 2 finished cells" in said
    config = configuration(world, out, *WORDS)
    assert "everything is finished already" in describe(config, expand(config), world.data)


def test_more_cells_take_longer_and_shared_work_counts_once(world, tmp_path):
    few, engine = planned(world, tmp_path / "run", *WORDS)
    probe = Probe(engine.keys, world.data)
    assert 0 < probe.estimate(few[:1]) < probe.estimate(few)
    assert probe.estimate([*few, *few]) == probe.estimate(few)


def test_the_probes_few_demonstrations_are_not_held_against_the_plan(world, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("fairseq_icl.replication.estimate.STEPS", 1)  # so that a class is missing for certain
    (cell, *_), engine = planned(world, tmp_path / "run", *WORDS, "missing_class=refuse")
    assert Probe(engine.keys, world.data).estimate([cell]) > 0
    assert "no demonstration in the prompt has" not in caplog.text


def test_times_are_said_as_people_say_them():
    assert [duration(seconds) for seconds in (5, 119, 600, 7200)] == ["5 s", "119 s", "10 min", "2.0 h"]
