"""The demo: a small model that learns in context, with its tokenizer and datasets, all made by code in this folder."""

from pathlib import Path

DEMO_DATASETS = ("demo_sentiment", "demo_subjectivity", "demo_topic", "demo_pairs")
"""Names of the held-out datasets shipped with the model."""

_HERE = Path(__file__).parent


def demo_model() -> Path:
    """The shipped checkpoint; `dict.txt` and `sentencepiece.bpe.model` lie beside it."""
    return _HERE / "model" / "model.pt"


def demo_tokenizer() -> Path:
    """The shipped sentencepiece model, for fairseq's `--bpe sentencepiece --sentencepiece-model`."""
    return _HERE / "model" / "sentencepiece.bpe.model"


def demo_data() -> Path:
    """The folder of the demo datasets: NAME.yaml, and NAME/train.jsonl and NAME/valid.jsonl for each name."""
    return _HERE / "data"
