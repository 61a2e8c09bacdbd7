"""Rows -> the token sequences of one run: ICL prompt, queries and fine-tuning sequences.

    zero-shot   BOS input label
    ICL         BOS (input label EOS) (input label EOS) ... input label
    fine-tuning BOS input label

Input and label are encoded separately and concatenated. docs/protocol.md gives the authors' rules one by one.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

from fairseq_icl.errors import UserError
from fairseq_icl.prompts import sampling
from fairseq_icl.prompts.catalogue import DatasetSpec
from fairseq_icl.prompts.encoding import FinetuningSequence, Query, RowEncoder, Tokens, Writing, finetuning_sequence
from fairseq_icl.prompts.readers import Row, RowRecord, Split, compare_rows, read_split, record_rows
from fairseq_icl.settings import Settings

logger = logging.getLogger(__name__)
warn_once = cache(logger.warning)  # of the rows of a dataset, which are read anew for every seed

CONTENT_FREE = ("N/A", "[MASK]", "")  # inputs without content of Zhao et al. 2021 (arXiv 2102.09690, section 5)


@dataclass(frozen=True)
class Prompts:
    """All sequences of one run."""

    spec: DatasetSpec
    settings: Settings
    """What they were built with; observing and comparing read from here what they need (`position`, ...)."""
    start: Tokens
    """What every sequence starts with: BOS."""
    context: Tokens
    """BOS and the demonstrations that fit, each closed by the separator (EOS, or a line break)."""
    context_rows: tuple[int, ...]
    """Training file row of each demonstration in the prompt, in its order."""
    context_spans: tuple[tuple[int, int], ...]
    """Start and end of each demonstration inside the context, without its closing EOS."""
    queries: tuple[Query, ...]
    """Validation rows (or other rows of the train split, see `settings.queries`) after shuffle, cap and limit."""
    finetuning: tuple[FinetuningSequence, ...]
    """In training order."""
    data: Path = Path()
    """The folder that the rows were read from."""
    rows: Mapping[Split, RowRecord] = field(default_factory=dict)
    """Number and hash of the rows, in order, of every split that was read."""
    content_free: tuple[Query, ...] = ()
    """Queries with texts that say nothing, which show how the model leans without looking; none without classes."""
    spell: Callable[[Tokens], list[str]] | None = field(default=None, repr=False, compare=False)
    """The model's tokens as texts, for `text`."""

    def __repr__(self) -> str:
        context = f"{len(self.context_rows)} demonstrations in a prompt of {len(self.context)} tokens"
        return (
            f"Prompts({self.spec.name}: {len(self.queries)} queries, {context}, {len(self.finetuning)} to fine-tune on)"
        )

    def text(self, number: int = 0, *, boundaries: bool = False) -> str:
        """What the model reads for query `number` (from 0), in lines to be printed, on request with a | between tokens.

        ICL prompt, query, options, and a fine-tuning sequence.
        """
        if self.spell is None:
            raise UserError(
                "Prompts.text: these prompts do not know the model's words; make them with fi.build_prompts"
            )
        spell, mark = self.spell, "|" if boundaries else ""

        def written(tokens: Tokens) -> str:
            return mark.join(spell(tokens))

        query = self.queries[number]
        lines = [f"ICL prompt, {len(self.context_rows)} demonstrations:", written(self.context), ""]
        lines += [f"query {number} (row {query.row} of its file; * is the right option):"]
        for choice, (words, label) in enumerate(zip(query.inputs, query.labels, strict=True)):
            lines += [written(words)] if choice == 0 or not query.shared_input else []
            lines += [f"  option {choice} {'*' if choice == query.gold else ' '} {written(label)}"]
        if self.finetuning:
            first = self.finetuning[number % len(self.finetuning)]
            lines += ["", f"fine-tuning sequence (row {first.row} of the train file):", written(first.tokens)]
        return "\n".join(lines)

    @cached_property
    def single_token(self) -> bool:
        """Whether every query can be scored at a single position."""
        return all(query.single_token for query in self.queries)

    @cached_property
    def opening(self) -> Tokens:
        """What the inputs of all queries begin with, such as the template's instruction; a token of each is left."""
        inputs = [tokens for query in (*self.queries, *self.content_free) for tokens in query.inputs]
        if not inputs:
            return ()
        first, last = min(inputs), max(inputs)  # in this order: what these two begin with, all begin with
        most = min(map(len, inputs)) - 1
        return first[: next((index for index in range(most) if first[index] != last[index]), most)]


def build_prompts(
    spec: DatasetSpec, folder: str | Path, writing: Writing | Callable[[], Writing], settings: Settings
) -> Prompts:
    """The prompts of one run, a function of its arguments and the data files alone.

    `writing` may be a function that makes it (a tokenizer may have to be read): it is called when the rows are there.

    `settings.limit` keeps the first queries only; which demonstrations fit is still decided by the longest sequence of
    the whole (capped) validation set, as the authors do, so a limited run has the same prompt as the full one.
    """
    folder, k = Path(folder), settings.num_demonstrations
    records: dict[Split, RowRecord] = {}
    train = _read(folder, spec, "train", records)
    writing = (writing() if callable(writing) else writing).separated(settings.separator)
    encoder = RowEncoder(spec, writing)
    if k > len(train):
        raise UserError(
            f"{train[0].path}: {k} demonstrations asked for, but the train split of {spec.name} has {len(train)} rows; "
            "lower num_demonstrations"
        )
    chosen = sampling.demonstration_rows([row.gold for row in train], spec.label_words, settings)
    rows, trained_on = [train[i] for i in chosen], set(chosen)
    if settings.queries == "train":
        asked = [train[i] for i in sampling.shuffled(len(train), settings.seed) if i not in trained_on]
    else:
        valid = _read(folder, spec, "valid", records)
        asked = [valid[i] for i in sampling.shuffled(len(valid), sampling.VALIDATION_SEED)]
    if not asked:
        raise UserError(f"queries=train: all rows of {train[0].path} are demonstrations; lower num_demonstrations")
    queries = [encoder.query(row) for row in asked[: settings.max_validation]]
    demonstrations = [encoder.query(row) for row in rows]
    golds, switch_seed = [row.gold for row in rows], settings.switch_seed
    seed = settings.seed if switch_seed is None else switch_seed
    switched = sampling.switched_labels(golds, [len(row.options) for row in rows], settings.switch_fraction, seed)
    shown = switched if settings.switch_labels in ("demonstrations", "both") else golds
    trained = switched if settings.switch_labels in ("finetuning", "both") else golds

    icl_order, finetuning_order = sampling.demonstration_orders(settings)
    free = writing.max_positions - max(query.longest for query in queries)
    icl_order, context, spans = _build_context(demonstrations, shown, icl_order, free, writing)
    _warn(spec, k, [shown[i] for i in icl_order], writing.max_positions, settings.missing_class)
    if settings.finetuning_demonstrations == "fitting":
        finetuning_order = [i for i in finetuning_order if i in set(icl_order)]
    return Prompts(
        spec=spec,
        settings=settings,
        start=(writing.bos,),
        context=context,
        context_rows=tuple(rows[i].index for i in icl_order),
        context_spans=spans,
        queries=tuple(queries[: settings.limit]),
        finetuning=tuple(
            finetuning_sequence(demonstrations[i], trained[i], settings.loss_on, (writing.bos,))
            for i in finetuning_order
        ),
        data=folder,
        rows=records,
        content_free=_content_free(asked[0], spec, encoder),
    )


def _read(folder: Path, spec: DatasetSpec, split: Split, records: dict[Split, RowRecord]) -> list[Row]:
    """A split's rows, what results remember of them put into `records`; it is said if they are not the papers'."""
    rows = read_split(folder, spec, split)
    records[split] = record_rows(spec, rows)
    if compared := compare_rows(folder, spec, split, rows, records[split]):
        records[split] = replace(records[split], likeness=compared.likeness)
        if compared.is_doubtful:
            told = f"{spec.name}, {split}: {compared.text}"
            warn_once(f"{told}; a seed draws others (fairseq-icl fetch data {spec.name})")
    return rows


def _content_free(row: Row, spec: DatasetSpec, encoder: "RowEncoder") -> tuple[Query, ...]:
    """The row with each of the texts without content in place of its own; those that leave no input are left out."""
    if not spec.has_classes:
        return ()
    rows = [replace(row, texts=dict.fromkeys(row.texts, text)) for text in CONTENT_FREE]
    return tuple(encoder.query(row) for row in rows if encoder.writing.tokens(spec.render(row)[0][0]))


def _build_context(
    demonstrations: Sequence[Query], labels: Sequence[int], order: Sequence[int], room: int, writing: Writing
) -> tuple[list[int], Tokens, tuple[tuple[int, int], ...]]:
    """(demonstrations used, context tokens, spans): appended while the context stays below `room`, then no more."""
    context, spans, used = [writing.bos], [], []
    for i in order:
        tokens = (*demonstrations[i].inputs[labels[i]], *demonstrations[i].labels[labels[i]])
        if len(context) + len(tokens) + len(writing.separator) >= room:
            break
        spans.append((len(context), len(context) + len(tokens)))
        context += (*tokens, *writing.separator)
        used.append(i)
    return used, tuple(context), tuple(spans)


def _warn(spec: DatasetSpec, k: int, shown: Sequence[int], max_positions: int, missing_class: str) -> None:
    """Say what the authors' code passes over in silence: demonstrations that do not fit, classes never shown."""
    if len(shown) < k:
        logger.warning(
            f"{spec.name}: only {len(shown)} of {k} demonstrations fit into {max_positions} positions beside the "
            f"longest query; the ICL prompt leaves out {k - len(shown)}"
        )
    missing = [word for number, word in enumerate(spec.label_words) if number not in shown]
    if shown and missing and missing_class != "ignore":
        text = f"{spec.name}: no demonstration in the prompt has the label {', '.join(missing)}"
        if missing_class == "refuse":
            raise UserError(f"{text}; raise num_demonstrations or take another seed")
        logger.warning(text)
