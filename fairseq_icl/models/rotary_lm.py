"""`RotaryDecoder`: the decoder of Llama, Mistral, Qwen, SmolLM and Pythia, with the names of fairseq's own decoder.

fairseq adds positions to the embeddings; these models rotate queries and keys instead: pair i of a head's dimensions is
turned at position p by the angle p * f_i, so that a score depends on the distance of two tokens. Everything that looks
at an attention module therefore asks it for its queries, keys and values (`queries_keys_values`) and projects nothing
on its own.

Shapes: T tokens, B sequences, d the width, H heads of D dimensions. H * D need not be d.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import FairseqDecoder
from torch import Tensor, nn

from fairseq_icl.errors import UserError
from fairseq_icl.models.attention import ORDINARY

INIT_STD = 0.02
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class Rotation:
    """Frequencies of the rotation: f_i = theta ** (-2i / dim) for i < dim / 2, then scaled as `kind` says.

    `dim` is the number of rotated dimensions of a head; the rest is left as it is. Kind "linear" divides every
    frequency by `factor`. Kind "llama3" divides those whose wavelength is above `original_positions / low`, keeps
    those below `original_positions / high`, and interpolates between.
    """

    dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_positions: int = 8192

    def frequencies(self) -> Tensor:
        """f_i in fp32, as the models were trained with: (dim / 2,)"""
        plain = 1.0 / (self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float) / self.dim))
        if self.kind == "default":
            return plain
        slow = plain / self.factor
        if self.kind == "linear":
            return slow
        wavelength = 2 * math.pi / plain
        share = ((self.original_positions / wavelength - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - share) * slow + share * plain


class RotaryTable:
    """cos and sin of all angles p * f_i up to the last position asked for, in fp32.

    Not a module: its buffers would follow `.half()` and lose the angles of far positions.
    """

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation
        self._angles = torch.empty(2, 0, rotation.dim // 2)

    def rows(self, start: int | Tensor, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of `length` positions from `start` on, of type and device of `like`: (length, dim / 2).

        With a start (B,) for each sequence: (B, 1, length, dim / 2).
        """
        stop = int(torch.as_tensor(start).max()) + length
        if stop > self._angles.size(1):
            # An inference tensor would be kept here and could not be used for training later.
            with torch.inference_mode(False), torch.no_grad():
                positions = torch.arange(max(stop, 2 * self._angles.size(1)), dtype=torch.float)
                angles = positions[:, None] * self.rotation.frequencies()
                self._angles = torch.stack([angles.cos(), angles.sin()])
        places = slice(start, stop) if isinstance(start, int) else start[:, None, None] + torch.arange(length)
        cos, sin = self._angles[:, places].to(like)
        return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, T, D) with dimensions i and i + dim/2 of the first `dim` turned as a pair.

    cos, sin: (T, dim / 2), or (B, 1, T, dim / 2).
    """
    half = cos.size(-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


@dataclass(frozen=True)
class RotaryConfig:
    """What a rotary decoder is built from; the defaults are Llama's."""

    embed_dim: int
    ffn_embed_dim: int
    layers: int
    attention_heads: int
    key_value_heads: int
    head_dim: int
    rotation: Rotation
    max_positions: int
    window: int | None = None
    """Tokens that attention of some layer sees at most; longer inputs are refused, shorter ones do not notice."""
    norm: str = "rms"
    norm_eps: float = 1e-6
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    query_key_norm: bool = False
    parallel_residual: bool = False
    share_embeddings: bool = False


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x ** 2) + eps) over the last dimension; half precision is normalised in fp32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x (..., dim) -> (..., dim)"""
        exact = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return self.weight * (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def _norm(config: RotaryConfig, dim: int) -> nn.Module:
    return RMSNorm(dim, config.norm_eps) if config.norm == "rms" else nn.LayerNorm(dim, config.norm_eps)


class RotaryAttention(nn.Module):
    """Causal self-attention with rotated queries and keys; several query heads may share one key/value head."""

    self_attention = True

    def __init__(self, config: RotaryConfig, table: RotaryTable) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.attention_heads, config.head_dim
        self.num_key_value_heads = config.key_value_heads
        self.scaling = self.head_dim**-0.5
        self.rule = ORDINARY
        self.table = table
        width, shared_width = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.embed_dim, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.embed_dim, shared_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.embed_dim, shared_width, bias=config.qkv_bias)
        self.out_proj = nn.Linear(width, config.embed_dim, bias=config.out_bias)
        self.q_norm = _norm(config, self.head_dim) if config.query_key_norm else None
        self.k_norm = _norm(config, self.head_dim) if config.query_key_norm else None

    def queries_keys_values(self, x: Tensor, start: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (scaled), keys and values of x (T, B, d) whose first token has position `start`: (B, H, T, D) each.

        `start` is one for all sequences, or one each, (B,).
        Normed where the model does so, rotated, and key/value heads repeated for every query head: a score is
        query . key and nothing else.
        """
        query = self.q_proj(x).unflatten(2, (self.num_heads, self.head_dim))  # (T, B, H, D)
        key = self.k_proj(x).unflatten(2, (self.num_key_value_heads, self.head_dim))
        value = self.v_proj(x).unflatten(2, (self.num_key_value_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))  # (B, H, T, D)
        cos, sin = self.table.rows(start, x.size(0), query)
        query, key = rotate(query, cos, sin) * self.scaling, rotate(key, cos, sin)
        groups = self.num_heads // self.num_key_value_heads
        return query, key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Attention of `query` (T, B, d) to itself and its past, with output projection: (T, B, d).

        `key` and `value` are there for fairseq's way of calling and must be the same tensor.
        """
        queries, keys, values = self.queries_keys_values(query, 0)
        attended = self.rule.attend(queries, keys, values)  # (B, H, T, D)
        return self.out_proj(attended.permute(2, 0, 1, 3).flatten(2)), None


class RotaryDecoderLayer(nn.Module):
    """x + attention(norm(x)), then the same with the MLP; or, in parallel, x + attention(norm(x)) + mlp(norm'(x)).

    In a parallel layer `final_layer_norm` reads the layer's input: the residual stream right after attention is
    nowhere in the model, and a hook on that norm does not see it.
    """

    normalize_before = True

    def __init__(self, config: RotaryConfig, table: RotaryTable) -> None:
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.self_attn = RotaryAttention(config, table)
        self.self_attn_layer_norm = _norm(config, config.embed_dim)
        self.final_layer_norm = _norm(config, config.embed_dim)
        width, hidden = config.embed_dim, config.ffn_embed_dim
        self.gate_proj = nn.Linear(width, hidden, bias=config.ffn_bias) if config.gated else None
        self.fc1 = nn.Linear(width, hidden, bias=config.ffn_bias)
        self.fc2 = nn.Linear(hidden, width, bias=config.ffn_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None, None]:
        """x (T, B, d) -> ((T, B, d), None, None), which is what a layer of fairseq returns."""
        normed = self.self_attn_layer_norm(x)
        attended, _unused = self.self_attn(query=normed, key=normed, value=normed)
        after = x + attended
        return after + self._mlp(self.final_layer_norm(x if self.parallel_residual else after)), None, None

    def _mlp(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        if self.gate_proj is None:
            return self.fc2(self.activation(hidden))
        return self.fc2(self.activation(self.gate_proj(x)) * hidden)


class RotaryDecoder(FairseqDecoder):
    """A decoder-only transformer with rotary positions; attributes are named as in fairseq's `TransformerDecoder`.

    Arguments:

    - `config`: the architecture.
    - `dictionary`: one symbol per row of the embedding matrix; its padding symbol may only fill up sequences on the
      right, where causal attention does not see it.
    """

    def __init__(self, config: RotaryConfig, dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        self.config = config
        self.embed_dim = config.embed_dim
        self.padding_idx = dictionary.pad()
        self.share_input_output_embed = config.share_embeddings
        self.embed_positions = self.project_in_dim = self.project_out_dim = self.adaptive_softmax = None
        self.embed_tokens = nn.Embedding(len(dictionary), config.embed_dim, self.padding_idx)
        table = RotaryTable(config.rotation)
        self.layers = nn.ModuleList([RotaryDecoderLayer(config, table) for _ in range(config.layers)])
        self.num_layers = config.layers
        self.layer_norm = _norm(config, config.embed_dim)
        self.output_projection = nn.Linear(config.embed_dim, len(dictionary), bias=False)
        if config.share_embeddings:
            self.output_projection.weight = self.embed_tokens.weight
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:  # vectors are the weights of norms, which start at one
                nn.init.normal_(parameter, std=INIT_STD)

    @property
    def attention(self) -> list[RotaryAttention]:
        """The self-attention modules, bottom first."""
        return [cast(RotaryDecoderLayer, layer).self_attn for layer in self.layers]

    def extract_features(
        self, prev_output_tokens: Tensor, encoder_out: None = None, incremental_state: Any = None, **_: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Features (B, T, d) after the final norm of tokens (B, T), and {"attn", "inner_states"} as fairseq gives."""
        if incremental_state is not None:
            raise NotImplementedError("a rotary decoder keeps no incremental state")
        self._check_length(prev_output_tokens)
        # Contiguous, or torch multiplies by a frozen weight one sequence at a time, which takes twice as long.
        x = self.embed_tokens(prev_output_tokens).transpose(0, 1).contiguous()  # (T, B, d)
        inner_states = [x]
        for layer in self.layers:
            x = layer(x)[0]
            inner_states.append(x)
        x = x if self.layer_norm is None else self.layer_norm(x)
        return x.transpose(0, 1), {"attn": [None], "inner_states": inner_states}

    def forward(
        self, prev_output_tokens: Tensor, encoder_out: None = None, features_only: bool = False, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits (B, T, V) of tokens (B, T), or with `features_only` what `extract_features` gives."""
        x, extra = self.extract_features(prev_output_tokens, encoder_out, **kwargs)
        return (x if features_only else self.output_layer(x)), extra

    def output_layer(self, features: Tensor, **_: Any) -> Tensor:
        """Logits (..., V) of features (..., d)."""
        return self.output_projection(features)

    def max_positions(self) -> int:
        """Longest sequence the model can read: its trained positions, or its attention window if that is shorter."""
        return min(self.config.max_positions, self.config.window or self.config.max_positions)

    def _check_length(self, tokens: Tensor) -> None:
        length = tokens.size(1)
        if self.config.window is not None and length > self.config.window:
            raise UserError(
                f"a prompt of {length:,} tokens is longer than the model's attention window (sliding_window="
                f"{self.config.window:,}), which is not implemented; use fewer demonstrations"
            )
        if length > 1 and bool(tokens[:, 0].eq(self.padding_idx).any()):
            raise ValueError("a rotary decoder wants its sequences filled up on the right, not on the left")
