"""The whole instrument on Hugging Face folders, against transformers on the same tokens, and by the real commands."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import fairseq_icl as fi
from fairseq_icl.commands import doctor
from fairseq_icl.errors import UserError
from fairseq_icl.models import Model
from fairseq_icl.models.pretrained_lm import load_decoder
from fairseq_icl.observing import Observer
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.replication.cells import Cell, Keys
from fairseq_icl.settings import Settings
from tests.commands import run, succeeded
from tests.models.hf_reference import (
    byte_tokenizer,
    change_config,
    outputs_of,
    reference_attention,
    reference_model,
    save,
    transformers,
)
from tests.world import SPEC, save_rows

EXACT = {"rtol": 0, "atol": 1e-5}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 512},
    "llama": {"max_position_embeddings": 512, "head_dim": 10},  # heads wider than the model
    "qwen3": {"max_position_embeddings": 512},
    "pythia": {"max_position_embeddings": 512},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of four tiny models and a toy dataset."""
    root = tmp_path_factory.mktemp("folders")
    for name in SHAPES:
        save(reference(name), root / name)
    (root / "data").mkdir()
    save_rows(root / "data" / "toy_train.jsonl", 20, seed=1)
    save_rows(root / "data" / "toy_valid.jsonl", 15, seed=2)
    (root / "toy.yaml").write_text(SPEC)
    return root


def reference(name: str) -> Any:
    return reference_model(name, bos_token_id=0, eos_token_id=0, **SHAPES[name])


def prompts_for(model: Model, root: Path, **settings: Any) -> Prompts:
    return fi.build_prompts(model, str(root / "toy.yaml"), data=root / "data", **{"k": 4, "limit": 5} | settings)


@pytest.mark.parametrize("name", SHAPES)
def test_in_context_on_the_shared_prefix_is_the_whole_prompt_and_transformers(name: str, root: Path) -> None:
    model = fi.load_model(root / name)
    prompts = prompts_for(model, root, position="query")
    shared = fi.observe(model, prompts, in_context=True)
    observer = Observer(model, prompts, in_context=True)
    assert observer.prefix is not None
    whole = Observer(model, prompts, in_context=True, whole_prompt=True)(prompts.queries)
    for field in ("option_logprobs", "attention_output"):
        torch.testing.assert_close(getattr(shared, field), getattr(whole, field), **EXACT)
    for field in ("attention_row", "query_vector", "context_row"):  # scores are unbounded: up to 33 here
        expected = getattr(whole, field)
        size = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(getattr(shared, field) / size, expected / size, **EXACT)
    theirs = reference(name)
    for number, query in enumerate(prompts.queries):
        tokens = torch.tensor([[*prompts.context, *query.inputs[0]]])
        with torch.no_grad(), outputs_of(reference_attention(theirs)) as outputs:
            logits = theirs(tokens).logits[0, -1]
        expected = torch.stack([output[0, -1] for output in outputs])  # (L, d)
        torch.testing.assert_close(shared.attention_output[number], expected, **EXACT)
        for option, label in enumerate(query.labels):
            first = logits.log_softmax(-1)[label[0]]
            if len(label) == 1:
                torch.testing.assert_close(shared.option_logprobs[number, option], first, **EXACT)


@pytest.mark.parametrize("method", ["gd", "lcgd"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_one_step_is_autograd_on_transformers(name: str, method: str, root: Path) -> None:
    model = fi.load_model(root / name)
    prompts = prompts_for(model, root, k=1)
    with fi.fine_tuned(model, prompts, method, lr=0.1) as tuned:
        weights = dict(tuned.weights or {})
    theirs = reference(name)
    sequence = prompts.finetuning[0]
    step_on(theirs, torch.tensor([sequence.tokens]), torch.tensor(sequence.scored[1:]), method)
    compared = 0
    for layer, attention in enumerate(reference_attention(theirs)):
        for part, expected in key_and_value(attention).items():
            ours = weights.pop(f"decoder.layers.{layer}.self_attn.{part}").cpu()
            torch.testing.assert_close(ours, expected, **EXACT)
            before = model.lm.get_parameter(f"decoder.layers.{layer}.self_attn.{part}").cpu()
            compared += int((ours - before).abs().max() > 1e-4)
    assert not weights
    assert compared >= 6  # a key bias has no gradient in the first layer's softmax


def step_on(theirs: Any, tokens: Tensor, scored: Tensor, method: str) -> None:
    """One step of SGD at the rate 0.1 on a model of transformers."""
    body = theirs.transformer if hasattr(theirs, "transformer") else theirs.model
    layers = body.h if hasattr(body, "h") else body.layers
    final_norm = body.ln_f if hasattr(body, "ln_f") else body.norm
    states: list[Tensor] = []
    if method == "lcgd":
        for layer in layers:
            layer.register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))
            layer.register_forward_hook(
                lambda _, __, output: states.append(output if torch.is_tensor(output) else output[0])
            )
    logits = theirs(tokens).logits
    seen = [theirs.lm_head(final_norm(state)) for state in states] or [logits]
    loss = sum(
        torch.nn.functional.cross_entropy(each[0, :-1][scored], tokens[0, 1:][scored], reduction="sum") for each in seen
    )
    (loss / scored.sum()).backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


def key_and_value(attention: Any) -> dict[str, Tensor]:
    """Name in fairseq -> weight of an attention module of transformers."""
    if hasattr(attention, "c_attn"):
        _, *weights = attention.c_attn.weight.T.chunk(3)
        _, *biases = attention.c_attn.bias.chunk(3)
        parts = zip(("k_proj", "v_proj"), weights, biases, strict=True)
        return {f"{name}.{kind}": tensor for name, w, b in parts for kind, tensor in (("weight", w), ("bias", b))}
    return {f"{name}.weight": getattr(attention, name).weight for name in ("k_proj", "v_proj")}


@pytest.mark.parametrize("name", ["llama", "pythia"])
@pytest.mark.parametrize("method", ["linearized", "linearized_lcgd"])
def test_every_metric_runs_on_a_model_of_transformers(name: str, method: str, root: Path) -> None:
    model = fi.load_model(root / name)
    prompts = prompts_for(model, root)
    zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    with fi.fine_tuned(model, prompts, method, lr=0.01) as tuned:
        table = fi.compare(prompts, zsl, icl, fi.observe(tuned, prompts))
    assert tuned.gradients is not None
    biases = {parameter for parameter in tuned.gradients["parameter"] if parameter.endswith("bias")}
    assert biases == (set() if name == "llama" else {"k_proj.bias", "v_proj.bias"})
    assert {"sim_aou", "sim_am_after", "kendall_tokens"} <= set(table["metric"])


@pytest.mark.parametrize(("name", "width"), [("llama", 10), ("gpt2", 6), ("pythia", 16)])
def test_weight_updates_on_grouped_heads_and_fused_matrices(name: str, width: int, root: Path) -> None:
    from fairseq_icl.observing.weight_updates import observe_weight_updates

    model = fi.load_model(root / name)
    prompts = prompts_for(model, root)
    prefix = Observer(model, prompts, in_context=True).prefix
    assert prefix is not None
    with fi.fine_tuned(model, prompts, "gd", lr=0.1) as tuned:
        seen = observe_weight_updates(model, tuned, prompts.queries, prefix, prompts.start, "query")
    assert seen.icl.shape == (3, 4, width, width)
    assert seen.ft.shape == (5, 3, 4, width, width)
    assert bool(seen.ft.abs().max() > 0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("final_norm", ["lost", "kept"])
def test_baselines_keep_what_they_say(name: str, final_norm: str, root: Path) -> None:
    source = fi.load_model(root / name).files.source
    dictionary = source.dictionary  # type: ignore[union-attr]
    whole = dict(load_decoder(source, dictionary).named_parameters())
    mlp = "c_fc" if name == "gpt2" else "up_proj"
    for init in ("untrained", "layer-norms", "trained-embeddings"):
        decoder = load_decoder(source, dictionary, init=init, final_norm=final_norm, seed=3)
        again = dict(load_decoder(source, dictionary, init=init, final_norm=final_norm, seed=3).named_parameters())
        assert all(torch.equal(value, again[key]) for key, value in decoder.named_parameters())
        same = {key for key, value in decoder.named_parameters() if torch.equal(value, whole[key])}
        assert ("layers.1.final_layer_norm.block.weight" in same) == (init != "untrained")
        assert ("embed_tokens.weight" in same) == (init == "trained-embeddings")
        assert f"layers.0.block.mlp.{mlp}.weight" not in same
        assert "layers.2.self_attn.v_proj.weight" not in same
        assert (decoder.layer_norm is None) == (init != "untrained" and final_norm == "lost")
        assert ("layer_norm.weight" in same) == (init != "untrained" and final_norm == "kept")
        assert bool(decoder(torch.tensor([[0, 5, 6]]))[0].isfinite().all())


def test_the_separator_is_the_models_unless_told_otherwise(root: Path) -> None:
    model = fi.load_model(root / "llama")
    newline = tuple(model.writing.encode("\n"))
    closing = {}
    for separator in ("model", "eos", "newline"):
        prompts = prompts_for(model, root, separator=separator)
        (_, end), (start, _) = prompts.context_spans[:2]
        closing[separator] = prompts.context[end:start]
    assert closing == {"model": newline, "eos": (0,), "newline": newline}
    demo = fi.load_model("demo")
    assert demo.writing.separated("model").separator == (2,)


def test_a_line_break_in_a_text_stays_one(root: Path) -> None:
    writing = fi.load_model(root / "gpt2").writing
    assert writing.tokens("a\nb") == (*writing.encode("a"), *writing.encode("\n"), *writing.encode("b"))


def test_a_window_shorter_than_the_prompt_is_computed(root: Path, tmp_path: Path) -> None:
    theirs = reference_model("mistral window", bos_token_id=0, eos_token_id=0, max_position_embeddings=512)
    model = fi.load_model(save(theirs, tmp_path))
    prompts = prompts_for(model, root, k=8, position="query")
    assert len(prompts.context) > 100
    shared = fi.observe(model, prompts, in_context=True)
    tokens = torch.tensor([[*prompts.context, *prompts.queries[0].inputs[0]]])
    with torch.no_grad(), outputs_of(reference_attention(theirs)) as outputs:
        theirs(tokens)
    torch.testing.assert_close(shared.attention_output[0], torch.stack([out[0, -1] for out in outputs]), **EXACT)


def test_the_parallel_layer_has_no_state_between_attention_and_mlp(root: Path) -> None:
    model = fi.load_model(root / "pythia")
    prompts = prompts_for(model, root)
    with (
        pytest.raises(UserError, match="layer_causal_point=attention"),
        fi.fine_tuned(model, prompts, "lcgd", lr=0.1, layer_causal_point="attention"),
    ):
        pass
    with fi.fine_tuned(model, prompts, "lcgd", lr=0.1, layer_causal_point="attention_output") as tuned:
        assert tuned.gradients["norm"].max() > 0


@pytest.mark.parametrize("changed", ["config.json", "tokenizer.json", "model.safetensors"])
def test_keys_cover_every_file_of_the_folder(changed: str, root: Path, tmp_path: Path) -> None:
    cell = Cell("x", "toy", "gd", "", Settings(), str(root / "toy.yaml"))
    keys = []
    for altered in (False, True):
        folder = shutil.copytree(root / "llama", tmp_path / str(altered))
        if altered and changed != "model.safetensors":
            (folder / changed).write_text(json.dumps(json.loads((folder / changed).read_text()), indent=3))
        elif altered:
            content = bytearray((folder / changed).read_bytes())
            content[-1] ^= 1
            (folder / changed).write_bytes(content)
        keys.append(Keys(fi.load_model(folder).files, root / "data").of(cell, "icl"))
    assert keys[0] != keys[1]


def test_commands_run_on_a_folder(root: Path, tmp_path: Path) -> None:
    examined = succeeded(run("fairseq-icl", "doctor", root / "llama"))
    run_by = "llama, up to 512 positions, run by transformers' own code"
    for words in (run_by, "'<|endoftext|>' (0)", "separator      'Ċ'", "without key and"):
        assert words in examined.stdout
    small = ["num_demonstrations=4", "seed=1", "limit=4", "lr=0.1", "skip=[]", "method=gd,lcgd,alpha"]
    inits = "init=pretrained,trained-embeddings,layer-norms"
    names = [f"model={root / 'llama'}", f"data={root / 'data'}", f"dataset={root / 'toy.yaml'}", f"out={tmp_path}/run"]
    replicate = ["replicate", "experiment=deutch2024", *names, *small, inits]
    result = succeeded(run("fairseq-icl", *replicate))
    assert "9 of 9 cells finished" in result.stdout
    cells = [json.loads(path.read_text()) for path in (tmp_path / "run" / "cells").glob("*/cell.json")]
    assert {cell["cell"]["settings"]["separator"] for cell in cells} == {"model"}
    tables = [pd.read_parquet(path) for path in (tmp_path / "run" / "cells").glob("*/results.parquet")]
    assert all(len(table) for table in tables)
    assert len(tables) == 9
    again = succeeded(run("fairseq-icl", *replicate, "--dry-run"))
    assert "everything is finished already" in again.stdout


class Payload:
    """A pickle that creates a folder when it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def _without_a_shard(folder: Path) -> None:
    shutil.rmtree(folder)
    save(reference("llama"), folder, max_shard_size="20KB")
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def _another_family(folder: Path) -> None:
    shutil.rmtree(folder)
    config = transformers.BloomConfig(vocab_size=300, hidden_size=24, n_layer=2, n_head=4)
    save(transformers.BloomForCausalLM(config), folder)


def _with_code(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Payload(folder / "owned")}, folder / "pytorch_model.bin")


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "family": (lambda folder: _another_family(folder), "its attention is not open to other code in transformers"),
    "remote code": (lambda f: change_config(f, model_type="own", auto_map={"AutoConfig": "c.C"}), "its own code"),
    "shard": (_without_a_shard, "shard of the weights is missing"),
    "tokenizer": (
        lambda folder: byte_tokenizer(["<|endoftext|>"], 260).save(str(folder / "tokenizer.json")),
        "the tokenizer is of another model",
    ),
    "code": (_with_code, "asks to run code"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_the_doctor_refuses_in_one_line(
    kind: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(root / "llama", tmp_path / "model")
    spoil, words = REFUSALS[kind]
    spoil(folder)
    assert doctor.main([str(folder)]) == 2
    problems = [line for line in capsys.readouterr().out.splitlines() if "PROBLEM" in line]
    assert len(problems) == 1
    assert words in problems[0]
    assert not (folder / "owned").exists()


MEASURE = """
import resource, sys
import torch
from fairseq_icl import api, load_model

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.ones(64, 64) @ torch.ones(64, 64)
before = peak()
sizes = [4 * p.numel() for p in load_model(sys.argv[1]).lm.parameters()]
print(peak() - before, sum(sizes), max(sizes))
"""


@pytest.mark.parametrize("saved_as", [torch.float32, torch.float16])
def test_loading_takes_little_more_than_the_weights(tmp_path: Path, saved_as: torch.dtype) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}
    folder = save(reference_model("llama", **shape).to(saved_as), tmp_path / "model", max_shard_size="40MB")
    command = [sys.executable, "-c", MEASURE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    grown, weights, largest = map(int, done.stdout.split())
    assert weights > 150 * 2**20
    assert grown < 1.1 * weights + largest + 20 * 2**20  # and what Python itself takes
