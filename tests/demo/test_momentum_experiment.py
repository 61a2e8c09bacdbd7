"""The experiment on momentum attention: its commands, its data, and its tables; nothing is trained here."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.demo_model.episodes import Level
from examples.demo_model.pretraining.task import DemoPretrainingConfig, DemoPretrainingTask
from examples.momentum_attention.measuring import DEMONSTRATIONS, LENGTHS, MOMENTUM
from examples.momentum_attention.tables import MARKS, write_tables
from examples.momentum_attention.training import ETAS, LAST_LEVEL, LEVELS, RUNS, SEEDS, Run

DATASETS = ("demo_sentiment", "demo_subjectivity", "demo_topic", "demo_pairs")
LOG = """x | INFO | train_inner | epoch 001: 50 loss=2, label_loss=1.5, level=0, ups=9.5, num_updates=50, lr=1
x | INFO | valid on 'demo_topic' subset | accuracy_k16 0.25 | num_updates 50
"""


def test_runs_differ_in_eta_and_seed_alone():
    assert len(RUNS) == len(ETAS) * len(SEEDS)
    ordinary, momentum = Run(0.0, 2).command, Run(0.5, 2).command
    assert [word for word in momentum if word not in ordinary] == ["momentum", "--momentum", "0.5"]
    assert momentum[momentum.index("--seed") + 1] == "2"


def test_planned_levels_begin_whatever_the_accuracy_is():
    task = DemoPretrainingTask(DemoPretrainingConfig(data="", widen_at_epochs=LEVELS), None, None)
    task.datasets["train"] = SimpleNamespace()
    levels = {}
    for epoch in range(1, 61):
        task.begin_epoch(epoch, None)
        levels.setdefault(task.state.level, epoch)
    assert list(levels.values()) == [1, *map(int, LEVELS.split(","))]
    assert LAST_LEVEL == max(levels) == Level.LAST
    resumed = DemoPretrainingTask(task.cfg, None, None)
    resumed.datasets["train"] = SimpleNamespace()
    resumed.begin_epoch(60, None)
    assert resumed.state.level == Level.LAST


def measured(shift: float) -> dict:
    against = {method: {"sim_aou": shift, "sim_am_delta": 0.2, "accuracy_ft": 0.5} for method in ("gd", MOMENTUM.name)}
    icl = {str(k): 0.5 + shift for k in DEMONSTRATIONS}
    return {
        "perplexity": {str(length): {"all": 4.0 + shift, "labels": 2.0} for length in LENGTHS},
        "datasets": {name: {"icl": icl, "against": against} for name in DATASETS},
    }


def test_tables_have_means_and_deviations_and_go_into_the_page(tmp_path: Path):
    found = {run: measured(0.1 * run.seed) for run in RUNS}
    for run in RUNS:
        (tmp_path / run.name).mkdir()
        (tmp_path / run.name / "train.log").write_text(LOG)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    write_tables(found, tmp_path, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| momentum 0.5 | 4.20 ± 0.10 |" in text
    assert "70.0 ± 10.0" in text
    assert "| vanilla | 17.61 | 19.5 |" in text
    assert page.with_suffix(".png").stat().st_size > 1000


@pytest.mark.parametrize("eta", ETAS)
def test_names_tell_runs_apart(eta: float):
    assert Run(eta, 1).name == f"eta{eta:g}_seed1"
