"""experiment=rate_search: which rate is chosen, where it is written, and that a run takes it from there."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from scipy.stats import ttest_1samp

import fairseq_icl as fi
from examples.findings import __main__ as findings
from examples.findings.cells import cells_file, cells_of, run_of, values_of, with_folders
from examples.findings.page import authors
from examples.findings.prose import filled
from examples.findings.verdicts import at_rates
from examples.findings.verdicts import verdicts as verdicts_at
from fairseq_icl.prompts.encoding import finetuning_sequence
from fairseq_icl.replication.report.claims import verdicts
from fairseq_icl.replication.report.displacement import (
    COSINES,
    LINE,
    RATIO,
    at_equal_length,
    displacement_figures,
    displacement_tables,
    sweeps,
)
from fairseq_icl.replication.report.published import FOLDER
from fairseq_icl.replication.report.rates import (
    DRAWS,
    OUTCOMES,
    Choice,
    choose_rates,
    half_decade,
    rate_figures,
    rate_tables,
    write_model_files,
)
from fairseq_icl.replication.report.rates import _tried as tried_rate
from fairseq_icl.replication.report.run import load_run
from tests.commands import run, succeeded

SEARCH = ["experiment=rate_search", "model=demo", "dataset=demo_sentiment", "num_demonstrations=6", "limit=8"]
SEARCH += ["vary.lr=[0.01,0.03]", "method=gd,lcgd", "seed=101,102", "quiet=true"]


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """From a grid below the best rates."""
    out = tmp_path_factory.mktemp("rates") / "run"
    succeeded(run("fairseq-icl", "replicate", *SEARCH, f"out={out}"))
    return out


def test_the_grid_grows_until_the_best_rate_is_inside_it_and_was_tested_against_rounding(searched):
    choices = {choice.method: choice for choice in choose_rates(load_run(searched))}
    assert choices.keys() == {"gd", "lcgd"}
    for choice in choices.values():
        rates = list(choice.tried.index)
        assert rates[:4] == [0.01, 0.03, 0.1, 0.3]
        assert set(choice.tried["runs"]) == {2}
        assert choice.problem == ""
        assert rates[0] < choice.rate < rates[-1]
        assert choice.is_admitted(choice.rate)
        refused = [rate for rate in rates if choice.is_admitted(rate) is False]
        left = choice.tried[choice.tried.index < min([*refused, 1000])]
        assert choice.rate == left["log_likelihood_ft"].astype(float).idxmax()
        assert choice.by_text == choice.tried["demonstration_log_likelihood_ft"].astype(float).idxmax()


def test_the_report_shows_both_criteria_and_the_spread_by_rounding(searched):
    found = load_run(searched)
    (table,) = rate_tables(found)
    assert [label for label, _ in table.rows][:3] == [
        f"demo_sentiment: gd, {x}" for x in ("labels", "text", "rounding")
    ]
    choice = choose_rates(found)[0]
    rows = {label: dict(zip(table.columns, entries, strict=True)) for label, entries in table.rows}
    assert rows["demo_sentiment: gd, labels"]["best rate"].mean == choice.rate
    assert rows["demo_sentiment: gd, text"]["best rate"].mean == choice.by_text
    assert rows["demo_sentiment: gd, rounding"][f"{choice.rate:g}"].mean >= 0
    assert rows["demo_sentiment: gd, rounding"]["0.01"].mean is None  # only the best are tested
    charts = list(rate_figures(found, "demo"))
    assert [chart.name for chart in charts] == [
        "rates_log_likelihood_ft_demo",
        "rates_demonstration_log_likelihood_ft_demo",
        "rates_auc_ft_demo",
    ]
    labels, best = charts[0].panels[0].series[:2]
    assert (best.x, best.y) == ([choice.rate], [max(labels.y)])
    ranking, chosen = charts[2].panels[0].series[:2]
    assert chosen.x == [choice.rate], "the labels choose, not the AUC"
    auc = found.values[(found.values["metric"] == "auc_ft") & (found.values["variant"] == f"lr={choice.rate:g}")]
    of_gd = auc[(auc["method"] == "gd") & auc["layer"].isna()].drop_duplicates("key")
    assert chosen.y == [pytest.approx(of_gd["value"].mean())]
    assert chosen.y[0] in ranking.y


def test_a_search_that_is_done_has_nothing_left_to_try_and_changes_nothing(searched):
    before = sorted(path.name for path in (searched / "cells").iterdir())
    succeeded(run("fairseq-icl", "replicate", *SEARCH, f"out={searched}"))
    assert sorted(path.name for path in (searched / "cells").iterdir()) == before


def test_methods_are_compared_where_they_move_the_model_as_far_as_icl_does(searched):
    found = load_run(searched)
    cells = sweeps(found, "demo")
    assert set(cells["method"]) == {"gd", "lcgd"}
    assert not cells["variant"].str.contains("perturbation").any()
    (table,) = displacement_tables(found)
    (chart,) = displacement_figures(found, "demo")
    equal = at_equal_length(cells)
    for choice, (label, entries) in zip(choose_rates(found), table.rows, strict=True):
        assert label == f"demo_sentiment: {choice.method}"
        by_name = dict(zip(table.columns, entries, strict=True))
        own = cells[(cells["method"] == choice.method) & (cells["size"] == choice.rate)]
        assert by_name["SimAOU at own rate"].mean == pytest.approx(own["sim_aou"].mean())
        assert by_name["length ratio at own rate"].mean == pytest.approx(own["length_ratio_sim_aou"].mean())
        there = equal[equal["method"] == choice.method]
        assert by_name["SimAOU at ratio 1"].runs == len(there)
        series = next(series for series in chart.panels[0].series if series.label == choice.method)
        assert list(series.x) == sorted(series.x)  # a higher rate goes further
        assert len(series.x) == len(choice.tried)
    judged = {verdict.claim.name: verdict for verdict in verdicts(found, "demo")}
    for metric in ("sim_aou", "sim_aou_projected"):
        both = equal.pivot_table(index="seed", columns="method", values=metric).dropna()
        assert len(both) == 2
        assert judged[f"lcgd_{metric}_equal_length"].average.value == pytest.approx((both["lcgd"] - both["gd"]).mean())
        words = ["queries=train", "method=lcgd", "lr=all", f"{metric}_at_equal_length", "minus", "method=gd"]
        asked = values_of(cells_of(found), words).to_numpy()  # from the file of cells, which has six places
        assert asked == pytest.approx((both["lcgd"] - both["gd"]).to_numpy(), abs=1e-4)


def test_the_value_at_equal_length_lies_between_the_rates_on_either_side():
    sizes, ratios = (0.01, 0.1, 1.0), (0.1, 0.5, 2.0)
    rows = [
        ("d", "pretrained", "gd", "lr", 1, 0, True, *point, 0.3, 0.2, 0.1)
        for point in zip(sizes, ratios, (0.3, 0.5, 0.7), strict=True)
    ]
    never = [("d", "pretrained", "gd", "lr", 2, 0, True, size, 0.5, 0.3, 0.3, 0.2, 0.1) for size in sizes]
    names = [*LINE, "seed", "permutation", "usable", "size", RATIO, *COSINES]
    (found,) = at_equal_length(pd.DataFrame(rows + never, columns=names)).to_dict("records")
    assert (found["seed"], found["sim_aou"]) == (1, pytest.approx(0.6))  # 1 is half way from 0.5 to 2
    assert found["size"] == pytest.approx(10**-0.5)
    decided_by_rounding = pd.DataFrame(rows, columns=names).assign(usable=[True, True, False])
    assert at_equal_length(decided_by_rounding).empty


def test_a_rate_that_rounding_decides_is_no_neighbour_of_equal_length_and_is_drawn_apart(searched):
    cells = cells_of(load_run(searched)).assign(model="demo")
    tested = cells[(cells["method"] == "gd") & (cells["perturbation"] != 0)]["lr"].iloc[0]
    moved = (cells["method"] == "gd") & (cells["lr"] == tested) & (cells["metric"] == "auc_ft")
    assert set(sweeps(run_of(cells), "demo")["usable"]) == {True}
    decided = cells.assign(
        value=cells["value"].where(~moved, cells["perturbation"] % 2)
    )  # 0, 1, 0: the draw says it all
    found = sweeps(run_of(decided), "demo").set_index("method")
    assert dict(zip(found.loc["gd", "size"], found.loc["gd", "usable"], strict=True)) == {
        size: size < float(tested) for size in found.loc["gd", "size"]
    }
    assert set(found.loc["lcgd", "usable"]) == {True}
    (chart,) = displacement_figures(run_of(decided), "demo")
    points = {series.label: len(series.x) for series in chart.panels[0].series}
    assert points.keys() == {"gd", "gd, decided by rounding", "lcgd"}
    assert points["gd"] == len({size for size in found.loc["gd", "size"] if size < float(tested)})


def curve(likelihoods, rounding=(), seed_sd=0.1, runs=2):
    """A choice among the rates 1, 3, 10 ... with these likelihoods; `rounding` by rate."""
    rows = {
        half_decade(1, place): {
            "runs": runs,
            "keys": (),
            "log_likelihood_ft": value,
            "demonstration_log_likelihood_ft": -value,
            "log_likelihood_ft by rounding": dict(rounding).get(half_decade(1, place), float("nan")),
            "log_likelihood_ft by seed": seed_sd,
            "auc_ft by rounding": float("nan"),
            "auc_ft by seed": float("nan"),
        }
        for place, value in enumerate(likelihoods)
    }
    return Choice("m", "d", "gd", pd.DataFrame(rows).T)


def test_the_rates_are_half_decades():
    assert [half_decade(0.03, steps) for steps in (-2, -1, 0, 1, 2)] == [0.003, 0.01, 0.03, 0.1, 0.3]
    assert half_decade(0.2, -1) < 0.2 < half_decade(0.2, 1)


@pytest.mark.parametrize(
    ("likelihoods", "rounding", "rate", "beyond", "problem"),
    [
        ([-3, -1, -2], {3: 0.01}, 3, None, ""),
        ([-3, -1, -2], {}, 3, None, "not tested"),
        ([-3, -2, -1], {10: 0.01}, 10, 30, "at the edge"),
        ([-1, -2, -3], {}, 1, 0.3, "at the edge"),
        ([-4, -2, -1, -3], {10: 0.2, 3: 0.01}, 3, None, ""),  # the best one is decided by rounding
        ([-4, -2, -3, -1], {10: 0.2, 3: 0.01}, 3, None, ""),  # nor is any above one that is refused
        ([-4, -2, -1, -3], {3: 0.2, 10: 0.01}, 10, None, ""),  # but where it is tested itself
        ([-2, -1, float("nan")], {3: 0.01}, 3, None, ""),  # the next one leaves no finite numbers
        ([-2, -1, -3], {1: 0.2, 3: 0.2, 10: 0.2}, None, 0.3, "every rate"),
    ],
)
def test_what_is_chosen_and_what_is_tried_next(likelihoods, rounding, rate, beyond, problem):
    choice = curve(likelihoods, rounding)
    assert (choice.rate, choice.beyond) == (rate, beyond)
    assert problem in choice.problem
    assert bool(problem) == bool(choice.problem)


def test_a_run_takes_the_rates_from_the_models_file(searched, tmp_path):
    path = searched / "report" / "demo.yaml"
    rates = yaml.safe_load(path.read_text())["learning_rates"]
    choices = {choice.method: choice.rate for choice in choose_rates(load_run(searched))}
    assert rates == {"demo_sentiment": choices}
    words = ["experiment=deutch2024", f"model={path}", "data=demo", "dataset=demo_sentiment", "paper=demo", "seed=1"]
    words += ["num_demonstrations=6", "limit=4", "method=gd", "init=pretrained", f"out={tmp_path / 'run'}"]
    assert "1 of 1 cells finished" in succeeded(run("fairseq-icl", "replicate", *words)).stdout
    (said,) = load_run(tmp_path / "run").configurations.values()
    assert said["cell"]["settings"]["lr"] == choices["gd"]
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
    cells = cells_of(found)
    assert dict(zip(cells["method"], cells["lr"], strict=True)) == {
        "gd": "0.1",
        "lcgd": "0.3",
        "alpha": "gd=0.1,lcgd=0.3",
    }
    rates = {("demo_sentiment", "gd"): 0.1, ("demo_sentiment", "lcgd"): 0.3}
    assert at_rates(cells, rates).all()
    assert set(cells[at_rates(cells, rates | {("demo_sentiment", "lcgd"): 0.1})]["method"]) == {"gd"}
    assert not at_rates(cells, {}).any(), "without a searched rate nothing is evidence"
    names = {verdict.claim.name for verdict in verdicts_at(cells, rates)}
    assert "alpha_small" in names
    assert "alpha_small" not in {verdict.claim.name for verdict in verdicts_at(cells, {("demo_sentiment", "gd"): 0.1})}


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
            tokens = torch.tensor([sequence.tokens], device=next(model.lm.parameters()).device)
            with torch.no_grad():
                log_probs = model.lm.decoder(tokens[:, :-1])[0].log_softmax(-1)
            of_tokens = log_probs[0].gather(1, tokens[0, 1:, None])[:, 0]
            expected = of_tokens[torch.tensor(sequence.scored[1:])].mean()
            assert found == pytest.approx(expected.item(), abs=1e-5)
    assert fi.observe(model, prompts, in_context=True).demonstration_logprob is None
    assert fi.observe(model, fi.build_prompts(model, "demo_sentiment", k=6, limit=4)).demonstration_logprob is None


def test_a_cell_of_the_search_has_everything_else_as_well(searched):
    of_text = {"demonstration_log_likelihood_zsl", "demonstration_log_likelihood_ft"}
    found = load_run(searched)
    for key, said in found.settings.items():
        names = set(found.values.loc[found.values["key"] == key, "metric"])
        assert {"auc_icl", "accuracy_calibrated_ft", "log_likelihood_ft"} <= names
        assert names & of_text == (set() if said.get("perturbation") else of_text), "of moved weights nobody asks it"


def test_the_page_of_findings_is_made_of_the_file_of_its_cells_alone(searched, tmp_path, monkeypatch):
    page, prose = tmp_path / "findings.md", tmp_path / "prose.md"
    prose.write_text("# Prose\n\nWithout numbers.\n")
    monkeypatch.setattr("sys.argv", ["findings", str(searched), "--page", str(page), "--prose", str(prose)])
    findings.main()
    first = page.read_text()
    assert first.startswith("# Prose\n\nWithout numbers.\n\n## Tables\n\n### Cells\n")
    cells = pd.read_csv(tmp_path / "findings_cells.csv", keep_default_na=False, dtype=str)
    assert cells["key"].nunique() == load_run(searched).values["key"].nunique()
    chosen = {choice.method: choice.rate for choice in choose_rates(load_run(searched))}
    for method, rate in chosen.items():
        (row,) = [line for line in first.splitlines() if line.startswith(f"| demo_sentiment: {method}, labels")]
        assert row.endswith(f"| {rate:.4f} |")
    monkeypatch.setattr("sys.argv", ["findings", "--page", str(page), "--prose", str(prose)])
    findings.main()
    assert page.read_text() == first, "without folders it is the same page"
    others = [cells.assign(model="other"), cells.assign(model="other", queries="validation", key=cells["key"] + "v")]
    more = others[1][(others[1]["method"] == "gd") & (others[1]["seed"] == others[1]["seed"].min())]
    others.append(more.assign(seed=999, key=more["key"] + "m"))
    page.with_name("findings_cells.csv").write_text(pd.concat(others).to_csv(index=False))
    monkeypatch.setattr("sys.argv", ["findings", str(searched), "--page", str(page), "--prose", str(prose)])
    findings.main()
    lines = page.read_text().splitlines()
    parts = ["### Cells", "### The papers' claims, model by model", "### What the authors' seeds could decide"]
    assert [line for line in lines if line.startswith("### ")] == [
        *parts,
        "### demo (num_demonstrations=6)",
        "### other",
    ]
    title = lines.index("#### other, demo_sentiment (seeds differ)")
    counts = re.findall(r"(gd|lcgd), lr [^ ]+ \((\d seeds)\)", lines[title + 2])
    assert set(counts) == {("gd", "3 seeds"), ("lcgd", "2 seeds")}
    heads = next(
        index for index, line in enumerate(lines) if line.startswith("|  | demo (num_demonstrations=6) | other | ")
    )
    row = next(line for line in lines[heads:] if "(`lcgd_sim_aou_norm`)" in line)
    (told,) = [line for line in lines if line.startswith("Decided, of the claims that could be asked: ")]
    shown = [line.split("|")[3].strip() for line in lines[heads + 2 : lines.index(told) - 1]]
    decided = [words for words in shown if words.startswith(("holds", "does not hold"))]
    left = [words for words in decided if "with all others" not in words]
    asked = [words for words in shown if words != "–"]
    assert f"other {len(decided)} of {len(asked)}, {len(left)} with all others" in told
    assert re.fullmatch(r"\| .* \| – \| \w[^|]*: [+-]\d[^|]* on demo_sentiment \| \w[^|]*: [^|]* \|", row)


def test_the_rows_behind_a_number_of_the_page_are_told(searched, tmp_path, monkeypatch, capsys):
    page = tmp_path / "findings.md"

    def ask(*words):
        monkeypatch.setattr("sys.argv", ["findings", str(searched), "--page", str(page), "--ask", *words])
        findings.main()
        return capsys.readouterr().out

    run = load_run(searched).values
    plain = run[run["layer"].isna() & (run["metric"] == "sim_aou") & (run["variant"] == "lr=0.03")]
    by_seed = plain.pivot_table(index="seed", columns="method", values="value")
    told = ask("method=lcgd", "lr=0.03", "sim_aou", "minus", "method=gd")
    assert f"mean {(by_seed['lcgd'] - by_seed['gd']).mean():.4f}" in told
    interval = ttest_1samp(by_seed["gd"], 0).confidence_interval(0.95)
    assert f"95 % [{interval.low:.4f}, {interval.high:.4f}] over 2 seeds" in ask("method=gd", "lr=0.03", "sim_aou")
    for words, reason in (
        (["method=gd", "sim_aou"], "cells of one kind only are averaged; say lr={0.01|0.03"),
        (["method=sgd", "sim_aou"], "no cell with method=sgd is left; there are gd, lcgd"),
        (["methods=gd", "sim_aou"], "the file has no column methods"),
    ):
        with pytest.raises(SystemExit):
            ask(*words)
        assert reason in capsys.readouterr().err


def test_numbers_in_the_prose_are_asked_of_the_file(searched, tmp_path):
    prose, cells = tmp_path / "prose.md", cells_of(load_run(searched))
    prose.write_text(
        "<!--\nlcgd = method=lcgd lr=0.03\n-->\n\n"
        "{{lcgd sim_aou}}; {{mean: lcgd sim_aou}}; {{range: lcgd sim_aou}}; {{lcgd\nsim_aou minus method=gd}}\n"
    )
    chosen = cells[(cells["lr"] == "0.03") & (cells["perturbation"] == 0) & (cells["metric"] == "sim_aou")]
    by_seed = chosen.pivot(index="seed", columns="method", values="value")
    lcgd, less = by_seed["lcgd"], by_seed["lcgd"] - by_seed["gd"]
    interval = ttest_1samp(less, 0).confidence_interval(0.95)
    expected = [
        f"{lcgd.mean():.3f} ± {lcgd.std():.3f}",
        f"{lcgd.mean():.3f}",
        f"{lcgd.min():.3f} to {lcgd.max():.3f}",
        f"{less.mean():+.3f} [{interval.low:.3f}, {interval.high:.3f}]",
    ]
    text, numbers = filled(prose, cells)
    number, words, told = numbers[-1]
    is_told = ttest_1samp(less, 0).pvalue <= 0.05
    assert told == ("all together" if is_told else "open"), "one difference is all there are"
    *others, last = text.strip().split("; ")
    assert last == (f"**{number}**" if is_told else number)
    assert words == "`method=lcgd lr=0.03 sim_aou minus method=gd`"
    plainly = [re.sub(r"(?<!\d)\.(?=\d)", "0.", part) for part in [*others, number]]
    assert plainly == expected, "without the zero before the point"
    assert {told for _, _, told in numbers[:-1]} == {""}, "only differences are told from zero"
    prose.write_text(
        "<!--\na = lr=0.03\na.x = method=lcgd lr=0.03\nb = lr=0.01\nb.x = method=lcgd lr=0.01\n"
        "each = a b\neach.other = b a\n-->\n"
        "| lcgd | {{each mean: .x sim_aou}} |\n| gd | {{each.other mean: . sim_aou method=gd}} |\n"
    )
    chosen = cells[(cells["perturbation"] == 0) & (cells["metric"] == "sim_aou")]
    means = chosen[chosen["lr"].isin(["0.01", "0.03"])].pivot_table("value", "method", "lr")
    rows = [[float(cell) for cell in row.split("|")[2:4]] for row in filled(prose, cells)[0].splitlines()]
    lcgd, gd = means.loc["lcgd"], means.loc["gd"]
    assert rows == [pytest.approx(row, abs=6e-4) for row in ([lcgd["0.03"], lcgd["0.01"]], [gd["0.01"], gd["0.03"]])]
    table = "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
    prose.write_text(f"A\nline.\n\n{table}")
    assert filled(prose, cells)[0] == f"A line.\n\n{table}", "lines of tables are not joined"
    prose.write_text("{{each.one mean: . sim_aou}}")
    with pytest.raises(ValueError, match=r"prose\.md:1: .*: the head of the prose has no line each\.one = PLACE PLACE"):
        filled(prose, cells)
    for mistake, reason in (("{{lcgd sim}}", "no cell with metric=sim"), ("{{most: lcgd sim_aou}}", "no kind most")):
        prose.write_text(f"<!--\nlcgd = method=lcgd lr=0.03\n-->\n\nText.\n{mistake}\n")
        with pytest.raises(ValueError, match=rf"prose\.md:6: .*{reason}"):
            filled(prose, cells)


def test_differences_of_the_prose_are_counted_and_taken_together(searched, tmp_path):
    cells = cells_of(load_run(searched))
    known = cells[(cells["lr"] == "0.03") & (cells["perturbation"] == 0) & (cells["method"] == "gd")]
    known = known[known["metric"] == "sim_aou"]
    draws = {"clear": (0.3, 1e-3), "less": (0.3, 0.1), "least": (0.3, 0.12), "open": (0.0, 0.1)}
    rows, by_seed = [known.assign(metric="rpa", value=0.0)], np.array([-1.0, 0.0, 1.0])
    for metric, (mean, sd) in zip(("sim_aou", "sim_aou_norm", "sim_am_delta", "rec2ftp"), draws.values(), strict=True):
        rows.append(known.assign(metric=metric, value=0.0))
        for seed, value in zip((1, 2, 3), mean + sd * by_seed, strict=True):
            rows.append(known.iloc[:1].assign(metric=metric, value=value, seed=seed, others="x"))
            rows.append(
                known.iloc[:1].assign(metric="rpa", value=0.0, seed=seed, others="x")
            ) if metric == "sim_aou" else 0
    table, prose = pd.concat(rows, ignore_index=True), tmp_path / "prose.md"
    asked = [
        f"method=gd lr=0.03 others=x {m} minus rpa" for m in ("rec2ftp", "sim_am_delta", "sim_aou_norm", "sim_aou")
    ]
    prose.write_text(
        "{{count: differences}} {{count: decided}} {{count: together}}" + "".join(f" {{{{{x}}}}}" for x in asked)
    )
    text, numbers = filled(prose, table)
    levels = [ttest_1samp(draws[name][0] + draws[name][1] * by_seed, 0).pvalue for name in draws]
    assert levels[0] < 0.05 / 4 < 0.05 / 3 < levels[1] < levels[2] < 0.05 < levels[3]
    assert text.split()[:3] == ["4", "3", "1"]
    assert re.findall(r"\*\*(.+?)\*\*", text) == [numbers[-1][0]], "what is left of them all is in bold"
    assert [told for *_, told in numbers] == ["open", "alone", "alone", "all together"]
    prose.write_text("{{count: claims}}")
    with pytest.raises(ValueError, match="no count of 'claims'; there are differences, decided, together"):
        filled(prose, table)


def test_cells_that_differ_in_more_than_their_column_says_do_not_replace_each_other(searched, tmp_path):
    run, file = load_run(searched), tmp_path / "cells.csv"
    for key in run.settings:
        run.settings[key].update(limit=None)
    cells = cells_of(run)
    assert set(cells["limit"]) == {"all"}
    assert set(cells["model"]) == {"demo (num_demonstrations=6)"}, "with other demonstrations it is another model"
    with_folders(file, [searched]).to_csv(file, index=False)
    (told,) = pd.read_csv(file, dtype=str)["limit"].unique()
    both = pd.concat([cells, with_folders(file, [])])
    assert len(with_folders(file, [searched])) == len(cells), "once more the same cells"
    with pytest.raises(ValueError, match=rf"gd: rates were searched with limit={told} and limit=all; keep one"):
        run_of(both)


def test_a_folder_without_a_finished_cell_adds_nothing(searched, tmp_path):
    begun = load_run(searched)
    begun = replace(begun, values=begun.values.iloc[:0])
    assert list(cells_of(begun).columns) == list(cells_of(load_run(searched)).columns)
    assert cells_of(begun).empty


def test_spreads_in_the_prose_are_those_of_rounding_and_of_seeds_beyond_it(searched, tmp_path):
    prose, cells = tmp_path / "prose.md", cells_of(load_run(searched))
    (choice,) = [choice for choice in choose_rates(load_run(searched)) if choice.method == "gd"]
    prose.write_text(f"{{{{spread: method=gd lr={choice.rate:g} auc_ft}}}}")
    tested = choice.tried.loc[choice.rate]
    told = [float(number) for number in filled(prose, cells)[0].split(" and ")]
    assert told == pytest.approx([tested["auc_ft by rounding"], tested["auc_ft by seed"]], abs=6e-4)


def test_the_page_of_findings_has_the_numbers_of_its_file():
    page = Path(__file__).parents[2] / "docs" / "findings.md"
    prose, _ = filled(Path(findings.__file__).with_name("prose.md"), with_folders(cells_file(page), []))
    assert page.read_text("utf-8").startswith(prose.rstrip() + "\n")


def test_what_the_authors_seeds_could_decide_is_paired_by_seed():
    (row,) = [line for line in authors().splitlines() if line.startswith("| SimAOU_norm, lcgd - gd, mr |")]
    logs = pd.read_csv(FOLDER / "authors_runs.csv", dtype={"clip_norm": str})
    logs = logs[(logs["dataset"] == "mr") & (logs["metric"] == "sim_aou_norm") & (logs["layer"] == "all")]
    logs = logs[(logs["init"] == "pretrained") & (logs["clip_norm"] == "0") & (logs["precision"] == "fp16")]
    by_seed = logs[logs["source"].str.startswith("master")].pivot(index="seed", columns="method", values="value")
    seeds = (by_seed["lcgd"] - by_seed["gd"]).dropna()
    interval = ttest_1samp(seeds, 0).confidence_interval(0.95)
    half = (interval.high - interval.low) / 2
    told = [
        f"{len(seeds)}",
        f"{seeds.mean():+.3f} ± {seeds.std():.3f}",
        f"{half:.3f}",
        "yes" if half < abs(seeds.mean()) else "no",
    ]
    assert [cell.strip() for cell in row.split("|")[2:6]] == told


def test_a_rate_where_rounding_is_all_there_is_seldom_passes_and_one_where_seeds_differ_does():
    def share(seed_sd, rounding_sd, trials=300):
        generator = np.random.default_rng(0)
        admitted = 0
        for _ in range(trials):
            rows = []
            for seed in (101, 102, 103):
                of_seed = generator.normal(size=2) * seed_sd
                for draw in (0, *DRAWS):
                    values = of_seed + generator.normal(size=2) * rounding_sd
                    of_cell = {"seed": seed, "permutation": 0, "draw": draw, "key": f"{seed} {draw}"}
                    rows += [of_cell | {"metric": name, "value": x} for name, x in zip(OUTCOMES, values, strict=True)]
            tried = pd.DataFrame({0.01: tried_rate(pd.DataFrame(rows))}).T
            admitted += bool(Choice("m", "d", "gd", tried).is_admitted(0.01))
        return admitted / trials

    assert share(0.0, 1.0) < 0.08
    assert share(1.0, 1.0) < 0.5, "as much by rounding as by seeds is not less"
    assert share(1.0, 0.05) > 0.95
