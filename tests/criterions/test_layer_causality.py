"""Layer causality itself: what a layer learns depends on no layer above it."""

import pytest
import torch

from tests.criterions.tiny_model import build_model, criterion, gradients, sample_of

TOKENS = [[0, 5, 7, 4, 9, 11, 6], [0, 8, 6, 10, 2]]
MODEL = build_model(dtype=torch.float32, train_all=True)
LAYER_PARAMETERS = [name for name, _ in MODEL.named_parameters() if name.startswith("decoder.layers.")]


def layer_of(name: str) -> int:
    return int(name.split(".")[2])


@pytest.mark.parametrize("point", ["layer", "attention"])
@pytest.mark.parametrize("perturbed", [name for name in LAYER_PARAMETERS if layer_of(name) > 0])
def test_no_parameter_changes_the_gradients_of_layers_below_it(perturbed: str, point: str):
    model, sample = build_model(dtype=torch.float32, train_all=True), sample_of(TOKENS)
    before = gradients(model, criterion(layer_causal_point=point)(model, sample)[0])
    with torch.no_grad():
        parameter = model.get_parameter(perturbed)
        parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    after = gradients(model, criterion(layer_causal_point=point)(model, sample)[0])
    below = [name for name in before if layer_of(name) < layer_of(perturbed)]
    own_or_above = [name for name in before if layer_of(name) >= layer_of(perturbed)]
    assert below
    for name in below:
        assert torch.equal(before[name], after[name]), name  # to the bit
    # The softmax of attention does not see k_proj.bias, and right after attention the top layer's rest has no effect.
    if point == "layer" and not perturbed.endswith("k_proj.bias"):
        assert any(not torch.equal(before[name], after[name]) for name in own_or_above)


@pytest.mark.parametrize("point", ["layer", "attention", "attention_output"])
def test_joint_gradient_is_the_sum_over_single_layer_runs(point: str):
    model, sample = build_model(train_all=True), sample_of(TOKENS)
    joint = gradients(model, criterion(layer_causal_point=point)(model, sample)[0])
    total: dict[str, torch.Tensor] = {}
    for layer in range(3):
        single = gradients(model, criterion(layer_causal_point=point, layers=str(layer))(model, sample)[0])
        assert {layer_of(name) for name in single} == {layer}
        for name, gradient in single.items():
            total[name] = total.get(name, 0) + gradient
    torch.testing.assert_close(total, joint)


def test_vanilla_gradients_are_not_layer_causal():
    """The test above would notice: under the ordinary loss a layer's gradient does depend on the layers above."""
    model, sample = build_model(train_all=True), sample_of(TOKENS)
    loss = torch.nn.functional.cross_entropy
    target = sample["target"].flatten()

    def vanilla() -> dict[str, torch.Tensor]:
        logits = model(**sample["net_input"])[0].flatten(0, 1)
        return gradients(model, loss(logits, target, ignore_index=1, reduction="sum"))

    before = vanilla()
    with torch.no_grad():
        model.decoder.layers[2].fc1.weight += 0.5
    after = vanilla()
    name = "decoder.layers.0.self_attn.v_proj.weight"
    assert not torch.equal(before[name], after[name])
