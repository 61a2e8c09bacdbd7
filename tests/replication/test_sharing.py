"""Workers share one base model: the same bits, loaded once, private to each; and what happens when something fails."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from fairseq_icl.files import HOST, temporary_prefix
from fairseq_icl.models import load_from
from fairseq_icl.models.files import ModelFiles, find_files
from fairseq_icl.replication import sharing
from fairseq_icl.replication.cells import Cell
from fairseq_icl.replication.sharing import SHARING_VARIABLE, base_model, keep_only, model_name, shared_models
from fairseq_icl.replication.store import Store
from fairseq_icl.settings import Settings

WRITER = """
import sys, time
from pathlib import Path
import torch
from fairseq_icl.models.files import find_files
from fairseq_icl.replication import sharing
from fairseq_icl.replication.cells import Cell
from fairseq_icl.settings import Settings

def save(lm, path):
    Path(path).write_bytes(b"half of a model")
    print("writing", flush=True)
    time.sleep(600)

torch.save = save
sharing.base_model(find_files("demo"), Cell("demo", "toy", "gd", "", Settings()), print)
"""


def cell(**settings) -> Cell:
    return Cell("demo", "toy", "gd", "", Settings(**settings))


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return find_files("demo")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of two workers that share their models."""
    with shared_models(tmp_path) as made:
        monkeypatch.setenv(SHARING_VARIABLE, str(made))
        yield made


@pytest.fixture
def loads(monkeypatch) -> list[Settings]:
    """The settings of every model that is loaded or drawn."""
    seen: list[Settings] = []
    monkeypatch.setattr(sharing, "load_from", lambda files, given: seen.append(given) or load_from(files, given))
    return seen


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    """Whether a tensor lies in the mapping of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= tensor.data_ptr() < high:
            return line.endswith(str(path)) and line.split()[1].endswith("p")  # private
    return False


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"init": "trained-embeddings", "final_norm": "lost", "seed": 3},
        {"init": "layer-norms", "final_norm": "kept", "seed": 3},
        {"precision": "bf16"},
        {"perturbation": 2},
        {"attention": "linear"},
    ],
    ids=str,
)
def test_a_shared_model_is_the_loaded_one_to_the_last_bit(files, folder, settings):
    own, shared = load_from(files, Settings(**settings)), base_model(files, cell(**settings), print)
    (path,) = folder.glob("*.pt")
    before, after = (dict(model.lm.named_parameters()) for model in (own, shared))
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) and is_mapped(after[name], path) for name in before)
    assert {tensor.dtype for tensor in after.values()} == {tensor.dtype for tensor in before.values()}
    tied = shared.lm.decoder.embed_tokens.weight is shared.lm.decoder.output_projection.weight
    assert tied == (own.lm.decoder.embed_tokens.weight is own.lm.decoder.output_projection.weight)
    assert not shared.lm.training
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(own.lm.decoder(tokens)[0], shared.lm.decoder(tokens)[0])
    facts = [(model.init, model.seed, model.attention, model.precision) for model in (own, shared)]
    assert facts[0] == facts[1]


def test_a_rotary_model_can_be_shared(folder, tmp_path):
    pytest.importorskip("transformers")
    from tests.models.hf_reference import reference_model, save

    made = tmp_path / "model"
    save(reference_model("llama"), made)
    files = find_files(made)
    own, shared = load_from(files, Settings()), base_model(files, cell(), print)
    tokens = torch.arange(5, 15)[None]
    with torch.no_grad():
        assert torch.equal(own.lm.decoder(tokens)[0], shared.lm.decoder(tokens)[0])
    assert is_mapped(next(shared.lm.parameters()), next(folder.glob("*.pt")))


def test_the_second_worker_draws_nothing_and_cannot_change_what_the_first_has(files, folder, loads):
    random = cell(init="untrained", seed=5)
    first, second = base_model(files, random, print), base_model(files, random, print)
    assert len(loads) == 1
    weights = [model.lm.decoder.embed_tokens.weight for model in (first, second)]
    with torch.no_grad():
        weights[1].zero_()
    assert weights[0].any()
    assert torch.equal(base_model(files, random, print).lm.decoder.embed_tokens.weight, weights[0])
    base_model(files, cell(init="untrained", seed=6), print)
    assert len(loads) == 2


def test_without_workers_nothing_is_written(files, tmp_path, monkeypatch, loads):
    monkeypatch.delenv(SHARING_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    base_model(files, cell(), print)
    assert (len(loads), list(tmp_path.iterdir())) == (1, [])


def test_where_the_file_cannot_be_written_one_line_says_so_and_each_loads_its_own(files, folder, loads):
    said: list[str] = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # the kernel refuses the rest of a larger file
    try:
        models = [base_model(files, cell(), said.append) for _ in range(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(loads) == 2
    assert torch.equal(*(model.lm.decoder.embed_tokens.weight for model in models))
    (line,) = said
    assert "cannot be written" in line
    assert "each worker loads a model of its own" in line
    assert not folder.exists()


def test_a_model_that_would_fill_the_disk_is_not_even_begun(files, folder, loads, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    monkeypatch.setattr(torch, "save", lambda *_: pytest.fail("written all the same"))
    for _ in range(2):
        base_model(files, cell(), said.append)
    (line,) = said
    assert "too little space for workers to share their model" in line
    assert len(loads) == 2


def test_a_worker_killed_while_it_writes_stops_nobody(files, folder, loads):
    variables = os.environ | {SHARING_VARIABLE: str(folder)}
    process = subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True, env=variables)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "writing"
    process.stdout.close()
    (half,) = folder.glob(".*.pt-*")
    process.send_signal(signal.SIGKILL)
    process.wait()
    model = base_model(files, cell(), print)
    assert len(loads) == 1
    assert not half.exists()
    assert is_mapped(model.lm.decoder.embed_tokens.weight, next(folder.glob("*.pt")))


def test_a_folder_that_vanishes_is_no_error(files, folder, loads):
    shutil.rmtree(folder)
    base_model(files, cell(), pytest.fail)
    assert len(loads) == 1


def test_a_file_of_somebody_else_is_not_read(files, folder, loads, monkeypatch):
    base_model(files, cell(), print)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    base_model(files, cell(), print)
    assert len(loads) == 2


def test_models_that_no_cell_needs_are_removed(files, folder):
    needed, other = cell(), cell(init="untrained")
    for one in (needed, other):
        base_model(files, one, print)
    os.utime(folder, (0, 0))
    keep_only(folder, {model_name(needed)})
    assert [path.name.split("-")[0] for path in folder.glob("*.pt")] == [model_name(needed)]
    assert time.time() - folder.stat().st_mtime < 60  # or another host would take it for a leftover after a day


def test_the_folder_is_gone_in_the_end_and_a_killed_parents_is_swept(tmp_path):
    store = Store(tmp_path)
    with suppress(KeyboardInterrupt), shared_models(tmp_path) as folder:
        assert folder is not None
        (folder / "model.pt").write_text("weights")
        store.sweep_unfinished()
        assert (folder / "model.pt").exists()  # its parent lives
        raise KeyboardInterrupt
    assert list(tmp_path.glob(".sharing-*")) == []
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / (temporary_prefix("sharing").replace(f"{HOST}.{os.getpid()}", f"{HOST}.{ended.pid}") + "abc")
    left.mkdir()
    (left / "model.pt").write_text("weights")
    store.sweep_unfinished()
    assert not left.exists()
