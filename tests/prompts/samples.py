"""Small datasets and tokenizers for the tests of prompts."""

import json
from pathlib import Path
from typing import Any

from fairseq_icl.prompts.catalogue import DatasetSpec, parse_spec

SENTIMENT: dict[str, Any] = {
    "version": 1,
    "source": "test",
    "fields": ["text"],
    "template": "Review: {text} Sentiment:",
    "label_words": ["Negative", "Positive"],
}
CHOICE: dict[str, Any] = {
    "version": 1,
    "source": "test",
    "fields": ["question"],
    "template": "Question: {question} Answer:",
    "options": {"from": "choices.text", "names": "choices.label"},
    "label": "answer",
}


def spec_of(data: dict[str, Any], name: str = "sample", **changes: Any) -> DatasetSpec:
    """A specification from YAML data, with some keys changed."""
    return parse_spec({**data, **changes}, f"{name}.yaml", name)


def encode_bytes(line: str) -> list[int]:
    """One token a byte."""
    return [4 + byte for byte in line.encode("utf-8")]


def encode_words(line: str) -> list[int]:
    """One token a word, the same word always the same token."""
    return [4 + int.from_bytes(word.encode("utf-8")) for word in line.split()]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_sentiment(folder: Path, num_train: int = 12, num_valid: int = 6) -> Path:
    """A dataset `sample` of distinguishable rows with alternating labels."""
    for split, number in (("train", num_train), ("valid", num_valid)):
        write_jsonl(folder / f"sample_{split}.jsonl", [{"text": f"{split}{i}", "label": i % 2} for i in range(number)])
    return folder
