"""The held-out demo datasets: sentences, templates and label mappings that pretraining never shows."""

import json
from pathlib import Path
from random import Random

from fairseq_icl.demo.episodes import HELD_OUT, Episode, fill
from fairseq_icl.demo.grammar import is_held_out, sentence

ROWS_PER_SPLIT = 204
"""Divisible by 2, 3 and 4, so that every class has equally many rows: guessing one class is exactly chance."""


def draw_held_out(rng: Random, group: str) -> str:
    """A sentence of the group from the tenth that pretraining leaves out."""
    while not is_held_out(text := sentence(rng, group)):
        pass
    return text


def held_out_episode(rng: Random, dataset: str, num_demonstrations: int) -> Episode:
    """Demonstrations of a held-out task, classes drawn at random."""
    task = HELD_OUT[dataset]
    classes = [rng.randrange(len(task.groups)) for _ in range(num_demonstrations)]
    inputs = [fill(task.template, draw_held_out(rng, task.groups[c])) for c in classes]
    return Episode(inputs, [task.label_words[c] for c in classes], classes)


def dataset_rows(dataset: str, seed: int) -> dict[str, list[dict[str, str | int]]]:
    """Split -> rows of a dataset: balanced classes in random order, no text twice, not even across the splits."""
    rng = Random(f"{dataset} {seed}")
    groups = HELD_OUT[dataset].groups
    texts: set[str] = set()
    splits = {}
    for split in ("train", "valid"):
        rows = []
        for index in range(ROWS_PER_SPLIT):
            label = index % len(groups)
            while (text := draw_held_out(rng, groups[label])) in texts:
                pass
            texts.add(text)
            premise, _, hypothesis = text.partition(" | ")
            fields = {"premise": premise, "hypothesis": hypothesis} if hypothesis else {"text": text}
            rows.append({**fields, "label": label})
        rng.shuffle(rows)
        splits[split] = rows
    return splits


def write_datasets(folder: Path, seed: int) -> None:
    """Write FOLDER/NAME/train.jsonl and FOLDER/NAME/valid.jsonl for every held-out dataset."""
    for dataset in HELD_OUT:
        (folder / dataset).mkdir(parents=True, exist_ok=True)
        for split, rows in dataset_rows(dataset, seed).items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / dataset / f"{split}.jsonl").write_text(lines, encoding="utf-8")
