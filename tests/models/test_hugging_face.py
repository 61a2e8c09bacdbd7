"""Hugging Face folders against transformers itself, on tiny random models of its own classes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.models import FairseqDecoder
from fairseq.models.transformer import TransformerDecoder
from fairseq.modules import gelu as fairseq_gelu
from tokenizers import Tokenizer
from torch import Tensor

from fairseq_icl.models.checkpoints import is_hugging_face
from fairseq_icl.models.hugging_face import HFModel, read_folder
from fairseq_icl.models.transformers_lm import TransformersDecoder
from tests.models.hf_reference import (
    GELU_IN_FP32,
    MODELS,
    ROWS,
    change_config,
    load_decoder,
    metaspace_tokenizer,
    outputs_of,
    reference_attention,
    reference_model,
    save,
)

FAIRSEQS = [name for name in MODELS if name.split()[0] in ("xglm", "dense")]


def in_precision(decoder: FairseqDecoder, precision: torch.dtype) -> FairseqDecoder:
    """The decoder in this precision throughout; fairseq's gelu alone would stay in fp32."""
    for layer in decoder.layers:
        if getattr(layer, "activation_fn", None) is fairseq_gelu:
            layer.activation_fn = torch.nn.functional.gelu
    return decoder.eval().to(precision)


def some_tokens(model: HFModel, batch: int = 2, length: int = 30) -> tuple[Tensor, Tensor]:
    """Token ids as transformers has them and as rows, (batch, length) each; padding is not among them."""
    rows = torch.randint(4, ROWS - 4, (batch, length), generator=torch.Generator().manual_seed(2))
    rows[rows == model.dictionary.pad()] = 4
    return torch.tensor(model.vocabulary.order)[rows], rows


@pytest.mark.parametrize(
    ("name", "precision"),
    [(name, torch.float32) for name in MODELS] + [(name, torch.float64) for name in FAIRSEQS],
)
def test_logits_and_attention_outputs_are_those_of_transformers(
    name: str, precision: torch.dtype, tmp_path: Path
) -> None:
    reference = reference_model(name)
    model = read_folder(save(reference, tmp_path))
    decoder: Any = in_precision(load_decoder(model), precision)
    ids, rows = some_tokens(model)
    with torch.no_grad(), outputs_of([layer.self_attn for layer in decoder.layers]) as outputs:
        logits = decoder(rows)[0]
    torch.set_default_dtype(precision)  # XGLM's class makes a constant of the default type, which overflows
    try:
        with torch.no_grad(), outputs_of(reference_attention(reference)) as expected:
            expected_logits = reference.to(precision)(ids).logits[..., model.vocabulary.order]
    finally:
        torch.set_default_dtype(torch.float32)
    exact = 1e-5 if precision == torch.float32 else 1e-10
    assert isinstance(decoder, TransformerDecoder if name in FAIRSEQS else TransformersDecoder)
    assert len(outputs) == len(expected) == 3
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=exact)
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output.transpose(0, 1), wanted, rtol=0, atol=exact)


@pytest.mark.parametrize("name", GELU_IN_FP32)
def test_gelu_is_all_that_keeps_fairseq_from_fp64(name: str, tmp_path: Path) -> None:
    """As it is, the fp64 decoder is off by the rounding of gelu to fp32; positions and the rest are exact."""
    model = read_folder(save(reference_model(name), tmp_path))
    _, rows = some_tokens(model)
    with torch.no_grad():
        plain = load_decoder(model).double()(rows)[0]
        exact = in_precision(load_decoder(model), torch.double)(rows)[0]
    assert 1e-8 < (plain - exact).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["gpt2", "opt-350m", "dense", "llama", "pythia"])
def test_shards_and_pickles_hold_the_same_model(name: str, tmp_path: Path) -> None:
    reference = reference_model(name)
    whole = save(reference, tmp_path / "whole")
    sharded = save(reference, tmp_path / "sharded", max_shard_size="20KB")
    pickled = save(reference, tmp_path / "pickled")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    (pickled / "model.safetensors").unlink()
    torch.save(reference.state_dict(), pickled / "pytorch_model.bin")  # stores tied matrices twice
    expected = load_decoder(whole).state_dict()
    for folder in (sharded, pickled):
        state = load_decoder(folder).state_dict()
        assert all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_mapping_a_file_anew_changes_nothing(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = reference_model("dense")
    folder = save(reference, tmp_path)
    expected = load_decoder(folder).state_dict()
    if kind == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
        torch.save(reference.state_dict(), folder / kind)
    monkeypatch.setattr("fairseq_icl.models.hugging_face.weights.MAPPED", 0)
    state = load_decoder(folder).state_dict()
    assert all(torch.equal(state[key], expected[key]) for key in expected)


def test_half_precision_files_become_fp32(tmp_path: Path) -> None:
    reference = reference_model("llama").to(torch.bfloat16)
    decoder = load_decoder(save(reference, tmp_path))
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.float32}
    assert torch.equal(decoder.embed_tokens.weight, reference.model.embed_tokens.weight.float())


def test_files_of_older_transformers_are_read(tmp_path: Path) -> None:
    """Version 4 writes rope_theta and rope_scaling, and masks; a bare GPT-2 has no prefix."""
    llama = save(reference_model("llama llama3"), tmp_path / "llama")
    scaling = {key: value for key, value in MODELS["llama llama3"][1]["rope_parameters"].items() if key != "rope_theta"}
    rows = torch.randint(4, 200, (1, 30))
    with torch.no_grad():
        new = load_decoder(llama)(rows)[0]
        change_config(llama, rope_parameters=None, rope_theta=500.0, rope_scaling=scaling)
        torch.testing.assert_close(load_decoder(llama)(rows)[0], new)
    gpt2 = reference_model("gpt2")
    folder = save(gpt2, tmp_path / "gpt2")
    (folder / "model.safetensors").unlink()
    state = gpt2.transformer.state_dict() | {
        "h.0.attn.bias": torch.ones(1, 1, 64, 64),
        "h.0.attn.masked_bias": torch.ones(1),
    }
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(load_decoder(folder).embed_tokens.weight, gpt2.transformer.wte.weight)


@pytest.mark.parametrize("name", ["gpt2", "opt", "xglm", "dense", "llama"])
def test_dictionary_and_tokenizer_count_rows(name: str, tmp_path: Path) -> None:
    model = read_folder(save(reference_model(name), tmp_path))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "the film is great, ça va ÿ </s>"
    ids = model.encode_line(text)
    assert [model.dictionary[row] for row in ids[:2]] == tokenizer.encode(text).tokens[:2]
    assert model.decode(ids) == text
    assert len(model.dictionary) == ROWS == load_decoder(model).embed_tokens.num_embeddings
    assert not {model.dictionary.pad(), model.dictionary.unk(), model.dictionary.eos()} & set(ids)
    assert model.dictionary.pad() not in {model.bos, model.dictionary.eos(), *model.separator, model.dictionary.unk()}
    assert all(model.dictionary.index(model.dictionary[row]) == row for row in range(ROWS))


def test_special_tokens_and_separators_follow_the_family(tmp_path: Path) -> None:
    seen = {}
    for name in ("gpt2", "opt", "xglm", "dense", "llama"):
        model = read_folder(save(reference_model(name), tmp_path / name))
        seen[name] = (model.bos, model.dictionary.eos(), model.decode(model.separator))
    assert seen == {
        "gpt2": (256, 257, "\n"),
        "opt": (2, 2, "\n"),
        "xglm": (2, 2, "</s>"),
        "dense": (0, 2, "</s>"),
        "llama": (256, 257, "\n"),
    }


def test_old_opt_files_name_the_wrong_first_token(tmp_path: Path) -> None:
    assert read_folder(change_config(save(reference_model("opt"), tmp_path), bos_token_id=0)).bos == 2


def test_vocab_and_merges_are_the_same_tokenizer(tmp_path: Path) -> None:
    folder = save(reference_model("gpt2"), tmp_path)
    text = "the film is great\n  bad"
    expected = read_folder(folder).encode_line(text)
    Tokenizer.from_file(str(folder / "tokenizer.json")).model.save(str(folder))
    (folder / "tokenizer.json").unlink()
    model = read_folder(folder)
    assert model.encode_line(text) == expected
    assert model.decode(expected) == text


def test_a_tokenizer_that_begins_with_a_space_does_not_double_it(tmp_path: Path) -> None:
    tokenizer = metaspace_tokenizer()
    rows = tokenizer.get_vocab_size()
    folder = save(reference_model("llama", vocab_size=rows, bos_token_id=1, eos_token_id=2), tmp_path)
    tokenizer.save(str(folder / "tokenizer.json"))
    model = read_folder(folder)
    symbols = [[model.dictionary[row] for row in model.encode_line(text)] for text in ("great", " great", "a great")]
    assert symbols == [["▁great"], ["▁great"], ["▁", "a", "▁great"]]
    assert [model.dictionary[row] for row in model.separator] == ["<0x0A>"]
    assert (model.dictionary[model.dictionary.pad()], model.dictionary.unk()) == ("<0xFF>", 0)


def test_xglm_reads_sentencepiece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("\n".join(["the film is great", "a bad story", "the plot is told with care"] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "sp"), vocab_size=28, minloglevel=2
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    folder = save(reference_model("xglm"), tmp_path / "xglm")
    change_config(folder, vocab_size=29)
    (folder / "tokenizer.json").unlink()
    (tmp_path / "sp.model").rename(folder / "sentencepiece.bpe.model")
    model = read_folder(folder)
    text = "the film is great"
    assert [model.dictionary[row] for row in model.encode_line(text)] == pieces.encode(text, out_type=str)
    assert model.encode_line(" great") == model.encode_line("great")
    assert model.encode_line("Ω")[-1] == model.dictionary.unk() == 3
    assert model.decode(model.encode_line(text)).strip() == text


def test_padding_of_the_config_is_used_only_where_no_prompt_contains_it(tmp_path: Path) -> None:
    folder = save(reference_model("llama"), tmp_path)
    assert read_folder(change_config(folder, pad_token_id=258)).dictionary.pad() == 258
    end = read_folder(change_config(folder, pad_token_id=257))
    assert end.dictionary[end.dictionary.pad()] == "ÿ"


def test_the_hash_covers_config_tokenizer_index_and_shards(tmp_path: Path) -> None:
    folder = save(reference_model("llama"), tmp_path, max_shard_size="20KB")
    seen = {read_folder(folder).sha256}
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        sorted(folder.glob("*-00002-*"))[0].name,
    ):
        path = folder / name
        before = path.read_bytes()
        path.write_bytes(before + b" ")
        seen.add(read_folder(folder).sha256)
        path.write_bytes(before)
    assert len(seen) == 5
    assert read_folder(folder).sha256 in seen


def test_a_folder_is_told_from_other_paths(tmp_path: Path) -> None:
    assert not is_hugging_face(tmp_path)
    assert not is_hugging_face(tmp_path / "model.pt")
    assert is_hugging_face(save(reference_model("gpt2"), tmp_path))
