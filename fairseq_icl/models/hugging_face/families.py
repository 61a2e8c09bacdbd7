"""The model families that can be read from a Hugging Face folder, and what their config.json means.

An architecture is either a set of options of fairseq's own decoder, which represents GPT-2, OPT, XGLM and the papers'
dense LMs exactly, or the configuration of a `RotaryDecoder`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fairseq_icl.errors import UserError
from fairseq_icl.models.hugging_face.config import Architecture, ConfigFile, first_and_last, read_rotation
from fairseq_icl.models.rotary_lm import RotaryConfig

FAIRSEQ_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_accurate",
    "gelu_pytorch_tanh": "gelu_accurate",
    "tanh": "tanh",
    "linear": "linear",
}
FAIRSEQ_EPS = 1e-5
ROTARY_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_architecture(values: Mapping[str, Any], path: Path) -> Architecture:
    """The architecture in the content of the config.json at `path`; a UserError names what cannot be represented."""
    kind = str(values.get("model_type"))
    if kind not in FAMILIES:
        reason = "is not a known family"
        if kind == "gpt_neo":
            reason = "has local attention windows and unscaled scores, which fairseq's decoder cannot represent"
        elif "moe" in kind.lower() or kind in ("mixtral", "dbrx", "jamba"):
            reason = "is a mixture of experts, which is not supported"
        raise UserError(f"{path}: model_type={kind!r} {reason}; use a model of {', '.join(FAMILIES)}")
    file = ConfigFile(values, path)
    architecture = FAMILIES[kind](file)
    file.finish()
    for name in ("bos", "eos"):
        token = getattr(architecture, name)
        if token >= architecture.vocab_size:
            raise UserError(
                f"{path}: {name}_token_id={token} is not among the {architecture.vocab_size} tokens (vocab_size); "
                "get the model's own file"
            )
    return architecture


def _fairseq(
    file: ConfigFile, *, positions: int, width: int, embedded: int | None = None, **options: Any
) -> dict[str, Any]:
    """Options of fairseq's decoder that all families share, with those given."""
    if width % options["decoder_attention_heads"]:
        raise UserError(
            f"{file.path}: a width of {width} cannot be cut into {options['decoder_attention_heads']} heads; "
            "get the model's own file"
        )
    return {
        "decoder_embed_dim": width,
        "decoder_input_dim": embedded or width,
        "decoder_output_dim": embedded or width,
        "max_target_positions": positions,
        "tokens_per_sample": positions,
        "decoder_normalize_before": True,
        **options,
    }


def _gpt2(file: ConfigFile) -> Architecture:
    width = file.size("n_embd", 768)
    positions = file.size("n_positions", 1024)
    file.must_be("layer_norm_epsilon", FAIRSEQ_EPS, f"is not fairseq's {FAIRSEQ_EPS}; use another model")
    file.must_be("scale_attn_weights", True)
    file.must_be("scale_attn_by_inverse_layer_idx", False)
    file.must_be("reorder_and_upcast_attn", (False, True))  # the same in fp32
    file.must_be("n_ctx", positions, "contradicts n_positions; get the model's own file")
    tied = file.take("tie_word_embeddings", True, bool)
    bos, eos = first_and_last(file, file.token("bos_token_id", 50256), file.token("eos_token_id", 50256))
    options = _fairseq(
        file,
        positions=positions,
        width=width,
        decoder_ffn_embed_dim=file.size("n_inner", 4 * width),
        decoder_layers=file.size("n_layer", 12),
        decoder_attention_heads=file.size("n_head", 12),
        activation_fn=file.choose("activation_function", "gelu_new", FAIRSEQ_ACTIVATIONS),
        decoder_learned_pos=True,
        no_scale_embedding=True,
        share_decoder_input_output_embed=tied,
    )
    pad = file.token("pad_token_id", None)
    return Architecture("gpt2", file.size("vocab_size", 50257), positions, tied, bos, eos, pad, options)


def _opt(file: ConfigFile) -> Architecture:
    width, positions = file.size("hidden_size", 768), file.size("max_position_embeddings", 2048)
    for key in ("enable_bias", "layer_norm_elementwise_affine", "output_projection"):
        file.must_be(key, True)
    file.must_be("pad_token_id", 1, "would move all positions: OPT's padding is 1; get the model's own file")
    file.token("bos_token_id", 2)  # old files say 0; OPT was trained on texts that begin with </s>
    tied = file.take("tie_word_embeddings", True, bool)
    options = _fairseq(
        file,
        positions=positions,
        width=width,
        embedded=file.size("word_embed_proj_dim", width),
        decoder_ffn_embed_dim=file.size("ffn_dim", 3072),
        decoder_layers=file.size("num_hidden_layers", 12),
        decoder_attention_heads=file.size("num_attention_heads", 12),
        activation_fn=file.choose("activation_function", "relu", FAIRSEQ_ACTIVATIONS),
        decoder_learned_pos=True,
        no_scale_embedding=True,
        share_decoder_input_output_embed=tied,
    )
    options["decoder_normalize_before"] = file.take("do_layer_norm_before", True, bool)
    options["no_decoder_final_norm"] = file.take("_remove_final_layer_norm", False, bool)
    _, eos = first_and_last(file, 2, file.token("eos_token_id", 2))
    return Architecture("opt", file.size("vocab_size", 50272), positions, tied, eos, eos, 1, options)


def _xglm(file: ConfigFile) -> Architecture:
    """XGLM itself, or one of the dense LMs that circulate in its form; their special tokens are the last four."""
    width, positions = file.size("d_model", 1024), file.size("max_position_embeddings", 2048)
    rows = file.size("vocab_size", 256008)
    tied = file.take("tie_word_embeddings", True, bool)
    options = _fairseq(
        file,
        positions=positions,
        width=width,
        decoder_ffn_embed_dim=file.size("ffn_dim", 4096),
        decoder_layers=file.size("num_layers", 24),
        decoder_attention_heads=file.size("attention_heads", 16),
        activation_fn=file.choose("activation_function", "gelu", FAIRSEQ_ACTIVATIONS),
        decoder_learned_pos=False,
        no_scale_embedding=not file.take("scale_embedding", True, bool),
        share_decoder_input_output_embed=tied,
    )
    bos, eos = first_and_last(file, file.token("bos_token_id", 0), file.token("eos_token_id", 2))
    pad = file.token("pad_token_id", 1)
    if (bos, eos) == (rows - 4, rows - 2):
        # Another padding id would blank out a position in transformers: it zeroes that row of the sinus table.
        file.must_be("pad_token_id", (0, 1, rows - 3), "is not a dense LM's padding; get the model's own file")
        return Architecture("dense", rows, positions, tied, bos, eos, rows - 3, options)
    if (bos, pad, eos) != (0, 1, 2):
        raise UserError(
            f"{file.path}: bos, pad and eos token ids {bos}, {pad}, {eos} are neither XGLM's (0, 1, 2) nor a dense "
            f"LM's (the last four, {rows - 4} to {rows - 1}); get the model's own file"
        )
    return Architecture("xglm", rows, positions, tied, eos, eos, pad, options)


def _window(file: ConfigFile, family: str, layers: int) -> int | None:
    """The sliding window if any layer has one."""
    if family == "llama":
        return None
    if family == "mistral":
        # Without the key, transformers takes Mistral's first window; null says that there is none.
        return file.take("sliding_window", None if file.has("sliding_window") else 4096)
    window = file.take("sliding_window", None)
    in_use = file.take("use_sliding_window", False, bool)
    full_layers = file.take("max_window_layers", layers)
    kinds = file.take("layer_types", [], list)
    unknown = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
    if unknown:
        raise file.error("layer_types", f"has {unknown[0]!r}, which is not implemented; use another model")
    slides = "sliding_attention" in kinds if kinds else in_use and full_layers < layers
    return window if slides else None


def _rotary(family: str) -> Callable[[ConfigFile], Architecture]:
    """Reader for a family of Llama's kind: `family` is llama, mistral, qwen2 or qwen3."""
    starts = {"llama": (1, 2), "mistral": (1, 2)}.get(family, (None, None))

    def read(file: ConfigFile) -> Architecture:
        width, heads = file.size("hidden_size"), file.size("num_attention_heads")
        layers, positions = file.size("num_hidden_layers"), file.size("max_position_embeddings")
        head_dim = file.size("head_dim", 128 if family == "qwen3" else width // heads)
        shared = file.size("num_key_value_heads", 8 if family == "mistral" else heads)
        bias = file.take("attention_bias", False, bool) if family in ("llama", "qwen3") else False
        tied = file.take("tie_word_embeddings", False, bool)
        theta = file.take("rope_theta", 10000.0, float)
        file.must_be("partial_rotary_factor", 1.0)
        file.must_be("use_mrope", False)
        if family == "llama":  # marks of SmolLM2 and of a way to split matrices that changes nothing
            file.must_be("rope_interleaved", False, "is another layout of the rotation; use another model")
            file.must_be("is_llama_config", True, "is not Llama's; use another model")
            file.size("pretraining_tp", 1)
        config = RotaryConfig(
            embed_dim=width,
            ffn_embed_dim=file.size("intermediate_size"),
            layers=layers,
            attention_heads=heads,
            key_value_heads=shared,
            head_dim=head_dim,
            rotation=read_rotation(file, head_dim, theta, 1.0),
            max_positions=positions,
            window=_window(file, family, layers),
            norm_eps=file.take("rms_norm_eps", 1e-6, float),
            activation=file.choose("hidden_act", "silu", ROTARY_ACTIVATIONS),
            qkv_bias=bias or family == "qwen2",
            out_bias=bias,
            ffn_bias=file.take("mlp_bias", False, bool) if family == "llama" else False,
            query_key_norm=family == "qwen3",
            share_embeddings=tied,
        )
        return _rotary_architecture(file, family, config, *starts)

    return read


def _gpt_neox(file: ConfigFile) -> Architecture:
    width, heads = file.size("hidden_size"), file.size("num_attention_heads")
    bias = file.take("attention_bias", True, bool)
    theta, share = file.take("rotary_emb_base", 10000.0, float), file.take("rotary_pct", None, float)
    if share is None:
        share = float(file.take("rope_parameters", {}, dict).get("partial_rotary_factor", 0.25))
    config = RotaryConfig(
        embed_dim=width,
        ffn_embed_dim=file.size("intermediate_size"),
        layers=file.size("num_hidden_layers"),
        attention_heads=heads,
        key_value_heads=heads,
        head_dim=width // heads,
        rotation=read_rotation(file, width // heads, theta, share),
        max_positions=file.size("max_position_embeddings", 2048),
        norm="layer",
        norm_eps=file.take("layer_norm_eps", 1e-5, float),
        activation=file.choose("hidden_act", "gelu", ROTARY_ACTIVATIONS),
        gated=False,
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=True,
        parallel_residual=file.take("use_parallel_residual", True, bool),
        share_embeddings=file.take("tie_word_embeddings", False, bool),
    )
    return _rotary_architecture(file, "gpt_neox", config, 0, 2)


def _rotary_architecture(
    file: ConfigFile, family: str, config: RotaryConfig, bos: int | None, eos: int | None
) -> Architecture:
    if config.attention_heads % config.key_value_heads:
        raise UserError(
            f"{file.path}: {config.attention_heads} heads cannot share {config.key_value_heads} key/value heads; "
            "get the model's own file"
        )
    return Architecture(
        family,
        file.size("vocab_size"),
        config.max_positions,
        config.share_embeddings,
        *first_and_last(file, file.token("bos_token_id", bos), file.token("eos_token_id", eos)),
        file.token("pad_token_id", None),
        rotary=config,
        window=config.window,
    )


FAMILIES: dict[str, Callable[[ConfigFile], Architecture]] = {
    "gpt2": _gpt2,
    "opt": _opt,
    "xglm": _xglm,
    "llama": _rotary("llama"),
    "mistral": _rotary("mistral"),
    "qwen2": _rotary("qwen2"),
    "qwen3": _rotary("qwen3"),
    "gpt_neox": _gpt_neox,
}
