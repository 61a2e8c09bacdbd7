"""Architecture and weights come from the checkpoint; what learns is remembered and can be taken back."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary

from fairseq_icl.errors import UserError
from fairseq_icl.models.checkpoints import read_checkpoint
from fairseq_icl.models.files import load_dictionary, save_random_model
from fairseq_icl.models.pretrained_lm import LINEARIZED_MARK, PretrainedLM, call_with_weights, load_decoder
from tests.world import World, make_world, save_model


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("pretrained") / "w")


@pytest.fixture(scope="module")
def dictionary(world: World) -> Dictionary:
    return load_dictionary(world.dictionary)


def logits(decoder: torch.nn.Module) -> torch.Tensor:
    return decoder.eval()(torch.tensor([[0, 5, 6, 7]]))[0]


def test_args_and_cfg_checkpoints_give_the_same_model(world: World, dictionary: Dictionary, tmp_path: Path):
    save_model(tmp_path / "cfg.pt", dictionary, style="cfg")
    assert torch.equal(
        logits(load_decoder(world.model, dictionary)), logits(load_decoder(tmp_path / "cfg.pt", dictionary))
    )


def test_half_precision_file_is_loaded_in_single_precision(world: World, dictionary: Dictionary, tmp_path: Path):
    state = dict(read_checkpoint(world.model))
    state["model"] = {name: tensor.half() for name, tensor in state["model"].items()}
    torch.save(state, tmp_path / "half.pt")
    decoder = load_decoder(tmp_path / "half.pt", dictionary)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.float32}
    assert torch.allclose(logits(decoder), logits(load_decoder(world.model, dictionary)), atol=1e-2)


def test_weights_that_xglm_does_not_use_are_left_aside_and_others_refused(
    world: World, dictionary: Dictionary, tmp_path: Path
):
    state = dict(read_checkpoint(world.model))
    state["model"] |= {"decoder.mevo_layer.proj_weight": torch.zeros(2)}
    torch.save(state, tmp_path / "xglm.pt")
    assert torch.equal(
        logits(load_decoder(tmp_path / "xglm.pt", dictionary)), logits(load_decoder(world.model, dictionary))
    )
    state["model"] |= {"decoder.other_layer.weight": torch.zeros(2)}
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(UserError, match=r"unknown: other_layer\.weight"):
        load_decoder(tmp_path / "other.pt", dictionary)


def test_missing_version_marker_does_not_lose_the_final_norm(world: World, dictionary: Dictionary, tmp_path: Path):
    state = dict(read_checkpoint(world.model))
    state["model"] = {name: tensor for name, tensor in state["model"].items() if name != "decoder.version"}
    torch.save(state, tmp_path / "unmarked.pt")
    assert torch.equal(
        logits(load_decoder(tmp_path / "unmarked.pt", dictionary)), logits(load_decoder(world.model, dictionary))
    )


@pytest.mark.parametrize(
    ("init", "kept"),
    [
        ("untrained", set()),
        ("layer-norms", {"self_attn_layer_norm", "final_layer_norm"}),
        ("trained-embeddings", {"self_attn_layer_norm", "final_layer_norm", "embed_tokens", "output_projection"}),
    ],
)
def test_baselines_keep_exactly_the_named_parts(world: World, dictionary: Dictionary, init: str, kept: set[str]):
    original = load_decoder(world.model, dictionary).state_dict()
    decoder = load_decoder(world.model, dictionary, init=init, final_norm="lost", seed=4)
    for name, tensor in decoder.state_dict().items():
        if name != "version" and "_float_tensor" not in name:
            part = name.split(".")[2] if name.startswith("layers.") else name.split(".")[0]
            assert torch.equal(tensor, original[name]) == (part in kept), name
    assert (decoder.layer_norm is None) == (init != "untrained")


def test_final_norm_of_a_baseline_can_be_kept(world: World, dictionary: Dictionary):
    decoder = load_decoder(world.model, dictionary, init="layer-norms", final_norm="kept")
    assert torch.equal(decoder.layer_norm.weight, load_decoder(world.model, dictionary).layer_norm.weight)


def test_random_weights_follow_the_seed_and_leave_the_generator_alone(world: World, dictionary: Dictionary):
    torch.manual_seed(9)
    one = logits(load_decoder(world.model, dictionary, init="untrained", seed=1))
    drawn = torch.rand(1)
    two = logits(load_decoder(world.model, dictionary, init="untrained", seed=1))
    three = logits(load_decoder(world.model, dictionary, init="untrained", seed=2))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)
    torch.manual_seed(9)
    assert torch.equal(drawn, torch.rand(1))


def test_only_keys_and_values_learn_by_default(world: World, dictionary: Dictionary):
    model = PretrainedLM(load_decoder(world.model, dictionary))
    model.freeze_all_but("self_attn.k_proj,self_attn.v_proj", biases=True)
    assert {name.split("self_attn.")[1] for name in model.trained_names} == {
        f"{part}_proj.{kind}" for part in "kv" for kind in ("weight", "bias")
    }
    model.freeze_all_but("self_attn.k_proj", biases=False)
    assert {name.split("self_attn.")[1] for name in model.trained_names} == {"k_proj.weight"}
    with pytest.raises(UserError, match="no parameter of the model has x_proj in its name"):
        model.freeze_all_but("x_proj", biases=True)


def test_trained_part_alone_is_saved_and_comes_back_over_the_base(world: World, dictionary: Dictionary):
    model = PretrainedLM(load_decoder(world.model, dictionary))
    model.freeze_all_but("self_attn.v_proj", biases=True)
    base = logits(model.decoder)
    assert not model.base_state
    with torch.no_grad():
        for name in model.trained_names:
            model.get_parameter(name).add_(0.5)
    trained = logits(model.decoder)
    state = model.state_dict()
    assert set(state) == set(model.trained_names)

    other = PretrainedLM(load_decoder(world.model, dictionary))
    other.freeze_all_but("self_attn.v_proj", biases=True)
    other.load_state_dict(state)
    assert torch.equal(logits(other.decoder), trained)
    assert other.base_state
    assert torch.equal(other.evaluate(lambda: logits(other.decoder), other.base_state), base)
    assert torch.equal(logits(other.decoder), trained)
    assert torch.equal(model.evaluate(lambda: logits(model.decoder), other.base_state), base)


def test_base_state_follows_the_model_to_another_precision(world: World, dictionary: Dictionary):
    model = PretrainedLM(load_decoder(world.model, dictionary))
    model.freeze_all_but("self_attn.v_proj", biases=True)
    model.load_state_dict(model.state_dict())
    assert {tensor.dtype for tensor in model.double().base_state.values()} == {torch.float64}


def test_an_exception_under_other_weights_leaves_the_own_ones(world: World, dictionary: Dictionary):
    model = PretrainedLM(load_decoder(world.model, dictionary))
    name = "decoder.layers.0.fc1.weight"
    before, weights = model.get_parameter(name), {name: torch.zeros_like(model.get_parameter(name))}

    def fail() -> None:
        assert not model.decoder.layers[0].fc1.weight.any()
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        call_with_weights(model, weights, fail)
    assert model.get_parameter(name) is before
    assert before.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder.nonsense": torch.zeros(1)}, "trained decoder.nonsense, which the base model does not have"),
        (
            {"decoder.layers.0.fc1.bias": torch.zeros(3)},
            r"shape \(3,\) in the checkpoint and \(32,\) in the base",
        ),
        ({"decoder.layers.0.fc1.bias": torch.full((32,), torch.nan)}, "NaN or infinite .*lower --lr"),
        ({"decoder.layers.0.fc1.bias": [0.0] * 32}, "no tensor of weights"),
        ({LINEARIZED_MARK: torch.ones(1)}, "linearized model: add --linearize"),
    ],
)
def test_finetuned_weights_that_do_not_fit_are_refused_and_change_nothing(
    world: World, dictionary: Dictionary, change: dict, message: str
):
    model = PretrainedLM(load_decoder(world.model, dictionary))
    before = logits(model.decoder)
    with pytest.raises(UserError, match=message):
        model.load_state_dict({"decoder.layers.0.fc2.bias": torch.ones(16), **change})
    assert not model.base_state
    assert torch.equal(logits(model.decoder), before)


def test_wrong_dictionary_is_explained(world: World):
    with pytest.raises(UserError, match=r"model has 48 token embeddings, but the dictionary has 4 symbols"):
        load_decoder(world.model, Dictionary())


def test_weights_that_are_not_numbers_are_named(world: World, dictionary: Dictionary, tmp_path: Path):
    state = dict(read_checkpoint(world.model))
    state["model"] = {name: tensor.clone() for name, tensor in state["model"].items()}
    state["model"]["decoder.layers.1.fc1.weight"][0, 0] = float("nan")
    torch.save(state, tmp_path / "nan.pt")
    with pytest.raises(UserError, match=r"decoder\.layers\.1\.fc1\.weight holds NaN or infinite weights"):
        load_decoder(tmp_path / "nan.pt", dictionary)


def test_missing_weights_are_named(world: World, dictionary: Dictionary, tmp_path: Path):
    state = dict(read_checkpoint(world.model))
    state["model"] = {name: tensor for name, tensor in state["model"].items() if "layers.2.fc2" not in name}
    torch.save(state, tmp_path / "missing.pt")
    with pytest.raises(UserError, match=r"missing: layers\.2\.fc2\.bias and 1 more"):
        load_decoder(tmp_path / "missing.pt", dictionary)


MEASURE = """
import resource, sys
import torch
from fairseq_icl.models import pretrained_lm
from fairseq_icl.models.files import load_dictionary

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

dictionary = load_dictionary(sys.argv[2])
pretrained_lm.MAPPED_BYTES = 2**23
before = peak()
dtype = getattr(torch, sys.argv[3])
sizes = [p.nbytes for p in pretrained_lm.load_decoder(sys.argv[1], dictionary, dtype=dtype).parameters()]
print(peak() - before, sum(sizes), max(sizes))
"""


@pytest.mark.parametrize(("dtype", "size"), [("float32", 190), ("half", 95)])
def test_loading_half_precision_takes_little_more_than_the_weights(
    world: World, tmp_path: Path, dtype: str, size: int
) -> None:
    shape = {"layers": 16, "width": 512, "heads": 8, "ffn": 2048, "vocabulary": 100}
    save_random_model(tmp_path / "model.pt", load_dictionary(world.dictionary), shape)
    assert {t.dtype for t in read_checkpoint(tmp_path / "model.pt")["model"].values() if t.dim() == 2} == {torch.half}
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "model.pt"), str(world.dictionary), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    grown, weights, largest = map(int, done.stdout.split())
    assert weights > size * 2**20
    assert grown < 1.1 * weights + largest + 8 * 2**20 + 20 * 2**20  # what stays mapped, and what Python itself takes
