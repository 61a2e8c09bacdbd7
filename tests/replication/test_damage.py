"""Damaged and foreign files in a results folder: named in one line with the remedy, or made again."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fairseq_icl.commands.report import report
from fairseq_icl.errors import UserError
from fairseq_icl.replication import engine
from fairseq_icl.replication.folders import ResultsFolder
from fairseq_icl.replication.report.run import load_run
from tests.replication.toy_run import run, tables
from tests.world import World

CELLS = ("experiment=deutch2024", "init=pretrained", "method=gd,lcgd", "limit=3")


@pytest.fixture(scope="module")
def sound(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two cells."""
    return run(world, tmp_path_factory.mktemp("sound") / "run", *CELLS)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "run"))


def cell(folder: Path) -> Path:
    return sorted((folder / "cells").iterdir())[0]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0xFF
    path.write_bytes(content)


def flip_a_value(path: Path) -> None:
    """A wrong byte among the numbers themselves."""
    group = pq.read_metadata(path).row_group(0)
    columns = [group.column(place) for place in range(group.num_columns)]
    (values,) = [column for column in columns if column.path_in_schema == "value"]
    start = values.dictionary_page_offset or values.data_page_offset
    content = bytearray(path.read_bytes())
    content[start + values.total_compressed_size - 1] ^= 0xFF
    path.write_bytes(content)


def other_parquet(path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), path)


def in_place_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


def write(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


CELL_DAMAGE = {
    "results missing": ("results.parquet", Path.unlink),
    "results truncated": ("results.parquet", truncate),
    "results with a wrong byte": ("results.parquet", flip_a_value),
    "results of something else": ("results.parquet", other_parquet),
    "results a folder": ("results.parquet", in_place_of),
    "configuration missing": ("cell.json", Path.unlink),
    "configuration truncated": ("cell.json", truncate),
    "configuration no mapping": ("cell.json", write("[1, 2]")),
    "configuration without settings": ("cell.json", write('{"cell": {"method": "gd"}}')),
    "configuration binary": ("cell.json", lambda path: path.write_bytes(b"\xff\xfe\x00")),
    "configuration too deep": ("cell.json", write("[" * 100_000)),
    "gradients truncated": ("gradients.parquet", truncate),
    "gradients of something else": ("gradients.parquet", other_parquet),
}


@pytest.mark.parametrize("kind", CELL_DAMAGE)
def test_a_damaged_cell_is_named_with_the_remedy_by_report_and_replicate(world, folder, kind):
    name, damage = CELL_DAMAGE[kind]
    place = cell(folder)
    damage(place / name)
    for command in (lambda: report(folder, quiet=True), lambda: run(world, folder, *CELLS)):
        with pytest.raises(UserError) as caught:
            command()
        assert str(caught.value).startswith(f"{place / name}: ")
        assert f"remove the folder {place} and give the replicate command again" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_remedy_works(world, sound, folder):
    truncate(cell(folder) / "results.parquet")
    shutil.rmtree(cell(folder))
    run(world, folder, *CELLS)
    assert tables(folder) == tables(sound)


def test_an_empty_cell_and_a_file_in_its_place(world, folder):
    place = cell(folder)
    shutil.rmtree(place)
    place.mkdir()
    with pytest.raises(UserError, match=r"cell\.json: damaged.*remove the folder"):
        report(folder, quiet=True)
    place.rmdir()
    place.write_text("")
    assert len(load_run(folder).missing) == 1
    with pytest.raises(UserError, match=rf"{place}: not a folder; remove it"):
        run(world, folder, *CELLS)


ENTRY = {"model": "m", "init": "pretrained", "dataset": "d", "method": "gd", "variant": "", "seed": 1, "permutation": 0}
BAD_PLANS = {
    "empty": "",
    "truncated": '{"experiment": "x", "cel',
    "not text": "\x00\x01",
    "a list": "[]",
    "no cells": '{"experiment": "x"}',
    "cells no list": '{"experiment": "x", "cells": 3}',
    "a cell no mapping": '{"experiment": "x", "cells": [3]}',
    "a cell without key": json.dumps({"experiment": "x", "cells": [ENTRY]}),
    "a key that leaves the folder": json.dumps({"experiment": "x", "cells": [{**ENTRY, "key": "../x"}]}),
    "no name": json.dumps({"experiment": 1, "cells": []}),
    "tables no list": json.dumps({"experiment": "x", "tables": 1, "cells": []}),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("kind", BAD_PLANS)
def test_a_bad_plan_is_told_and_never_blocks_the_folder(world, folder, kind, capsys):
    bad = folder / "plans" / "bad.json"
    bad.write_text(BAD_PLANS[kind])
    report(folder, quiet=True)
    run(world, folder, *CELLS)
    captured = capsys.readouterr()
    assert "2 of 2 cells finished" in captured.out
    said = [line for line in captured.err.splitlines() if "bad.json" in line]
    assert len(said) == 1
    assert said[0].startswith(f"left out: {bad}: ")
    assert "remove it and give the replicate command again" in said[0]


def test_a_plan_with_a_table_that_is_not_published_shows_the_others(folder):
    (path,) = (folder / "plans").iterdir()
    plan = json.loads(path.read_text())
    path.write_text(json.dumps({**plan, "tables": ["nope", 3, *plan["tables"]]}))
    report(folder, quiet=True)


def test_unknown_tables_are_refused_before_any_work(world, tmp_path):
    with pytest.raises(UserError, match="tables=nope: no such published table"):
        run(world, tmp_path / "run", *CELLS, "tables=[nope]")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"version": 2}', "[" * 100_000])
def test_a_damaged_marker_is_named(folder, content):
    marker = folder / "store.json"
    marker.write_text(content)
    for create in (False, True):
        with pytest.raises(UserError, match=rf'{marker}: not readable.*write {{"format": 3}} into it'):
            ResultsFolder(folder, create=create)
    marker.unlink()
    marker.mkdir()
    with pytest.raises(UserError, match=rf"{marker}: a folder where a file should be"):
        ResultsFolder(folder)


def truncated_observation(place: Path) -> None:
    truncate(place / "observation.safetensors")


def flipped_observation(place: Path) -> None:
    flip(place / "observation.safetensors")


def file_instead(place: Path) -> None:
    shutil.rmtree(place)
    place.write_text("not a folder")


def empty_folder(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


def dangling_link(place: Path) -> None:
    shutil.rmtree(place)
    place.symlink_to(place.parent / "nowhere")


def without_sums(place: Path) -> None:
    (place / "sums.json").unlink()


def of_another_key(place: Path) -> None:
    other = next(entry for entry in place.parent.iterdir() if entry != place)
    shutil.rmtree(place)
    shutil.copytree(other, place)


OBSERVATION_DAMAGE = [truncated_observation, flipped_observation, file_instead, empty_folder, dangling_link]
OBSERVATION_DAMAGE += [without_sums, of_another_key]


@pytest.mark.parametrize("damage", OBSERVATION_DAMAGE)
def test_damaged_observations_are_made_again_with_a_line(world, sound, tmp_path, monkeypatch, capsys, damage):
    out = tmp_path / "run"
    with monkeypatch.context() as patched:  # stop after the first cell: its observations are kept for the second
        patched.setattr(engine, "compare", stop_at_second())
        with pytest.raises(KeyboardInterrupt):
            run(world, out, *CELLS)
    kept = sorted((out / "observations").iterdir())
    assert len(kept) >= 2
    damage(kept[0])
    capsys.readouterr()
    run(world, out, *CELLS)
    said = [line for line in capsys.readouterr().err.splitlines() if "it is made again" in line]
    assert len(said) == 1
    assert str(kept[0]) in said[0]
    assert tables(out) == tables(sound)


def stop_at_second() -> Callable[..., object]:
    compare, calls = engine.compare, []

    def stopping(*observations, **options):
        calls.append(observations)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return compare(*observations, **options)

    return stopping
