"""Observations in memory and on disk: complete, small, and written whole or not at all."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fairseq_icl.errors import UserError
from fairseq_icl.observing.observation import Observation, concatenate
from fairseq_icl.observing.saved import load_observations, save_observations
from tests.observing.tiny import look, make_queries, tiny_model


def tuned_observation() -> Observation:
    """Of a fine-tuned baseline, with what training recorded."""
    recorded = {row: torch.randn(3, 4 + row, 16) for row in (2, 0, 11)}
    seen = look(tiny_model(), make_queries("multi"))
    return replace(seen, training_queries=recorded, method="lcgd", init="untrained")


@pytest.mark.parametrize(("precision", "tolerance"), [("single", 0), ("half", 1e-3)])
def test_what_was_saved_is_read_back(tmp_path: Path, precision: str, tolerance: float) -> None:
    model, queries = tiny_model(), make_queries("single")
    seen = {"zsl": look(model, queries), "icl": look(model, queries, in_context=True)}
    path = tmp_path / "sub" / "a.safetensors"
    save_observations(path, seen, torch.tensor([4, 0, 9, 1, 2, 3]), precision)
    example, read = load_observations(path)
    assert example.tolist() == [4, 0, 9, 1, 2, 3]
    assert list(read) == ["zsl", "icl"]
    assert read["zsl"].context_row is None
    for setting, observation in seen.items():
        assert read[setting].tensors().keys() == observation.tensors().keys()
        for name, value in observation.tensors().items():
            found = getattr(read[setting], name)
            assert found.dtype == value.dtype
            torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance)
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["a.safetensors"]


def test_a_finetuned_observation_comes_back_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    tuned = tuned_observation()
    save_observations(tmp_path / "a.safetensors", {"zsl": look(tiny_model(), make_queries("multi")), "ft": tuned})
    example, read = load_observations(tmp_path / "a.safetensors")
    assert example.tolist() == list(range(6))
    assert (read["ft"].method, read["ft"].init) == ("lcgd", "untrained")
    assert (read["zsl"].method, read["zsl"].init, read["zsl"].training_queries) == ("none", "pretrained", None)
    assert read["ft"].training_queries.keys() == tuned.training_queries.keys()
    for row, queries in tuned.training_queries.items():
        assert torch.equal(read["ft"].training_queries[row], queries)


def test_options_that_do_not_exist_stay_minus_infinity(tmp_path: Path) -> None:
    few, many = (look(tiny_model(), make_queries("single", options=number)) for number in (2, 3))
    joined = concatenate([few, many])
    save_observations(tmp_path / "a.safetensors", {"zsl": joined}, precision="half")
    read = load_observations(tmp_path / "a.safetensors")[1]["zsl"]
    assert torch.equal(read.option_logprobs, joined.option_logprobs)
    assert (read.option_logprobs[:6, 2] == -torch.inf).all()


def test_examples_are_taken_in_any_order_with_what_they_share() -> None:
    tuned = tuned_observation()
    chosen = tuned.take([4, 1])
    assert len(chosen) == 2
    for name, value in tuned.tensors().items():
        assert torch.equal(getattr(chosen, name), value[[4, 1]])
    assert chosen.training_queries is tuned.training_queries
    assert (chosen.method, chosen.init) == ("lcgd", "untrained")


def test_a_tenth_of_the_bytes_of_json_lines(tmp_path: Path) -> None:
    model = tiny_model(decoder_embed_dim=256, decoder_input_dim=256, decoder_output_dim=256)
    queries = make_queries("single", count=200)
    seen = look(model, queries, in_context=True)
    save_observations(tmp_path / "a.safetensors", {"icl": seen}, precision="half")
    fields = ("row", "gold", "prediction", "option_logprobs", "attention_output", "query_vector", "context_row")
    fields += ("depth_scores", "top_tokens", "top_logprobs")
    written = 0
    for number, length in enumerate(seen.query_length.tolist()):
        record = {name: getattr(seen, name)[number].tolist() for name in fields}
        record["attention_row"] = seen.attention_row[number, ..., -length:].tolist()
        written += len(json.dumps(record)) + 1
    assert (tmp_path / "a.safetensors").stat().st_size <= written / 10


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    seen = {"zsl": look(tiny_model(), make_queries("single"))}
    with pytest.raises(UserError, match="cannot be written"):
        save_observations(tmp_path / "file" / "a.safetensors", seen)


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    """A mapped file that is cut short or altered later would end the process, or change its numbers in silence."""
    path, tuned = tmp_path / "a.safetensors", tuned_observation()
    save_observations(path, {"seen": tuned})
    read = load_observations(path)[1]["seen"]
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert torch.equal(read.attention_output, tuned.attention_output)
    assert read.training_queries is not None
    assert all(torch.equal(value, read.training_queries[row]) for row, value in (tuned.training_queries or {}).items())


def damaged(path: Path, change: str) -> None:
    """Spoil a good file in one way."""
    content = path.read_bytes()
    tensors = load_file(path)
    metadata = {"format": "fairseq_icl observations 1", "settings": json.dumps({"zsl": {}})}
    if change == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif change == "empty":
        path.write_bytes(b"")
    elif change == "text":
        path.write_text("this is no file of tensors")
    elif change == "no metadata":
        save_file(tensors, path)
    elif change == "no settings":
        save_file(tensors, path, {"format": metadata["format"]})
    elif change == "settings no JSON":
        save_file(tensors, path, metadata | {"settings": "{"})
    elif change == "settings a list":
        save_file(tensors, path, metadata | {"settings": "[1]"})
    elif change == "facts a number":
        save_file(tensors, path, metadata | {"settings": json.dumps({"zsl": 3})})
    elif change == "unknown fact":
        save_file(tensors, path, metadata | {"settings": json.dumps({"zsl": {"colour": "red"}})})
    elif change == "unknown setting":
        save_file(tensors, path, metadata | {"settings": json.dumps({"none": {}})})
    elif change == "missing tensor":
        save_file({name: tensor for name, tensor in tensors.items() if name != "zsl.gold"}, path, metadata)
    elif change == "missing examples":
        save_file({name: tensor for name, tensor in tensors.items() if name != "example"}, path, metadata)
    elif change == "odd name":
        save_file({"nothing": torch.zeros(1), **tensors}, path, metadata)
    elif change == "odd field":
        save_file({"zsl.nothing": torch.zeros(1), **tensors}, path, metadata)
    elif change == "odd row":
        save_file({"zsl.training_queries.first": torch.zeros(1), **tensors}, path, metadata)
    elif change == "no row":
        save_file({"zsl.training_queries": torch.zeros(1), **tensors}, path, metadata)
    elif change == "wrong lengths":
        save_file({**tensors, "zsl.query_length": tensors["zsl.query_length"] + 1}, path, metadata)
    elif change == "no examples":
        save_file({**tensors, "zsl.query_length": tensors["zsl.query_length"][:0]}, path, metadata)


@pytest.mark.parametrize(
    "change",
    [
        *("missing", "folder", "truncated", "empty", "text", "no metadata", "no settings", "settings no JSON"),
        *("settings a list", "facts a number", "unknown fact", "unknown setting", "missing tensor", "missing examples"),
        *("odd name", "odd field", "odd row", "no row", "wrong lengths", "no examples"),
    ],
)
def test_damaged_and_foreign_files_are_one_line(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.safetensors"
    if change == "folder":
        path.mkdir()
    elif change != "missing":
        save_observations(path, {"zsl": look(tiny_model(), make_queries("single"))})
        damaged(path, change)
    with pytest.raises(UserError, match=r"a\.safetensors: (damaged|not a file of observations)"):
        load_observations(path)
