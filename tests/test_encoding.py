import json
from pathlib import Path

import pytest
import sentencepiece
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

from fairseq_icl.encoding import line_encoder, load_bpe, load_dictionary
from fairseq_icl.errors import UserError

SPACE = bytes_to_unicode()[ord(" ")]


@pytest.fixture
def gpt2(tmp_path: Path) -> dict[str, str]:
    """Files of a GPT-2 tokenizer with all bytes and the one word " an"."""
    merges = [(SPACE, "a"), (f"{SPACE}a", "n")]
    symbols = [*bytes_to_unicode().values(), *map("".join, merges)]
    files = {"gpt2_encoder_json": tmp_path / "encoder.json", "gpt2_vocab_bpe": tmp_path / "vocab.bpe"}
    files["gpt2_encoder_json"].write_text(json.dumps({symbol: i for i, symbol in enumerate(symbols)}))
    lines = "".join(f"{a} {b}\n" for a, b in merges)
    files["gpt2_vocab_bpe"].write_text(f"#version: 0.2\n{lines}", encoding="utf-8")
    return {name: str(path) for name, path in files.items()}


def dictionary_of(*symbols: str) -> Dictionary:
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    return dictionary


def test_without_bpe_words_are_looked_up_and_unknown_ones_are_three() -> None:
    encode = line_encoder(dictionary_of("good", "bad"), None)
    assert encode(" good  \tugly bad") == [4, 3, 5]
    assert encode("") == []


def test_encoding_does_not_grow_the_dictionary_and_returns_lists_of_its_own() -> None:
    dictionary = dictionary_of("good")
    encode = line_encoder(dictionary, None)
    encode("new good").append(9)
    assert encode("new good") == [3, 4]
    assert len(dictionary) == 5


def test_gpt2_pieces_depend_on_the_space_before_a_word(gpt2: dict[str, str]) -> None:
    encode = line_encoder(dictionary_of(*map(str, range(258))), load_bpe("gpt2", **gpt2))
    assert encode(" an") == [4 + 257]
    assert len(encode("an")) == 2
    assert len(encode("\u20ac")) == 3


def test_dictionary_of_another_model_is_refused(gpt2: dict[str, str]) -> None:
    with pytest.raises(UserError, match="holds only 1 of the tokenizer's 258 pieces"):
        line_encoder(dictionary_of("word", "5"), load_bpe("gpt2", **gpt2))


def test_merges_of_another_model_are_refused(gpt2: dict[str, str]) -> None:
    Path(gpt2["gpt2_vocab_bpe"]).write_text("#version: 0.2\nq q\n", encoding="utf-8")
    with pytest.raises(UserError, match="use one model's files"):
        line_encoder(dictionary_of(*map(str, range(258))), load_bpe("gpt2", **gpt2))


@pytest.mark.parametrize("content", ["", "no json", "[1, 2"])
def test_broken_encoder_json_is_one_line(gpt2: dict[str, str], content: str) -> None:
    Path(gpt2["gpt2_encoder_json"]).write_text(content)
    with pytest.raises(UserError, match="not the files of a gpt2 tokenizer"):
        load_bpe("gpt2", **gpt2)


def test_sentencepiece_pieces_are_looked_up(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the cat sat on the mat\nthe dog sat on the log\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "sp"), vocab_size=24, model_type="bpe", minloglevel=2
    )
    bpe = load_bpe("sentencepiece", sentencepiece_model=str(tmp_path / "sp.model"))
    pieces = [bpe.sp.id_to_piece(i) for i in range(3, 24)]
    dictionary = dictionary_of(*pieces)
    encode = line_encoder(dictionary, bpe)
    assert dictionary.string(encode("the cat"), bpe_symbol="sentencepiece") == "the cat"
    assert encode(" the") == encode("the")  # the space before a label word makes no difference here


def test_broken_sentencepiece_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sp.model").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not the files of a sentencepiece tokenizer"):
        load_bpe("sentencepiece", sentencepiece_model=str(tmp_path / "sp.model"))


def test_missing_file_is_named() -> None:
    with pytest.raises(UserError, match="--gpt2-vocab-bpe nowhere: no such file"):
        load_bpe("gpt2", gpt2_vocab_bpe="nowhere")


@pytest.mark.parametrize("content", [b"word\n", b"word count\n", b"\xff\xfe 3\n"])
def test_file_that_is_no_dictionary_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dict.txt").write_bytes(content)
    with pytest.raises(UserError, match=r"dict.txt: not a fairseq dictionary"):
        load_dictionary(tmp_path / "dict.txt")
