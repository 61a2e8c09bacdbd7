"""The statements on a decoder of fairseq's kind, with random weights."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from fairseq.modules import TransformerDecoderLayer
from torch import Tensor, nn

from fairseq_icl.errors import UserError
from fairseq_icl.metrics.vectors import relative_error
from fairseq_icl.theory.linear_attention import Heads, explain, softmax_attention, softmax_change
from fairseq_icl.theory.on_decoder import (
    antisymmetric_share,
    attention_change,
    implicit_updates,
    run_on_decoder,
    update_fields,
)

WIDTH, LAYERS, HEADS = 12, 3, 2
START = [0]
CONTEXT = [0, 5, 6, 1, 7, 2, 1, 9, 3]
QUERIES = [[4, 5, 6], [8, 2], [3, 3, 7, 1]]


def heads_of(module: Any, inputs: Tensor) -> Heads:
    """Attention inputs (tokens, d), after the layer's norm, projected and split into heads."""
    parts = (projection(inputs) for projection in (module.q_proj, module.k_proj, module.v_proj))
    return Heads(*(part.unflatten(-1, (HEADS, -1)).transpose(0, 1) for part in parts))


class Decoder(nn.Module):
    """Token and position embeddings and fairseq's own layers."""

    layers: Any  # a ModuleList, whose items a type checker knows too little of

    def __init__(self, norm_in_front: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        settings = Namespace(
            decoder_embed_dim=WIDTH,
            decoder_attention_heads=HEADS,
            decoder_ffn_embed_dim=20,
            decoder_normalize_before=norm_in_front,
            activation_fn="relu",
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
        )
        self.tokens, self.positions = nn.Embedding(10, WIDTH), nn.Embedding(30, WIDTH)
        self.layers = nn.ModuleList(TransformerDecoderLayer(settings, no_encoder_attn=True) for _ in range(LAYERS))
        self.double().eval()

    def extract_features(self, tokens: Tensor, _: None) -> Tensor:
        length = tokens.shape[1]
        x = (self.tokens(tokens) + self.positions(torch.arange(length))).transpose(0, 1)
        future = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, self_attn_mask=future)[0]
        return x

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        return (self.extract_features(tokens, None).transpose(0, 1) @ self.tokens.weight.T,)


@pytest.mark.parametrize("norm_in_front", [True, False])
def test_implicit_update_is_exact_in_every_block(norm_in_front: bool) -> None:
    decoder = Decoder(norm_in_front)
    before = decoder.extract_features(torch.tensor([CONTEXT]), None)
    seen = implicit_updates(decoder, START, [CONTEXT[:4], CONTEXT[:7], CONTEXT], QUERIES[0])
    assert float(seen.error.max()) < 1e-10
    assert float(seen.unmoved.min()) > 1e-3
    assert seen.rank == [1] * LAYERS
    assert seen.norms.shape == (LAYERS, 3)
    assert [update.shape for update in seen.updates] == [(20, WIDTH)] * LAYERS
    assert torch.equal(decoder.extract_features(torch.tensor([CONTEXT]), None), before)


def test_attention_change_is_what_the_layer_itself_computes() -> None:
    decoder = Decoder()
    seen = attention_change(decoder, START, CONTEXT, QUERIES)
    assert seen.share.shape == seen.direct.cosine.shape == (LAYERS, HEADS)
    assert ((seen.share > 0) & (seen.share < 1)).all()
    # The first layer by hand, for one query: its inputs are the embeddings, normalised.
    sequence = torch.tensor([*CONTEXT, *QUERIES[0]])
    with torch.no_grad():
        x = decoder.layers[0].self_attn_layer_norm(decoder.tokens(sequence) + decoder.positions(torch.arange(12)))
        heads = heads_of(decoder.layers[0].self_attn, x)
    demonstrations = Heads(*(part[:, 1:9] for part in heads))
    own = Heads(*(torch.cat([part[:, :1], part[:, 9:]], dim=1) for part in heads))
    last = heads.query[:, -1:]
    linear = last @ demonstrations.key.transpose(1, 2) @ demonstrations.value
    by_hand = explain(softmax_change(last, own, demonstrations).change, linear)
    alone = attention_change(decoder, START, CONTEXT, QUERIES[:1])
    assert relative_error(alone.direct.cosine[0], by_hand.cosine) < 1e-10
    assert relative_error(alone.direct.relative_error[0], by_hand.relative_error) < 1e-10


def test_heads_give_the_modules_own_output() -> None:
    decoder = Decoder()
    seen: dict[str, Any] = {}
    attention = decoder.layers[1].self_attn
    attention.register_forward_hook(lambda _, args, kwargs, out: seen.update(kwargs, out=out[0]), with_kwargs=True)
    with torch.no_grad():
        decoder.extract_features(torch.tensor([CONTEXT]), None)
        heads = heads_of(attention, seen["query"][:, 0])
        last = softmax_attention(heads.query[:, -1:], heads.key, heads.value)  # (H, 1, D)
        assert relative_error(attention.out_proj(last.flatten()), seen["out"][-1, 0]) < 1e-10


def test_records_of_a_decoder_hold() -> None:
    records = run_on_decoder(Decoder(), START, [CONTEXT[:4], CONTEXT], QUERIES)
    assert [record.holds for record in records] == [True] * 4
    single = run_on_decoder(Decoder().float(), START, [CONTEXT], QUERIES)
    assert not all(record.holds for record in single)  # float32 is not exact enough


def test_an_update_field_is_a_gradient_where_values_are_tied_to_keys_and_nowhere_else() -> None:
    """With W_V = W_K and W_O = W_Q^T, and no norm in front, u(h) is the gradient of -log(1 - share), head by head."""
    decoder = Decoder(norm_in_front=False)
    free, controls = zip(*update_fields(decoder, START, CONTEXT, QUERIES[0]), strict=True)
    assert len(free) == LAYERS
    assert min(free + controls) > 0.1
    for layer in decoder.layers:
        attention = layer.self_attn
        for part in ("weight", "bias"):
            getattr(attention.v_proj, part).data.copy_(getattr(attention.k_proj, part))
        attention.out_proj.weight.data.copy_(attention.q_proj.weight.T)
    assert max(share for share, _ in update_fields(decoder, START, CONTEXT, QUERIES[0])) < 1e-20
    attention.out_proj.weight.data.mul_(torch.linspace(0, 2, WIDTH))  # one premise removed, in the last layer
    shares = [share for share, _ in update_fields(decoder, START, CONTEXT, QUERIES[0])]
    assert shares[-1] > 1e-3 > 1e-20 > max(shares[:-1])


def test_a_step_of_descent_on_weights_is_no_gradient_field_of_the_state() -> None:
    """The constructed step moves y by -dW x: its Jacobian in (x, y) has as much antisymmetry as a matrix can have."""
    step = torch.zeros(6, 6, dtype=torch.float64)
    step[4:, :4] = torch.randn(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert antisymmetric_share(step) == pytest.approx(0.5)
    assert antisymmetric_share(step + step.T) == 0


def test_other_models_and_missing_demonstrations_are_refused() -> None:
    with pytest.raises(UserError, match="not a decoder"):
        attention_change(nn.Linear(2, 2), START, CONTEXT, QUERIES)
    with pytest.raises(UserError, match="begin with the start"):
        attention_change(Decoder(), [3], CONTEXT, QUERIES)
    with pytest.raises(UserError, match="no context"):
        implicit_updates(Decoder(), START, [], QUERIES[0])
