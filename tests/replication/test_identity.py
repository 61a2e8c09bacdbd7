"""What a result is stored under is what it was made of: specs, data files and stand-ins by content, not by name."""

from pathlib import Path

import pytest
import torch

from fairseq_icl.commands.replicate import job_of
from fairseq_icl.errors import UserError
from fairseq_icl.replication.cells import Keys, file_hash
from fairseq_icl.replication.engine import Engine
from fairseq_icl.replication.find_model import find_model
from fairseq_icl.replication.folders import ResultsFolder
from fairseq_icl.replication.plan import expand
from fairseq_icl.replication.run import engine_of
from fairseq_icl.replication.run import run as run_cells
from tests.replication.toy_run import configuration, run, tables
from tests.world import SPEC, World, make_world

SHAPE = {"layers": 2, "width": 16, "heads": 2, "ffn": 32, "vocabulary": 48}


def stand_in(world: World, folder: Path, **changes: int) -> Path:
    config = {"name": "x", "path": str(world.model), "bpe": None, "tokenizer": None, "random": True}
    return find_model({**config, "shape": SHAPE | changes}, folder).checkpoint


def test_another_shape_is_another_stand_in(world: World, tmp_path: Path):
    two, five, again = (stand_in(world, tmp_path, layers=layers) for layers in (2, 5, 2))
    assert two == again != five
    assert torch.load(five, weights_only=False)["args"].decoder_layers == 5


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("layers", 0, "must be a whole number"),
        ("layers", "abc", "must be a whole number"),
        ("layers", 10**9, "must be a whole number"),
        ("heads", 3, "does not divide"),
        ("bogus", 1, "unknown key"),
        ("width", 2**19, "weights; give a smaller one"),
    ],
)
def test_a_shape_that_no_model_has_is_one_line(world: World, tmp_path: Path, key: str, value: object, part: str):
    with pytest.raises(UserError, match=part):
        stand_in(world, tmp_path, **{key: value})


def test_two_specs_of_one_name_over_one_folder_are_two_cells(world: World, tmp_path: Path):
    other = tmp_path / "other" / "toy.yaml"
    other.parent.mkdir()
    other.write_text(SPEC.replace("Sentence: {text} Label:", "Label: {text} Sentence:"))
    words = ["experiment=deutch2024", "method=none", "init=pretrained"]
    out = run(world, tmp_path / "run", *words)
    run(world, out, *words, f"dataset={other}")
    found = tables(out)
    assert len(found) == 2
    assert len(set(found.values())) == 2


def test_one_engine_tells_two_specs_of_one_name_apart(world: World, tmp_path: Path):
    other = tmp_path / "toy.yaml"
    other.write_text(SPEC.replace("Sentence: {text} Label:", "Label: {text} Sentence:"))
    config = configuration(world, tmp_path / "run", "experiment=deutch2024", "method=none", "init=pretrained")
    engine = Engine(Keys(find_model(config["model"], tmp_path), world.data), ResultsFolder(tmp_path / "run"))
    first, second = expand(config)[0], expand(config | {"datasets": [str(other)]})[0]
    assert first.dataset == second.dataset
    assert engine.keys.of(first) != engine.keys.of(second)
    assert engine.keys.of(first, "prompts") != engine.keys.of(second, "prompts")
    assert engine.prompts(first).queries != engine.prompts(second).queries


def test_data_that_change_between_plan_and_reading_are_refused(tmp_path: Path):
    world = make_world(tmp_path / "w")
    config = configuration(world, tmp_path / "run", "experiment=deutch2024", "method=none", "init=pretrained")
    (cell,) = expand(config)
    job = job_of(config, world.data)
    engine_of(job).keys.of(cell)
    with (world.data / "toy_valid.jsonl").open("a") as file:
        file.write('{"text": "word1 word2", "label": 0}\n')
    with pytest.raises(UserError, match="toy changed during the run; start it again"):
        run_cells(job, [cell], print)
    assert not tables(tmp_path / "run")
    file_hash.cache_clear()


def test_the_rows_in_a_file_of_demonstrations_are_part_of_the_key(world: World, tmp_path: Path):
    rows = tmp_path / "rows.txt"
    words = ["experiment=deutch2024", "method=gd", "init=pretrained", f"demonstrations={rows}"]
    keys = []
    for text in ("1\n2\n3\n4\n", "# the same\n1\n2\n3\n4\n", "1\n2\n4\n3\n"):
        rows.write_text(text)
        config = configuration(world, tmp_path / "run", *words)
        engine = Engine(Keys(find_model(config["model"], tmp_path), world.data), ResultsFolder(tmp_path / "run"))
        (cell,) = expand(config)
        keys.append([engine.keys.of(cell, kind) for kind in ("cell", "zsl", "icl", "ft")])
    first, same, other = keys
    assert first == same
    assert [a == b for a, b in zip(first, other, strict=True)] == [False, True, False, False]
    rows.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        Engine(Keys(engine.keys.files, world.data), engine.folder).keys.of(cell)
