"""Token batches of episodes: BOS, then each demonstration's input, label word and EOS, cut at the row's length."""

from dataclasses import dataclass
from random import Random

import torch
from fairseq.data import FairseqDataset
from torch import Tensor

from examples.demo_model.datasets import held_out_episode
from examples.demo_model.episodes import FORMATS, Episode, Level, draw_episode
from examples.demo_model.tokenizer import Tokenizer

BOS, EOS = 0, 2
SHORTEST = {"bare": 3, "separator": 4, "sentence": 6, "template": 9}
"""Tokens of a format's shortest demonstration, to draw enough of them for a row."""


@dataclass(frozen=True)
class Row:
    """One episode in tokens; `demonstration` and `seen` are -1 except at label tokens."""

    tokens: list[int]
    demonstration: list[int]
    """How many demonstrations came before this label."""
    seen: list[int]
    """How many of them had this label's class: with none, the label cannot be known."""
    format: int
    """Index into FORMATS; -1 for natural label words, which do not show whether the demonstrations are read."""


def to_row(episode: Episode, tokenizer: Tokenizer, length: int, format_name: str = "template") -> Row:
    """The first `length` + 1 tokens of an episode (inputs are all but the last token, targets all but the first)."""
    row = Row([BOS], [-1], [-1], -1 if episode.natural else FORMATS.index(format_name))
    counts: dict[int, int] = {}
    inputs, labels = tokenizer.encode(episode.inputs), tokenizer.encode(episode.labels)
    for index, (tokens, label, cls) in enumerate(zip(inputs, labels, episode.classes, strict=True)):
        row.tokens.extend([*tokens, *label, EOS])
        row.demonstration.extend([-1] * len(tokens) + [index] * len(label) + [-1])
        row.seen.extend([-1] * len(tokens) + [counts.get(cls, 0)] * len(label) + [-1])
        counts[cls] = counts.get(cls, 0) + 1
        if len(row.tokens) > length:
            break
    end = length + 1
    return Row(row.tokens[:end], row.demonstration[:end], row.seen[:end], row.format)


def collate(rows: list[Row], pad: int = 1) -> dict:
    """A fairseq sample with `demonstration`, `seen` and `format` beside `target`, all of shape (rows, tokens)."""
    width = max(len(row.tokens) for row in rows)

    def rectangle(lists: list[list[int]], filler: int) -> Tensor:
        return torch.tensor([values + [filler] * (width - len(values)) for values in lists])

    tokens = rectangle([row.tokens for row in rows], pad)
    lengths = torch.tensor([len(row.tokens) - 1 for row in rows])
    return {
        "id": torch.arange(len(rows)),
        "nsentences": len(rows),
        "ntokens": int(lengths.sum()),
        "net_input": {"src_tokens": tokens[:, :-1], "src_lengths": lengths},
        "target": tokens[:, 1:],
        "demonstration": rectangle([row.demonstration for row in rows], -1)[:, 1:],
        "seen": rectangle([row.seen for row in rows], -1)[:, 1:],
        "format": torch.tensor([[row.format] for row in rows]).expand(-1, width - 1),
    }


class _BatchesDataset(FairseqDataset):
    """A dataset whose items are whole batches, for `--batch-size 1`."""

    def __init__(self, tokenizer: Tokenizer, seed: int, num_batches: int) -> None:
        self.tokenizer, self.seed, self.num_batches = tokenizer, seed, num_batches

    def __len__(self) -> int:
        return self.num_batches

    def num_tokens(self, index: int) -> int:
        return 1

    def size(self, index: int) -> int:
        return 1

    def collater(self, samples: list[list[Row]]) -> dict:
        return collate([row for rows in samples for row in rows])


class EpisodeBatches(_BatchesDataset):
    """Pretraining batches drawn on the fly; batch i of epoch e depends on the seed, e, i and the current level only."""

    def __init__(self, tokenizer: Tokenizer, seed: int, num_batches: int, tokens_per_batch: int) -> None:
        super().__init__(tokenizer, seed, num_batches)
        self.tokens_per_batch, self.level, self.epoch = tokens_per_batch, Level(0), 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> list[Row]:
        rng = Random(f"{self.seed} {self.epoch} {index}")
        length = rng.choice(self.level.lengths)
        weights = self.level.format_weights
        rows = []
        for _ in range(self.tokens_per_batch // length):
            format_name = rng.choices(FORMATS, weights)[0]
            episode = draw_episode(rng, self.level, length // SHORTEST[format_name] + 1, format_name)
            rows.append(to_row(episode, self.tokenizer, length, format_name))
        return rows


class HeldOutBatches(_BatchesDataset):
    """Episodes of one held-out dataset, 33 demonstrations each: the last label has 32 before it."""

    def __init__(self, tokenizer: Tokenizer, seed: int, num_batches: int, dataset: str) -> None:
        super().__init__(tokenizer, seed, num_batches)
        self.dataset = dataset

    def __getitem__(self, index: int) -> list[Row]:
        rng = Random(f"{self.seed} {self.dataset} {index}")
        return [to_row(held_out_episode(rng, self.dataset, 33), self.tokenizer, 1000) for _ in range(8)]
