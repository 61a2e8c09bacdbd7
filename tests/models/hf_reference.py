"""Tiny random models of transformers' own classes, saved as folders with tokenizers that are made on the spot."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn

from fairseq_icl.models import pretrained_lm
from fairseq_icl.models.hugging_face import HFModel, read_folder
from fairseq_icl.models.transformers_lm import import_transformers

pytest.importorskip("transformers")
transformers = import_transformers()

ROWS = 300
TEXT = ["the film is great", "the film is bad", "a great story told with care", "bad acting, bad plot", "the end"] * 3
ROTARY = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": ROWS,
}
GROUPED = ROTARY | {"num_key_value_heads": 2, "max_position_embeddings": 64}
IDS = {"bos_token_id": 256, "eos_token_id": 257}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT2 = dict(n_embd=24, n_layer=3, n_head=4, n_positions=64, vocab_size=ROWS, **IDS)
OPT = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 40, "vocab_size": ROWS}
OPT |= {"max_position_embeddings": 64, "word_embed_proj_dim": 24}
XGLM = {
    "d_model": 24,
    "num_layers": 3,
    "attention_heads": 4,
    "ffn_dim": 40,
    "vocab_size": ROWS,
    "max_position_embeddings": 64,
}
DENSE = {"bos_token_id": ROWS - 4, "eos_token_id": ROWS - 2, "pad_token_id": 1}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2 untied, wide": ("GPT2", GPT2 | {"tie_word_embeddings": False, "n_inner": 50}),
    "opt": ("OPT", OPT),
    "opt untied": ("OPT", OPT | {"tie_word_embeddings": False}),
    "opt without final norm": ("OPT", OPT | {"_remove_final_layer_norm": True}),
    "opt-350m": ("OPT", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt projected, pre-norm": ("OPT", OPT | {"word_embed_proj_dim": 16}),
    "xglm": ("XGLM", XGLM),
    "xglm unscaled, untied": ("XGLM", XGLM | {"scale_embedding": False, "tie_word_embeddings": False}),
    "dense": ("XGLM", XGLM | DENSE),
    "dense untied": ("XGLM", XGLM | DENSE | {"tie_word_embeddings": False}),
    "llama": ("Llama", GROUPED | IDS),
    "llama tied, one kv head": ("Llama", GROUPED | IDS | {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama all biases, no groups": (
        "Llama",
        GROUPED | IDS | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ),
    "llama wide heads": (
        "Llama",
        GROUPED | IDS | {"head_dim": 10, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
    ),
    "llama llama3": ("Llama", GROUPED | IDS | {"head_dim": 16, "rope_parameters": LLAMA3}),
    "llama linear": (
        "Llama",
        GROUPED | IDS | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "mistral": ("Mistral", GROUPED | IDS | {"sliding_window": None}),
    "mistral window": ("Mistral", GROUPED | IDS | {"sliding_window": 32}),
    "qwen2": ("Qwen2", GROUPED | IDS),
    "qwen2 tied": ("Qwen2", GROUPED | IDS | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", GROUPED | IDS | {"head_dim": 16}),
    "qwen3 biases, tied": (
        "Qwen3",
        GROUPED | IDS | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "pythia": ("GPTNeoX", ROTARY | IDS | {"hidden_size": 64, "max_position_embeddings": 64}),
    "neox sequential, no bias": (
        "GPTNeoX",
        ROTARY
        | IDS
        | {
            "max_position_embeddings": 64,
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    ),
}
GELU_IN_FP32 = ("xglm", "dense")
"""Families with the erf form of gelu, which fairseq computes in fp32 whatever it is given."""


def reference_model(name: str, **changes: Any) -> Any:
    """A causal language model of transformers whose weights, biases and norms are all random."""
    kind, options = MODELS[name]
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{kind}Config")(**options | changes)
    torch.manual_seed(1)
    model = getattr(transformers, kind + suffix)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0))
    return model


def byte_tokenizer(specials: list[str], rows: int = ROWS) -> Tokenizer:
    """Byte-level BPE: 256 bytes, the special tokens, and merges up to `rows`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=rows, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Llama 2's kind: a space before every text, pieces with ▁, bytes for what is unknown."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgrst"]
    merges = [("g", "r"), ("e", "a"), ("gr", "ea"), ("grea", "t"), ("▁", "great")]
    pieces += [first + second for first, second in merges]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def save(model: Any, folder: Path, **options: Any) -> Path:
    """The model and a tokenizer that fits it, as a Hugging Face folder."""
    model.save_pretrained(folder, **options)
    kind, rows = model.config.model_type, model.config.vocab_size
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    if kind == "xglm" and model.config.bos_token_id:
        tokenizer = byte_tokenizer([], rows - 4)
        tokenizer.add_special_tokens(specials)
    else:
        tokenizer = byte_tokenizer(specials if kind in ("opt", "xglm") else ["<|endoftext|>"], rows)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def change_config(folder: Path, **values: Any) -> Path:
    """config.json with other values; None removes a key."""
    config = json.loads((folder / "config.json").read_text()) | values
    kept = {key: value for key, value in config.items() if value is not None or key not in values}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def reference_attention(model: Any) -> list[nn.Module]:
    """The attention modules of a model of transformers."""
    return [module for name, module in model.named_modules() if name.endswith((".self_attn", ".attn", ".attention"))]


@contextmanager
def outputs_of(modules: list[nn.Module]) -> Iterator[list[Tensor]]:
    """A list that fills with the first output of each module."""
    seen: list[Tensor] = []
    hooks = [module.register_forward_hook(lambda _, __, output: seen.append(output[0])) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def load_decoder(folder: Path | HFModel) -> Any:
    """The decoder in a folder."""
    model = folder if isinstance(folder, HFModel) else read_folder(folder)
    return pretrained_lm.load_decoder(model, model.dictionary)
