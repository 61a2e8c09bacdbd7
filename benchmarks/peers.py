"""What a user could pick instead of us: each library is a function here, and a line of `PEERS`.

Everybody scores the same prompts, given as token ids (random tokens are no text), and records every layer's attention
output at the token before the label, but for lm-evaluation-harness, which gives scores alone. A `load` function takes
the folder of a Hugging Face model and returns the way of scoring; it raises ImportError where its library is not
installed. All run in fp32 on the processor with the library's own defaults.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.limits import KEY_VALUE_CACHE, WHOLE_PROMPTS, Bound
from fairseq_icl.models.transformers_lm import import_transformers
from fairseq_icl.observing.layout import filled_up
from fairseq_icl.prompts import Tokens
from fairseq_icl.prompts.encoding import Query


@dataclass(frozen=True)
class Work:
    """What is to be scored, in the model's own ids: n queries with labels of one token after one context."""

    context: Tokens
    inputs: tuple[Tokens, ...]
    options: Tensor  # (n, C)

    @classmethod
    def of(cls, context: Tokens, queries: Sequence[Query], order: Sequence[int]) -> "Work":
        """`order`: the model's id of each of our rows."""
        inputs = [query.inputs[0] for query in queries]
        options = [[order[label[0]] for label in query.labels] for query in queries]
        return cls(_renamed(context, order), tuple(_renamed(one, order) for one in inputs), torch.tensor(options))

    def take(self, chosen: Sequence[int]) -> "Work":
        """Some of the queries, in that order."""
        return replace(self, inputs=tuple(self.inputs[index] for index in chosen), options=self.options[list(chosen)])

    def batches(self, size: int) -> Iterator["Work"]:
        """Batches of `size` queries."""
        return (self.take(range(len(self.inputs))[start : start + size]) for start in range(0, len(self.inputs), size))

    def scores(self, logits: Tensor) -> Tensor:
        """(n, C) log-probabilities of logits (n, V) before the labels."""
        return logits.log_softmax(dim=-1).gather(1, self.options)


@dataclass(frozen=True)
class Seen:
    """What a way of scoring gives for n queries."""

    scores: Tensor  # (n, C) log-probability of each option
    outputs: Tensor | None = None  # (n, L, d) attention outputs at the token before the label


Scoring = Callable[[Work, int], Seen]
"""A way of scoring: the queries, in batches of so many."""


@dataclass(frozen=True)
class Peer:
    """A library, used one way."""

    name: str
    load: Callable[[Path], Scoring]
    batches: tuple[int, ...] = (1,)
    """Queries in a batch that it is tried with; its best counts."""
    whole: bool = True
    """Whether the demonstrations run again with every query: such a way is timed on a few queries."""
    bound: Bound | None = None
    """How many times faster ours is to be."""


def joined(parts: Sequence[Seen]) -> Seen:
    """The queries of several batches."""
    outputs = [part.outputs for part in parts if part.outputs is not None]
    return Seen(torch.cat([part.scores for part in parts]), torch.cat(outputs) if outputs else None)


def by_length(work: Work, size: int, score: Callable[[Work], Seen]) -> Seen:
    """Queries of like length in batches of `size`; given back in their own order."""
    ordered = sorted(range(len(work.inputs)), key=lambda index: len(work.inputs[index]))
    seen = joined([score(batch) for batch in work.take(ordered).batches(size)])
    back = torch.tensor(ordered).argsort()
    return Seen(seen.scores[back], None if seen.outputs is None else seen.outputs[back])


def continued(prefix: Any, work: Work) -> tuple[dict[str, Any], Tensor, Tensor]:
    """A batch after the context: (cache and mask as transformers takes them, tokens (B, T), last positions (B,)).

    `prefix` is transformers' cache of the context; every batch gets a copy, because a forward pass adds to it.
    """
    number, length = len(work.inputs), len(work.context)
    tokens = filled_up(work.inputs)
    last = torch.tensor([len(one) - 1 for one in work.inputs])
    cache = import_transformers().DynamicCache()
    for layer, past in enumerate(prefix.layers):
        cache.update(past.keys.expand(number, -1, -1, -1), past.values.expand(number, -1, -1, -1), layer)
    mask = torch.ones(number, length + tokens.size(1), dtype=torch.long)
    mask[:, length:] = torch.arange(tokens.size(1)) <= last[:, None]
    return {"past_key_values": cache, "attention_mask": mask}, tokens, last


class Transformers:
    """transformers with forward hooks on its attention modules."""

    def __init__(self, folder: Path) -> None:
        self.model = import_transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.body = self.model.transformer if hasattr(self.model, "transformer") else self.model.model
        layers = self.body.h if hasattr(self.body, "h") else self.body.layers
        self.attention = [getattr(layer, "attn", None) or layer.self_attn for layer in layers]

    @contextmanager
    def outputs(self) -> Iterator[list[Tensor]]:
        """A list that fills with every layer's attention output, (B, T, d)."""
        seen: list[Tensor] = []
        hooks = [
            module.register_forward_hook(lambda _, __, output: seen.append(output[0])) for module in self.attention
        ]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def whole_prompt(self, work: Work) -> Seen:
        """One query behind the whole prompt; all logits."""
        with self.outputs() as seen:
            logits = self.model(torch.tensor([work.context + work.inputs[0]])).logits
        return Seen(work.scores(logits[:, -1]), torch.stack([output[:, -1] for output in seen], dim=1))

    @torch.no_grad()
    def cached(self, work: Work, size: int) -> Seen:
        """The prompt once, its cache copied for every batch of `size` queries of like length; few logits."""
        prefix = self.body(torch.tensor([work.context]), use_cache=True).past_key_values

        def score(batch: Work) -> Seen:
            arguments, tokens, last = continued(prefix, batch)
            rows = torch.arange(len(last)), last
            with self.outputs() as seen:
                hidden = self.body(tokens, **arguments).last_hidden_state
            logits = self.model.lm_head(hidden[rows])
            return Seen(batch.scores(logits), torch.stack([output[rows] for output in seen], dim=1))

        return by_length(work, size, score)


def load_transformers(folder: Path) -> Scoring:
    """transformers as most use it."""
    model = Transformers(folder)
    return lambda work, _: joined([model.whole_prompt(one) for one in work.batches(1)])


def load_transformers_cached(folder: Path) -> Scoring:
    """transformers as somebody uses it who knows it well."""
    return Transformers(folder).cached


class TransformerLens:
    """TransformerLens' bridge: its hooks on the Hugging Face model."""

    def __init__(self, folder: Path) -> None:
        import_transformers()  # first, for what it repairs
        from transformer_lens import TransformerBridge

        self.model: Any = TransformerBridge.boot_transformers(str(folder), device="cpu", dtype=torch.float32).eval()
        self.names = [f"blocks.{layer}.hook_attn_out" for layer in range(self.model.cfg.n_layers)]

    def run(self, tokens: Tensor, last: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """Logits (B, V) and attention outputs (B, L, d) at the positions `last`."""
        logits, cache = self.model.run_with_cache(tokens, names_filter=self.names, **arguments)
        rows = torch.arange(len(last)), last
        return logits[rows], torch.stack([cache[name][rows] for name in self.names], dim=1)

    @torch.no_grad()
    def whole_prompt(self, work: Work) -> Seen:
        """One query behind the whole prompt."""
        tokens = torch.tensor([work.context + work.inputs[0]])
        logits, outputs = self.run(tokens, torch.tensor([tokens.size(1) - 1]))
        return Seen(work.scores(logits), outputs)

    @torch.no_grad()
    def cached(self, work: Work, size: int) -> Seen:
        """The prompt once, its cache copied for every batch of `size` queries of like length."""
        context = torch.tensor([work.context])
        _, prefix = self.model(context, return_type="logits_and_cache", use_cache=True)

        def score(batch: Work) -> Seen:
            arguments, tokens, last = continued(prefix, batch)
            logits, outputs = self.run(tokens, last, **arguments)
            return Seen(batch.scores(logits), outputs)

        return by_length(work, size, score)


def load_lens(folder: Path) -> Scoring:
    """`run_with_cache` on whole prompts."""
    model = TransformerLens(folder)
    return lambda work, _: joined([model.whole_prompt(one) for one in work.batches(1)])


def load_lens_cached(folder: Path) -> Scoring:
    """`run_with_cache` after a key-value cache of the demonstrations."""
    return TransformerLens(folder).cached


def load_harness(folder: Path) -> Scoring:
    """lm-evaluation-harness: log-likelihoods of (context and query, label); labels of one query share a pass."""
    import_transformers()  # first, for what it repairs
    from lm_eval.models.huggingface import HFLM

    model = HFLM(str(folder), device="cpu", dtype="float32")

    def score(work: Work, size: int) -> Seen:
        model.batch_size_per_gpu = size
        prompts = [[*work.context, *one] for one in work.inputs]
        requests = [
            (("", ""), prompt, [label])
            for prompt, labels in zip(prompts, work.options.tolist(), strict=True)
            for label in labels
        ]
        answers = model._loglikelihood_tokens(requests, disable_tqdm=True)
        return Seen(torch.tensor([value for value, _ in answers]).view(work.options.shape))

    return score


PEERS = (
    Peer("transformers, whole prompts", load_transformers, bound=WHOLE_PROMPTS),
    Peer("transformers, key-value cache", load_transformers_cached, (4, 8, 16, 32), whole=False, bound=KEY_VALUE_CACHE),
    Peer("TransformerLens, whole prompts", load_lens),
    Peer("TransformerLens, key-value cache", load_lens_cached, (8, 16, 32), whole=False),
    Peer("lm-evaluation-harness, scores alone", load_harness, (1, 4)),
)


def _renamed(tokens: Tokens, order: Sequence[int]) -> Tokens:
    return tuple(order[token] for token in tokens)
