"""A checkpoint is foreign data: it is described, or refused in one line, and never runs code."""

import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from fairseq_icl.errors import UserError
from fairseq_icl.models.checkpoints import BASE_REFERENCE, base_reference, language_model_config, read_checkpoint
from tests.world import model_options


class Payload:
    """A pickle that creates a folder when it is loaded."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_code_in_a_checkpoint_is_refused_and_does_not_run(tmp_path: Path):
    torch.save({"model": {}, "args": Payload(tmp_path / "owned")}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match=r"evil\.pt: refused.*mkdir"):
        read_checkpoint(tmp_path / "evil.pt")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("old_format", [False, True])
def test_both_file_formats_of_torch_load(tmp_path: Path, old_format: bool):
    state = {"model": {"decoder.version": torch.tensor([3.0])}, "args": Namespace(decoder_embed_dim=8)}
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=not old_format)
    assert read_checkpoint(tmp_path / "model.pt")["args"].decoder_embed_dim == 8


def test_truncated_corrupt_empty_and_foreign_files_are_told_apart(tmp_path: Path):
    whole = tmp_path / "whole.pt"
    torch.save({"model": {"x": torch.zeros(1000)}}, whole)
    cases = {
        "truncated": whole.read_bytes()[:-500],
        "garbage": b"\x80\x02this is no pickle at all" * 10,
        "empty": b"",
    }
    for name, content in cases.items():
        (tmp_path / f"{name}.pt").write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}\.pt: .*(corrupt|empty)"):
            read_checkpoint(tmp_path / f"{name}.pt")
    torch.save([1, 2, 3], tmp_path / "list.pt")
    with pytest.raises(UserError, match="not a fairseq checkpoint"):
        read_checkpoint(tmp_path / "list.pt")
    with pytest.raises(UserError, match="no such checkpoint"):
        read_checkpoint(tmp_path / "absent.pt")


def test_options_are_read_from_args_cfg_and_old_omegaconf_trees(tmp_path: Path):
    options = model_options(moe_freq=0, unheard_of=1)
    tree = {"model": {"_name": "transformer_lm", **options}}
    for number, described in enumerate(
        ({"args": Namespace(**options)}, {"args": None, "cfg": tree}, {"cfg": OmegaConf.create(tree)})
    ):
        path = tmp_path / f"{number}.pt"
        torch.save({"model": {}, **described}, path)
        config = language_model_config(read_checkpoint(path), path)
        assert (config.decoder_layers, config.decoder_embed_dim, config.max_target_positions) == (3, 16, 256)
        assert config.dropout == 0


def test_checkpoint_without_options_is_explained():
    with pytest.raises(UserError, match="neither 'args' nor 'cfg'"):
        language_model_config({"model": {}}, "model.pt")


@pytest.mark.parametrize("cfg", [{}, {"model": None}, {"model": [1]}, [1, 2], "text"])
def test_configuration_without_a_model_is_explained(cfg: object):
    with pytest.raises(UserError, match=r"model\.pt: its 'cfg' has no section 'model'"):
        language_model_config({"model": {}, "cfg": cfg}, "model.pt")


def test_only_our_finetuned_checkpoints_name_a_base():
    reference = {"path": "model.pt", "sha256": "abc"}
    assert base_reference({"model": {}, "task_state": {BASE_REFERENCE: reference}}) == reference
    for state in ({"model": {}}, {"model": {}, "task_state": None}, {"model": {}, "task_state": {}}):
        assert base_reference(state) is None
