"""experiment=rate_search: which rate is chosen, where it is written, and that a run takes it from there."""

import pytest
import torch
import yaml

import fairseq_icl as fi
from fairseq_icl.prompts.encoding import finetuning_sequence
from fairseq_icl.replication.report.rates import choose_rates, rate_tables, write_model_files
from fairseq_icl.replication.report.run import load_run
from fairseq_icl.results import read_results
from tests.commands import run, succeeded

SEARCH = ["experiment=rate_search", "model=demo", "dataset=demo_sentiment", "num_demonstrations=6", "limit=8"]
SEARCH += ["vary.lr=[0.0001,0.1,1000]", "method=gd,lcgd", "quiet=true"]


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    out = tmp_path_factory.mktemp("rates") / "run"
    succeeded(run("fairseq-icl", "replicate", *SEARCH, f"out={out}"))
    return out


def test_the_rate_with_the_most_likely_demonstrations_is_chosen(searched):
    found = load_run(searched)
    choices = {choice.method: choice for choice in choose_rates(found)}
    assert choices.keys() == {"gd", "lcgd"}
    for choice in choices.values():
        assert list(choice.likelihoods.index) == [0.0001, 0.1, 1000.0]
        assert set(choice.likelihoods["runs"]) == {2}
        assert choice.likelihoods["mean"].max() == choice.likelihoods.loc[choice.rate, "mean"]
        assert choice.rate == 0.1  # little is learned with the first, nothing is left after the last
    (table,) = rate_tables(found)
    assert [entries[-1].mean for _, entries in table.rows] == [0.1, 0.1]
    assert "edge of the grid" not in " ".join(table.notes)


def test_a_best_rate_at_the_edge_is_told(searched):
    found = load_run(searched)
    narrow = found.values[found.values["variant"] != "lr=1000"]
    (table,) = rate_tables(type(found)(**{**vars(found), "values": narrow}))
    assert "edge of the grid" in " ".join(table.notes)


def test_a_run_takes_the_rates_from_the_models_file(searched, tmp_path):
    path = searched / "report" / "demo.yaml"
    rates = yaml.safe_load(path.read_text())["learning_rates"]
    assert rates == {"demo_sentiment": dict.fromkeys(("gd", "lcgd", "linearized", "linearized_lcgd"), 0.1)}
    words = ["experiment=deutch2024", f"model={path}", "data=demo", "dataset=demo_sentiment", "paper=demo", "seed=1"]
    words += ["num_demonstrations=6", "limit=4", "method=gd", "init=pretrained", f"out={tmp_path / 'run'}"]
    assert "1 of 1 cells finished" in succeeded(run("fairseq-icl", "replicate", *words)).stdout
    (said,) = load_run(tmp_path / "run").configurations.values()
    assert said["cell"]["settings"]["lr"] == 0.1
    assert write_model_files(load_run(tmp_path / "run"), tmp_path) == []  # nothing was searched there


def test_two_methods_with_rates_of_their_own_are_compared(tmp_path):
    words = ["experiment=deutch2024", "model=demo", "dataset=demo_sentiment", "paper=demo", "seed=1", "limit=4"]
    words += ["++model.learning_rates.demo_sentiment={gd:0.1,lcgd:0.3}", "num_demonstrations=6", "init=pretrained"]
    done = run("fairseq-icl", "replicate", *words, "method=gd,lcgd,alpha", f"out={tmp_path / 'run'}", "quiet=true")
    assert "3 of 3 cells finished" in succeeded(done).stdout
    found = load_run(tmp_path / "run")
    own = {said["cell"]["method"]: said["cell"] for said in found.configurations.values()}
    assert (own["gd"]["settings"]["lr"], own["lcgd"]["settings"]["lr"]) == (0.1, 0.3)
    assert own["alpha"]["rates"] == {"gd": 0.1, "lcgd": 0.3}


def test_rows_that_are_asked_about_are_no_demonstrations_and_their_likelihood_is_the_training_loss():
    model = fi.load_model("demo")
    for loss_on in ("all", "label"):
        prompts = fi.build_prompts(model, "demo_sentiment", k=6, limit=10, queries="train", loss_on=loss_on)
        trained_on = {sequence.row for sequence in prompts.finetuning}
        assert len(prompts.queries) == 10
        assert not {query.row for query in prompts.queries} & trained_on
        seen = fi.observe(model, prompts)
        for query, found in zip(prompts.queries, seen.demonstration_logprob.tolist(), strict=True):
            sequence = finetuning_sequence(query, query.gold, loss_on, prompts.start)
            tokens = torch.tensor([sequence.tokens])
            with torch.no_grad():
                log_probs = model.lm.decoder(tokens[:, :-1])[0].log_softmax(-1)
            of_tokens = log_probs[0].gather(1, tokens[0, 1:, None])[:, 0]
            expected = of_tokens[torch.tensor(sequence.scored[1:])].mean()
            assert found == pytest.approx(expected.item(), abs=1e-5)
    assert fi.observe(model, prompts, in_context=True).demonstration_logprob is None
    assert fi.observe(model, fi.build_prompts(model, "demo_sentiment", k=6, limit=4)).demonstration_logprob is None


def test_a_cell_of_the_search_has_everything_else_as_well(searched):
    cell = next((searched / "cells").iterdir())
    table, _ = read_results(cell / "results.parquet")
    names = set(table["metric"])
    assert {"demonstration_log_likelihood_zsl", "auc_icl", "accuracy_calibrated_ft", "log_likelihood_ft"} <= names
