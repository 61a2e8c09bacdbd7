"""The same demonstrations in many orders: what a run of them reports, and fine-tuning that cannot depend on it."""

import pytest
import torch

import fairseq_icl as fi
from fairseq_icl.replication.plan import expand
from fairseq_icl.replication.report.experiments import ORDER_COLUMNS, order_tables
from fairseq_icl.replication.report.figures import all_figures
from fairseq_icl.replication.report.run import load_run
from fairseq_icl.training.methods import get_method, name_of_method
from tests.replication.toy_run import configuration, run

WORDS = ("experiment=order", "permutation=[0,1,5]", "lr=1.0")


@pytest.fixture(scope="module")
def ordered(world, tmp_path_factory):
    return load_run(run(world, tmp_path_factory.mktemp("order") / "run", *WORDS))


def test_fine_tuning_sees_the_order_of_the_prompt(world, tmp_path):
    cells = expand(configuration(world, tmp_path, *WORDS))
    assert {cell.settings.finetuning_order for cell in cells} == {"icl"}
    assert sorted({cell.settings.permutation for cell in cells}) == [0, 1, 5]


def test_the_spread_of_fine_tuning_on_all_at_once_is_rounding(ordered):
    (table,) = order_tables(ordered)
    rows = {
        name: dict(zip(ORDER_COLUMNS, (entry.mean for entry in entries), strict=True)) for name, entries in table.rows
    }
    steps, at_once = rows["toy: gd, 3 orders"], rows["toy: gd_full_batch, 3 orders"]
    assert at_once["FT: probability, SD"] < 1e-5 < steps["FT: probability, SD"]
    assert at_once["FT: changed predictions"] == 0
    assert at_once["ICL: probability, SD"] == steps["ICL: probability, SD"] > 1e-5
    for row in rows.values():
        assert 0 <= row["token overlap"] <= 1


def test_accuracies_are_drawn_by_order(ordered):
    charts = {chart.name: chart for chart in all_figures(ordered)}
    [panel] = charts["order_model"].panels
    labels = {series.label for series in panel.series}
    assert labels == {"ICL", "FT gd", "FT gd_full_batch", "FT gd_full_batch lr_scale=32"}
    assert all(series.x == [0, 1, 5] for series in panel.series)


def test_one_order_makes_no_table(world, tmp_path):
    single = load_run(run(world, tmp_path / "run", "experiment=order", "method=gd"))
    assert order_tables(single) == []


def test_full_batch_is_one_step_of_the_averaged_gradient():
    model = fi.load_model("demo")
    prompts = fi.build_prompts(model, "demo_sentiment", k=3, limit=2)
    with fi.fine_tuned(model, prompts, "gd_full_batch", lr=0.5, record_queries=False) as tuned:
        assert tuned.gradients["step"].nunique() == 1
        rows = ",".join(str(sequence.row) for sequence in prompts.finetuning)
        assert set(tuned.gradients["demonstration"]) == {rows}
    name = "decoder.layers.3.self_attn.v_proj.weight"
    parameter = model.lm.get_parameter(name).requires_grad_()
    losses, count = [], 0
    for sequence in prompts.finetuning:
        tokens = torch.tensor([sequence.tokens], device=parameter.device)
        logits = model.lm.decoder(tokens[:, :-1])[0][0]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        count += tokens.size(1) - 1
    (gradient,) = torch.autograd.grad(sum(losses) / count, parameter)
    torch.testing.assert_close(tuned.weights[name], parameter.detach() - 0.5 * gradient, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_says_whether_it_was_one_step():
    config = {"criterion": {"_name": "cross_entropy"}, "optimization": {"update_freq": [1]}}
    assert name_of_method(config, False) == "gd"
    at_once = {"optimization": {"update_freq": [get_method("gd_full_batch").options["update_freq"]]}}
    assert name_of_method(config | at_once, False) == "gd_full_batch"
    assert name_of_method(config | {"optimization": {"update_freq": [4]}}, False) == "cross_entropy update_freq=4"
