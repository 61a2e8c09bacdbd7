"""`fairseq-icl replicate` and `report` as a user types them: resumed after kills, extended, misused."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_icl.commands.report import report
from fairseq_icl.replication.report.figures import all_figures
from fairseq_icl.replication.report.run import load_run
from tests.commands import assert_one_clear_line, run, succeeded
from tests.replication.toy_run import settings, tables

HARNESS = Path(__file__).parent / "kill_and_resume.py"
# (finished cells to wait for, seconds more): at the start, while observing, while fine-tuning, and between cells.
MOMENTS = [(0, 0.0), (0, 0.4), (1, 0.05), (2, 0.2), (4, 0.0)]


# Small, on the shipped model.
AUDIT = ["experiment=audit", "model=demo", "dataset=demo_sentiment", "seed=1", "num_demonstrations=6", "limit=8"]
AUDIT += ["method=lcgd", "init=pretrained", "quiet=true"]


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results folder of an uninterrupted audit of the demo model."""
    out = tmp_path_factory.mktemp("audit") / "run"
    succeeded(run("fairseq-icl", "replicate", *AUDIT, f"out={out}"))
    return out


def test_an_audit_compares_every_difference(audit):
    results = load_run(audit)
    assert results.planned["finished"].all()
    assert not (audit / "report" / "report.md").exists()  # Markdown and LaTeX on request
    report(audit, formats=("md",), quiet=True)
    text = (audit / "report" / "report.md").read_text()
    (left_out,) = [line for line in text.splitlines() if "Left out, since no number differs" in line]
    for variant in results.planned["variant"].drop_duplicates():
        assert (f"| {variant or '(plain)'} |" in text) != (variant in left_out and variant != "")
    assert "| reading=paper |" in text
    assert (audit / "report" / "report.html").is_file()


def test_killed_five_times_and_resumed_it_is_the_uninterrupted_run(audit, tmp_path):
    out = tmp_path / "run"
    command = ["replicate", *AUDIT, f"out={out}"]
    harness = [sys.executable, str(HARNESS), str(out), json.dumps(MOMENTS), *command]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # as the other run: rounding depends on it
    done = subprocess.run(harness, capture_output=True, text=True, timeout=600, check=False, env=one_thread)
    assert done.returncode == 0, done.stderr[-3000:]
    starts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(starts) == len(MOMENTS) + 1
    for before, after in itertools.pairwise(starts):
        assert before.items() <= after.items(), "a finished cell was computed again"
    assert tables(out) == tables(audit)
    leftovers = [path for name in ("cells", "observations") for path in (out / name).glob(".*")]
    assert leftovers == []


def test_the_demo_experiment_fills_the_papers_tables(tmp_path):
    small = ["seed=1", "num_demonstrations=6", "limit=8", "dataset=demo_sentiment", f"out={tmp_path / 'run'}"]
    result = succeeded(run("fairseq-icl", "replicate", "experiment=demo", "model=demo", *small))
    assert "missing" not in result.stdout.split("Similarities of trained")[1]  # Rec2FTP need not exist on 8 examples
    assert "SimAOU, trained embeddings" in result.stdout
    assert "SimAOU_norm, LCGD" in result.stdout
    assert "7 of 7 cells finished" in result.stdout
    names = {figure.name for figure in all_figures(load_run(tmp_path / "run"))}
    assert {"alpha_demo", "partition_demo", "gradients_demo_pretrained_gd"} <= names


def test_accounts_of_icl_stand_side_by_side(tmp_path):
    """One method that trains and two that do not; the nearest comes first."""
    small = ["seed=1", "num_demonstrations=6", "limit=8", "dataset=demo_sentiment", "selection_rows=3"]
    words = ["experiment=accounts", "model=demo", "paper=demo", "data=demo", f"out={tmp_path / 'run'}"]
    chosen = "method=[lcgd,shallow_gd,shallow_gd_kernel,task_vector,function_vector]"
    result = succeeded(run("fairseq-icl", "replicate", *words, *small, chosen))
    assert "5 of 5 cells finished" in result.stdout
    loaded = load_run(tmp_path / "run")
    (figure,) = [figure for figure in all_figures(loaded) if figure.name == "accounts_demo"]
    similar = loaded.summary[loaded.summary["metric"] == "sim_aou"].set_index("method")["mean"]
    labels = [series.label for series in figure.panels[0].series]
    assert labels == [*similar.sort_values(ascending=False).index, "by chance"]
    assert list(figure.ticks) == ["demo_sentiment"]
    rates = {said["cell"]["method"]: said["cell"]["settings"]["lr"] for said in loaded.configurations.values()}
    assert rates == {
        "lcgd": 0.3,
        "shallow_gd": 0.03,
        "shallow_gd_kernel": 100,
        "task_vector": None,
        "function_vector": None,
    }


PLUGIN = '''
from fairseq_icl.metrics import metric
from fairseq_icl.models.state_edits import StateEdit
from fairseq_icl.training.methods import Method

flags = ("--criterion", "cross_entropy", "--clip-norm", "1")
clipped = Method("gd_clipped", "vanilla fine-tuning with small steps", flags)


class Louder(StateEdit):
    def __init__(self, factor):
        self.factor = factor

    def attention(self, layer, output, received, state):
        return self.factor * output


def louder(model, prompts, settings):
    return Louder(1 + settings.lr)


loud = Method("louder", "attention outputs scaled up by lr", edit=louder, edit_reads=("lr",))


@metric("agreement", conditions=("icl", "ft"))
def agreement(icl, ft):
    """1 where ICL and FT predict the same label."""
    return (icl.prediction == ft.prediction).double()
'''
ENTRY_POINTS = """
[fairseq_icl.methods]
gd_clipped = otherlab:clipped
louder = otherlab:loud

[fairseq_icl.metrics]
agreement = otherlab

[fairseq_icl.datasets]
otherlab = otherlab.data:folder
"""


def test_a_package_from_outside_adds_a_dataset_a_metric_and_a_method(world, tmp_path):
    site = tmp_path / "site"
    (site / "otherlab").mkdir(parents=True)
    (site / "otherlab" / "__init__.py").write_text(PLUGIN)
    (site / "otherlab" / "data.py").write_text("from pathlib import Path\nfolder = Path(__file__).parent\n")
    (site / "otherlab" / "toy.yaml").write_text(world.spec.read_text())
    info = site / "otherlab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: otherlab\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    words = [word for word in settings(world, tmp_path / "run", "experiment=deutch2024") if "dataset=" not in word]
    chosen = ["dataset=toy", "method=gd,gd_clipped,louder", "init=pretrained"]
    succeeded(run("fairseq-icl", "replicate", *words, *chosen, PYTHONPATH=str(site)))
    summary = load_run(tmp_path / "run").summary.set_index(["method", "metric"])["mean"]
    assert 0 <= summary["gd_clipped", "agreement"] <= 1
    assert summary["gd", "sim_aou"] != summary["gd_clipped", "sim_aou"]
    assert summary["louder", "log_likelihood_ft"] != summary["louder", "log_likelihood_zsl"]


def test_a_method_in_a_module_is_found_by_plugins(world, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from fairseq_icl.training.methods import Method, register_method\n"
        'register_method(Method("fast", "large steps", ("--criterion", "cross_entropy", "--momentum", "0.5")))\n'
    )
    chosen = ["experiment=deutch2024", "method=fast", "init=pretrained", "plugins=[mine]"]
    result = run("fairseq-icl", "replicate", *settings(world, tmp_path / "run", *chosen), cwd=tmp_path)
    assert "1 of 1 cells finished" in succeeded(result).stdout
    missing = settings(world, tmp_path / "run", "experiment=deutch2024", "plugins=[nowhere]")
    assert_one_clear_line(run("fairseq-icl", "replicate", *missing), "nowhere")


def test_mistakes_end_in_one_line_and_leave_nothing(world, tmp_path):
    out = tmp_path / "run"
    wrong = run("fairseq-icl", "replicate", *settings(world, out, "experiment=audit", "method=lgcd"))
    assert_one_clear_line(wrong, "did you mean lcgd")
    assert not out.exists()
    blocked = tmp_path / "file"
    blocked.write_text("")
    words = settings(world, blocked / "run", "experiment=deutch2024", "init=pretrained", "method=gd")
    assert_one_clear_line(run("fairseq-icl", "replicate", *words), "cannot be written")
    assert_one_clear_line(run("fairseq-icl", "report", tmp_path / "nowhere"), "not a results folder")
