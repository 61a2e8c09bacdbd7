"""The held-out demo datasets: sentences, templates and label mappings that pretraining never shows.

`write_datasets` writes the folder that ships as fairseq_icl/demo/data, byte for byte: rows and their YAML files.
"""

import json
from pathlib import Path
from random import Random

from examples.demo_model.episodes import HELD_OUT, Episode, fill
from examples.demo_model.grammar import is_held_out, sentence

ROWS_PER_SPLIT = 204
"""Divisible by 2, 3 and 4, so that every class has equally many rows: guessing one class is exactly chance."""

LEARNING_RATES = {"demo_sentiment": 0.3, "demo_subjectivity": 0.5, "demo_topic": 0.5, "demo_pairs": 0.5}
"""Found by `python -m examples.demo_model.evaluate --search`; docs/demo_model.md has the table."""

SPECIFICATION = """\
version: 1
source: made by examples/demo_model/datasets.py
fields: [{fields}]
template: "{template}"
label_words: [{label_words}]
label_names: [{label_names}]
splits: {{train: train, valid: valid}}
papers:
  demo: {{k: 32, seeds: [1, 2, 3], permutations: [0, 0, 0], learning_rate: {learning_rate}}}
note: Label words and template never seen in pretraining; the label words say nothing about the classes.
"""
"""A dataset's YAML file; docs/adding_a_dataset.md describes the keys."""


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


def dataset_specification(dataset: str) -> str:
    """The text of a dataset's YAML file."""
    task = HELD_OUT[dataset]
    return SPECIFICATION.format(
        fields="premise, hypothesis" if "{premise}" in task.template else "text",
        template=task.template,
        label_words=", ".join(task.label_words),
        label_names=", ".join(task.groups),
        learning_rate=LEARNING_RATES[dataset],
    )


def write_datasets(folder: Path, seed: int) -> None:
    """Write FOLDER/NAME.yaml, FOLDER/NAME/train.jsonl and FOLDER/NAME/valid.jsonl for every held-out dataset."""
    for dataset in HELD_OUT:
        (folder / dataset).mkdir(parents=True, exist_ok=True)
        (folder / f"{dataset}.yaml").write_text(dataset_specification(dataset), encoding="utf-8")
        for split, rows in dataset_rows(dataset, seed).items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / dataset / f"{split}.jsonl").write_text(lines, encoding="utf-8")
