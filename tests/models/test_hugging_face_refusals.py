"""What a Hugging Face folder is refused for: one line each, with the file, the problem and the remedy."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fairseq_icl.errors import UserError
from fairseq_icl.models.hugging_face import read_folder
from fairseq_icl.models.pretrained_lm import load_decoder as load_with
from tests.models.hf_reference import byte_tokenizer, change_config, load_decoder, reference_model, save


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def original(name: str) -> Path:
        if name not in made:
            made[name] = save(reference_model(name), tmp_path_factory.mktemp("original"))
        return made[name]

    return original


@pytest.fixture
def copy_of(originals: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        for path in originals(name).iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        return tmp_path

    return copy


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_decoder(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(folder))
    assert ";" in message or "download it" in message  # the remedy
    return message


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("llama", {"model_type": "gpt_neo"}, "transformers cannot read it"),
        ("llama", {"model_type": "no_such"}, "transformers cannot read it"),
        ("llama", {"model_type": "own", "auto_map": {"AutoConfig": "c.C"}}, "its own code, which is not run"),
        ("llama", {"model_type": "t5"}, "no decoder-only language model"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantised weights are not supported"),
        ("llama", {"hidden_size": "24"}, "transformers cannot read it"),
        ("llama", {"eos_token_id": 900}, "eos_token_id=900 is not among"),
        ("qwen2", {"bos_token_id": None, "eos_token_id": None}, "neither bos_token_id nor eos_token_id"),
        ("gpt2", {"n_head": 5}, "transformers cannot read it"),
        ("dense", {"pad_token_id": 7}, "neither XGLM's"),
        ("dense", {"attention_heads": 5}, "cannot be cut into 5 heads"),
        ("dense", {"activation_function": "silu"}, "activation_function='silu' is not implemented"),
        ("xglm", {"eos_token_id": 5}, "0, 1, 5 are neither XGLM's"),
    ],
)
def test_a_config_that_is_not_understood(
    copy_of: Callable[[str], Path], name: str, change: dict[str, Any], said: str
) -> None:
    assert said in refusal(change_config(copy_of(name), **change))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop(K_PROJ), f"missing keys: {K_PROJ}"),
        (
            lambda w: w.update({"model.layers.0.adapter.weight": torch.ones(1)}),
            "unexpected keys: model.layers.0.adapter",
        ),
        (lambda w: w.update({"model.layers.9.mlp.up_proj.weight": torch.ones(1)}), "unexpected keys: model.layers.9"),
        (lambda w: w.update({K_PROJ: torch.ones(24, 24)}), "mismatched keys: ('model.layers.1"),
        (lambda w: w.update({K_PROJ: torch.full((12, 24), torch.nan)}), "NaN or infinite"),
        (lambda w: w.update({K_PROJ: torch.full((12, 24), torch.inf)}), "NaN or infinite"),
        (lambda w: w.update({K_PROJ: torch.ones(12, 24, dtype=torch.int8)}), "is int8: quantised"),
    ],
)
def test_weights_that_do_not_fit(copy_of: Callable[[str], Path], change: Callable, said: str) -> None:
    assert said in refusal(change_weights(copy_of("llama"), change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("model.layers.1.fc1.weight"), "no weights for layers.1.fc1.weight;"),
        (lambda w: w.update({"model.layers.9.fc1.weight": torch.ones(1)}), "layers.9.fc1.weight has the shape (1,)"),
        (lambda w: w.update({"model.layers.1.fc1.weight": torch.ones(2, 2)}), "shape (2, 2)"),
        (lambda w: w.update({"model.layers.1.fc1.weight": torch.full((40, 24), torch.nan)}), "NaN or infinite"),
    ],
)
def test_weights_that_do_not_fit_fairseqs_decoder(copy_of: Callable[[str], Path], change: Callable, said: str) -> None:
    assert said in refusal(change_weights(copy_of("dense"), change))


def test_a_missing_shard_and_a_shard_without_its_tensor(tmp_path: Path) -> None:
    folder = save(reference_model("llama"), tmp_path, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = folder / content["weight_map"][K_PROJ]
    weights = load_file(shard)
    save_file({name: tensor for name, tensor in weights.items() if name != K_PROJ}, shard)
    assert f"missing keys: {K_PROJ}" in refusal(folder)
    shard.unlink()
    assert f"{shard.name}: this shard of the weights is missing" in refusal(folder)
    content["weight_map"][K_PROJ] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    assert "outside its folder" in refusal(folder)
    index.write_text("{}")
    assert "no weight_map" in refusal(folder)
    index.unlink()
    assert "no model.safetensors or pytorch_model.bin" in refusal(folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "truncated or corrupt"),
        (b"nonsense" * 9, "corrupt"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git lfs pull"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_files_that_are_not_weights(copy_of: Callable[[str], Path], name: str, content: bytes, said: str) -> None:
    folder = copy_of("llama")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    assert said in refusal(folder)


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch was_here",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_wants_to_run_code(
    copy_of: Callable[[str], Path], zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_of("llama")
    monkeypatch.chdir(folder)
    (folder / "model.safetensors").unlink()
    if zipped:
        torch.save({"model.norm.weight": RunsCode()}, folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": RunsCode()}))
    assert "pytorch_model.bin: refused" in refusal(folder)
    assert not (folder / "was_here").exists()


def test_a_pickle_of_something_else(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    (folder / "model.safetensors").unlink()
    torch.save({"model": {"a": torch.ones(1)}}, folder / "pytorch_model.bin")
    assert "not a file of named tensors" in refusal(folder)


def test_a_tokenizer_of_another_model(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    larger = byte_tokenizer([f"<{number}>" for number in range(60)], 316)
    smaller = byte_tokenizer(["<s>"], 262)  # noticed where more than a tenth of the rows has no token
    for tokenizer in (larger, smaller):
        tokenizer.save(str(folder / "tokenizer.json"))
        assert "the tokenizer is of another model" in refusal(folder)
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json: not a tokenizer" in refusal(folder)
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refusal(folder)
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("")
    assert "how llama splits text is written in tokenizer.json only" in refusal(folder)


def test_a_dictionary_of_another_model(originals: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match="is not the one of this folder"):
        load_with(read_folder(originals("llama")), read_folder(originals("opt")).dictionary)


def test_a_folder_without_config_and_one_that_is_not_json(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    assert "not readable as JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    assert "not a JSON object" in refusal(tmp_path)
