"""Prompts as fairseq datasets: demonstrations to fine-tune on, and queries to score."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset, monolingual_dataset

from fairseq_icl.observing.layout import plan_batches
from fairseq_icl.prompts import PAD
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.prompts.encoding import FinetuningSequence


class _OfKnownLengths(FairseqDataset):
    """What fairseq asks of every dataset; `lengths` are the items' numbers of tokens."""

    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def num_tokens(self, index: int) -> int:
        return int(self.lengths[index])

    size = num_tokens
    can_reuse_epoch_itr_across_epochs = True

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.lengths[indices]


class FinetuningDataset(_OfKnownLengths):
    """Demonstrations in training order, one item a step (`step_per="demonstration"`) or a scored token ("token")."""

    def __init__(self, sequences: Sequence[FinetuningSequence], step_per: str = "demonstration", pad: int = PAD):
        super().__init__()
        self.pad = pad
        self.items: list[tuple[int, tuple[int, ...], tuple[bool, ...]]] = []
        for one in sequences:
            if step_per == "demonstration":
                self.items.append((one.row, one.tokens, one.scored))
            else:  # one prefix for each scored token
                ends = [end for end, is_scored in enumerate(one.scored) if is_scored]
                self.items += [(one.row, one.tokens[: end + 1], (False,) * end + (True,)) for end in ends]
        self.lengths = np.array([len(tokens) for _, tokens, _ in self.items], dtype=np.int64)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, tokens, scored = self.items[index]
        return language_model_item(index, tokens, scored, self.pad) | {"row": row}

    def collater(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        return collate(items, self.pad, rows="row")

    def ordered_indices(self) -> np.ndarray:
        return np.arange(len(self))


class QueryDataset(_OfKnownLengths):
    """Queries in length order, so that a batch wastes little on padding. Its items are scored under every option.

    Stock criterions see the gold zero-shot sequence; `icl_similarity` takes the queries themselves.
    """

    def __init__(self, prompts: Prompts, pad: int = PAD):
        super().__init__()
        self.queries, self.start, self.pad = prompts.queries, prompts.start, pad
        self.lengths = np.array([query.longest for query in self.queries])

    def __getitem__(self, index: int) -> dict[str, Any]:
        query = self.queries[index]
        before, label = (*self.start, *query.inputs[query.gold]), query.labels[query.gold]
        tokens, scored = (*before, *label), [False] * len(before) + [True] * len(label)
        return language_model_item(index, tokens, scored, self.pad) | {"query": query}

    def collater(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        return collate(items, self.pad, queries="query", positions_in_set="id")

    def ordered_indices(self) -> np.ndarray:
        return np.argsort(self.lengths, kind="stable")

    def batch_by_size(
        self, indices: np.ndarray, max_tokens: int | None = None, max_sentences: int | None = None, **_: Any
    ) -> list[list[int]]:
        """The package's batches: a number is the same whether fairseq asks for it or somebody else."""
        chosen = [int(index) for index in indices]
        limit = max_tokens if max_tokens is not None else int(self.lengths.sum()) + 1
        batches = plan_batches([self.queries[index] for index in chosen], limit, max_sentences)
        return [[chosen[number] for number in batch] for batch in batches]


def language_model_item(index: int, tokens: Sequence[int], scored: Sequence[bool], pad: int) -> dict[str, Any]:
    """One next-token item: source (length,) and target (length,), padded where nothing is scored.

    The last token predicts nothing, but is run along: its query vector is recorded with those of the others.
    """
    sequence, following = torch.tensor(tokens), torch.tensor([*tokens[1:], pad])
    target = following.masked_fill(~torch.tensor([*scored[1:], False]), pad)
    return {"id": index, "source": sequence, "target": target}


def collate(items: list[dict[str, Any]], pad: int, **lists: str) -> dict[str, Any]:
    """fairseq's batch of language-model items, (batch, tokens) each; `ntokens` are the scored ones.

    `lists`: name -> what of the items the batch lists under it. No items (a short shard) give an empty batch.
    """
    batch = monolingual_dataset.collate(items, pad, eos_idx=None)
    if not batch:
        return {}
    batch["ntokens"] = int(batch["target"].ne(pad).sum())
    return batch | {name: [item[key] for item in items] for name, key in lists.items()}
