"""Tiny random models of transformers, by the name of their family, and the decoders that the adapter makes of them."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from torch import Tensor

pytest.importorskip("transformers")

from fairseq_icl.models.transformers_lm import TransformersDecoder, adapted, import_transformers

ROWS = 97
FAMILIES = """llama mistral ministral qwen2 qwen3 gpt2 opt gpt_neox gemma gemma2 gemma3_text phi phi3 olmo olmo2 olmo3
    granite smollm3 stablelm starcoder2 cohere cohere2 glm glm4 exaone4 nemotron helium arcee apertus hunyuan_v1_dense
    ernie4_5 seed_oss persimmon biogpt gpt_bigcode bitnet ministral3 cwm""".split()  # noqa: SIM905
EXPERTS = "qwen3_moe mixtral olmoe granitemoe qwen2_moe gpt_oss phimoe".split()  # noqa: SIM905
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 3),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 48),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head"), 6),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("num_local_experts", "num_experts"), 4),
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": ROWS, "sliding_window": 16},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def tiny_config(family: str, **changes: Any) -> Any:
    """The family's own configuration, with small sizes, a window shorter than prompts where it has one, no dropout."""
    transformers = import_transformers()
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(family)
    for name, value in (SIZES | changes).items():
        with suppress(AttributeError):  # of a property
            if hasattr(config, name):
                setattr(config, name, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def tiny_reference(family: str, **changes: Any) -> Any:
    """transformers' own model with eager attention; weights, biases and norms are all random."""
    torch.manual_seed(1)
    made = import_transformers().AutoModelForCausalLM.from_config(
        tiny_config(family, **changes), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0))
    return made.eval()


def dictionary_of(rows: int = ROWS) -> Dictionary:
    dictionary = Dictionary()
    for number in range(rows - 4):
        dictionary.add_symbol(str(number))
    return dictionary


def tiny_decoder(family: str, **changes: Any) -> TransformersDecoder:
    """The adapter around the same model."""
    model = tiny_reference(family, **changes)
    return adapted(model, dictionary_of(model.config.vocab_size), family)


def tokens(batch: int = 1, length: int = 7, seed: int = 5) -> Tensor:
    return torch.randint(4, ROWS, (batch, length), generator=torch.Generator().manual_seed(seed))
