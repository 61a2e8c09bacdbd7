"""What is large lies in files: memory stays flat, numbers stay the same, files vanish."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.measure import peak_bytes_of
from fairseq_icl.observing import observation
from fairseq_icl.observing.observation import Gathering, Observation, concatenate
from fairseq_icl.observing.saved import load_observations, save_observations
from tests.metrics.observations import random_observation

MEBI = 2**20
SIZES = {"layers": 12, "heads": 12, "tokens": 30, "width": 768}


@pytest.fixture
def in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is large."""
    monkeypatch.setattr(observation, "LARGE", 1)


def assert_same(first: Observation, second: Observation) -> None:
    assert first.tensors().keys() == second.tensors().keys()
    for name, value in first.tensors().items():
        assert torch.equal(getattr(second, name), value), name


def test_memory_does_not_grow_with_the_examples(tmp_path: Path) -> None:
    """Gathered, looked at in parts, taken in another order, saved and loaded: never as much as half of it in memory."""
    part = replace(random_observation(n=20, **SIZES), query_length=torch.full((20,), SIZES["tokens"]))
    gathering = Gathering(900)

    def gather() -> None:
        for places in torch.arange(900).flip(0).split(20):
            gathering.put(places, part)

    bytes_of_all = 45 * sum(value.nbytes for value in part.tensors().values())
    assert bytes_of_all > 50 * MEBI
    assert peak_bytes_of(gather) < bytes_of_all / 2
    seen = gathering.observation()
    kept: list[Observation] = []
    ways = {
        "parts": lambda: [len(one) for _, one in seen.parts()],
        "take": lambda: kept.append(seen.take(torch.randperm(900))),
        "save": lambda: save_observations(tmp_path / "a.safetensors", {"seen": seen}),
        "load": lambda: kept.append(load_observations(tmp_path / "a.safetensors")[1]["seen"]),
    }
    for name, way in ways.items():
        assert peak_bytes_of(way) < bytes_of_all / 2, name
    assert_same(kept[1], seen)


def test_tensors_in_files_are_like_any_others(in_files: None) -> None:
    parts = [random_observation(seed, n=n) for seed, n in enumerate((5, 70, 3))]
    joined = concatenate(parts)
    assert joined.stores
    for name, value in joined.tensors().items():
        assert torch.equal(value, torch.cat([getattr(part, name) for part in parts])), name
    joined.release()
    assert torch.equal(joined.attention_output[76], parts[2].attention_output[1])
    order = torch.randperm(78)
    taken = joined.take(order)
    assert all(torch.equal(getattr(taken, name), value[order]) for name, value in joined.tensors().items())
    changed = replace(joined, attention_output=joined.attention_output + 1)
    assert torch.equal(changed.take([3]).attention_output, joined.attention_output[[3]] + 1)
    assert_same(pickle.loads(pickle.dumps(joined)), joined)


def test_parts_may_come_in_any_order_and_width(in_files: None) -> None:
    narrow, wide = random_observation(0, n=4, tokens=3, options=2), random_observation(1, n=4, tokens=7, options=3)
    narrow, wide = (replace(one, label_prior=None) for one in (narrow, wide))
    for first, second in ((narrow, wide), (wide, narrow)):
        gathering = Gathering(8)
        gathering.put(torch.tensor([7, 0, 2, 4]), first)
        gathering.put(torch.tensor([1, 3, 5, 6]), second)
        seen = gathering.observation()
        assert seen.attention_row.shape[-1] == 7
        short = seen.take([7, 0, 2, 4] if first is narrow else [1, 3, 5, 6])
        assert torch.equal(short.attention_row[..., 4:], narrow.attention_row)
        assert (short.attention_row[..., :4] == 0).all()
        assert (short.option_logprobs[:, 2] == -torch.inf).all()


def open_files() -> Iterator[str]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "fairseq-icl" in line or "(deleted)" in line:
            yield line


def test_a_file_vanishes_with_its_observation(in_files: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(list(open_files()))
    joined = concatenate([random_observation(n=3)])
    assert len(list(open_files())) > before
    assert list(tmp_path.iterdir()) == []  # it never has a name
    del joined
    assert len(list(open_files())) == before


def test_a_file_is_what_safetensors_itself_would_write(tmp_path: Path) -> None:
    seen = replace(random_observation(n=150), training_queries={4: torch.randn(3, 5, 8)})
    for precision in ("single", "half"):
        save_observations(tmp_path / "ours", {"zsl": seen, "icl": seen}, precision=precision)
        with safe_open(tmp_path / "ours", "pt") as file:
            metadata = file.metadata()
        save_file(load_file(tmp_path / "ours"), tmp_path / "theirs", metadata)
        ours, theirs = ((tmp_path / name).read_bytes() for name in ("ours", "theirs"))
        size = int.from_bytes(ours[:8], "little")
        assert len(ours) == len(theirs)
        assert ours[8 + size :] == theirs[8 + size :]


def test_a_full_disk_is_one_line_that_names_tmpdir() -> None:
    """Files may have 64 kB in the process: to it, any disk is full."""
    code = (
        "import resource; from tests.metrics.observations import random_observation\n"
        "from fairseq_icl.observing.observation import concatenate\n"
        "from fairseq_icl.errors import UserError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "try: concatenate([random_observation(n=60, layers=12, width=768)])\n"
        "except UserError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    assert "TMPDIR" in result.stdout
    assert len(result.stdout.splitlines()) == 1
