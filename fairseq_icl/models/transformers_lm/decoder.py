"""`TransformersDecoder`: a language model of transformers under the names and in the layout of fairseq's decoder.

The modules are the library's own and run in its own order; `layers[i]` and `layers[i].self_attn` stand where its layers
and their attention stood, so that hooks see (T, B, d) there as in fairseq, while the library's code sees (B, T, d). No
number is copied for that. Every module is registered once, under the name that this package uses
(`layers.3.self_attn.k_proj.weight`): what is moved there stays in its old place as a plain attribute.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqDecoder
from torch import Tensor, nn

from fairseq_icl.compat.models import replaced
from fairseq_icl.models.attention import Rule
from fairseq_icl.models.transformers_lm.attention import Call, FamilySeam
from fairseq_icl.models.transformers_lm.examination import Anatomy, Separated, place_of, positions_of

NAMES = {"o_proj": "out_proj", "dense": "out_proj", "c_proj": "out_proj"}
"""Parts of an attention module -> what this package calls them."""
FEED_FORWARD = (("up_proj", "down_proj"), ("fc1", "fc2"), ("dense_h_to_4h", "dense_4h_to_h"), ("c_fc", "c_proj"))
"""The first and the last matrix of a feed-forward block; `gate_proj` may stand beside the first."""


def moved(parent: nn.Module, name: str) -> nn.Module:
    """The child of this name, from now on a plain attribute of `parent`, which somebody else has to register."""
    child = parent.__dict__[name] = parent.get_submodule(name)
    del parent._modules[name]
    return child


def run_turned(module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """What a module puts out that lays tokens and sequences out the other way round, and what else it returns."""
    result = module(x.transpose(0, 1), *args, **kwargs)
    output, *others = result if isinstance(result, tuple) else (result,)
    return output.transpose(0, 1), tuple(others)


class Turned(nn.Module):
    """Stands in transformers' place, (B, T, d), for a module that wants (T, B, d) and gives (output, others, ...)."""

    def __init__(self, inner: nn.Module, others: int = 0) -> None:
        super().__init__()
        self.__dict__["inner"] = inner  # registered elsewhere
        self.others = others

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, others = run_turned(self.__dict__["inner"], hidden_states, *args, **kwargs)
        return (output, *((others and others[0]) or (None,) * self.others)) if self.others else output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"].block, name)  # what transformers asks its own module for


class Attention(nn.Module):
    """The self-attention of a layer: `block` is transformers' module, its parts are registered here."""

    self_attention = True

    def __init__(self, call: Call) -> None:
        super().__init__()
        _, self.num_heads, _, self.head_dim = call.query.shape
        self.scaling = call.scaling
        self.seam = FamilySeam(call.scaling, call.window, self.num_heads // call.key.size(1))
        block = call.module
        block.__dict__["seam"] = self.seam
        for name in list(block._modules):
            part = moved(block, name)
            if any(True for _ in part.parameters()):
                self.add_module(NAMES.get(name, name), part)
            elif isinstance(part, Separated):
                for kind, projection in part.parts.items():
                    self.add_module(kind, projection)
        self.block = block
        self.called_with: dict[str, Any] = {}

    @property
    def rule(self) -> Rule:
        """Softmax, or linear; windows and caps are the family's business."""
        return self.seam.rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        self.seam.rule = rule

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Attention of `query` (T, B, d) to itself and its past, with output projection: (T, B, d)."""
        self.called_with = {"args": args, "kwargs": kwargs}
        return run_turned(self.block, query, *args, **kwargs)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (scaled), keys and values of x (T, B, d) at the positions of the last pass: (B, H, T, D) each."""
        seen: list[tuple[Tensor, Tensor, Tensor]] = []

        def stand_in(rule: Rule, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
            seen.append((query, key, value))
            return torch.zeros_like(query[..., : value.size(-1)])

        with replaced(self.seam, look=None, stand_in=stand_in):
            self.block(x.transpose(0, 1), *self.called_with["args"], **self.called_with["kwargs"])
        return seen[0]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"called_with": {}}  # tensors of the last pass are no part of a copy


class Layer(nn.Module):
    """A layer, (T, B, d) -> ((T, B, d), others, None), as fairseq's."""

    def __init__(self, block: nn.Module, self_attn: Attention, anatomy: Anatomy) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.block = block
        self.normalize_before: bool = getattr(block, "do_layer_norm_before", True)
        self.parallel_residual = anatomy.after_attention is None
        self.feed_forward: tuple[list[nn.Module], nn.Module] | None = None
        if anatomy.after_attention is not None:
            name = "final_layer_norm" if self.normalize_before else "self_attn_layer_norm"
            inner = Norm(block.get_submodule(anatomy.after_attention))
            self.add_module(name, inner)
            block._modules[anatomy.after_attention] = Turned(inner)
        whole = block._modules.get(anatomy.feed_forward or "")
        if whole is not None:
            self.__dict__["feed_forward"] = ([whole], whole)
        for owner in filter(None, (whole, block)):
            for first, last in FEED_FORWARD:
                if isinstance(getattr(owner, first, None), nn.Linear) and "fc1" not in self.__dict__:
                    self.__dict__.update(fc1=getattr(owner, first), fc2=getattr(owner, last))
                    if hasattr(owner, "gate_proj"):
                        self.__dict__["gate_proj"] = owner.gate_proj

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return *run_turned(self.block, x, *args, **kwargs), None


class Norm(nn.Module):
    """A norm, (T, B, d) -> (T, B, d); what it receives is the state between attention and MLP."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return run_turned(self.block, x)[0]


class Scale(nn.Module):
    """Times a constant: some families scale their logits, which is the same as scaling what the matrix reads."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class CappedHead(nn.Module):
    """Logits U x that become cap * tanh(U x / cap)."""

    def __init__(self, head: nn.Module, cap: float) -> None:
        super().__init__()
        self.head, self.cap = head, cap

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(x) / self.cap) * self.cap


class TransformersDecoder(FairseqDecoder):
    """A decoder of transformers; attributes are named as in fairseq's `TransformerDecoder`."""

    def __init__(self, model: Any, dictionary: Dictionary, anatomy: Anatomy) -> None:
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        self.adaptive_softmax = self.embed_positions = None
        self._positions = positions_of(model.config)
        self.body: Any = anatomy.body
        head = model.get_output_embeddings()
        self.embed_tokens: Any = moved(*place_of(model, model.get_input_embeddings()))
        self.layers = nn.ModuleList()
        for number, (block, call) in enumerate(zip(list(anatomy.layers), anatomy.attention, strict=True)):
            owner, name = place_of(block, call.module)
            attention = Attention(call)
            owner._modules[name] = Turned(attention, anatomy.others[call.module])
            self.layers.append(Layer(block, attention, anatomy))
            anatomy.layers[number] = Turned(self.layers[-1], anatomy.others[block])
        self._final_norm = anatomy.final_norm
        self.layer_norm = None if anatomy.final_norm is None else moved(self.body, anatomy.final_norm)
        self.project_out_dim = None if anatomy.projection is None else moved(self.body, anatomy.projection)
        self.scale = None if anatomy.scale == 1.0 else Scale(anatomy.scale)
        if self.scale is not None:
            self.project_out_dim = self.scale
        self.output_projection = head if anatomy.cap is None else CappedHead(head, anatomy.cap)
        self.embed_dim = self.embed_tokens.get_parameter("weight").size(1)
        self._start: int | Tensor = 0

    def lose_final_norm(self) -> None:
        """Go without the final norm from now on."""
        if self._final_norm is not None:
            self.body.__dict__[self._final_norm] = nn.Identity()
            self.layer_norm = None

    def positions_from(self, start: int | Tensor) -> AbstractContextManager[None]:
        """While open, positions are counted from `start`: one for all sequences or one each, (B,)."""
        return replaced(self, _start=start)

    def extract_features(
        self, prev_output_tokens: Tensor, encoder_out: None = None, incremental_state: Any = None, **_: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Features (B, T, d), as the output projection reads them, of tokens (B, T)."""
        if incremental_state is not None:
            raise NotImplementedError("a decoder of transformers keeps no incremental state here")
        tokens = prev_output_tokens
        if tokens.size(1) > 1 and bool(tokens[:, 0].eq(self.padding_idx).any()):
            raise ValueError("sequences must be filled up on the right, not on the left")  # where no token sees it
        start = torch.as_tensor(self._start, device=tokens.device)
        positions = (start[..., None] + torch.arange(tokens.size(1), device=tokens.device)).expand(tokens.shape)
        features = self.body(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        return (features if self.scale is None else self.scale(features)), {"attn": [None]}

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
        """Longest sequence the model was trained for."""
        return self._positions
