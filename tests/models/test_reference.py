"""`doctor --write-reference` and `--check-reference`: numbers of transformers, stored beside a folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fairseq_icl.commands import doctor
from fairseq_icl.errors import UserError
from fairseq_icl.models.hugging_face import read_folder
from fairseq_icl.models.pretrained_lm import load_decoder
from fairseq_icl.models.reference import FILE, largest_difference, write_reference
from tests.commands import assert_one_clear_line, run, succeeded
from tests.models.hf_reference import MODELS, reference_model, save


@pytest.mark.parametrize("name", list(MODELS))
def test_every_family_is_checked_against_transformers(name: str, tmp_path: Path) -> None:
    folder = save(reference_model(name), tmp_path / "model")
    model = read_folder(folder)
    assert write_reference(model) == folder / FILE
    difference, made_by = largest_difference(model, load_decoder(model, model.dictionary).eval())
    assert difference < 1e-4
    assert made_by.startswith("transformers ")
    assert len(json.loads((folder / FILE).read_text())["sequences"][1]["tokens"]) > 15


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference_model("llama"), tmp_path_factory.mktemp("reference") / "model")


def test_the_doctor_writes_and_checks_it(folder: Path) -> None:
    wanted = run("fairseq-icl", "doctor", folder, "--check-reference")
    assert wanted.code == 2
    assert "--write-reference" in wanted.stdout
    assert "reference " not in succeeded(run("fairseq-icl", "doctor", folder)).stdout
    assert str(folder / FILE) in succeeded(run("fairseq-icl", "doctor", folder, "--write-reference")).stdout
    assert "log-probabilities differ by at most" in succeeded(run("fairseq-icl", "doctor", folder)).stdout


def test_what_does_not_agree_is_a_problem(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_reference(read_folder(folder))
    said = json.loads(path.read_text())
    said["sequences"][0]["log_probs"][2] += 0.01
    path.write_text(json.dumps(said))
    assert doctor.main([str(folder)]) == 2
    assert "do not use this model" in capsys.readouterr().out
    for content, message in (("{", "not readable as JSON"), ('{"format": 3}', "another version"), ("[]", "again")):
        path.write_text(content)
        assert doctor.main([str(folder)]) == 2
        assert message in capsys.readouterr().out


def test_it_belongs_to_the_files_it_was_made_for(folder: Path, tmp_path: Path) -> None:
    write_reference(read_folder(folder))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + torch.tensor(1e-3)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = read_folder(folder)
    with pytest.raises(UserError, match="made for other files"):
        largest_difference(model, load_decoder(model, model.dictionary))


def test_only_folders_have_one(tmp_path: Path) -> None:
    assert_one_clear_line(run("fairseq-icl", "doctor", tmp_path, "--write-reference"), "not a Hugging Face folder")
