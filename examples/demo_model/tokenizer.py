"""The demo's tokenizer: a sentencepiece model and the fairseq dictionary that goes with it."""

from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from random import Random

import sentencepiece

from examples.demo_model.episodes import Level, draw_episode
from examples.demo_model.words import (
    BRIDGES,
    GROUPS,
    LABEL_WORDS,
    PERSONS,
    PREFIXES,
    SEPARATORS,
    SUBJECTS,
    SUFFIXES,
    VERBS,
)

NUM_PIECES = 1400


def tokenizer_texts(seed: int) -> list[str]:
    """Text for the tokenizer: inputs of a few hundred of the widest episodes."""
    rng = Random(f"tokenizer {seed}")
    episodes = [draw_episode(rng, Level(Level.LAST), 8, ("sentence", "template")[i % 2]) for i in range(600)]
    return [text for episode in episodes for text in episode.inputs]


def train_tokenizer(texts: Iterable[str], folder: Path) -> None:
    """Write sentencepiece.bpe.model and dict.txt into the folder.

    Every word of the corpus' own lists is a piece: a word in parts would put its meaning out of one embedding's reach.
    """
    words = [word for group in GROUPS.values() for word in group]
    words += [*GROUPS, *LABEL_WORDS, *PERSONS, *SUBJECTS, *VERBS, *PREFIXES, *SUFFIXES, *BRIDGES]
    folder.mkdir(parents=True, exist_ok=True)
    lines = [*texts, *words * 20, *SEPARATORS]
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,  # not model_prefix: that would write the folder's name into the model
        vocab_size=NUM_PIECES,
        model_type="bpe",
        character_coverage=1.0,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "sentencepiece.bpe.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    # fairseq adds <s> <pad> </s> <unk> as 0 to 3 by itself; sentencepiece's own <unk> <s> </s> are left out.
    pieces = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    (folder / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in pieces), encoding="utf-8")


class Tokenizer:
    """Texts -> ids of the fairseq dictionary, the same as `--bpe sentencepiece` and dict.txt give."""

    def __init__(self, model: Path) -> None:
        self.processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

    def encode(self, texts: list[str]) -> list[list[int]]:
        # Sentencepiece 3, 4, ... are dictionary entries 4, 5, ...; its unknown piece 0 is the dictionary's 3.
        return [[piece + 1 if piece else 3 for piece in ids] for ids in self.processor.encode(texts)]
