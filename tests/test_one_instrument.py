"""One instrument: a notebook, `fairseq-icl replicate` and fairseq's own commands give the same bits."""

import json
import shlex
from pathlib import Path

import pandas as pd
import pytest
import torch

import fairseq_icl as fi
from fairseq_icl.models.checkpoints import read_checkpoint
from fairseq_icl.observing.layout import plan_batches
from fairseq_icl.observing.saved import load_observations, save_observations
from fairseq_icl.results import read_gradient_record, read_results
from fairseq_icl.results.collector import COMPARED
from tests.commands import PLUGIN, run, succeeded

METHODS = ("gd", "lcgd", "lcgd_sequential", "linearized")
K, LIMIT, RATE = 6, 140, 0.3


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The commands of the tests run with one thread: rounding depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Method -> folder of its cell, by `fairseq-icl replicate`."""
    out = tmp_path_factory.mktemp("replicate") / "run"
    wanted = ["dataset=demo_sentiment", f"method={','.join(METHODS)}", "init=pretrained", "seed=1", f"limit={LIMIT}"]
    numbers = [f"num_demonstrations={K}", f"lr={RATE}", f"out={out}"]
    succeeded(run("fairseq-icl", "replicate", "experiment=demo", *wanted, *numbers, "device=cpu", "--quiet"))
    cells = {json.loads(path.read_text())["cell"]["method"]: path.parent for path in out.glob("cells/*/cell.json")}
    assert set(cells) == set(METHODS)
    return cells


@pytest.fixture(scope="module")
def notebook() -> dict[str, tuple[pd.DataFrame, fi.Model]]:
    """Method -> (table, fine-tuned model), by the Python functions."""
    model = fi.load_model("demo", device="cpu")
    prompts = fi.build_prompts(model, "demo_sentiment", k=K, seed=1, limit=LIMIT)
    # fairseq-validate measures batches, `compare` parts in the order of the file: there are to be several of both.
    assert len(plan_batches(prompts.queries)) > 1
    assert len(prompts.queries) > COMPARED
    zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    found = {}
    for method in METHODS:
        with fi.fine_tuned(model, prompts, method=method, lr=RATE) as tuned:
            found[method] = (fi.compare(prompts, zsl, icl, fi.observe(tuned, prompts)), tuned)
    return found


def assert_same(first: pd.DataFrame, second: pd.DataFrame) -> None:
    """Equal to the last bit, whatever the order of the rows."""
    order = ["metric", "layer", "example"]
    first, second = (table.sort_values(order).reset_index(drop=True) for table in (first, second))
    pd.testing.assert_frame_equal(first, second.astype(first.dtypes.to_dict()), check_exact=True)


@pytest.mark.parametrize("method", METHODS)
def test_a_notebook_gives_the_numbers_of_a_replication(method, notebook, replicated):
    table, tuned = notebook[method]
    assert_same(table, read_results(replicated[method] / "results.parquet")[0])
    record, _ = read_gradient_record(replicated[method] / "gradients.parquet")
    pd.testing.assert_frame_equal(tuned.gradients, record, check_exact=True, check_dtype=False)


@pytest.mark.parametrize("method", METHODS)
def test_fairseqs_commands_give_the_same_weights_and_numbers(method, notebook, replicated, tmp_path):
    """The `fairseq-train` command that a cell names is run as it stands, but for where it saves."""
    table, tuned = notebook[method]
    command = shlex.split(json.loads((replicated[method] / "cell.json").read_text())["command"])
    command[command.index("fairseq_icl")] = str(PLUGIN)
    command.remove("--no-save")
    train = [*command[1:], "--cpu", "--save-dir", tmp_path, "--no-epoch-checkpoints"]
    succeeded(run(command[0], *train))
    checkpoint = tmp_path / "checkpoint_last.pt"
    saved = read_checkpoint(checkpoint)["model"]
    assert {name for name in saved if name != "linearized"} == set(tuned.weights)
    for name, weight in tuned.weights.items():
        assert torch.equal(saved[name], weight), name
    data = command[command.index("--dataset") + 1].rsplit("/", 1)[0]
    task = ["--user-dir", PLUGIN, "--task", "demonstration_prompting", "--cpu", "--path", checkpoint]
    results = tmp_path / "results.parquet"
    succeeded(run("fairseq-validate", data, *task, "--criterion", "icl_similarity", "--results", results))
    assert_same(table, read_results(results)[0])


def test_a_third_partys_method_keeps_its_name_through_fairseqs_commands(tmp_path):
    """gd_momentum is a package's own; one without a name is described by what sets it apart."""
    from fairseq_icl.training.methods import Method, _methods, name_of_method, register_method

    def saved(**changes: object) -> dict[str, object]:
        options = {"momentum": 0.0, "weight_decay": 0.0} | changes
        return {"criterion": {"_name": "cross_entropy"}, "optimizer": {"_name": "sgd", **options}, "task": {}}

    assert name_of_method(saved(), linearized=False) == "gd"
    assert name_of_method(saved(), linearized=True) == "linearized"
    one_by_one = {"criterion": {"_name": "layer_causal_ce", "sequential": True}}
    assert name_of_method(saved() | one_by_one, linearized=False) == "lcgd_sequential"
    register_method(Method("gd_momentum", "", ("--criterion", "cross_entropy", "--momentum", "0.9")))
    try:
        assert name_of_method(saved(momentum=0.9), linearized=False) == "gd_momentum"
        assert name_of_method(saved(), linearized=False) == "gd"
        assert name_of_method(saved(momentum=0.5), linearized=False) == "cross_entropy momentum=0.5"
    finally:
        del _methods["gd_momentum"]


def test_switched_labels_of_another_length_leave_out_attention_to_training_tokens(tmp_path):
    """They cannot be paired token by token; every other number is there."""
    (tmp_path / "data").mkdir()
    rows = [{"text": f"word{i % 5} word{i % 3}", "label": i % 2} for i in range(12)]
    for split in ("train", "valid"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "data" / f"toy_{split}.jsonl").write_text(text)
    (tmp_path / "toy.yaml").write_text(
        "version: 1\nsource: s\nfields: [text]\ntemplate: '{text} is'\nlabel_words: [marble, velvet copper]\n"
    )
    model = fi.load_model("demo", device="cpu")
    prompts = fi.build_prompts(
        model, str(tmp_path / "toy.yaml"), data=tmp_path / "data", k=4, limit=4, switch_labels="finetuning"
    )
    zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    with fi.fine_tuned(model, prompts, lr=0.1) as tuned:
        table = fi.compare(prompts, zsl, icl, fi.observe(tuned, prompts))
    assert "sim_aou" in set(table["metric"])
    assert "kendall_tokens" not in set(table["metric"])


def test_the_base_model_is_untouched_by_fine_tuning_also_if_it_fails():
    model = fi.load_model("demo", device="cpu")
    before = {name: weight.clone() for name, weight in model.lm.named_parameters()}
    prompts = fi.build_prompts(model, "demo_sentiment", k=3, limit=4)
    zsl = fi.observe(model, prompts)
    with fi.fine_tuned(model, prompts, lr=0.5) as tuned:
        assert not torch.equal(fi.observe(tuned, prompts).attention_output, zsl.attention_output)
        assert torch.equal(fi.observe(model, prompts).attention_output, zsl.attention_output)
    with pytest.raises(fi.UserError, match="NaN or infinite"), fi.fine_tuned(model, prompts, lr=1e38):
        pass
    assert all(torch.equal(before[name], weight) for name, weight in model.lm.named_parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no learning rate"),
        ({"lr": 0.1, "loss_on": "label"}, "go into build_prompts"),
        ({"lr": True}, "must be a number"),
        ({"lr": 0.1, "method": "none"}, "trains nothing"),
        ({"lr": 0.1, "method": "gdd"}, "did you mean gd"),
    ],
)
def test_mistakes_in_a_notebook_are_explained(settings, message):
    model = fi.load_model("demo", device="cpu")
    prompts = fi.build_prompts(model, "demo_sentiment", k=2, limit=2)
    with pytest.raises(fi.UserError, match=message), fi.fine_tuned(model, prompts, **settings):
        pass


def test_observations_in_a_file_give_the_same_table(notebook, tmp_path):
    model = fi.load_model("demo", device="cpu")
    prompts = fi.build_prompts(model, "demo_sentiment", k=4, limit=6)
    seen = {"zsl": fi.observe(model, prompts), "icl": fi.observe(model, prompts, in_context=True)}
    save_observations(tmp_path / "seen.safetensors", seen)
    _, again = load_observations(tmp_path / "seen.safetensors")
    assert_same(fi.compare(prompts, **seen), fi.compare(prompts, **again))
