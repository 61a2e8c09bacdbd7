"""`Model`: one module under several sets of weights."""

from pathlib import Path

import pytest
import torch

from fairseq_icl.errors import UserError
from fairseq_icl.models import Model, load_from, load_model
from fairseq_icl.models.files import find_files
from fairseq_icl.settings import Settings
from tests.world import World, make_world

NAME = "decoder.layers.1.fc2.bias"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("models") / "w")


def logits(model: Model) -> torch.Tensor:
    tokens = torch.tensor([[0, 5, 6, 7]], device=next(model.lm.parameters()).device)
    return model.evaluate(lambda: model.lm.decoder(tokens)[0]).detach()


def test_loaded_model_is_in_fp32_and_ready_to_observe(world: World):
    model = load_model(world.model, bpe=None, device="cpu")
    assert {parameter.dtype for parameter in model.lm.parameters()} == {torch.float32}
    assert not model.lm.training
    assert (model.name, model.init, model.method, model.weights) == ("model", "pretrained", "none", None)
    assert model.writing is model.files.writing


def test_weights_stand_in_while_they_are_evaluated_and_no_longer(world: World):
    base = load_model(world.model, bpe=None, name="mine")
    other = base.under({NAME: base.lm.get_parameter(NAME).detach() + 1}, "gd")
    assert (other.name, other.method, base.method) == ("mine", "gd", "none")
    before = logits(base)
    changed = logits(other)
    assert not torch.allclose(changed, before)
    assert torch.equal(logits(base), before)
    assert torch.equal(logits(other.under(None)), before)
    assert other.under(None).method == "none"


def test_records_of_training_are_not_handed_on_to_other_weights(world: World):
    model = load_model(world.model, bpe=None)
    tuned = Model(model.lm, model.files, training_queries={1: torch.zeros(1)}, method="gd")
    assert tuned.under({}).training_queries is None


def test_baselines_follow_the_seed(world: World):
    files = find_files(world.model, bpe=None)
    one, same, other = (load_from(files, Settings(init="untrained", seed=seed)) for seed in (3, 3, 4))
    assert (one.init, one.seed) == ("untrained", 3)
    assert torch.equal(logits(one), logits(same))
    assert not torch.equal(logits(one), logits(other))
    assert load_model(world.model, bpe=None, init="layer-norms").lm.decoder.layer_norm is None
    assert load_model(world.model, bpe=None, init="layer-norms", final_norm="kept").lm.decoder.layer_norm is not None


def test_wrong_arguments_are_one_line(world: World, tmp_path: Path):
    with pytest.raises(UserError, match="init=random: choose from pretrained, untrained"):
        load_model(world.model, bpe=None, init="random")
    with pytest.raises(UserError, match="seed=-1: must be at least 0"):
        load_model(world.model, bpe=None, seed=-1)
    with pytest.raises(UserError, match="no such checkpoint"):
        load_model(tmp_path)
    with pytest.raises(UserError, match="device=auto: a model runs on one device and is not spread over several; name"):
        load_model(world.model, bpe=None, device="auto")
