"""The graph of a plan and its walk: what is shared is made once, what fails stops nothing else, parts make a whole."""

import json
from collections import Counter
from pathlib import Path

import pytest

from fairseq_icl.commands.replicate import job_of, run_configuration
from fairseq_icl.errors import UserError
from fairseq_icl.replication.cells import Keys
from fairseq_icl.replication.configuration import compose_configuration, share_of
from fairseq_icl.replication.engine import Engine
from fairseq_icl.replication.find_model import find_model
from fairseq_icl.replication.folders import ResultsFolder
from fairseq_icl.replication.graph import graph_of
from fairseq_icl.replication.plan import expand
from fairseq_icl.replication.run import engine_of, part_of
from tests.replication.toy_run import configuration, run, tables

CELLS = ("experiment=deutch2024", "method=gd,lcgd,alpha", "init=pretrained")
FOUR = (*CELLS, "seed=3,4")


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The tables of one process in peace."""
    return tables(run(world, tmp_path_factory.mktemp("whole") / "run", *FOUR))


def planned(world, out: Path, *words: str):
    """(cells, engine) of a plan."""
    config = configuration(world, out, *words)
    return expand(config), Engine(Keys(find_model(config["model"], out), world.data), ResultsFolder(out))


def test_zsl_is_one_task_for_all_seeds_and_everything_comes_after_what_it_needs(world, tmp_path):
    cells, engine = planned(world, tmp_path, *FOUR)
    graph = graph_of(cells, engine.keys, engine.folder)
    # gd and lcgd are shared with alpha, ICL with all methods of a seed, ZSL with both seeds.
    assert Counter(task.kind for task in graph) == {"prompts": 2, "zsl": 1, "icl": 2, "ft": 4, "cell": 6}
    before: set[str] = set()
    for task in graph:
        assert before >= set(task.needs)
        before.add(task.key)


def test_what_only_one_cell_needs_is_made_by_that_cell(world, tmp_path):
    cells, engine = planned(world, tmp_path, "experiment=deutch2024", "method=gd", "init=pretrained")
    graph = graph_of(cells, engine.keys, engine.folder, share_models=True)
    assert Counter(task.kind for task in graph) == {"prompts": 1, "model": 1, "cell": 1}


def test_what_is_on_disk_is_not_in_the_graph(world, tmp_path):
    out = run(world, tmp_path / "run", *CELLS)
    job = job_of(configuration(world, out, *FOUR), world.data)
    engine = engine_of(job)
    cells = [cell for cell in expand(configuration(world, out, *FOUR)) if cell.settings.seed == 4]
    done = [cell for cell in expand(configuration(world, out, *FOUR)) if cell.settings.seed == 3]
    assert all(engine.folder.cell(engine.keys.of(cell)).path.is_dir() for cell in done)
    assert Counter(task.kind for task in graph_of(cells, engine.keys, engine.folder))["zsl"] == 1
    (need,) = [task for task in graph_of(cells, engine.keys, engine.folder) if task.kind == "zsl"]
    (engine.folder.folder / "observations" / need.key).mkdir()
    assert Counter(task.kind for task in graph_of(cells, engine.keys, engine.folder))["zsl"] == 0


def test_a_training_that_fails_is_told_once_and_the_others_are_stored(world, tmp_path, capsys):
    words = ("experiment=deutch2024", "method=gd,lcgd,alpha", "init=pretrained", "lr=0.1,1e38", "quiet=false")
    with pytest.raises(UserError, match=r"3 of 6 cells failed, the others are stored; .*gd.*NaN or infinite"):
        run(world, tmp_path / "run", *words)
    assert len(tables(tmp_path / "run")) == 3
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed: ")]
    assert len(told) == 3
    assert list((tmp_path / "run" / "observations").iterdir()) == []


def test_parts_are_neighbours_that_load_one_model_each():
    cells = expand(compose_configuration(["experiment=deutch2024", "model=1.3b", "data=."]))
    parts = [part_of(cells, number, 4) for number in (1, 2, 3, 4)]
    assert [cell for part in parts for cell in part] == cells
    place = {(cell.model_key(), cell.prompts_key()): number for number, part in enumerate(parts) for cell in part}
    assert all(place[cell.model_key(), cell.prompts_key()] == n for n, part in enumerate(parts) for cell in part)
    assert max(map(len, parts)) < 1.5 * len(cells) / 4
    assert [len(part_of(cells[:2], number, 3)) for number in (1, 2, 3)] == [1, 0, 1]  # more parts than groups


def test_shares_together_are_the_whole_and_no_cell_is_computed_twice(world, whole, tmp_path):
    out = run(world, tmp_path / "parts", *FOUR, "share=2/2")
    second = {path.name: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    assert len(second) == 3
    run(world, out, *FOUR, "share=1/2")
    assert second.items() <= {path.name: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}.items()
    assert tables(out) == whole
    assert list((out / "observations").iterdir()) == []


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "2/3+", "a/b", "-1/3", "1/0", "1/3 "])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(UserError, match="must be like 2/8"):
        share_of(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["workers=0"], "workers=0: .*greater than or equal to 1"),
        (["workers=true"], "workers=True: must be a whole number"),
        (["workers=2", "share=1/2"], "workers: neither with"),
        (["cluster=slrum"], "slrum is none of .*did you mean slurm"),
        (["cluster=slurm", "share=1/2"], "share: not with cluster"),
        (["cluster.walltime=1"], r"cluster\.walltime=1: "),
        (["+cluster.partition=a"], r"cluster\.partition: unknown key"),
    ],
)
def test_numbers_of_processes_are_checked(world, tmp_path, words, said):
    with pytest.raises(UserError, match=said):
        configuration(world, tmp_path, *CELLS, *words)


def test_a_scheduler_that_does_not_answer_is_one_line(world, tmp_path):
    with pytest.raises(UserError, match=r"cluster=tcp://127\.0\.0\.1:9: no scheduler answers there"):
        run_configuration(configuration(world, tmp_path / "run", *CELLS, "cluster=tcp://127.0.0.1:9"))


METRIC = '''
from fairseq_icl.metrics import metric

@metric("mine", conditions=("icl", "ft"))
def mine(icl, ft):
    """1 where ICL and FT predict the same label."""
    return (icl.prediction == ft.prediction).double()
'''


def test_a_plugins_metric_is_added_to_a_cell_and_does_not_make_a_second_one(world, tmp_path, monkeypatch):
    from fairseq_icl import metrics

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(metrics, "_metrics", dict(metrics._metrics))
    (tmp_path / "my_metric.py").write_text(METRIC)
    words = ("experiment=deutch2024", "method=gd", "init=pretrained")
    out = run(world, tmp_path / "run", *words)
    (before,) = tables(out).items()
    run(world, out, *words, "plugins=[my_metric]")
    ((key, table),) = tables(out).items()
    assert key == before[0]
    assert ",mine," in table
    assert ",mine," not in before[1]
    described = json.loads((out / "cells" / key / "cell.json").read_text())
    assert list(described["metrics"]) == ["mine"]
    assert {"torch", "fairseq_icl", "numpy"} <= set(described["versions"])
