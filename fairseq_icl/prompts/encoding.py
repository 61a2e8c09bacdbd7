"""Rows -> tokens: how a model wants its text written, the authors' rule for line breaks, and what a row becomes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from fairseq_icl.errors import UserError
from fairseq_icl.prompts.catalogue import DatasetSpec
from fairseq_icl.prompts.readers import Row

Tokens = tuple[int, ...]
Encode = Callable[[str], list[int]]
"""ONE line of text -> ids of the model's dictionary, without BOS and EOS. A model supplies it."""

BOS, PAD, EOS, UNKNOWN = 0, 1, 2, 3  # fairseq's ids of the special symbols


@dataclass(frozen=True)
class Writing:
    """How a model wants its text written in tokens."""

    encode: Encode
    max_positions: int = 2048  # of the longest sequence
    bos: int = BOS
    separator: Tokens = (EOS,)  # what closes a demonstration in the prompt
    line_break: Tokens | None = (EOS,)  # what it becomes in a text; None if `encode` takes text that has some as it is
    unknown: int | None = UNKNOWN
    eos: int = EOS
    newline: Tokens = ()  # a line break in tokens; empty if the tokenizer has none

    def separated(self, by: str) -> "Writing":
        """The same with another separator: "model" (its own), "eos" or "newline"."""
        if by == "newline" and not self.newline:
            raise UserError("separator=newline: the model's tokenizer has no token for it; use separator=eos")
        return replace(self, separator={"model": self.separator, "eos": (self.eos,), "newline": self.newline}[by])

    def tokens(self, text: str) -> Tokens:
        """Ids of all non-empty lines, joined by `line_break`.

        `str.splitlines()` decides what a line is, so U+0085 and U+2028 break lines as well as a line feed does. The
        authors close every line by EOS and drop the last one, which is to say that a line break becomes one EOS.
        """
        if self.line_break is None:
            return tuple(self.encode(text))
        ids: list[int] = []
        for line in filter(None, text.splitlines()):
            ids += [*(self.line_break if ids else ()), *self.encode(line)]
        return tuple(ids)


@dataclass(frozen=True)
class Query:
    """One evaluation row: input and label tokens of every option, without BOS and EOS."""

    row: int  # in the validation file, before shuffling
    gold: int
    inputs: tuple[Tokens, ...]  # one an option; the same object where the options share the input
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

    row: int  # in the training file, before shuffling
    tokens: Tokens
    scored: tuple[bool, ...]
    label_length: int = 1  # how many of its last tokens are the label


def finetuning_sequence(demonstration: Query, label: int, loss_on: str, start: Tokens) -> FinetuningSequence:
    """What fine-tuning sees of a demonstration with that label, and which of its tokens carry the loss."""
    inputs, labels = demonstration.inputs[label], demonstration.labels[label]
    scored = (*[False] * len(start), *[loss_on == "all"] * len(inputs), *[True] * len(labels))
    return FinetuningSequence(demonstration.row, (*start, *inputs, *labels), scored, len(labels))


class RowEncoder:
    """Rows -> tokens, checked: nothing empty, nothing longer than the model, label words told apart by their tokens."""

    def __init__(self, spec: DatasetSpec, writing: Writing) -> None:
        self.spec, self.writing = spec, writing
        tokens = {word: writing.tokens(f" {word.strip()}") for word in spec.label_words}
        for word, ids in tokens.items():
            if not ids:
                raise UserError(f"dataset {spec.name}: label word {word!r} has no tokens; choose another word")
            if set(ids) == {writing.unknown}:
                raise UserError(
                    f"dataset {spec.name}: label word {word!r} is unknown to the dictionary; choose the model's "
                    "tokenizer (bpe), or another word"
                )
        # In alphabetical order of their tokens a word stands right before the first one that begins with it.
        for first, second in pairwise(sorted(tokens, key=tokens.__getitem__)):
            if tokens[second][: len(tokens[first])] == tokens[first]:
                raise UserError(
                    f"dataset {spec.name}: label word {second!r} has tokens {list(tokens[second])}, which begin "
                    f"with those of {first!r} {list(tokens[first])}, so they cannot be told apart; choose other words"
                )

    def query(self, row: Row) -> Query:
        """The tokens of a row's options."""
        texts = self.spec.render(row)
        encoded = {text: self.writing.tokens(text) for text in dict.fromkeys(text for pair in texts for text in pair)}
        for number, (input_text, label_text) in enumerate(texts):
            if not encoded[input_text]:
                raise UserError(f"{row.where}: the input is empty; change the row or the template of {self.spec.name}")
            if not encoded[label_text] or not label_text.strip():
                raise UserError(f"{row.where}: option {number} has no tokens; change the row or remove it")
        inputs, labels = zip(*((encoded[a], encoded[b]) for a, b in texts), strict=True)
        query = Query(row.index, row.gold, inputs, labels)
        if query.longest > (limit := self.writing.max_positions):
            told = f"{query.longest} tokens with its label, but the model has {limit} positions"
            raise UserError(f"{row.where}: {told}; shorten or remove the row")
        return query
