"""The probe sees what attention computed, and changes nothing."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from fairseq_icl.observing.probe import AttentionProbe, attention_modules
from tests.observing.tiny import VOCABULARY, tiny_model

TOKENS = torch.arange(4, 4 + 3 * 7).view(3, 7) % VOCABULARY
SEQUENCES, POSITIONS = torch.tensor([2, 0, 0]), torch.tensor([6, 3, 0])


@pytest.mark.parametrize("python_path", [False, True])
@torch.no_grad()
def test_outputs_stay_the_same_to_the_bit(python_path: bool) -> None:
    model = tiny_model()
    for module in attention_modules(model.decoder):
        module.skip_embed_dim_check = python_path
    plain = model(TOKENS)[0]
    with AttentionProbe(model.decoder, SEQUENCES, POSITIONS) as probe:
        probed = model(TOKENS)[0]
    assert torch.equal(plain, probed)
    assert probe.record().scores.shape == (3, 3, 4, 7)


@torch.no_grad()
def test_nothing_is_recorded_after_it_is_closed() -> None:
    model = tiny_model()
    with AttentionProbe(model.decoder, SEQUENCES, POSITIONS) as probe:
        model(TOKENS)
    first = probe.record()
    model(TOKENS + 1)
    assert torch.equal(first.output, probe.record().output)
    assert not any(module._forward_hooks for module in attention_modules(model.decoder))


@pytest.mark.parametrize("python_path", [False, True])
@torch.no_grad()
def test_record_is_what_attention_computes(python_path: bool) -> None:
    model = tiny_model()
    inputs, outputs = [], []

    def look(_: object, args: tuple, kwargs: dict[str, Tensor], result: tuple) -> None:
        inputs.append(kwargs["query"])
        outputs.append(result[0])

    for module in attention_modules(model.decoder):
        module.skip_embed_dim_check = python_path
        module.register_forward_hook(look, with_kwargs=True)
    with AttentionProbe(model.decoder, SEQUENCES, POSITIONS) as probe:
        model(TOKENS)
    record = probe.record()
    for layer, module in enumerate(attention_modules(model.decoder)):
        query = module.q_proj(inputs[layer]) * 4**-0.5  # (T, B, d), head_dim is 4
        keys = module.k_proj(inputs[layer])
        for seen, (sequence, position) in enumerate(zip(SEQUENCES, POSITIONS, strict=True)):
            q, k = query[position, sequence], keys[:, sequence]
            scores = torch.stack([k[:, head : head + 4] @ q[head : head + 4] for head in range(0, 16, 4)])
            torch.testing.assert_close(record.scores[seen, layer], scores, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(record.query[seen, layer], q, rtol=1e-5, atol=1e-6)
            assert torch.equal(record.output[seen, layer], outputs[layer][position, sequence])


@torch.no_grad()
def test_dual_numbers_pass_through() -> None:
    model = tiny_model().double()
    module = attention_modules(model.decoder)[0]
    weight, direction = module.k_proj.weight, torch.randn_like(module.k_proj.weight)

    def seen_with(key_weight: Tensor) -> tuple[Tensor, ...]:
        module.k_proj._parameters["weight"] = key_weight
        with AttentionProbe(model.decoder, SEQUENCES, POSITIONS) as probe:
            model.decoder(TOKENS)
        return probe.record()[:3]  # no heads were asked for

    step = 3e-3  # fairseq computes gelu in single precision, which a smaller step would show
    above, below = seen_with(weight + step * direction), seen_with(weight - step * direction)
    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        duals = seen_with(forward_ad.make_dual(weight.detach(), direction))
        tangents = [forward_ad.unpack_dual(dual).tangent for dual in duals]
    for tangent, up, down in zip(tangents, above, below, strict=True):
        torch.testing.assert_close(tangent, (up - down) / (2 * step), rtol=1e-2, atol=1e-2)
