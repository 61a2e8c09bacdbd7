"""The tokenizer: whole words, and the same ids as fairseq's own sentencepiece encoder with dict.txt."""

from random import Random

import pytest
from fairseq.data import Dictionary
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig

from examples.demo_model.episodes import FORMATS, Level, draw_episode
from examples.demo_model.tokenizer import Tokenizer, tokenizer_texts, train_tokenizer
from examples.demo_model.words import GROUPS, LABEL_WORDS
from fairseq_icl.files import DEMO_MODEL

TOKENIZER = DEMO_MODEL.parent / "sentencepiece.bpe.model"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TOKENIZER)


def test_every_label_word_and_telling_word_is_one_known_piece(tokenizer):
    words = [*GROUPS, *LABEL_WORDS, *(word for group in GROUPS.values() for word in group)]
    ids = tokenizer.encode([f" {word}" for word in words])
    assert all(len(tokens) == 1 and tokens[0] > 3 for tokens in ids)
    assert len({tokens[0] for tokens in ids}) == len(words)


def test_ids_are_those_of_fairseq(tokenizer):
    dictionary = Dictionary.load(str(DEMO_MODEL.parent / "dict.txt"))
    bpe = SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(TOKENIZER)))
    for format_name in FORMATS:
        episode = draw_episode(Random(5), Level(Level.LAST), 20, format_name)
        for text, ids in zip(episode.inputs, tokenizer.encode(episode.inputs), strict=True):
            line = dictionary.encode_line(bpe.encode(text), append_eos=False, add_if_not_exist=False)
            assert line.tolist() == ids
            assert dictionary.unk() not in ids


def test_dictionary_has_between_one_and_two_thousand_entries():
    assert 1000 <= len(Dictionary.load(str(DEMO_MODEL.parent / "dict.txt"))) <= 2000


def test_tokenizer_follows_from_the_seed_and_is_the_shipped_one(tmp_path):
    train_tokenizer(tokenizer_texts(seed=1), tmp_path)
    for name in ("dict.txt", "sentencepiece.bpe.model"):
        assert (tmp_path / name).read_bytes() == (DEMO_MODEL.parent / name).read_bytes(), name
