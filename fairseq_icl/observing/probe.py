"""Hooks on the self-attention of a decoder: what it put out and looked at, for chosen tokens.

They work on any path of fairseq's attention (fused, Python, replaced) because they read only the module's input and
output. The model's outputs do not change by one bit.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_icl.models.attention import RuledAttention, Seam, projected

HALF = (torch.float16, torch.bfloat16)
Pair = tuple[Tensor, Tensor]
Attention = Any  # a self-attention module: fairseq's, or one with a `Seam`; with out_proj, num_heads and head_dim


def attention_modules(decoder: Any) -> list[Attention]:
    """The self-attention modules of a decoder, bottom first; as many as it has layers, or an error."""
    modules = [layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn")]
    if len(modules) != len(decoder.layers):
        raise TypeError(
            f"{len(decoder.layers)} layers, but {len(modules)} of them have a self_attn that can be observed"
        )
    return modules


def is_plain(module: Attention) -> bool:
    """Whether the module is fairseq's own attention without extras, so that the formulas here are what it computes."""
    if type(module) is not MultiheadAttention or not module.self_attention:
        return False
    return module.bias_k is None and not module.add_zero_attn and not module.use_xformers


def queries_keys_values(module: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (scaled), keys and values, (B, H, T, D) each, of x (T, B, d), which the module received last."""
    own = getattr(module, "queries_keys_values", partial(projected, module))
    return cast(tuple[Tensor, Tensor, Tensor], own(x))


def seam_of(module: Attention) -> Seam:
    """Where the module hands over queries, keys and values; fairseq's own does so where a pass asks for it."""
    if not hasattr(module, "seam"):
        module.seam = Seam()
    return cast(Seam, module.seam)


@contextmanager
def listening(module: Attention, look: Callable[[Tensor, Tensor, Tensor], None]) -> Iterator[None]:
    """While open, `look` is called with the module's queries, keys and values whenever they are handed over."""
    seam_of(module).look = look
    try:
        yield
    finally:
        module.seam.look = None


def at_least_single(x: Tensor) -> Tensor:
    """x in fp32 if it is in half precision; otherwise as it is."""
    return x.float() if x.dtype in HALF else x


def detached(x: Tensor) -> Tensor:
    """x without its graph, in passes that have one: in others detach would drop tangents (forward-mode derivatives)."""
    return x.detach() if torch.is_grad_enabled() else x


class AttentionRecord(NamedTuple):
    """What the probe saw at n chosen tokens of L layers."""

    output: Tensor  # (n, L, d) attention output with output projection and bias, before the residual
    query: Tensor  # (n, L, d) query vector, heads concatenated, times head_dim ** -0.5
    scores: Tensor  # (n, L, H, K) query . key of every token of the sequence, before mask and softmax
    heads: Tensor | None = None  # (n, L, H, D) what each head puts out, before the output projection


class AttentionProbe(ExitStack):
    """While open, passes of `decoder` are recorded at tokens `positions[i]` of `sequences[i]`; `record()` tells."""

    def __init__(
        self, decoder: Any, sequences: Tensor, positions: Tensor, past: Pair | None = None, wants_heads: bool = False
    ) -> None:
        """`past`: the tokens that each is scored with, as sequences and positions, (n, K) each or broadcasting to it.

        By default all tokens of its sequence. `wants_heads`: in passes that call the output projection as a module,
        which fairseq's fused attention does not.
        """
        super().__init__()
        self.modules, self.wants_heads = attention_modules(decoder), wants_heads
        self.sequences, self.positions, self.past = sequences, positions, past  # (n,), (n,)
        self._seen: dict[nn.Module, tuple[Tensor, Tensor, Tensor]] = {}
        self._projected: dict[nn.Module, Pair] = {}
        self._heads: dict[nn.Module, Tensor] = {}

    def __enter__(self) -> "AttentionProbe":
        for module in self.modules:
            self.enter_context(module.register_forward_hook(self._look, with_kwargs=True))
            self.enter_context(listening(module, partial(self._listen, module)))
            if self.wants_heads:
                hook = partial(self._look_at_heads, module)
                self.enter_context(module.out_proj.register_forward_pre_hook(hook))
        return self

    def record(self) -> AttentionRecord:
        """The last forward pass, layers stacked."""
        per_layer = [self._seen[module] for module in self.modules]
        heads = torch.stack([self._heads[module] for module in self.modules], dim=1) if self.wants_heads else None
        output, query, scores = (torch.stack(layers, dim=1) for layers in zip(*per_layer, strict=True))
        return AttentionRecord(output, query, scores, heads)

    def _look(self, module: Attention, args: tuple[Any, ...], kwargs: dict[str, Any], result: tuple[Any, ...]) -> None:
        x = _input(args, kwargs)  # (T, B, d)
        output = result[0][self.positions, self.sequences]  # (n, d)
        sequences, positions = self.past or (self.sequences[:, None], torch.arange(x.size(0), device=x.device))
        projections = self._projected.pop(module, None)
        # In half precision keys are formed and rounded as in the model itself; the shorter way would round elsewhere.
        if projections is None and isinstance(module, MultiheadAttention) and x.dtype not in HALF:
            query = module.q_proj(x[self.positions, self.sequences]) * module.scaling  # (n, d)
            scores = key_scores(module, query, x[positions, sequences])
        else:
            queries, keys = projections or projected(module, x)[:2]
            query = queries[self.sequences, :, self.positions]  # (n, H, D)
            scores = torch.einsum("nhd,nkhd->nhk", query, keys[sequences, :, positions])
            query = query.flatten(1)
        self._seen[module] = (output, query, scores)

    def _look_at_heads(self, module: Attention, projection: nn.Module, args: tuple[Tensor, ...]) -> None:
        # The attention of fairseq lays out (T, B, H * D), that of transformers (B, T, H * D).
        by_time = isinstance(module, MultiheadAttention | RuledAttention)
        place = (self.positions, self.sequences) if by_time else (self.sequences, self.positions)
        self._heads[module] = args[0][place].unflatten(1, (module.num_heads, -1))

    def _listen(self, module: Attention, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._projected[module] = query, key


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a self-attention module is called with: (T, B, d)."""
    return cast(Tensor, kwargs["query"] if "query" in kwargs else args[0])


def key_scores(module: MultiheadAttention, query: Tensor, inputs: Tensor) -> Tensor:
    """Per head q . (W x + b) = (q W) . x + q . b, for each of n queries over its own K inputs x: (n, H, K).

    `query` is (n, d), `inputs` (n, K, d). This order never forms the keys, which would cost a second projection.
    """
    heads = query.unflatten(1, (module.num_heads, module.head_dim))  # (n, H, d/H)
    weight = module.k_proj.weight.unflatten(0, (module.num_heads, module.head_dim))  # (H, d/H, d)
    scores = torch.einsum("nhd,nkd->nhk", torch.einsum("nhe,hed->nhd", heads, weight), inputs)
    if module.k_proj.bias is None:
        return scores
    bias = module.k_proj.bias.unflatten(0, (module.num_heads, module.head_dim))  # (H, d/H)
    return scores + (heads * bias).sum(-1, keepdim=True)


@contextmanager
def attention_inputs(decoder: nn.Module) -> Iterator[list[Tensor]]:
    """A list that fills with what each layer's self-attention receives, (T, B, d), while the decoder runs."""
    inputs: list[Tensor] = []
    with ExitStack() as hooks:
        for module in attention_modules(decoder):
            look = module.register_forward_pre_hook(lambda _, *given: inputs.append(_input(*given)), with_kwargs=True)
            hooks.enter_context(look)
        yield inputs


@contextmanager
def attention_outputs(decoder: nn.Module) -> Iterator[list[Tensor]]:
    """A list that fills with what each layer's self-attention puts out, (T, B, d), while the decoder runs."""
    outputs: list[Tensor] = []
    with ExitStack() as hooks:
        for module in attention_modules(decoder):
            hooks.enter_context(module.register_forward_hook(lambda _, __, result: outputs.append(result[0])))
        yield outputs


@contextmanager
def attention_queries(decoder: nn.Module) -> Iterator[list[Tensor]]:
    """A list that fills with each layer's scaled queries, heads concatenated, (B, T, d), while the decoder runs."""
    queries: list[Tensor] = []

    def keep(query: Tensor, *_: Tensor) -> None:
        queries.append(detached(query).transpose(1, 2).flatten(2))

    def project(module: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.no_grad():
            queries.append((module.q_proj(_input(args, kwargs)) * module.scaling).transpose(0, 1))

    with ExitStack() as hooks:
        for module in attention_modules(decoder):
            if isinstance(module, MultiheadAttention):
                hooks.enter_context(module.register_forward_pre_hook(project, with_kwargs=True))
            else:
                hooks.enter_context(listening(module, keep))
        yield queries


@torch.no_grad()
def observe_training_queries(model: Any, tokens: Tensor) -> Tensor:
    """(layers, B, T, d): scaled queries, heads concatenated, of sequences `tokens` (B, T), by a pass of its own."""

    def run() -> Tensor:
        with attention_queries(model.decoder) as queries:
            model.decoder(tokens, features_only=True)
        return torch.stack(queries)

    return cast(Tensor, model.evaluate(run))
