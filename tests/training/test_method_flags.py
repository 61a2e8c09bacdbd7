"""What a method's flags fix is part of its settings: in Python, in the keys of cells, and in the command they name."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fairseq_icl as fi
from fairseq_icl.errors import UserError
from fairseq_icl.models.checkpoints import read_checkpoint
from fairseq_icl.training.methods import Method, _methods, name_of_method, register_method
from tests.commands import PLUGIN, run, succeeded

LAST_VALUES = "layers.1.self_attn.v_proj,layers.2.self_attn.v_proj"
FLAGS = (
    "--criterion",
    "layer_causal_ce",
    "--train-parameters",
    LAST_VALUES,
    "--biases",
    "frozen",
    "--clip-norm",
    "1e-1",
)


@pytest.fixture
def mine() -> Iterator[Method]:
    yield register_method(Method("mine", "values of two layers", FLAGS))
    _methods.pop("mine")


def test_flags_are_settings_and_nonsense_is_refused(mine: Method):
    assert mine.settings == {"train_parameters": LAST_VALUES, "biases": "frozen", "clip_norm": 0.1}
    for flags, told in (
        (("--criterion", "cross_entropy", "gd"), "gd follows no flag"),
        (("--criterion", "cross_entropy", "--biases", "free"), "biases=free: choose from trained, frozen"),
        (("--criterion", "cross_entropy", "--loss-on", "label"), "--loss-on is not of training; give loss_on=VALUE"),
    ):
        with pytest.raises(UserError, match=told):
            Method("wrong", "", flags)


def test_a_third_partys_method_trains_the_same_in_python_in_a_run_and_by_the_command(mine: Method, tmp_path: Path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = fi.load_model("demo", device="cpu")
    prompts = fi.build_prompts(model, "demo_sentiment", k=4, seed=1, limit=6)
    with fi.fine_tuned(model, prompts, method="mine", lr=0.3) as tuned:
        pass
    torch.set_num_threads(threads)
    assert set(tuned.weights or ()) == {f"decoder.layers.{n}.self_attn.v_proj.weight" for n in (1, 2)}
    with pytest.raises(UserError, match="biases=trained: method mine has biases=frozen; leave it out"):
        fi.fine_tuned(model, prompts, method="mine", lr=0.3, biases="trained").__enter__()
    with pytest.raises(UserError, match="no parameter of the model has nonsense in its name"):
        fi.fine_tuned(model, prompts, lr=0.3, train_parameters="self_attn.v_proj,nonsense").__enter__()

    text = f"from fairseq_icl.training.methods import Method, register_method\nregister_method({mine!r})\n"
    (tmp_path / "theirs.py").write_text(text)
    chosen = ["experiment=demo", "dataset=demo_sentiment", "seed=1", "init=pretrained", "k=4", "limit=6", "lr=0.3"]
    words = [*chosen, "method=mine", "plugins=[theirs]", "out=run", "--quiet"]
    succeeded(run("fairseq-icl", "replicate", *words, cwd=tmp_path))
    described = json.loads(next(tmp_path.glob("run/cells/*/cell.json")).read_text())
    assert described["cell"]["settings"]["train_parameters"] == LAST_VALUES
    assert described["learns"] == "2 tensors, layers 1 to 2, 32,768 parameters"
    command = shlex.split(described["command"])
    command[command.index("fairseq_icl")] = str(PLUGIN)
    command.remove("--no-save")
    trained = succeeded(run(*command, "--cpu", "--save-dir", tmp_path, "--no-epoch-checkpoints"))
    assert "2 tensors, layers 1 to 2, 32,768 parameters learn" in trained.text
    checkpoint = read_checkpoint(tmp_path / "checkpoint_last.pt")
    assert set(checkpoint["model"]) == set(tuned.weights or ())
    assert all(torch.equal(checkpoint["model"][name], weight) for name, weight in (tuned.weights or {}).items())
    assert name_of_method(checkpoint["cfg"], linearized=False) == "mine"


@pytest.fixture(scope="module")
def demo():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = fi.load_model("demo")
    yield model, fi.build_prompts(model, "demo_sentiment", k=4, seed=1, limit=6)
    torch.set_num_threads(threads)


def weights_of(demo, method: str, **settings):
    with fi.fine_tuned(*demo, method=method, lr=0.3, **settings) as tuned:
        return dict(tuned.weights)


def test_fine_tuning_after_no_epoch_of_alignment_is_gd_to_the_bit_and_after_one_it_is_not(demo):
    plain, none, one = (
        weights_of(demo, "gd"),
        weights_of(demo, "align_then_train", align_epochs=0),
        weights_of(demo, "align_then_train", align_epochs=1),
    )
    assert plain.keys() == none.keys() == one.keys()
    assert all(torch.equal(plain[name], none[name]) for name in plain)
    assert not any(torch.equal(plain[name], one[name]) for name in plain if name.endswith("v_proj.weight"))


def test_lora_of_full_rank_is_gd_and_of_a_lower_one_adds_a_matrix_of_that_rank(demo):
    base = {name: parameter.detach() for name, parameter in demo[0].lm.named_parameters()}
    plain = weights_of(demo, "gd", biases="frozen")
    width = demo[0].lm.decoder.embed_dim
    full, low = (weights_of(demo, "lora", lora_rank=rank) for rank in (width, 2))
    assert plain.keys() == full.keys() == low.keys()
    assert all(torch.equal(plain[name], full[name]) for name in plain)
    ranks = {int(torch.linalg.matrix_rank((low[name] - base[name]).double(), rtol=1e-4)) for name in low}
    assert ranks == {2}


def test_a_step_of_lora_is_autograd_on_its_factor():
    """W + B A with B = 0: one step on B."""
    from fairseq_icl.training.gradients import LowRank
    from tests.training.small_models import optimizer_of, small_model

    torch.manual_seed(0)
    low = LowRank(3, seed=5)
    weight, x, y = torch.randn(6, 8).double(), torch.randn(10, 8).double(), torch.randn(10, 6).double()
    rows, factor = low.rows(0, 8), torch.zeros(6, 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(rows @ rows.T, torch.eye(3).double(), rtol=0, atol=1e-12)
    (of_factor,) = torch.autograd.grad((x @ (weight + factor @ rows).T - y).square().sum(), factor)
    learning = weight.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad((x @ learning.T - y).square().sum(), learning)
    model = small_model("fairseq")
    low.project(optimizer_of(model), [gradient])
    torch.testing.assert_close(gradient, of_factor @ rows, rtol=0, atol=1e-10)
    with pytest.raises(UserError, match="needs plain gradient descent"):
        low.project(optimizer_of(model, momentum=0.9), [gradient])
