"""What a user would pick instead of us: the same model in `transformers`, used naively and used well (`bench --peers`).

The models are random, of GPT-2's and of Llama's kind and of the shape's size, in a Hugging Face folder that both read.
All ways score the same queries after the same demonstrations and record every layer's attention output at one token;
ours also records query vectors, scores over all tokens, and the options' scores after every layer.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from fairseq_icl.api import load_model, observe
from fairseq_icl.bench.measure import interleave
from fairseq_icl.bench.report import BenchFindings, BenchRow, Limit
from fairseq_icl.bench.scoring import sample_by_length
from fairseq_icl.bench.shapes import Shape, random_prompts
from fairseq_icl.errors import UserError
from fairseq_icl.models import Model
from fairseq_icl.models.hugging_face import read_folder
from fairseq_icl.models.reference import import_transformers
from fairseq_icl.observing.layout import filled_up
from fairseq_icl.prompts.build import Prompts, Query

BATCHES = (4, 8, 16, 32)
"""Queries in a batch that the careful way is tried with; its best counts."""
POSITIONS = 2048
FAMILIES = ("gpt2", "llama")
WANTED = {"naive": 35.0, "careful": 1.8}
"""Times faster that ICL scoring is to be."""


@dataclass(frozen=True)
class Seen:
    """What a way of scoring gives for n queries."""

    scores: Tensor  # (n, C) log-probability of each option
    outputs: Tensor  # (n, L, d) attention outputs at the token before the label


def measure_peers(findings: BenchFindings, shape: Shape, rounds: int, sample: int, say: Callable[[str], None]) -> None:
    """A row a family and way: seconds of ICL scoring with the prefix, beside ours."""
    for family in FAMILIES:
        say(f"peers: transformers, a {family} of the {shape.name} shape")
        with tempfile.TemporaryDirectory(prefix="fairseq-icl-peers-") as folder:
            theirs = save_random(family, shape, Path(folder))
            ours = load_model(folder)
            peer = Peer(theirs, read_folder(folder).vocabulary.order)
        prompts = random_prompts(shape)
        sampled = sample_by_length(prompts.queries, sample)
        ways: dict[str, Callable[[], object]] = {
            "ours": partial(observe, ours, prompts, in_context=True),
            "naive": partial(peer.naive, prompts, sampled),
        }
        ways |= {f"careful {size}": partial(peer.careful, prompts, size) for size in BATCHES}
        best = interleave(ways, rounds)
        naive = best["naive"] * len(prompts.queries) / sample
        size = min(BATCHES, key=lambda size: best[f"careful {size}"])
        rows = {
            "naive": BenchRow(f"{family}, ICL scoring: transformers, whole prompts", best["ours"], naive),
            "careful": BenchRow(
                f"{family}, ICL scoring: transformers, key-value cache, batches of {size}",
                best["ours"],
                best[f"careful {size}"],
            ),
        }
        for way, row in rows.items():
            findings.rows.append(row)
            findings.expect_faster(row, WANTED[way], f"{family}, ICL scoring, times faster than transformers, {way}")
        findings.limits.append(
            Limit(
                f"{family}, ICL scoring, largest relative difference from transformers",
                largest_difference(ours, prompts, peer.careful(prompts, size)),
                1e-5,
            )
        )
    sizes = ", ".join(map(str, BATCHES))
    findings.notes.append(
        "transformers computes attention by its default, PyTorch's scaled-dot-product attention. Its whole prompts "
        f"were timed on {sample} queries and scaled up; its key-value cache was tried with batches of {sizes}. All "
        "times include the demonstrations."
    )


def save_random(family: str, shape: Shape, folder: Path) -> Any:
    """A random model of transformers' own class, saved with a tokenizer that has as many tokens."""
    try:
        transformers = import_transformers()
    except ImportError as error:
        raise UserError("--peers: needs transformers; install it with pip install 'fairseq-icl[bench]'") from error
    ids = {"bos_token_id": 256, "eos_token_id": 256, "vocab_size": shape.vocabulary}
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_inner=shape.ffn,
            n_positions=POSITIONS,
            **ids,
        )
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=shape.ffn,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            **ids,
        )
        model = transformers.LlamaForCausalLM(config)
    transformers.utils.logging.disable_progress_bar()
    model.eval().save_pretrained(folder)
    _tokenizer(shape.vocabulary).save(str(folder / "tokenizer.json"))
    return model


def _tokenizer(size: int) -> Tokenizer:
    """Bytes, the end of a text, and words that no text becomes, up to `size` tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "<|endoftext|>", *(f"<{number}>" for number in range(size - len(alphabet) - 1))]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


class Peer:
    """A model of transformers, asked the two ways that its users ask it."""

    def __init__(self, model: Any, order: Sequence[int]) -> None:
        """`order`: the model's id of each of our rows."""
        self.model, self.order = model, torch.tensor(order)
        self.body = model.transformer if hasattr(model, "transformer") else model.model
        layers = self.body.h if hasattr(self.body, "h") else self.body.layers
        self.attention = [getattr(layer, "attn", None) or layer.self_attn for layer in layers]

    @torch.no_grad()
    def naive(self, prompts: Prompts, queries: Sequence[Query]) -> Seen:
        """Every query by itself, behind the whole prompt; all logits."""
        scores, outputs = [], []
        for query in queries:
            ids = self.order[torch.tensor([(*prompts.context, *query.inputs[0])])]
            with self._outputs() as seen:
                logits = self.model(ids).logits
            scores.append(self._scores(logits[:, -1], [query]))
            outputs.append(torch.stack([output[:, -1] for output in seen], dim=1))
        return Seen(torch.cat(scores), torch.cat(outputs))

    @torch.no_grad()
    def careful(self, prompts: Prompts, size: int) -> Seen:
        """The prompt once, its cache copied for every batch of `size` queries of like length; few logits."""
        context = self.order[torch.tensor([prompts.context])]
        prefix = self.body(context, use_cache=True).past_key_values
        ordered = sorted(range(len(prompts.queries)), key=lambda index: len(prompts.queries[index].inputs[0]))
        scores, outputs = [], []
        for start in range(0, len(ordered), size):
            queries = [prompts.queries[index] for index in ordered[start : start + size]]
            tokens = self.order[filled_up([query.inputs[0] for query in queries])]
            last = torch.tensor([len(query.inputs[0]) - 1 for query in queries])
            cache = import_transformers().DynamicCache()
            for layer, past in enumerate(prefix.layers):
                shape = (len(queries), -1, -1, -1)
                cache.update(past.keys.expand(shape), past.values.expand(shape), layer)
            mask = torch.ones(len(queries), context.size(1) + tokens.size(1), dtype=torch.long)
            mask[:, context.size(1) :] = torch.arange(tokens.size(1)) <= last[:, None]
            rows = torch.arange(len(queries)), last
            with self._outputs() as seen:
                hidden = self.body(tokens, past_key_values=cache, attention_mask=mask).last_hidden_state
            scores.append(self._scores(self.model.lm_head(hidden[rows]), queries))
            outputs.append(torch.stack([output[rows] for output in seen], dim=1))
        back = torch.tensor(ordered).argsort()
        return Seen(torch.cat(scores)[back], torch.cat(outputs)[back])

    def _scores(self, logits: Tensor, queries: Sequence[Query]) -> Tensor:
        """(n, C) of logits (n, V); labels have one token each."""
        options = self.order[torch.tensor([[label[0] for label in query.labels] for query in queries])]
        return logits.log_softmax(dim=-1).gather(1, options)

    @contextmanager
    def _outputs(self) -> Iterator[list[Tensor]]:
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


def largest_difference(model: Model, prompts: Prompts, theirs: Seen) -> float:
    """max |ours - theirs| over scores and attention outputs, each relative to its largest value."""
    before_label = replace(prompts, settings=replace(prompts.settings, position="query"))
    mine = observe(model, before_label, in_context=True)
    pairs = ((mine.option_logprobs, theirs.scores), (mine.attention_output, theirs.outputs))
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
