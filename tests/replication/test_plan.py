"""Configuration -> cells."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.models.files import find_files
from fairseq_icl.replication.cells import Keys
from fairseq_icl.replication.configuration import compose_configuration, friendly
from fairseq_icl.replication.plan import borrowed_rate, borrowed_rates, expand
from fairseq_icl.settings import READING, Settings


def plan(*overrides: str):
    return expand(compose_configuration(friendly(["data=.", "model=1.3b", *overrides])))


def test_deutch2024_has_the_papers_runs():
    cells = plan("experiment=deutch2024")
    runs = {(c.dataset, c.settings.seed, c.settings.permutation, c.settings.lr) for c in cells}
    assert {("sst2", 2, 0, 0.0005), ("mr", 6, 1, 0.003), ("cb", 5, 2, 0.08)} <= runs
    assert len(runs) == 18
    assert Counter((c.settings.init, c.method) for c in cells) == {
        ("pretrained", "gd"): 18,
        ("pretrained", "lcgd"): 18,
        ("pretrained", "alpha"): 18,
        ("trained-embeddings", "gd"): 15,
        ("layer-norms", "gd"): 15,
    }
    assert not [c for c in cells if c.settings.init != "pretrained" and c.dataset == "agnews"]
    assert all(c.settings.num_demonstrations == 32 for c in cells)


def test_cells_of_one_model_follow_each_other():
    cells = plan("experiment=deutch2024", "dataset=[sst2,sst5,cb]", "seed=3,4", "permutation=0")
    models = [cell.model_key() for cell in cells]
    changes = sum(one != other for one, other in pairwise(models))
    assert changes + 1 == len(set(models)) == 1 + 2 * 2  # the trained one; two random ones a seed
    assert [c.dataset for c in cells if c.settings.init == "layer-norms" and c.settings.seed == 4] == [
        "sst2",
        "sst5",
        "cb",
    ]


def test_dai2023_has_the_papers_settings_for_each_size():
    small = {c.dataset: c for c in plan("experiment=dai2023")}
    large = {c.dataset: c for c in plan("experiment=dai2023", "model=2.7b")}
    assert [small["sst2"].settings.seed, large["sst2"].settings.seed, large["mr"].settings.seed] == [2, 7, 1]
    assert [small["cb"].settings.lr, large["cb"].settings.lr] == [0.08, 0.01]
    assert [small[name].settings.num_demonstrations for name in ("cb", "agnews", "mr")] == [19, 22, 32]
    assert {c.settings.permutation for c in small.values()} == {0}


def test_audit_switches_every_difference_alone_and_all_together():
    cells = plan("experiment=audit", "dataset=[sst2]", "seed=2", "method=gd")
    trained = {c.variant: c.settings for c in cells if c.settings.init == "pretrained"}
    authors = trained[""]
    single = {name: len(known.choices) - 1 for name, known in READING.items() if name != "final_norm"}
    assert len(trained) == sum(single.values()) + 2
    paper = Settings.of("paper")
    assert all(getattr(trained["reading=paper"], name) == getattr(paper, name) for name in READING)
    for variant, settings in trained.items():
        if variant not in ("", "reading=paper"):
            name, value = variant.split("=")
            assert settings == replace(authors, **{name: value})
    untrained = {c.variant for c in cells if c.settings.init == "trained-embeddings"}
    assert untrained == {"", "final_norm=kept", "reading=paper"}


def test_label_switching_and_clipping_vary_what_they_say():
    switching = {c.variant for c in plan("experiment=label_switching", "dataset=[sst2]")}
    assert "switch_labels=both switch_fraction=0.5" in switching
    assert len(switching) == 13
    clipping = {(c.method, c.variant): c.settings for c in plan("experiment=clipping")}
    assert clipping["lcgd", "clip_norm=12"].clip_norm == 12
    assert clipping["lcgd", "layer_clip=gd"].layer_clip_value == "gd"
    assert ("gd", "layer_clip=gd") not in clipping
    sweep = [c.settings.clip_norm for c in plan("experiment=clipping", "dataset=[subj]", "method=lcgd")]
    assert sweep == [0, 0, 0.2, 0.5, 1, 2, 5, 7, 9, 12, 15]
    assert {c.variant for c in plan("experiment=clipping") if c.dataset == "mr"} == {"", "clip_norm=12"}


def test_no_training_is_what_the_logs_name_or_what_the_text_says():
    authors = {cell.settings.init for cell in plan("experiment=deutch2024")}
    paper = {cell.settings.init for cell in plan("experiment=deutch2024", "reading=paper")}
    assert authors == {"pretrained", "trained-embeddings", "layer-norms"}
    assert paper == {"pretrained", "trained-embeddings", "untrained"}
    assert len(plan("experiment=deutch2024")) == len(plan("experiment=deutch2024", "reading=paper")) == 84


def test_variants_may_bring_their_own_k():
    cells = plan("experiment=shots", "dataset=[sst2]", "seed=9")
    assert [c.settings.num_demonstrations for c in cells] == [1, 2, 4, 8, 16, 32]
    assert {c.settings.lr for c in cells} == {None}


def test_overrides_choose_parts_and_keep_the_papers_permutations():
    cells = plan("experiment=deutch2024", "dataset=[mr]", "seed=[7,5,11]", "method=lcgd", "lr=0.5", "lr_scale=0.1")
    assert [(c.settings.seed, c.settings.permutation) for c in cells] == [(7, 2), (5, 0), (11, 2)]
    assert {c.settings.lr for c in cells} == {0.05}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset=[sst3]"], "sst3.*did you mean"),
        (["method=lgcd"], "did you mean lcgd"),
        (["init=random"], "choose from pretrained"),
        (["dataset=[trec]"], "no number of demonstrations"),
        (["dataset=[trec]", "num_demonstrations=4"], "give seed="),
        (["dataset=[trec]", "num_demonstrations=4", "seed=1"], "give lr="),
        (["dataset=[]"], "no dataset"),
        (["position=last"], "option0, query, gold"),
        (["init=layer-norms", "method=alpha"], "plan is empty"),
        (["vary={seed:[1]}"], "seed cannot be varied"),
        (["skip=[{seed:1}]"], "unknown key seed"),
        (["model.name='=HYPERLINK(1)'"], "none of . = . - @ in front"),
    ],
)
def test_mistakes_are_explained(overrides, message):
    with pytest.raises(UserError, match=message):
        plan("experiment=deutch2024", *overrides)


def test_keys_follow_what_determines_a_cell_and_nothing_else(world, tmp_path):
    from tests.replication.toy_run import configuration

    cell = expand(configuration(world, tmp_path, "experiment=deutch2024", "method=gd", "init=pretrained"))[0]
    files = find_files(world.model, bpe=None, name="toy")
    keys = Keys(files, world.data)
    key = keys.of(cell)
    assert key == keys.of(replace(cell, variant="other name"))
    assert key != Keys(replace(files, checkpoint=world.dictionary), world.data).of(cell)
    assert key != keys.of(cell.changed(seed=9))
    assert key != keys.of(cell.changed(method="lcgd"))


def test_two_datasets_of_one_name_are_refused(tmp_path):
    text = (
        "name: same\nversion: 1\nsource: s\nfields: [text]\ntemplate: '{text} A:'\nlabel_words: [a, b]\n"
        "papers: {deutch2024: {k: 4, seeds: [1], learning_rate: 0.1}}\n"
    )
    (tmp_path / "one.yaml").write_text(text)
    (tmp_path / "two.yaml").write_text(text.replace("A:", "B:"))
    with pytest.raises(UserError, match="also named same"):
        plan("experiment=deutch2024", f"dataset=[{tmp_path / 'one.yaml'},{tmp_path / 'two.yaml'}]")


def test_observations_are_shared_by_what_cannot_change_them():
    gd, lcgd, alpha, *_ = plan("experiment=deutch2024", "dataset=[sst2]")
    assert gd.observed("zsl") == lcgd.observed("zsl") == alpha.observed("zsl")
    assert gd.observed("icl") == lcgd.observed("icl")
    assert gd.observed("ft") != lcgd.observed("ft")
    seeds = [c for c in plan("experiment=deutch2024", "dataset=[sst2]", "method=gd") if c.settings.init == "pretrained"]
    assert len({c.observed("zsl") for c in seeds}) == 1
    assert len({c.observed("icl") for c in seeds}) == 3
    untrained = [
        c for c in plan("experiment=deutch2024", "dataset=[sst2]", "method=gd") if c.settings.init == "layer-norms"
    ]
    assert len({c.observed("zsl") for c in untrained}) == 3


def test_audit_shares_all_that_a_difference_leaves_alone():
    cells = plan("experiment=audit", "dataset=[sst2]", "seed=2", "method=gd", "init=pretrained")
    icl = {}
    for cell in cells:
        icl.setdefault(cell.observed("icl"), []).append(cell.variant)
    assert sorted(map(len, icl.values()), reverse=True)[0] == len(cells) - 4  # position twice, permutation_zero, paper
    ft = {}
    for cell in cells:
        ft.setdefault(cell.observed("ft"), []).append(cell.variant)
    metrics_alone = {"random_update=gaussian", "attention_similarity=probabilities"}
    layer_causal_alone = {f"layer_causal_point={point}" for point in ("attention", "attention_output")}
    assert max(map(set, ft.values()), key=len) == {"", *metrics_alone, *layer_causal_alone, "layer_loss=mean"}
    assert len(ft) == len(cells) - 5


def test_a_layer_causal_audit_trains_anew_for_every_difference_of_training():
    cells = plan("experiment=audit", "dataset=[sst2]", "seed=2", "method=lcgd", "init=pretrained")
    assert len({cell.observed("ft") for cell in cells}) == len(cells) - 2


def test_switched_labels_of_fine_tuning_leave_icl_alone():
    cells = plan("experiment=label_switching", "dataset=[sst2]", "seed=2", "method=gd")
    by_variant = {c.variant: c.observed("icl") for c in cells}
    assert by_variant["switch_labels=finetuning switch_fraction=1"] == by_variant[""]
    assert by_variant["switch_labels=both switch_fraction=1"] != by_variant[""]


def test_a_model_brings_its_own_learning_rates():
    rates = "++model.learning_rates={sst2:{gd:0.5,lcgd:0.25},mr:0.125}"
    chosen = ("experiment=deutch2024", "init=pretrained", "seed=3")
    cells = {(c.dataset, c.method): c for c in plan(*chosen, "dataset=[sst2,mr]", rates)}
    assert cells["sst2", "gd"].settings.lr == 0.5
    assert cells["sst2", "lcgd"].settings.lr == 0.25
    assert {cells["mr", method].settings.lr for method in ("gd", "lcgd", "alpha")} == {0.125}
    assert {c.settings.lr for c in plan(*chosen, "dataset=sst2", rates, "lr=0.01")} == {0.01}


def test_a_cell_that_compares_two_methods_takes_the_models_that_their_own_cells_have():
    rates = "++model.learning_rates={sst2:{gd:0.5,lcgd:0.25}}"
    cells = {c.method: c for c in plan("experiment=deutch2024", "init=pretrained", "seed=3", "dataset=sst2", rates)}
    alpha = cells["alpha"]
    assert alpha.settings.lr is None
    assert alpha.configuration()["rates"] == {"gd": 0.5, "lcgd": 0.25}
    for method in ("gd", "lcgd"):
        assert alpha.changed(method=method) == cells[method]


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ("{mr:0.1}", "no rate for sst2"),
        ("{sst2:{lcgd:0.1}}", "no learning rate for method gd in model.learning_rates"),
        ("{sst2:-1}", "lr=-1: must be at least 0"),
        ("{sst2:{gd:fast}}", "lr=fast: must be a number"),
        ("3", "model.learning_rates=3: must be a mapping"),
    ],
)
def test_rates_that_do_not_fit_are_told(rates, message):
    with pytest.raises(UserError, match=message):
        plan("experiment=deutch2024", "dataset=sst2", "method=gd", f"++model.learning_rates={rates}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: x", "it needs at least the line path"),
        ("path: model.pt\nrates: 3", "unknown key rates"),
        ("path: model.pt\npath: other.pt", "path"),
    ],
)
def test_a_models_yaml_file_is_checked(tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        plan("experiment=deutch2024", f"model={path}")


def test_a_learning_rate_made_for_another_model_is_said():
    assert borrowed_rates(plan("experiment=deutch2024", "dataset=sst2")) == []
    told = borrowed_rates(plan("experiment=deutch2024", "model=125m", "dataset=sst2,mr", "method=gd,alpha,match_icl"))
    assert told == [borrowed_rate("sst2", "125m", "1.3b"), borrowed_rate("mr", "125m", "1.3b")]
    assert "the paper's for 1.3b, not one for 125m; experiment=rate_search finds it" in told[0]
    assert borrowed_rates(plan("experiment=dai2023", "model=2.7b", "dataset=sst2")) == []
    assert borrowed_rates(plan("experiment=deutch2024", "model=125m", "dataset=sst2", "lr=0.1")) == []
    assert borrowed_rates(plan("experiment=deutch2024", "model=125m", "dataset=sst2", "method=match_icl")) == []
