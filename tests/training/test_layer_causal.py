"""Losses behind a frozen unembedding: exact, in blocks, with no logits kept; and which layers get one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fairseq_icl.errors import UserError
from fairseq_icl.training import layer_causal
from fairseq_icl.training.layer_causal import check_decoder, decoder_of, parse_layers, unembedding_losses
from tests.criterions.tiny_model import build_model


@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize("layers", [1, 3])
def test_losses_and_gradients_are_those_of_cross_entropy(tokens: int, layers: int):
    generator = torch.Generator().manual_seed(tokens)
    unembedding = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    target = torch.randint(50, (tokens,), generator=generator)
    features = torch.randn(layers, tokens, 8, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(layers, tokens, generator=generator, dtype=torch.float64)
    expected = torch.stack([cross_entropy(x @ unembedding.T, target, reduction="none") for x in features])
    [expected_gradient] = torch.autograd.grad((expected * weight).sum(), features)
    found = unembedding_losses(unembedding, target, tuple(features))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad((found * weight).sum(), features)[0], expected_gradient)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_result_does_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, precision: float):
    generator = torch.Generator().manual_seed(1)
    unembedding = (10 * torch.randn(50, 8, generator=generator)).to(dtype)  # logits up to hundreds
    target = torch.randint(50, (7,), generator=generator)
    features = torch.randn(2, 7, 8, generator=generator).to(dtype).requires_grad_()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        losses = unembedding_losses(unembedding, target, tuple(features))
        return losses, torch.autograd.grad(losses.sum(), features)[0]

    whole = run()
    assert bool(whole[0].isfinite().all())
    monkeypatch.setattr(layer_causal, "LEAST_BLOCK", 8)  # seven blocks, the last with two symbols
    monkeypatch.setattr(layer_causal, "LOGITS_AT_A_TIME", 1)
    torch.testing.assert_close(run(), whole, rtol=0, atol=precision)  # weights and gradients are of the order of ten


def test_only_one_block_of_logits_is_alive(monkeypatch: pytest.MonkeyPatch):
    vocabulary, dim, layers, tokens, block = 20_000, 8, 12, 16, 2_000
    monkeypatch.setattr(layer_causal, "LEAST_BLOCK", block)
    monkeypatch.setattr(layer_causal, "LOGITS_AT_A_TIME", 1)
    unembedding, target = torch.randn(vocabulary, dim), torch.arange(tokens)
    features = tuple(torch.randn(tokens, dim, requires_grad=True) for _ in range(layers))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        unembedding_losses(unembedding, target, features).sum().backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = torch.tensor([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]).cumsum(0)
    logits = block * layers * tokens * 4
    assert logits <= alive.max() < 1.2 * logits


@pytest.mark.parametrize(
    ("text", "layers"),
    [(None, range(12)), ("0-11", range(12)), ("3", range(3, 4)), ("2-", range(2, 12)), ("4-5", range(4, 6))],
)
def test_layer_ranges(text: str | None, layers: range):
    assert parse_layers(text, 12) == layers


@pytest.mark.parametrize("text", ["12", "0-12", "5-4", "-3", "a", "", "1,2", "1-2-3", "9" * 30])
def test_bad_layer_range_is_told_in_one_line(text: str):
    with pytest.raises(UserError, match=r"^layers=") as error:
        parse_layers(text, 12)
    assert "\n" not in str(error.value)


def test_decoder_is_found_inside_wrappers():
    model = build_model()
    assert decoder_of(SimpleNamespace(module=SimpleNamespace(), decoder=model.decoder)) is model.decoder
    assert decoder_of(nn.DataParallel(nn.DataParallel(model))) is model.decoder


@pytest.mark.parametrize("head", [nn.Linear(2, 2, bias=True), nn.Identity()])
def test_output_layer_that_is_no_plain_matrix_is_refused(head: nn.Module):
    decoder = SimpleNamespace(adaptive_softmax=None, output_projection=head, layers=nn.ModuleList())
    with pytest.raises(UserError, match="output layer is not one plain matrix"):
        check_decoder(decoder, None)
