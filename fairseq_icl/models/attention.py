"""Other rules of attention than softmax alone, for any decoder here: linear attention and momentum attention.

With q_t, k_i, v_i the queries (scaled), keys and values of one head and tokens i <= t, ordinary attention puts out
sum_i softmax_i(q_t . k_i) v_i. A `Rule` changes this in one or both of two ways:

    linear       sum_i (q_t . k_i) v_i, queries unscaled     the papers' relaxation (Dai et al. 2023, section 3)
    momentum     + sum_{i < t} eta^(t-i) v_i                 their momentum attention (the same, section 5.2)

`set_rule` gives a decoder its rule: a pretrained one the setting `attention`, and the model `attention_lm`, which is
fairseq's `transformer_lm` with this choice, to be trained from scratch, the one it is trained with. Shapes: B
sequences, H heads, T tokens, D the width of a head.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_icl.errors import UserError

KINDS = ("softmax", "momentum")
"""Rules of attention that a model may have been trained with."""
MOMENTUM_HELP = "eta of --attention momentum, above 0 and below 1: sum over i < t of eta^(t-i) v_i is added"
HIDDEN = -1e30
"""Added to the score of a token that is not seen: less than any score, and finite, so that a row may hide all."""


def decayed_sum(values: Tensor, eta: float | Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """m_t = sum_{i < t} eta^(t-i) v_i, (..., T, D), and the m of the token that comes next, (..., 1, D).

    The sum follows m_{t+1} = eta (m_t + v_t). Here it is a scan by doubling: if s_t holds the decayed sum over the last
    2^j values, then s_t + eta^(2^j) s_{t-2^j} holds it over the last 2^(j+1), so log2(T) additions of whole tensors
    replace T steps in Python, nothing is divided by a power of eta, and no (T x T) matrix is needed.

    `values` are (..., T, D), zero where they are padding; `eta` in [0, 1) is a number or a tensor that broadcasts to
    (..., 1, 1), such as (H, 1, 1). `state` is the second result of an earlier call, to go on behind its tokens.
    """
    rate = torch.as_tensor(eta, dtype=values.dtype, device=values.device)
    if bool((rate < 0).any()) or bool((rate >= 1).any()):
        raise UserError(f"momentum {eta}: must be at least 0 and below 1, or the sum does not decay")
    length = values.shape[-2]
    total = values if state is None else torch.cat([values[..., :1, :] + state, values[..., 1:, :]], dim=-2)
    reach = 1
    while reach < length:
        total = total + rate**reach * F.pad(total[..., :-reach, :], (0, 0, reach, 0))
        reach *= 2
    shifted = rate * total  # (..., T, D) of the token after t
    first = torch.zeros_like(values[..., :1, :]) if state is None else state
    return torch.cat([first, shifted[..., :-1, :]], dim=-2), shifted[..., -1:, :]


@dataclass(frozen=True)
class Rule:
    """How a head makes its output of queries, keys and values."""

    linear: bool = False
    """Without softmax (and without `cap` and sinks, which are parts of it); the queries are then unscaled."""
    momentum: float = 0.0
    """eta; 0: none."""
    window: int | None = None
    """A token sees so many tokens, itself included; None: all before it."""
    cap: float | None = None
    """Scores s become cap * tanh(s / cap) before softmax; None: they stay."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None, dropout: float = 0.0
    ) -> Tensor:
        """Every token to itself and its past: (B, H, T, D) each -> (B, H, T, D).

        Linear attention has neither `sinks` (H,), scores of a key without a value, nor `dropout` of softmax's weights.
        """
        window = self.window if self.window is not None and self.window < query.size(2) else None
        if self.linear:
            scores = (query @ key.transpose(2, 3)).tril()
            attended = (scores if window is None else scores.triu(1 - window)) @ value
        elif self.cap is None and sinks is None:
            mask = None if window is None else band(query.size(2), window, query.device)
            fused = F.scaled_dot_product_attention
            attended = fused(query, key, value, mask, dropout_p=dropout, is_causal=mask is None, scale=1.0)
        else:
            attended, total = attention_by_formula(query, key, value, causal=True, rule=self)
            if sinks is not None:  # beside the scores of which `total` is the logsumexp
                attended = attended * torch.sigmoid(total - sinks[:, None]).to(attended)[..., None]
        return attended + decayed_sum(value, self.momentum)[0] if self.momentum else attended


def band(length: int, window: int, device: torch.device | None = None) -> Tensor:
    """(T, T): whether a token sees another one, of the last `window` with itself."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, rule: "Rule", mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of (B, H, T, D) to (B, H, K, D), and logsumexp of its scores, (B, H, T); `mask` (T, K) is added.

    By PyTorch's fused kernels, whose public function keeps the logarithm to itself; by the formula where gradients are
    wanted or scores are capped.
    """
    learns = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    plain = mask is None and rule.cap is None and rule.window is None
    if query.is_cuda and plain and not learns and query.size(3) % 8 == 0 and query.size(1) == key.size(1):
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        attended, total = efficient(query, key, value, None, True, 0.0, causal, scale=1.0)[:2]
        return attended, total[..., : query.size(2)]  # which the kernel fills up to a multiple of 32
    if learns or query.device.type != "cpu" or rule.cap is not None:
        return attention_by_formula(query, key, value, causal=causal, rule=rule, mask=mask)
    if causal and rule.window is not None and rule.window < query.size(2):
        causal, mask = False, torch.where(band(query.size(2), rule.window), 0.0, HIDDEN).to(query)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, 0.0, causal, attn_mask=mask, scale=1.0)


def attention_by_formula(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, rule: "Rule", mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same with all scores in memory, summed in fp32 or better."""
    scores = (query @ key.transpose(2, 3)).to(torch.promote_types(query.dtype, torch.float32))  # (B, H, T, K)
    scores = scores if rule.cap is None else torch.tanh(scores / rule.cap) * rule.cap
    scores = scores if mask is None else scores + mask
    if causal:
        length = query.size(2)
        scores = scores.masked_fill(~band(length, rule.window or length, scores.device), -torch.inf)
    total = scores.logsumexp(dim=3)
    return (scores - total[..., None]).exp().to(value) @ value, total


ORDINARY = Rule()
"""Softmax attention and nothing else."""


def rule_of(module: Any) -> Rule:
    """The rule of an attention module; fairseq's own has none but the ordinary one."""
    return getattr(module, "rule", ORDINARY)


class Seam:
    """Where an attention module hands over its queries, keys and values, (B, H, T, D) each, queries scaled.

    While a pass runs, others may look at them there, or attend in the module's stead. Every kind of attention has one;
    fairseq's own, which is one fused operation, while somebody asks for it (`observing.probe.listening`).
    """

    look: Callable[[Tensor, Tensor, Tensor], None] | None = None
    stand_in: Callable[[Rule, Tensor, Tensor, Tensor, Tensor | None], Tensor] | None = None
    """Rule, queries, keys, values and sinks -> what the heads put out."""
    heads_per_key = 1  # neighbouring heads whose keys and values are the same

    def attend(
        self, rule: Rule, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None, dropout: float = 0.0
    ) -> Tensor:
        """What the heads put out, (B, H, T, D)."""
        if self.look is not None:
            self.look(query, key, value)
        if self.stand_in is not None:
            return self.stand_in(rule, query, key, value, sinks)
        return rule.attend(query, key, value, sinks, dropout)


def projected(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (scaled), keys and values of fairseq's attention, (B, H, T, D) each, for what it receives, x (T, B, d).

    They are views of (T, B, H, D): the products read x as it lies in memory, and nothing is copied.
    """
    query = module.q_proj(x) if rule_of(module).linear else module.q_proj(x) * module.scaling
    parts = (query, module.k_proj(x), module.v_proj(x))
    query, key, value = (part.unflatten(2, (module.num_heads, -1)).permute(1, 2, 0, 3) for part in parts)
    return query, key, value


class RuledAttention(nn.Module):
    """fairseq's causal self-attention under another rule, with its parameters and their names."""

    self_attention = True

    def __init__(self, plain: MultiheadAttention, rule: Rule) -> None:
        super().__init__()
        if not plain.self_attention or plain.bias_k is not None or plain.add_zero_attn or plain.use_xformers:
            raise UserError("attention: the model's self-attention has extras (biases, xformers) beside softmax")
        self.rule, self.seam = rule, Seam()
        self.num_heads, self.head_dim, self.scaling = plain.num_heads, plain.head_dim, plain.scaling
        self.dropout: float = plain.dropout_module.p
        self.k_proj, self.v_proj, self.q_proj = plain.k_proj, plain.v_proj, plain.q_proj
        self.out_proj = plain.out_proj

    def forward(
        self, query: Tensor, *_: Any, key_padding_mask: Tensor | None = None, incremental_state: Any = None, **__: Any
    ) -> tuple[Tensor, None]:
        """Attention of `query` (T, B, d) to itself and its past, with output projection: (T, B, d).

        fairseq calls it with `key` and `value` too, which must be the same tensor. Padding may only fill up sequences
        on the right, where nothing sees it.
        """
        if incremental_state is not None:
            raise UserError("linear and momentum attention keep no incremental state: fairseq-generate cannot use them")
        if self.seam.stand_in is None and key_padding_mask is not None and bool(key_padding_mask[:, 0].any()):
            raise UserError("linear and momentum attention want sequences filled up on the right, not on the left")
        dropout = self.dropout if self.training else 0.0
        attended = self.seam.attend(self.rule, *projected(self, query), dropout=dropout)
        return self.out_proj(attended.permute(2, 0, 1, 3).flatten(2)), None

    def _get_input_buffer(self, incremental_state: Any) -> dict[str, Tensor]:
        """fairseq's decoder layer asks for this before every pass; see `forward` for why it is always empty."""
        return {}


def trained_rule(options: Mapping[str, Any], path: str | Path = "") -> Rule:
    """The rule of attention in the options of a model; `path` names its checkpoint in errors, if there is one."""
    kind, eta = str(options.get("attention") or KINDS[0]), options.get("attention_momentum") or 0.0
    where = f"{path}: its options say " if path else ""
    if kind not in KINDS:
        raise UserError(f"{where}attention={kind[:40]}: choose from {', '.join(KINDS)}")
    if isinstance(eta, bool) or not isinstance(eta, int | float) or not 0 <= eta < 1:
        raise UserError(f"{where}momentum={str(eta)[:40]}: must be at least 0 and below 1, or the sum does not decay")
    if (eta > 0) != (kind == "momentum"):
        said = f"{where}attention={kind}, momentum={eta:g}"
        raise UserError(f"{said}: give --attention momentum and --momentum ETA together")
    return Rule(momentum=float(eta))


def set_rule(decoder: Any, rule: Rule) -> None:
    """Let the self-attention of every layer follow `rule`; parameters and their names stay as they are."""
    if rule == ORDINARY:
        return
    for layer in decoder.layers:
        if isinstance(layer.self_attn, MultiheadAttention):
            layer.self_attn = RuledAttention(layer.self_attn, rule)
        else:
            layer.self_attn.rule = rule


@dataclass
class AttentionLMConfig(TransformerLanguageModelConfig):
    """`transformer_lm` and two options, which its checkpoints carry and whatever loads a model here follows."""

    attention: ChoiceEnum(list(KINDS)) = field(  # type: ignore[valid-type]
        default="softmax", metadata={"help": "softmax, or momentum: softmax and a decaying sum of the preceding values"}
    )
    # SGD's flag has the name --momentum too: hence another name in configurations and checkpoints.
    attention_momentum: float = field(default=0.0, metadata={"help": MOMENTUM_HELP, "argparse_alias": "--momentum"})


@register_model("attention_lm", dataclass=AttentionLMConfig)
class AttentionLM(TransformerLanguageModel):
    """fairseq's `transformer_lm`, its flags, initialisation and names of weights, under the rule of its options."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "AttentionLM":
        """Called by fairseq for `--arch attention_lm --attention momentum --momentum 0.5`."""
        rule = trained_rule({name: getattr(args, name) for name in ("attention", "attention_momentum")})
        model: AttentionLM = super().build_model(args, task)
        set_rule(model.decoder, rule)
        return model


@contextmanager
def relaxed(decoder: Any) -> Iterator[None]:
    """While open, the decoder's attention is linear; whatever else its rule says stays."""
    before = [(layer, layer.self_attn, rule_of(layer.self_attn)) for layer in decoder.layers]
    set_rule(decoder, replace(before[0][2], linear=True))
    try:
        yield
    finally:
        for layer, module, rule in before:
            layer.self_attn = module
            if not isinstance(module, MultiheadAttention):
                module.rule = rule


@contextmanager
def replaced_forward(
    replacements: Mapping[nn.Module, Callable[[Callable[..., Any]], Callable[..., Any]]],
) -> Iterator[None]:
    """While open, each module's forward method is what its function makes of it.

    What a library put in the place of the method before (activation checkpointing, accelerate) is what the function
    is given, and comes back in the end.
    """
    own = {module: module.__dict__.get("forward") for module in replacements}
    for module, make in replacements.items():
        module.forward = make(module.forward)
    try:
        yield
    finally:
        for module, forward in own.items():
            del module.forward
            if forward is not None:
                module.forward = forward
