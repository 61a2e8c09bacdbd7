"""Raw activations on disk: complete, small, and written whole or not at all."""

import json
from pathlib import Path

import pytest
import torch

from fairseq_icl.errors import UserError
from fairseq_icl.observing import PrefixCache, observe_queries
from fairseq_icl.observing.activations import load_activations, save_activations
from tests.observe.tiny import CONTEXT, make_queries, tiny_model


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    model, queries = tiny_model(), make_queries("single")
    prefix = PrefixCache().of(model, CONTEXT)
    seen = {
        "zsl": observe_queries(model, queries),
        "icl": observe_queries(model, queries, prefix=prefix, context_row=True),
    }
    save_activations(tmp_path / "sub" / "a.safetensors", torch.arange(6), seen)
    example, read = load_activations(tmp_path / "sub" / "a.safetensors")
    assert example.tolist() == list(range(6))
    assert read["zsl"].context_row is None
    for setting, observation in seen.items():
        for name, value in vars(observation).items():
            if value is not None:
                torch.testing.assert_close(getattr(read[setting], name), value, rtol=1e-3, atol=1e-3)
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["a.safetensors"]


def test_a_tenth_of_the_bytes_of_json_lines(tmp_path: Path) -> None:
    model = tiny_model(decoder_embed_dim=64, decoder_input_dim=64, decoder_output_dim=64)
    queries = make_queries("single", count=200)
    seen = observe_queries(model, queries, prefix=PrefixCache().of(model, CONTEXT), context_row=True)
    save_activations(tmp_path / "a.safetensors", torch.arange(200), {"icl": seen})
    fields = ("row", "gold", "prediction", "option_logprobs", "attention_output", "query_vector", "context_row")
    written = 0
    for number, length in enumerate(seen.query_length.tolist()):
        record = {name: getattr(seen, name)[number].tolist() for name in fields}
        record["attention_row"] = seen.attention_row[number, ..., -length:].tolist()
        written += len(json.dumps(record)) + 1
    assert (tmp_path / "a.safetensors").stat().st_size <= written / 10


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    seen = {"zsl": observe_queries(tiny_model(), make_queries("single"))}
    with pytest.raises(UserError, match="cannot be written"):
        save_activations(tmp_path / "file" / "a.safetensors", torch.arange(6), seen)
