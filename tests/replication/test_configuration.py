"""Overrides as people type them, and what Hydra makes of them."""

import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.replication.configuration import FOLDER, compose_configuration, each_of, friendly


def test_bare_lists_and_checkpoint_paths_are_understood():
    typed = ["seed=1,2,3", "dataset=sst2,mr", "lr=0.1", "model=/some where/model.pt", "out=a,b"]
    assert friendly(typed) == [
        "seed=[1,2,3]",
        "datasets=[sst2,mr]",
        "lr=0.1",
        "model=checkpoint",
        "model.path='/some where/model.pt'",
        "out='a,b'",
    ]


def test_the_shipped_model_brings_its_data():
    assert friendly(["experiment=audit", "model=demo", "dataset=demo_topic"]) == [
        "data=demo",
        "paper=demo",
        "experiment=audit",
        "model=demo",
        "datasets=demo_topic",
    ]


def test_every_setting_takes_a_list_and_a_text_with_commas_stays_one():
    typed = ["k=1,2,4", "lr=0.1,0.2", "train_parameters=k_proj,v_proj", "++workers=2", "++seed=1,2", "cluster=slurm"]
    assert friendly(typed) == [
        "num_demonstrations=[1,2,4]",
        "lr=[0.1,0.2]",
        "train_parameters='k_proj,v_proj'",
        "++workers=2",
        "++seed=[1,2]",
        "cluster.kind=slurm",
    ]
    assert compose_configuration(friendly(["experiment=demo", *typed[:4]]))["workers"] == 2


def test_several_models_or_readings_are_several_runs():
    assert each_of(friendly(["seed=1,2", "model=125m,355m", "reading=authors,paper"])) == [
        ["seed=[1,2]", f"model={model}", f"reading={reading}"]
        for model in ("125m", "355m")
        for reading in ("authors", "paper")
    ]


@pytest.mark.parametrize("path", sorted((FOLDER / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_composes_under_its_own_name(path):
    assert compose_configuration([f"experiment={path.stem}", "data=."])["name"] == path.stem


@pytest.mark.parametrize("path", sorted((FOLDER / "model").glob("*[0-9][mb].yaml")), ids=lambda path: path.stem)
def test_every_size_composes_under_its_own_name(path):
    config = compose_configuration(["experiment=audit", f"model={path.stem}", "data=."])
    assert config["model"]["name"] == path.stem
    assert config["model"]["shape"]["width"] % config["model"]["shape"]["heads"] == 0


def test_the_command_line_wins_over_the_experiment():
    config = compose_configuration(["experiment=demo", "model=125m", "data=.", "reading=paper", "position=gold"])
    assert (config["model"]["name"], config["reading"], config["position"]) == ("125m", "paper", "gold")


def test_a_checkpoint_is_named_after_its_folder(tmp_path):
    path = tmp_path / "mine" / "model.pt"
    config = compose_configuration(friendly(["experiment=audit", f"model={path}", "data=."]))
    assert config["model"]["name"] == "mine"
    assert config["model"]["path"] == str(path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["experiment=nix", "data=."], "Could not find 'experiment/nix'"),
        (["experiment=audit"], "data is missing"),
        (["experiment=audit", "data=.", "foo=1"], "foo"),
        (["experiment=audit", "data=.", "seed=["], "no viable alternative"),
    ],
)
def test_mistakes_are_told_in_one_line(overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        compose_configuration(overrides)
    assert "\n" not in str(caught.value)


def test_what_the_command_says_of_a_model_counts_before_its_file(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text("name: small\npath: elsewhere/model\nbpe: null\nlearning_rates: {sst2: {gd: 0.5}, mr: 0.25}\n")

    def model(*words: str) -> dict[str, object]:
        return compose_configuration(friendly(["experiment=deutch2024", "data=DATA", *words]))["model"]

    rates = {"sst2": {"gd": 0.5}, "mr": 0.25}
    plain = model(f"model={file}")
    assert (plain["name"], plain["path"], plain["bpe"]) == ("small", "elsewhere/model", None)
    moved = model(f"model={file}", "model.path=here/model")
    assert (moved["name"], moved["path"], moved["learning_rates"]) == ("small", "here/model", rates)
    assert model("model.path=here/model", f"model={file}") == moved
    assert model(f"model={file}", "model.name=large")["name"] == "large"
    assert model(f"model={file}", "++model.learning_rates={sst2:1.0}")["learning_rates"] == {"sst2": 1.0}
    assert "file" not in plain
    with pytest.raises(UserError, match=r"model\.file=3: must be a text"):
        model(f"model={file}", "model.file=3")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model=smollm"], "model=smollm: unknown model; .*or give a path of a checkpoint"),
        (["model=125n"], "did you mean 125m"),
        (["experiment=deutch2023"], "experiment=deutch2023: unknown experiment; did you mean deutch2024"),
        (["model=demo", "data=DATA"], "which datasets of the folder. Give dataset=NAME"),
    ],
)
def test_suggestions_fit_what_was_asked_for(words, told):
    with pytest.raises(UserError, match=told) as caught:
        friendly(words)
    assert "wav2vec" not in str(caught.value)
