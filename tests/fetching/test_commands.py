"""`fairseq-icl fetch` by the real command against a loopback hub, and a replication of what it brought."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import fairseq_icl as fi
from fairseq_icl.commands import datasets, fetch
from fairseq_icl.commands.replicate import with_fetched
from fairseq_icl.errors import UserError
from fairseq_icl.fetching.models import fetch_hub_model, needed_files
from fairseq_icl.files import DEMO_MODEL, sha256_of
from fairseq_icl.replication.configuration import compose_configuration, friendly
from tests.commands import Result, assert_one_clear_line, run, succeeded
from tests.fetching.loopback_hub import COMMIT, LoopbackHub, Repo
from tests.fetching.six import SIX, as_file, made_up_rows, publish
from tests.fetching.test_archive import make_archive, special

TINY = "someone/tiny-gpt2"


def command(hub: LoopbackHub, *words: object, **environment: str) -> Result:
    """`fairseq-icl ...` by a user who has HF_ENDPOINT on the loopback hub and an empty cache."""
    home = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return run("fairseq-icl", *words, **(home | environment))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny GPT-2 as a repository has them, with some that nobody needs."""
    from tests.models.hf_reference import reference_model, save

    folder = tmp_path_factory.mktemp("tiny") / "model"
    save(reference_model("gpt2", n_positions=1024, bos_token_id=0, eos_token_id=0), folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "generation_config.json"}
    return files | {"README.md": b"# tiny", "onnx/model.onnx": b"x" * 100, "pytorch_model.bin": b"x" * 100}


def test_from_an_empty_folder_to_a_replication(hub: LoopbackHub, tiny: dict[str, bytes], tmp_path: Path):
    """The six datasets and a model are fetched, then replicated."""
    specs = publish(hub, tmp_path / "specs")
    hub.repos[f"models/{TINY}"] = Repo(tiny)
    home = {"HF_HOME": str(tmp_path / "hf"), "FAIRSEQ_ICL_CACHE": str(tmp_path / "cache")}

    brought = succeeded(command(hub, "fetch", "data", *specs.values(), "--to", tmp_path / "DATA", **home))
    lines = brought.stdout.splitlines()
    assert len(lines) == 12
    assert sum("12 rows, row for row those of the papers" in line for line in lines) == 5
    assert sum("5 rows, row for row those of the papers" in line for line in lines) == 6
    assert (
        f"{tmp_path / 'DATA/subj/train.jsonl'}: fetched, 12 rows, as many rows as the papers' file; the 2" in lines[6]
    )
    assert "train.parquet: 100%" in brought.stderr  # progress

    model = succeeded(command(hub, "fetch", "model", TINY, "--to", tmp_path / "tiny", **home))
    assert f"{TINY} of the hub at commit {COMMIT}" in model.stdout
    assert "ready: fairseq-train" in model.stdout  # the doctor
    assert sorted(path.name for path in (tmp_path / "tiny").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]

    words = ["replicate", "experiment=deutch2024", "init=pretrained", "method=gd", "lr=0.01", "num_demonstrations=2"]
    words += ["seed=1", "limit=2", "--quiet"]
    folders = [f"model={tmp_path / 'tiny'}", f"data={tmp_path / 'DATA'}", f"out={tmp_path / 'RUN'}"]
    succeeded(command(hub, *words, f"dataset={','.join(map(str, specs.values()))}", *folders, **home))
    found = cells(tmp_path / "RUN")
    assert set(found) == set(SIX)
    assert found["cb"]["rows"]["valid"] == {
        **yaml.safe_load(specs["cb"].read_text())["rows"]["valid"],
        "likeness": "same",
    }

    asked = len(hub.asked)
    succeeded(command(hub, "fetch", "data", specs["sst2"], specs["agnews"], "--to", tmp_path / "DATA", **home))
    assert len(hub.asked) == asked  # all is there and known: the hub is not asked


def cells(folder: Path) -> dict[str, dict[str, Any]]:
    """Dataset -> what its cell says of itself, and its values as bytes."""
    found = {}
    for place in (folder / "cells").iterdir():
        said = json.loads((place / "cell.json").read_text())
        values = pd.read_parquet(place / "results.parquet")["value"].to_numpy()
        found[said["cell"]["dataset"]] = said | {"values": values.tobytes()}
    return found


@pytest.fixture
def cb(hub: LoopbackHub, tmp_path: Path) -> Path:
    """The YAML of the smallest dataset, which is on the hub."""
    return publish(hub, tmp_path / "specs", ("cb",))["cb"]


def cb_file(hub: LoopbackHub, split: str = "train") -> tuple[dict[str, bytes], str, str]:
    """(files of its repository, path of a split in it, the same as the server's path)."""
    repo = hub.repos["datasets/aps/super_glue"]
    path = next(name for name in repo.files if split in name)
    return repo.files, path, f"/datasets/aps/super_glue/resolve/{repo.commit}/{path}"


def test_a_download_that_was_cut_off_is_gone_on_with(hub, cb, tmp_path):
    path = cb_file(hub)[2]
    hub.cuts[path] = [700, 300]
    assert fetch.main(["data", str(cb), "--to", str(tmp_path / "DATA")]) == 0
    assert hub.ranges(path) == ["", "bytes=700-", "bytes=1000-"]


def test_what_goes_wrong_is_one_line_and_leaves_no_file_behind(hub, cb, tmp_path):
    files, path, served = cb_file(hub)
    content, turned = files[path], as_file(made_up_rows("cb", "train", 12)[::-1], ".parquet")

    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message):
            fetch.main(["data", str(cb), "--to", str(tmp_path / "DATA"), "--quiet"])
        assert not (tmp_path / "DATA" / "cb").exists()

    hub.altered[served] = content[:-1] + b"?"
    refused(f"{served}: damaged or changed on the way .checksum .*give the command again")
    hub.altered.clear()
    files[path] = turned
    refused("not the papers' rows: as many, but other ones or in another order, so it is not put .*--any-rows")
    del files[path]
    refused(f"aps/super_glue: no file {path} in it")
    hub.repos["datasets/aps/super_glue"].commit = COMMIT
    refused("aps/super_glue: the hub has no revision 5234c61e.*download .* and put it at")
    hub.repos.clear()
    refused("aps/super_glue: the hub has no repository of that name")


def test_a_checksum_in_the_yaml_counts_whatever_the_hub_says(hub, tmp_path):
    spec = publish(hub, tmp_path / "specs", ("agnews",))["agnews"]
    said = yaml.safe_load(spec.read_text())
    said["hub"]["sha256"]["train"] = "0" * 64
    spec.write_text(yaml.safe_dump(said))
    with pytest.raises(UserError, match=f"expected {'0' * 16}"):
        fetch.main(["data", str(spec), "--to", str(tmp_path / "DATA"), "--quiet"])


def test_rows_of_another_order_are_kept_on_request_and_said_to_be_such(hub, cb, tmp_path, capsys):
    files, path, _ = cb_file(hub)
    files[path] = as_file(made_up_rows("cb", "train", 12)[::-1], ".parquet")
    assert fetch.main(["data", str(cb), "--to", str(tmp_path / "DATA"), "--any-rows", "--quiet"]) == 0
    assert "not the papers' rows" in capsys.readouterr().out
    assert datasets.main([str(cb), "--data", str(tmp_path / "DATA")]) == 0
    warning = "WARNING: not the papers' rows: as many, but other ones or in another order; a seed draws others"
    assert warning in capsys.readouterr().out


def test_without_space_it_is_one_line(hub, cb, tmp_path):
    words = ["fetch", "data", cb, "--to", tmp_path / "DATA", "--quiet"]
    home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    assert_one_clear_line(run("fairseq-icl", *words, shell_prefix="ulimit -f 1;", **home), "cannot be written", "--to")


def test_without_network_it_is_one_line_that_says_what_to_do(tmp_path):
    nobody = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path),
    }
    result = run("fairseq-icl", "fetch", "data", "sst2", "--to", tmp_path / "DATA", **nobody)
    put = f"and put it at {tmp_path / 'DATA/sst2/train.parquet'}"
    assert_one_clear_line(result, "http://127.0.0.1:9: cannot be reached", "/sst2/train-00000-of-00001.parquet", put)
    offline = run("fairseq-icl", "fetch", "data", "sst2", "--to", tmp_path / "DATA", HF_HUB_OFFLINE="1")
    assert_one_clear_line(offline, "HF_HUB_OFFLINE is set", put)


def test_by_hand_lists_the_papers_files_without_any_network(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert fetch.main(["data", "--to", "DATA", "--by-hand"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert sorted({line.split("/")[1] for line in lines}) == sorted(SIX)
    assert all(" https://huggingface.co/datasets/" in line for line in lines)


def test_a_file_that_is_there_is_not_overwritten(hub, cb, tmp_path):
    (tmp_path / "DATA").mkdir()
    (tmp_path / "DATA" / "cb_train.jsonl").write_text('{"premise": "p", "hypothesis": "h", "label": 0}\n')
    with pytest.raises(UserError, match=r"cb_train\.jsonl: is there already.*move it away"):
        fetch.main(["data", str(cb), "--to", str(tmp_path / "DATA"), "--quiet"])
    (tmp_path / "DATA" / "cb_train.jsonl").unlink()
    place = tmp_path / "DATA" / "cb" / "train.parquet"
    place.parent.mkdir()
    place.write_bytes(as_file(made_up_rows("cb", "train", 11), ".parquet"))
    with pytest.raises(
        UserError, match=r"train\.parquet: is there already, and is another file than http.*move it away"
    ):
        fetch.main(["data", str(cb), "--to", str(tmp_path / "DATA"), "--quiet"])


def test_what_was_fetched_once_needs_no_network_again(hub, tmp_path, capsys):
    spec = publish(hub, tmp_path / "specs", ("subj",))["subj"]  # no checksum, not all rows known
    words = ["data", str(spec), "--to", str(tmp_path / "DATA"), "--quiet"]
    assert fetch.main(words) == 0
    assert "train.jsonl: fetched, 12 rows" in capsys.readouterr().out
    asked = len(hub.asked)
    assert fetch.main(words) == 0
    assert len(hub.asked) == asked
    assert "train.jsonl: there, 12 rows" in capsys.readouterr().out
    hub.repos.clear()
    (tmp_path / "DATA" / "subj" / "train.jsonl").write_text('{"text": "other", "label": 0}\n')
    with pytest.raises(UserError, match="the hub has no repository"):  # another file: the hub is asked
        fetch.main(words)


def test_names_on_the_hub_become_folders_of_the_cache(hub, cb, tiny, tmp_path, monkeypatch):
    hub.repos[f"models/{TINY}"] = Repo(tiny)
    words = [f"model=hub:{TINY}", "data=hub", f"dataset={cb}", "experiment=deutch2024", "quiet=true"]
    config = compose_configuration(friendly(words))
    assert config["model"]["name"] == "tiny-gpt2"
    fetched = with_fetched(config)
    model, data = Path(fetched["model"]["path"]), Path(fetched["data"])
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert model.parent == tmp_path / "hf" / "models--someone--tiny-gpt2" / "snapshots"
    assert sorted(path.name for path in (data / "cb").iterdir()) == ["train.parquet", "valid.parquet"]
    assert data == tmp_path / "cache" / "data"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # now without network
    assert with_fetched(config) == fetched
    with pytest.raises(UserError, match=r"cannot be reached .* download config\.json.* and give model=THE_FOLDER"):
        with_fetched(config | {"model": {"path": "hub:someone/else"}})


def test_a_revision_of_a_model_can_be_named(hub, tiny, tmp_path):
    hub.repos[f"models/{TINY}"] = Repo(tiny)
    assert fetch_hub_model(f"{TINY}@{COMMIT}", tmp_path / "a", quiet=True).endswith(COMMIT)
    with pytest.raises(UserError, match=f"{TINY}: the hub has no revision v9 of it"):
        fetch_hub_model(f"{TINY}@v9", tmp_path / "b", quiet=True)


WHOLE = ["config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    ("there", "needed"),
    [
        ([*WHOLE, "model.safetensors", "pytorch_model.bin"], [*WHOLE, "model.safetensors"]),
        ([*WHOLE, "vocab.json", "merges.txt", "pytorch_model.bin", "tf_model.h5"], [*WHOLE, "pytorch_model.bin"]),
        (
            ["config.json", "vocab.json", "merges.txt", "model.safetensors"],
            ["config.json", "vocab.json", "merges.txt", "model.safetensors"],
        ),
        (
            [
                *WHOLE,
                "model.safetensors.index.json",
                "model-00002-of-00002.safetensors",
                "model-00001-of-00002.safetensors",
            ],
            [
                *WHOLE,
                "model.safetensors.index.json",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
            ],
        ),
    ],
)
def test_only_what_is_needed_of_a_repository_is_fetched(there, needed):
    assert needed_files("x", there) == needed


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (["model.gguf"], "no config.json in it"),
        (["config.json", "tokenizer.model"], "its tokenizer cannot be read here"),
        ([*WHOLE, "model.gguf"], "its weights cannot be read here"),
    ],
)
def test_a_repository_that_cannot_be_read_is_refused_before_it_is_fetched(there, message):
    with pytest.raises(UserError, match=message):
        needed_files("x", there)


def model_yaml(hub: LoopbackHub, folder: Path, *members) -> Path:
    """A model's YAML file whose archive, of the demo model or of `members`, is on the server."""
    archive = folder / "demo.tar.gz"
    if members:
        make_archive(archive, *members)
    else:
        with tarfile.open(archive, "w:gz") as tar:
            for name in ("model.pt", "dict.txt"):
                tar.add(DEMO_MODEL.parent / name, f"inner/{name}")
    hub.files["/lm/demo.tar.gz"] = archive.read_bytes()
    tokenizer = DEMO_MODEL.parent / "sentencepiece.bpe.model"
    hub.files["/bpe/pieces"] = tokenizer.read_bytes()
    beside = {tokenizer.name: {"url": f"{hub.url}/bpe/pieces", "sha256": sha256_of(tokenizer)}}
    said = {"path": str(folder / "models" / "mine" / "model.pt"), "bpe": "sentencepiece", "beside": beside}
    (folder / "mine.yaml").write_text(yaml.safe_dump(said | {"archive": f"{hub.url}/lm/demo.tar.gz"}))
    return folder / "mine.yaml"


def test_an_archive_comes_to_where_replicate_looks_for_it(hub, tmp_path, capsys):
    said = model_yaml(hub, tmp_path)
    hub.cuts["/lm/demo.tar.gz"] = [10_000]
    assert fetch.main(["model", str(said), "--quiet"]) == 0
    assert "ready" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "models" / "mine").iterdir())
    assert names == ["dict.txt", "model.pt", "sentencepiece.bpe.model"]
    assert hub.ranges("/lm/demo.tar.gz") == ["", "bytes=10000-"]


def test_a_hostile_archive_is_refused(hub, tmp_path):
    link = special(tarfile.SYMTYPE, "inner/dict.txt", "/etc/passwd")
    said = model_yaml(hub, tmp_path, ("inner/model.pt", b"weights"), link)
    with pytest.raises(UserError, match="a link or a device"):
        fetch.main(["model", str(said), "--quiet"])
    assert [path.name for path in (tmp_path / "models" / "mine").iterdir()] == ["demo.tar.gz"]


def test_python_takes_the_same_name_of_a_model(hub, tiny, monkeypatch):
    hub.repos[f"models/{TINY}"] = Repo(tiny)
    assert fi.load_model(f"hub:{TINY}", device="cpu").name == "tiny-gpt2"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # now without network, from the cache
    assert fi.load_model(f"hub:{TINY}", device="cpu", name="mine").name == "mine"
