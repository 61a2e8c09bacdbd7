"""The authors' metrics through a whole run: plan, fine-tuning in one process, observation, results."""

import json
from pathlib import Path

import pytest

from fairseq_icl.commands.replicate import run_configuration
from fairseq_icl.replication.configuration import compose_configuration, friendly
from fairseq_icl.replication.report.run import load_run

METHODS = {"gd": "vanilla", "lcgd": "layer_causal", "linearized": "linearized"}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def results(golden, golden_spec, tmp_path_factory: pytest.TempPathFactory):
    """(task, permutation, method) -> metric -> value, from one run a task."""
    values = {}
    for task in golden.tasks:
        out = tmp_path_factory.mktemp("golden_run") / "run"
        overrides = [
            "experiment=linearized",
            f"model={golden.root / 'model' / 'model.pt'}",
            "model.bpe=null",
            f"data={golden.root / 'data'}",
            f"dataset={golden_spec(task)}",
            f"num_demonstrations={golden.setting('k', task)}",
            f"seed={golden.setting('seed', task)}",
            f"permutation={golden.permutations(task)}".replace(" ", ""),
            f"lr={golden.setting('lr', task)}",
            "method=gd,lcgd,linearized",
            f"out={out}",
            "quiet=true",
        ]
        run_configuration(compose_configuration(friendly(overrides)))
        run = load_run(out)
        overall = run.values[run.values["layer"].isna()]
        for (permutation, method), group in overall.groupby(["permutation", "method"]):
            values[task, permutation, method] = group.set_index("metric")["value"]
    return values


@pytest.mark.parametrize("method", METHODS)
def test_a_run_gives_the_authors_metrics(golden, golden_case, results, method):
    task, permutation = golden_case
    path = Path(golden.root) / "metrics" / f"{task}_p{permutation}_{METHODS[method]}.json"
    stored = json.loads(path.read_text())
    ours = results[task, permutation, method]
    expected = {
        "sim_aou_norm": stored["dai_all"]["SimAOU"]["overall"],
        "sim_aou": stored["deutch_SimAOU_unnormalised"]["overall"],
        "sim_am_before": stored["dai_all"]["ZSL SimAM"]["overall"],
        "sim_am_after": stored["dai_all"]["SimAM"]["overall"],
        "sim_am_delta": stored["deutch_SimAM_delta"]["overall"],
    }
    for name, value in expected.items():
        assert ours[name] == pytest.approx(value, abs=TOLERANCE), name
    recall = stored["dai_all"]["Recall2FTP"]
    assert ("rec2ftp" in ours) == (recall is not None)
    if recall is not None:
        assert 100 * ours["rec2ftp"] == pytest.approx(recall)
