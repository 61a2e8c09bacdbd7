"""A tiny random decoder, its linearized model, and deltas for it."""

from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerDecoder
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import Tensor

from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.pretrained_lm import PretrainedLM

TOKENS = torch.tensor([[0, 5, 7, 4, 9, 11], [0, 8, 6, 10, 2, 5]])


def build_decoder(**options) -> TransformerDecoder:
    """A random decoder: 2 layers, width 16, 2 heads; ReLU, since fairseq's GELU rounds to float32."""
    dictionary = Dictionary()
    for number in range(12):
        dictionary.add_symbol(f"word{number}")
    config = TransformerLanguageModelConfig(
        activation_fn="relu", decoder_layers=2, decoder_embed_dim=16, decoder_ffn_embed_dim=24,
        decoder_attention_heads=2, decoder_normalize_before=True, share_decoder_input_output_embed=True,
    )  # fmt: skip
    config.decoder_input_dim = config.decoder_output_dim = 16
    config.max_target_positions = config.tokens_per_sample = 32
    config.dropout = config.attention_dropout = 0.0
    for name, value in options.items():
        setattr(config, name, value)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    torch.manual_seed(0)
    decoder = TransformerLanguageModel.build_model(config, task).decoder
    for parameter in decoder.parameters():  # fairseq starts with biases of zero, under which some derivatives vanish
        parameter.data += 0.1 * torch.randn_like(parameter)
    return decoder


def keys_and_values(decoder: TransformerDecoder) -> list[str]:
    return [f"decoder.{name}" for name, _ in decoder.named_parameters() if ".k_proj." in name or ".v_proj." in name]


def build(dtype: torch.dtype = torch.float64, **options) -> LinearizedLM:
    decoder = build_decoder(**options).to(dtype)
    return LinearizedLM(decoder, keys_and_values(decoder))


def random_deltas(model: LinearizedLM, seed: int, scale: float = 0.1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters())
    return {
        name: scale * torch.randn(parameters[name].shape, generator=generator).to(parameters[name])
        for name in model.trained_names
    }


@torch.no_grad()
def set_deltas(model: LinearizedLM, deltas: dict[str, Tensor]) -> LinearizedLM:
    for name, delta in deltas.items():
        model.get_parameter(name).copy_(delta)
    return model


def stock_logits(deltas: dict[str, Tensor], step: float = 1.0, **options) -> Tensor:
    """f(w0 + step * delta) of the ordinary model."""
    model = PretrainedLM(build_decoder(**options).to(torch.float64))
    with torch.no_grad():
        for name, delta in deltas.items():
            model.get_parameter(name).add_(step * delta)
        return model(TOKENS)[0]
