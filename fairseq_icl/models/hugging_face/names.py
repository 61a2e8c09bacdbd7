"""Names and layouts of the weights in Hugging Face files -> parameters of a fairseq decoder, family by family."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Cut = Callable[[Tensor, "Sizes"], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Sizes:
    """What some layouts depend on."""

    pad: int
    heads: int


@dataclass(frozen=True)
class Rule:
    """Tensors whose name matches `pattern` become `targets` (with \\1, \\2 of the match); no targets: not needed."""

    pattern: str
    targets: tuple[str, ...]
    cut: Cut


def _copy(tensor: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    return (tensor,)


def _transposed(tensor: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """GPT-2 stores (inputs, outputs)."""
    return (tensor.t() if tensor.dim() == 2 else tensor,)


def _transposed_qkv(tensor: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """(d, 3d), or a bias (3d,), with the queries' outputs first, then keys and values."""
    return (tensor.t() if tensor.dim() == 2 else tensor).chunk(3)


def _qkv_by_head(tensor: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """(H * 3 * D, ...): query, key and value of one head after the other."""
    if tensor.size(0) % (3 * sizes.heads):
        return (tensor,)  # of a wrong shape, which the caller reports
    parts = tensor.unflatten(0, (sizes.heads, 3, -1))  # (H, 3, D, ...)
    return tuple(parts[:, part].flatten(0, 1) for part in range(3))


def _positions_after_padding(tensor: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """fairseq numbers learned positions from pad + 1; the rows before are never read."""
    return (torch.cat([tensor.new_zeros(sizes.pad + 1, *tensor.shape[1:]), tensor]),)


def _dense_rows(tensor: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """The dense LMs' four specials come last in the file and first in fairseq."""
    return (torch.cat([tensor[-4:], tensor[:-4]]),)


def _rule(pattern: str, *targets: str, cut: Cut = _copy) -> Rule:
    return Rule(pattern, targets, cut)


def _both(pattern: str, target: str, cut: Cut = _copy) -> Rule:
    """Weight and bias of a module in a layer: {i} is the layer's number in both names."""
    return Rule(pattern.replace("{i}", r"(\d+)") + r"\.(weight|bias)", (rf"layers.\1.{target}.\2",), cut)


_QKV = tuple(rf"layers.\1.self_attn.{name}_proj.\2" for name in "qkv")
_MODULES = r"self_attn\.[qkv]_proj|self_attn\.out_proj|self_attn_layer_norm|fc[12]|final_layer_norm"
_SAME_AS_FAIRSEQ = rf"(layers\.\d+\.(?:{_MODULES})\.(?:weight|bias))"

GPT2 = (
    _rule(r"(?:transformer\.)?wte\.weight", "embed_tokens.weight"),
    _rule(r"(?:transformer\.)?wpe\.weight", "embed_positions.weight", cut=_positions_after_padding),
    _rule(r"(?:transformer\.)?h\.(\d+)\.attn\.c_attn\.(weight|bias)", *_QKV, cut=_transposed_qkv),
    _both(r"(?:transformer\.)?h\.{i}\.attn\.c_proj", "self_attn.out_proj", _transposed),
    _both(r"(?:transformer\.)?h\.{i}\.ln_1", "self_attn_layer_norm"),
    _both(r"(?:transformer\.)?h\.{i}\.ln_2", "final_layer_norm"),
    _both(r"(?:transformer\.)?h\.{i}\.mlp\.c_fc", "fc1", _transposed),
    _both(r"(?:transformer\.)?h\.{i}\.mlp\.c_proj", "fc2", _transposed),
    _rule(r"(?:transformer\.)?ln_f\.(weight|bias)", r"layer_norm.\1"),
    _rule(r"lm_head\.weight", "output_projection.weight"),
    _rule(r"(?:transformer\.)?h\.\d+\.attn\.(?:masked_)?bias"),  # the causal mask
)
OPT = (
    _rule(r"(?:model\.)?decoder\.embed_tokens\.weight", "embed_tokens.weight"),
    _rule(r"(?:model\.)?decoder\.embed_positions\.weight", "embed_positions.weight"),
    _rule(r"(?:model\.)?decoder\." + _SAME_AS_FAIRSEQ, r"\1"),
    _rule(r"(?:model\.)?decoder\.final_layer_norm\.(weight|bias)", r"layer_norm.\1"),
    _rule(r"(?:model\.)?decoder\.project_in\.weight", "project_in_dim.weight"),
    _rule(r"(?:model\.)?decoder\.project_out\.weight", "project_out_dim.weight"),
    _rule(r"lm_head\.weight", "output_projection.weight"),
)


def _xglm(rows: Cut) -> tuple[Rule, ...]:
    return (
        _rule(r"model\.embed_tokens\.weight", "embed_tokens.weight", cut=rows),
        _rule(r"model\." + _SAME_AS_FAIRSEQ, r"\1"),
        _rule(r"model\.layer_norm\.(weight|bias)", r"layer_norm.\1"),
        _rule(r"lm_head\.weight", "output_projection.weight", cut=rows),
        _rule(r"model\.embed_positions\.weights?"),  # the sinus table
        _rule(r"(?:model|decoder)\.mevo_layer\..*"),  # an unused layer of the 4.5B model
    )


LLAMA = (
    _rule(r"model\.embed_tokens\.weight", "embed_tokens.weight"),
    _rule(r"model\.layers\.(\d+)\.self_attn\.([qkv]_proj|[qk]_norm)\.(weight|bias)", r"layers.\1.self_attn.\2.\3"),
    _both(r"model\.layers\.{i}\.self_attn\.o_proj", "self_attn.out_proj"),
    _both(r"model\.layers\.{i}\.input_layernorm", "self_attn_layer_norm"),
    _both(r"model\.layers\.{i}\.post_attention_layernorm", "final_layer_norm"),
    _both(r"model\.layers\.{i}\.mlp\.gate_proj", "gate_proj"),
    _both(r"model\.layers\.{i}\.mlp\.up_proj", "fc1"),
    _both(r"model\.layers\.{i}\.mlp\.down_proj", "fc2"),
    _rule(r"model\.norm\.weight", "layer_norm.weight"),
    _rule(r"lm_head\.weight", "output_projection.weight"),
    _rule(r"model\.(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
)
GPT_NEOX = (
    _rule(r"gpt_neox\.embed_in\.weight", "embed_tokens.weight"),
    _rule(r"gpt_neox\.layers\.(\d+)\.attention\.query_key_value\.(weight|bias)", *_QKV, cut=_qkv_by_head),
    _both(r"gpt_neox\.layers\.{i}\.attention\.dense", "self_attn.out_proj"),
    _both(r"gpt_neox\.layers\.{i}\.input_layernorm", "self_attn_layer_norm"),
    _both(r"gpt_neox\.layers\.{i}\.post_attention_layernorm", "final_layer_norm"),
    _both(r"gpt_neox\.layers\.{i}\.mlp\.dense_h_to_4h", "fc1"),
    _both(r"gpt_neox\.layers\.{i}\.mlp\.dense_4h_to_h", "fc2"),
    _rule(r"gpt_neox\.final_layer_norm\.(weight|bias)", r"layer_norm.\1"),
    _rule(r"(?:embed_out|lm_head)\.weight", "output_projection.weight"),
    _rule(r"gpt_neox\.layers\.\d+\.attention\.(?:(?:masked_)?bias|rotary_emb\.inv_freq)"),
)
RULES: dict[str, tuple[Rule, ...]] = {
    "gpt2": GPT2,
    "opt": OPT,
    "xglm": _xglm(_copy),
    "dense": _xglm(_dense_rows),
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gpt_neox": GPT_NEOX,
}


def translate(family: str, name: str) -> tuple[tuple[str, ...], Cut] | None:
    """Decoder parameters that the tensor `name` of a file holds, and how to cut it; None if the name is unknown.

    No parameters at all means that the tensor is not needed (a stored mask, a table of frequencies).
    """
    for rule in RULES[family]:
        match = re.fullmatch(rule.pattern, name)
        if match:
            return tuple(match.expand(target) for target in rule.targets), rule.cut
    return None
