"""The floating-point operations of a decoder's matrix products, and how fast this machine does such products.

What a pass needs is counted here alone; measured times are held against it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Work = Counter[int | str]
"""What some passes need. A number of rows -> operations of the products with weights that have so many rows at once;
"attention" -> operations of queries on keys and of weights on values; "logits" -> numbers that a softmax over the
vocabulary reads; "tokens" -> tokens that a layer saw, added up over layers; "layers" -> calls of a layer."""
CACHES = 2**27
"""Bytes that no cache holds: matrices of so many take turns when products are measured."""


def operations(work: Work) -> float:
    """Floating-point operations of all matrix products."""
    return sum(count for kind, count in work.items() if isinstance(kind, int) or kind == "attention")


def times(number: float, work: Work) -> Work:
    """The work done `number` times."""
    return Work({kind: number * count for kind, count in work.items()})


@dataclass(frozen=True)
class DecoderSizes:
    """A decoder-only transformer, as far as its matrix products are concerned."""

    layers: int
    width: int
    heads: int
    attention: int
    """Width of all heads together: of the queries, and of what the output projection reads."""
    keys: int
    """Width of the keys, and of the values: less than `attention` where several query heads share one of theirs."""
    ffn: int
    vocabulary: int

    @classmethod
    def of(cls, *, layers: int, width: int, heads: int, ffn: int, vocabulary: int) -> "DecoderSizes":
        """fairseq's decoder of a shape as the model configurations write it; its heads share the width."""
        return cls(layers, width, heads, width, width, ffn, vocabulary)

    @property
    def matrices(self) -> dict[str, int]:
        """Name -> number of weights of every matrix of a layer."""
        return {
            "self_attn.q_proj.weight": self.width * self.attention,
            "self_attn.k_proj.weight": self.width * self.keys,
            "self_attn.v_proj.weight": self.width * self.keys,
            "self_attn.out_proj.weight": self.attention * self.width,
            **{f"{name}.weight": self.width * self.ffn for name in ("fc1", "fc2")},
        }

    @property
    def layer_weights(self) -> int:
        """Weights of one layer that multiply activations."""
        return sum(self.matrices.values())

    @property
    def weights(self) -> int:
        """Weights of the whole model, the embeddings once."""
        return self.layers * self.layer_weights + self.vocabulary * self.width

    def learning(self, parts: str = "self_attn.k_proj,self_attn.v_proj") -> int:
        """Weights of one layer that learn: those whose name contains one of the comma-separated `parts`."""
        wanted = [part.strip() for part in parts.split(",") if part.strip()]
        return sum(count for name, count in self.matrices.items() if any(part in name for part in wanted))

    def forward(self, rows: int, scores: float, layers: int | None = None, read: int | None = None) -> Work:
        """A pass of `rows` tokens that look at `scores` tokens in all: 2 rows weights + 4 scores attention a layer.

        `read`: the last layer's feed-forward block runs at so many of them only (observing/layers.py), its
        attention and output projection there and at as many more, whose activations are recorded (observing/prefix.py).
        """
        layers = self.layers if layers is None else layers
        linear, attention = 2 * rows * self.layer_weights * layers, 4 * scores * self.attention * layers
        if read is not None:
            left_out = rows - min(rows, 2 * read)
            linear -= 2 * (rows - read) * self.learning("fc1,fc2") + 2 * left_out * self.learning("out_proj")
            attention -= 4 * scores * self.attention * left_out / max(rows, 1)
        return Work({rows: linear, "attention": attention, "tokens": rows * layers, "layers": layers})

    def unembedding(self, rows: int) -> Work:
        """Logits of `rows` tokens over the vocabulary, and their softmax."""
        return Work({rows: 2 * rows * self.vocabulary * self.width, "logits": rows * self.vocabulary})

    def training(
        self, rows: int, losses: int, learning: int, *, linearized: bool = False, layers: int | None = None
    ) -> Work:
        """A step on `rows` tokens: forward, backward to the inputs, gradients of `learning` weights a layer.

        `losses` rows reach the vocabulary at once, forward and with their gradient back. A linearized model also makes
        a forward pass of values and tangents. `layers`: of a model that is cut after so many.
        """
        forward = self.forward(rows, rows**2 / 2, layers)
        gradients = Work({rows: 2 * rows * learning * (self.layers if layers is None else layers)})
        head = times(2, self.unembedding(losses))
        return times(4 if linearized else 2, forward) + gradients + times(2 if linearized else 1, head)


def like_feed_forward(sizes: DecoderSizes, rows: int, like: Tensor) -> tuple[float, list[Callable[[], None]]]:
    """(operations of one, products) to be timed: `rows` tokens through the feed-forward blocks of several layers.

    As in a model, weights come from memory and not from the cache. A block is over in milliseconds, so that among many
    some are not interrupted. Precision and device are those of `like`.
    """
    count = min(max(4, CACHES // (2 * sizes.width * sizes.ffn * like.itemsize)), max(4, sizes.layers))
    inputs = like.new_ones(rows, sizes.width)
    inner, outer = like.new_empty(rows, sizes.ffn), like.new_empty(rows, sizes.width)

    def multiply(up: Tensor, down: Tensor) -> None:
        torch.mm(inputs, up.T, out=inner)
        torch.mm(inner, down.T, out=outer)

    pairs = [(like.new_ones(sizes.ffn, sizes.width), like.new_ones(sizes.width, sizes.ffn)) for _ in range(count)]
    return 4.0 * rows * sizes.width * sizes.ffn, [partial(multiply, *pair) for pair in pairs]
