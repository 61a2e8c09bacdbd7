"""Rows -> the token sequences of one run: ICL prompt, queries and fine-tuning sequences.

    zero-shot   BOS input label
    ICL         BOS (input label EOS) (input label EOS) ... input label
    fine-tuning BOS input label

Input and label are encoded separately and concatenated. docs/protocol.md gives the authors' rules one by one.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from pathlib import Path

from fairseq_icl.errors import UserError
from fairseq_icl.prompts import sampling
from fairseq_icl.prompts.catalogue import DatasetSpec
from fairseq_icl.prompts.readers import Row, read_split
from fairseq_icl.prompts.render import render
from fairseq_icl.prompts.tokens import BOS, EOS, UNKNOWN, Encode, encode_text, is_prefix
from fairseq_icl.reading import Reading

logger = logging.getLogger(__name__)

Tokens = tuple[int, ...]
SWITCHES = ("none", "demonstrations", "finetuning", "both")
MAX_VALIDATION = 2000
"""The authors evaluate on at most so many rows."""


@dataclass(frozen=True)
class Query:
    """One evaluation row: input and label tokens of every option, without BOS and EOS."""

    row: int
    """Row in the validation file, before shuffling."""
    gold: int
    inputs: tuple[Tokens, ...]
    """One an option; the same object where the options share the input."""
    labels: tuple[Tokens, ...]

    @property
    def shared_input(self) -> bool:
        """Whether all options have the same input."""
        return all(tokens is self.inputs[0] for tokens in self.inputs)

    @property
    def single_token(self) -> bool:
        """Whether one position's logits score all options: a shared input and one token a label."""
        return self.shared_input and all(len(tokens) == 1 for tokens in self.labels)

    @property
    def longest(self) -> int:
        """Length of the longest zero-shot sequence, BOS included."""
        return 1 + max(len(a) + len(b) for a, b in zip(self.inputs, self.labels, strict=True))


@dataclass(frozen=True)
class FinetuningSequence:
    """One training sequence and which of its tokens are predicted (never the first)."""

    row: int
    """Row in the training file, before shuffling."""
    tokens: Tokens
    scored: tuple[bool, ...]


@dataclass(frozen=True)
class PromptSet:
    """All sequences of one run."""

    spec: DatasetSpec
    context: Tokens
    """BOS and the demonstrations that fit, each closed by EOS."""
    context_rows: tuple[int, ...]
    """Training file row of each demonstration in the prompt, in its order."""
    context_spans: tuple[tuple[int, int], ...]
    """Start and end of each demonstration inside the context, without its closing EOS."""
    queries: tuple[Query, ...]
    """Validation rows after shuffle, cap and limit."""
    finetuning: tuple[FinetuningSequence, ...]
    """In training order."""
    num_requested: int
    """k, the number of demonstrations asked for."""

    @property
    def num_dropped(self) -> int:
        """How many of the k demonstrations do not fit into the prompt."""
        return self.num_requested - len(self.context_rows)

    @cached_property
    def single_token(self) -> bool:
        """Whether every query can be scored at a single position."""
        return all(query.single_token for query in self.queries)


def build_prompts(
    spec: DatasetSpec,
    folder: str | Path,
    encode: Encode,
    *,
    num_demonstrations: int,
    seed: int,
    permutation: int = 0,
    reading: Reading,
    max_positions: int = 2048,
    max_validation: int = MAX_VALIDATION,
    limit: int | None = None,
    switch_labels: str = "none",
    switch_fraction: float = 1.0,
    switch_seed: int | None = None,
    missing_class: str = "warn",
    bos: int = BOS,
    eos: int = EOS,
) -> PromptSet:
    """The prompts of one run, a function of its arguments and the data files alone.

    `limit` keeps the first queries only; which demonstrations fit is still decided by the longest sequence of the
    whole (capped) validation set, as the authors do, so a limited run has the same prompt as the full one.
    """
    _check_arguments(num_demonstrations, max_validation, limit, seed, switch_labels, switch_seed)
    encoder = RowEncoder(spec, encode, eos, max_positions)
    valid = read_split(Path(folder), spec, "valid")
    order = sampling.shuffled(len(valid), sampling.VALIDATION_SEED)[:max_validation]
    queries = [encoder.query(valid[i]) for i in order]

    train = read_split(Path(folder), spec, "train")
    if num_demonstrations > len(train):
        raise UserError(
            f"{train[0].place[0]}: {num_demonstrations} demonstrations asked for, but the train split of {spec.name} "
            f"has {len(train)} rows; lower --num-demonstrations"
        )
    rows = [train[i] for i in sampling.shuffled(len(train), seed)[:num_demonstrations]]
    shown, trained = _draw_labels(rows, switch_labels, switch_fraction, seed if switch_seed is None else switch_seed)
    demonstrations = [encoder.query(row) for row in rows]

    icl_order, finetuning_order = sampling.demonstration_orders(num_demonstrations, seed, permutation, reading)
    room = max_positions - max(query.longest for query in queries)
    icl_order, context, spans = _build_context(demonstrations, shown, icl_order, room, bos, eos)
    _warn(spec, num_demonstrations, [shown[i] for i in icl_order], max_positions, missing_class)
    if reading.finetuning_demonstrations == "fitting":
        finetuning_order = [i for i in finetuning_order if i in set(icl_order)]
    return PromptSet(
        spec=spec,
        context=context,
        context_rows=tuple(rows[i].index for i in icl_order),
        context_spans=spans,
        queries=tuple(queries[:limit]),
        finetuning=tuple(
            _finetuning_sequence(demonstrations[i], trained[i], reading.loss_on, bos) for i in finetuning_order
        ),
        num_requested=num_demonstrations,
    )


def _check_arguments(
    k: int, max_validation: int, limit: int | None, seed: int, switch_labels: str, switch_seed: int | None
) -> None:
    if k < 0:
        raise UserError(f"--num-demonstrations {k}: must not be negative")
    for flag, value in (("--max-validation", max_validation), ("--limit", limit)):
        if value is not None and value < 1:
            raise UserError(f"{flag} {value}: must be at least 1")
    if switch_labels not in SWITCHES:
        raise UserError(f"--switch-labels {switch_labels}: choose from {', '.join(SWITCHES)}")
    sampling.check_seed(seed)
    if switch_seed is not None:
        sampling.check_seed(switch_seed, "--switch-seed")


def _draw_labels(rows: Sequence[Row], switch: str, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """The labels that the demonstrations have in the prompt and in fine-tuning."""
    golds = [row.gold for row in rows]
    switched = sampling.switched_labels(golds, [len(row.options) for row in rows], fraction, seed)
    shown = switched if switch in ("demonstrations", "both") else golds
    trained = switched if switch in ("finetuning", "both") else golds
    return shown, trained


def _build_context(
    demonstrations: Sequence[Query], labels: Sequence[int], order: Sequence[int], room: int, bos: int, eos: int
) -> tuple[list[int], Tokens, tuple[tuple[int, int], ...]]:
    """(demonstrations used, context tokens, spans): appended while the context stays below `room`, then no more."""
    context, spans, used = [bos], [], []
    for i in order:
        tokens = (*demonstrations[i].inputs[labels[i]], *demonstrations[i].labels[labels[i]])
        if len(context) + len(tokens) + 1 >= room:
            break
        spans.append((len(context), len(context) + len(tokens)))
        context += (*tokens, eos)
        used.append(i)
    return used, tuple(context), tuple(spans)


def _finetuning_sequence(demonstration: Query, label: int, loss_on: str, bos: int) -> FinetuningSequence:
    inputs, labels = demonstration.inputs[label], demonstration.labels[label]
    scored = (False, *[loss_on == "all"] * len(inputs), *[True] * len(labels))
    return FinetuningSequence(demonstration.row, (bos, *inputs, *labels), scored)


def _warn(spec: DatasetSpec, k: int, shown: Sequence[int], max_positions: int, missing_class: str) -> None:
    """Say what the authors' code passes over in silence: demonstrations that do not fit, classes never shown."""
    if len(shown) < k:
        logger.warning(
            f"{spec.name}: only {len(shown)} of {k} demonstrations fit into {max_positions} positions beside the "
            f"longest query; the ICL prompt leaves out {k - len(shown)}"
        )
    missing = [word for number, word in enumerate(spec.label_words) if number not in shown]
    if shown and missing:
        text = f"{spec.name}: no demonstration in the prompt has the label {', '.join(missing)}"
        if missing_class == "refuse":
            raise UserError(f"{text}; raise --num-demonstrations or take another --seed")
        logger.warning(text)


class RowEncoder:
    """Rows -> tokens, checked: nothing empty, nothing longer than the model, label words told apart by their tokens."""

    def __init__(self, spec: DatasetSpec, encode: Encode, eos: int, max_positions: int) -> None:
        self.spec, self.encode, self.eos, self.max_positions = spec, encode, eos, max_positions
        if spec.has_classes:
            self._check_label_words()

    def _tokens(self, text: str) -> Tokens:
        return tuple(encode_text(text, self.encode, self.eos))

    def query(self, row: Row) -> Query:
        """The tokens of a row's options."""
        texts = render(self.spec, row).options
        encoded = {text: self._tokens(text) for text in dict.fromkeys(text for pair in texts for text in pair)}
        for number, (input_text, label_text) in enumerate(texts):
            if not encoded[input_text]:
                raise UserError(f"{row.where}: the input is empty; change the row or the template of {self.spec.name}")
            if not encoded[label_text] or not label_text.strip():
                raise UserError(f"{row.where}: option {number} has no tokens; change the row or remove it")
        inputs, labels = zip(*((encoded[a], encoded[b]) for a, b in texts), strict=True)
        query = Query(row.index, row.gold, inputs, labels)
        if query.longest > self.max_positions:
            raise UserError(
                f"{row.where}: {query.longest} tokens with its label, but the model has {self.max_positions} "
                f"positions; shorten or remove the row"
            )
        return query

    def _check_label_words(self) -> None:
        tokens = {word: self._tokens(f" {word.strip()}") for word in self.spec.label_words}
        for word, ids in tokens.items():
            if not ids:
                raise UserError(f"dataset {self.spec.name}: label word {word!r} has no tokens; choose another word")
            if set(ids) == {UNKNOWN}:
                raise UserError(
                    f"dataset {self.spec.name}: label word {word!r} is unknown to the dictionary; choose the model's "
                    "tokenizer with --bpe, or another word"
                )
        for first, second in permutations(tokens, 2):
            if is_prefix(tokens[first], tokens[second]):
                raise UserError(
                    f"dataset {self.spec.name}: label word {second!r} has tokens {list(tokens[second])}, which begin "
                    f"with those of {first!r} {list(tokens[first])}, so they cannot be told apart; choose other words"
                )
