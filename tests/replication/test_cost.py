"""What a plan is said to cost."""

from collections import Counter
from pathlib import Path

import pytest

from fairseq_icl.replication.configuration import compose_configuration
from fairseq_icl.replication.cost import _line, describe, duration, stages_of
from fairseq_icl.replication.plan import expand
from tests.replication.toy_run import configuration, run


def test_shared_work_is_counted_once():
    cells = expand(compose_configuration(["experiment=deutch2024", "model=1.3b", "data=."]))
    counts = Counter()
    for stage, (count, _) in stages_of(cells).items():
        counts[stage.name] += count
    baselines = 2 * 5 * 3  # inits, datasets without AGNews, seeds
    assert counts["zsl"] == 6 + baselines  # a pretrained model without demonstrations knows no seed
    assert counts["icl"] == 18 + baselines
    assert counts["train"] == counts["ft"] == 2 * 18 + baselines  # alpha trains nothing of its own
    assert counts["measure"] == len(cells)
    assert counts["prompts"] == 18


def test_times_are_continued_as_straight_lines():
    assert _line((1, 3), (2.0, 4.0), 24) == pytest.approx(25.0)
    assert _line((1, 3), (2.0, 1.9), 24) == 2.0  # noise never makes a deeper model faster
    assert _line((20,), (5.0,), 20) == 5.0
    assert [duration(seconds) for seconds in (5, 330, 3000, 36000)] == ["5 s", "5.5 min", "50 min", "10.0 h"]


def test_a_dry_run_measures_and_writes_nothing(world, tmp_path: Path):
    out = tmp_path / "run"
    chosen = ["experiment=deutch2024", "method=gd", "init=pretrained", "seed=3,4"]
    config = configuration(world, out, *chosen)
    text = describe(config, expand(config), world.data)
    assert "estimated time:" in text
    assert "estimated memory: 0." in text
    assert not out.exists()
    run(world, out, *chosen)
    text = describe(config, expand(config), world.data)
    assert "everything is finished already" in text


def test_runs_held_to_the_norms_of_another_method_can_be_planned(world, tmp_path: Path):
    config = configuration(world, tmp_path / "run", "experiment=clipping", "method=lcgd")
    held = [cell for cell in expand(config) if cell.settings.layer_clip_value == "gd"]
    assert len(held) == 1
    assert "estimated time:" in describe(config, held, world.data)
