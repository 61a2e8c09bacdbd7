"""A model as files: dictionary and tokenizer found, matched to each other, and told what is missing."""

import json
from pathlib import Path

import pytest
import sentencepiece
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

from fairseq_icl.errors import UserError
from fairseq_icl.files import DEMO_MODEL
from fairseq_icl.models.checkpoints import language_model_config, read_checkpoint
from fairseq_icl.models.files import (
    find_files,
    find_tokenizer,
    line_encoder,
    load_bpe,
    load_dictionary,
    save_random_model,
)
from tests.world import make_world

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
    with pytest.raises(UserError, match=r"^nowhere: no such file; the tokenizer gpt2 needs .*--gpt2-vocab-bpe FILE"):
        load_bpe("gpt2", gpt2_vocab_bpe="nowhere")


@pytest.mark.parametrize("content", [b"word\n", b"word count\n", b"\xff\xfe 3\n"])
def test_file_that_is_no_dictionary_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dict.txt").write_bytes(content)
    with pytest.raises(UserError, match=r"dict.txt: not a fairseq dictionary"):
        load_dictionary(tmp_path / "dict.txt")


def test_files_are_found_beside_the_checkpoint(tmp_path: Path) -> None:
    world = make_world(tmp_path / "w")
    for name in ("encoder.json", "vocab.bpe"):
        (world.model.parent / name).write_text("")
    by_folder, by_file = find_files(world.model.parent), find_files(str(world.model))
    assert by_folder == by_file
    assert (by_file.name, by_file.checkpoint, by_file.dictionary) == ("model", world.model, world.dictionary)
    assert by_file.bpe == "gpt2"
    assert by_file.tokenizer == {
        "gpt2_encoder_json": world.model.parent / "encoder.json",
        "gpt2_vocab_bpe": world.model.parent / "vocab.bpe",
    }
    assert by_file.options() == {
        "base_model": str(world.model),
        "dict": str(world.dictionary),
        "bpe": "gpt2",
        "gpt2_encoder_json": str(world.model.parent / "encoder.json"),
        "gpt2_vocab_bpe": str(world.model.parent / "vocab.bpe"),
    }


def test_files_elsewhere_may_be_named_one_by_one_or_by_their_folder(tmp_path: Path) -> None:
    world = make_world(tmp_path / "w")
    named = find_files(
        world.model,
        name="mine",
        bpe="sentencepiece",
        tokenizer="there",
        dictionary="d.txt",
        tokenizer_files={"sentencepiece_model": "s.model"},
    )
    assert (named.name, named.dictionary) == ("mine", Path("d.txt"))
    assert named.tokenizer == {"sentencepiece_model": Path("s.model")}
    in_folder = find_files(world.model, bpe="sentencepiece", tokenizer="there")
    assert in_folder.dictionary == Path("there/dict.txt")
    assert in_folder.tokenizer == {"sentencepiece_model": Path("there/sentencepiece.bpe.model")}


def test_demo_is_the_shipped_model_and_knows_its_writing() -> None:
    files = find_files("demo")
    assert (files.name, files.checkpoint, files.bpe) == ("demo", DEMO_MODEL, "sentencepiece")
    assert len(files.sha256) == 64
    writing = files.writing
    assert (writing.bos, writing.separator, writing.line_break, writing.unknown) == (0, (2,), (2,), 3)
    assert writing.max_positions == 1024
    assert 3 not in writing.tokens("Review: the film was dull Sentiment:")


def test_wrong_places_and_tokenizers_are_one_line(tmp_path: Path) -> None:
    world = make_world(tmp_path / "w")
    with pytest.raises(UserError, match=r"nowhere: no such checkpoint; give the path of a model\.pt"):
        find_files("nowhere")
    with pytest.raises(UserError, match="bpe=gpt3: not a tokenizer known here; choose from gpt2, sentencepiece"):
        find_files(world.model, bpe="gpt3")
    with pytest.raises(UserError, match=r"no tokenizer files; put encoder.json and vocab.bpe \(gpt2\) or"):
        find_files(world.model)
    with pytest.raises(UserError, match="no tokenizer files"):
        find_tokenizer(world.data)
    assert find_files(world.model, bpe=None).writing.tokens("word1 nonsense") == (5, 3)


def test_random_model_follows_its_seed_and_loads(tmp_path: Path) -> None:
    dictionary = dictionary_of("good", "bad")
    shape = {"layers": 2, "width": 8, "ffn": 16, "heads": 2}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        save_random_model(tmp_path / f"{name}.pt", dictionary, shape, seed)
    states = {name: read_checkpoint(tmp_path / f"{name}.pt") for name in "abc"}
    weights = {name: state["model"]["decoder.layers.0.fc1.weight"] for name, state in states.items()}
    assert weights["a"].equal(weights["b"])
    assert not weights["a"].equal(weights["c"])
    config = language_model_config(states["a"], "a.pt")
    assert (config.decoder_layers, config.decoder_embed_dim, config.max_target_positions) == (2, 8, 2048)
