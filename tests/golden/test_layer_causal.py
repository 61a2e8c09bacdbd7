"""Layer-causal fine-tuning gives the authors' losses, gradient norms and final weights."""

from types import SimpleNamespace

import numpy as np
import torch

from fairseq_icl.criterions.layer_causal_ce import LayerCausalCrossEntropy
from fairseq_icl.models.pretrained_lm import PretrainedLM, load_decoder
from tests.criterions.tiny_model import sample_of
from tests.golden.folder import Golden

PARTS = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
RELATIVE = 1e-5
ROUNDING = 1e-6  # absolute: single components near zero, and k_proj.bias, whose gradient is zero but for rounding


def parameters_of(model: PretrainedLM, part: str) -> list[torch.nn.Parameter]:
    return [layer.self_attn.get_parameter(part) for layer in model.decoder.layers]


def test_training_gives_the_authors_losses_gradients_and_weights(golden: Golden, golden_case: tuple[str, int]) -> None:
    task, permutation = golden_case
    model = PretrainedLM(load_decoder(golden.root / "model" / "model.pt", golden.dictionary)).requires_grad_(False)
    trained = [parameter.requires_grad_() for part in PARTS for parameter in parameters_of(model, part)]
    optimizer = torch.optim.SGD(trained, lr=golden.setting("lr", task))
    criterion = LayerCausalCrossEntropy(SimpleNamespace(target_dictionary=golden.dictionary))
    expected = np.load(golden.root / "ft" / f"{task}_p{permutation}_layer_causal.npz")

    for step, sequence in enumerate(golden.tokens(task, permutation)["ft"]["src_tokens"]):
        optimizer.zero_grad()
        loss, sample_size, _ = criterion(model, sample_of([sequence]))
        (loss / sample_size).backward()
        assert sample_size == expected["step_sample_size"][step]
        np.testing.assert_allclose(loss.item(), expected["step_loss_sum"][step], rtol=RELATIVE)
        for part in PARTS:
            gradient = torch.stack([parameter.grad for parameter in parameters_of(model, part)])  # (L, d, d) or (L, d)
            if step == 0:
                np.testing.assert_allclose(gradient, expected[f"step0_grad.{part}"], rtol=RELATIVE, atol=ROUNDING)
            norms, tolerance = gradient.flatten(1).norm(dim=1), ROUNDING if part == "k_proj.bias" else 0
            np.testing.assert_allclose(norms, expected[f"grad_norm.{part}"][step], rtol=RELATIVE, atol=tolerance)
        optimizer.step()

    for part in PARTS:
        final = torch.stack([parameter.detach() for parameter in parameters_of(model, part)])
        np.testing.assert_allclose(final, expected[f"final.{part}"], rtol=RELATIVE, atol=ROUNDING)
