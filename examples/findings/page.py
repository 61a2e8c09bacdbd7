"""The generated part of docs/findings.md: tables, figures and verdicts."""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from examples.findings.cells import ANSWERS, SIMILARITIES, half_interval, run_of
from examples.findings.verdicts import at_equal_length, at_rates, papers_rates, searched_rates, verdicts
from fairseq_icl.replication.report.claims import FAILS, HOLDS, NO_DATA, Verdict, authors_verdicts
from fairseq_icl.replication.report.displacement import displacement_figures, displacement_tables
from fairseq_icl.replication.report.experiments import spreads
from fairseq_icl.replication.report.plotting import drawings
from fairseq_icl.replication.report.published import Claim, authors_noise, authors_runs
from fairseq_icl.replication.report.rates import rate_figures, rate_tables
from fairseq_icl.replication.report.run import Run
from fairseq_icl.replication.report.text import decided_by, effect_text, file_name, markdown


def all_of(cells: pd.DataFrame, page: Path) -> Iterator[str]:
    """Models side by side, what the authors could decide, then everything of each model."""
    models = {str(model): own for model, own in cells.groupby("model", sort=False)}
    searched = {model: at_equal_length(run_of(own[own["queries"] == "train"]), model) for model, own in models.items()}
    judged = {model: verdicts(own, searched_rates(own), searched[model]) for model, own in models.items()}
    at_papers = {f"{model}, the papers' rates": verdicts(own, papers_rates(own)) for model, own in models.items()}
    yield counts(cells)
    yield side_by_side(judged | {name: found for name, found in at_papers.items() if found})
    yield authors()
    for model, own in models.items():
        yield from parts_of(own, model, page, judged[model])


def counts(cells: pd.DataFrame) -> str:
    """How many cells there are of what, and how long they took: a column a model and dataset."""
    each = cells.drop_duplicates("key")
    purpose = trained = each["method"] + _after(", ", each["init"].where(each["init"] != "pretrained", ""))
    kinds = {
        "the papers' rates": at_rates(each, papers_rates(each)),
        "equal steps": each["layer_step_size"] != "",
        "rounding": each["perturbation"] != 0,
        "order": each["others"].str.contains("order="),
        "the query's last token": each["others"].str.contains("position=query"),
        "search of rates": each["queries"] == "train",
    }
    for kind, chosen in kinds.items():
        purpose = purpose.where(~chosen, f"{kind}: " + trained)
    columns = each["model"] + ", " + each["dataset"]
    numbers = pd.crosstab(purpose, columns)
    minutes = each.groupby(columns)["seconds"].sum() / 60
    rows = [[str(name), *(str(count) if count else "–" for count in row)] for name, row in numbers.iterrows()]
    rows.append(["minutes of one core", *(f"{minutes[name]:.0f}" for name in numbers)])
    table = lines_of("### Cells", ["", *map(str, numbers)], rows)
    return f"{table}\n\nWhere the search chose the paper's rate, the cell is counted with the papers'."


def parts_of(own: pd.DataFrame, model: str, page: Path, judged: Sequence[Verdict]) -> Iterator[str]:
    """All of a model: rates, equal displacement, answers, similarities, spreads, verdicts."""
    searched, tested = own[own["queries"] == "train"], own[own["queries"] != "train"]
    yield f"### {model}"
    if len(searched):
        run = run_of(searched)
        yield from (f"#{markdown(table)}" for table in rate_tables(run))
        yield from equal_length(run, model)
        yield from figures([*rate_figures(run, model), *displacement_figures(run, model)], page)
    for dataset, rows in tested.groupby("dataset", sort=False):
        yield from tested_tables(rows, f"{model}, {dataset}")
    equal = tested[(tested["layer_step_size"] != "") & (tested["perturbation"] == 0)]
    if len(equal):
        yield from equal_length(run_of(equal), model)
    if judged:
        rows = [[said(v.claim), v.status, decided_by(v), v.reason, v.corrected] for v in judged]
        title = f"#### Do the papers' claims hold on {model}, at the searched rates?"
        yield lines_of(title, ["", "here", "effect", "why", "all claims together"], rows)


def equal_length(run: Run, model: str) -> Iterator[str]:
    """Methods where they move the model equally far, and whether the two of the second paper differ there."""
    yield from (f"#{markdown(table)}" for table in displacement_tables(run))
    lines = [
        f"- `{v.claim.name}`: {v.status}, {effect_text(v.average)} ({v.reason})." for v in at_equal_length(run, model)
    ]
    yield "\n".join(lines)


def figures(charts: Sequence[Any], page: Path) -> Iterator[str]:
    """Every chart as a picture beside the page, and the line that shows it."""
    for drawing in drawings(charts):
        path = page.with_name(f"{page.stem}_{file_name(drawing.name)}.png")
        drawing.save(path, format="png", dpi=110, metadata={"Software": None})
        yield f"![{drawing.title}]({path.name})"


def tested_tables(rows: pd.DataFrame, title: str) -> Iterator[str]:
    """Answers and similarities of one model on one dataset, a column a method, init and rate; and the spreads."""
    plain = rows[(rows["perturbation"] == 0) & (rows["layer_step_size"] == "") & ~rows["others"].str.contains("order=")]
    for others, group in plain.groupby("others", sort=False):
        column = group["method"] + _after(", ", group["init"].where(group["init"] != "pretrained", ""))
        column += _after(", lr ", group["lr"])
        seeds = group["seed"].groupby(column).transform("nunique").map(seeds_said)
        alike = seeds.nunique() == 1
        group = group.assign(column=column if alike else column + " (" + seeds + ")")
        named = {f"{m}_{c}": f"{title}, {c.upper()}" for m, title in ANSWERS.items() for c in ("zsl", "icl", "ft")}
        words = [seeds.iloc[0] if alike else "seeds differ", *([others] if others else [])]
        yield table(f"#### {title} ({', '.join(words)})", group, named | SIMILARITIES)
    yield spread_table(rows, "perturbation", f"#### {title}: how much is rounding")
    orders = rows[rows["others"].str.contains("order=")]
    yield spread_table(orders, "permutation", f"#### {title}: how much is the order")


def seeds_said(count: int) -> str:
    """So many seeds, in words."""
    return f"{count} seed{'' if count == 1 else 's'}"


def _after(before: str, words: pd.Series) -> pd.Series:
    return words.map(lambda word: f"{before}{word}" if word else "")


def table(title: str, cells: pd.DataFrame, metrics: dict[str, str]) -> str:
    """A Markdown table: a row a metric, a column for each of `column`; mean ± SD over seeds, fewer ones told."""
    columns = list(dict.fromkeys(cells["column"]))
    most, rows = [cells.loc[cells["column"] == one, "metric"].value_counts().max() for one in columns], []
    for metric, name in metrics.items():
        values = [cells.loc[(cells["metric"] == metric) & (cells["column"] == one), "value"] for one in columns]
        if any(map(len, values)):
            fewer = [f" (of {len(x)})" if 0 < len(x) < seeds else "" for x, seeds in zip(values, most, strict=True)]
            rows.append([name, *(number(x) + few for x, few in zip(values, fewer, strict=True))])
    return lines_of(title, ["", *columns], rows)


def number(values: pd.Series) -> str:
    """Mean ± SD; one value has none."""
    if values.empty:
        return "–"
    return f"{values.mean():.3f}" + (f" ± {values.std():.3f}" if len(values) > 1 else "")


def spread_table(rows: pd.DataFrame, by: str, title: str) -> str:
    """SD over draws of `by` (perturbation or permutation) at one seed, beside that over seeds without draws' part."""
    shown = {"auc_icl": "AUC, ICL", "auc_ft": "AUC, FT", "rpa": "RPA"}
    shown |= {name: SIMILARITIES[name] for name in ("sim_aou", "sim_aou_norm", "sim_am_delta")}
    place = ["method", "init", "lr", "layer_step_size", "others"]
    several = rows[rows.groupby(place)[by].transform("nunique") > 1]
    other = "permutation" if by == "perturbation" else "perturbation"
    lines = []
    for (method, init, lr, size, others), group in several.groupby(place, sort=False):
        others = "" if by == "permutation" else others  # the title says them
        words = [method, *[init] * (init != "pretrained"), f"equal steps {size}" if size else f"lr {lr}", others]
        named = ", ".join(filter(None, words))
        for metric, name in shown.items():
            measured = group[group["metric"] == metric]
            measured = measured[measured.groupby("seed")[by].transform("nunique") > 1]  # not those of one draw alone
            within, over = spreads(measured, ["seed", other])
            if not pd.isna(within):
                draws = f"{measured[by].nunique()} draws, {seeds_said(measured['seed'].nunique())}"
                lines.append([f"{name}, {named}", f"{within:.3f}", "–" if pd.isna(over) else f"{over:.3f}", draws])
    heads = ["", f"SD by {'rounding' if by == 'perturbation' else 'order'}", "SD by seed beyond that", "of"]
    return lines_of(title, heads, lines) if lines else ""


def said(claim: Claim) -> str:
    """The claim and its name."""
    return f"{claim.says} (`{claim.name}`)"


def side_by_side(found: dict[str, list[Verdict]]) -> str:
    """Every claim that some model could be asked, a column a model, and the authors' runs."""
    columns = found | {"the authors' runs, 1.3B": authors_verdicts()}
    rows = []
    for claim in dict.fromkeys(verdict.claim for judged in found.values() for verdict in judged):
        told = [next((v for v in column if v.claim == claim), None) for column in columns.values()]
        rows.append([said(claim), *(outcome(v) if v and v.status != NO_DATA else "–" for v in told)])
    if not rows:
        return ""
    told = []
    for name, judged in found.items():
        decided = [verdict for verdict in judged if verdict.status in (HOLDS, FAILS)]
        left = sum(verdict.corrected == verdict.status for verdict in decided)
        told.append(f"{name} {len(decided)} of {len(judged)}, {left} with all others")
    table = lines_of("### The papers' claims, model by model", ["", *columns], rows)
    return f"{table}\n\nDecided, of the claims that could be asked: {'; '.join(told)}."


def outcome(verdict: Verdict) -> str:
    """What became of a claim by itself, and what is left of that when all claims of its column are taken together."""
    left = "" if verdict.corrected == verdict.status else f" ({verdict.corrected} with all others)"
    return f"{verdict.status}{left}: {decided_by(verdict)}"


def authors() -> str:
    """What the authors' seeds could decide: differences paired by seed in their runs, beside how far repeats differ."""
    runs = authors_runs()
    runs = runs[runs["layer"].isna() & (runs["clip_norm"] == 0) & (runs["precision"] == "fp16")]
    noise = authors_noise()
    gd = ("gd", "pretrained")
    rows = []
    for metric, other in product(
        ("sim_aou_norm", "sim_am_delta"), (("lcgd", "pretrained"), ("gd", "trained-embeddings"))
    ):
        values = (
            runs[runs["metric"] == metric]
            .set_index(["method", "init", "dataset", "seed", "permutation"])["value"]
            .sort_index()
        )
        differences = (values.loc[other] - values.loc[gd]).dropna()
        for dataset, by_seed in differences.groupby("dataset"):
            count, sd = len(by_seed), float(by_seed.std())
            half = half_interval(by_seed)
            apart = [noise.get((metric, *which, 0.0, dataset, "fp16"), (np.nan,))[0] for which in (gd, other)]
            name = f"{SIMILARITIES[metric]}, {other[0] if other[1] == 'pretrained' else other[1]} - gd, {dataset}"
            mean = float(by_seed.mean())
            repeats = "–" if np.isnan(apart).all() else f"{np.nanmax(apart):.4f}"
            rows.append([name, str(count), f"{mean:+.3f} ± {sd:.3f}", f"{half:.3f}"])
            rows[-1] += ["yes" if abs(mean) > half else "no", repeats]
    heads = [
        "",
        "seeds",
        "difference, paired by seed",
        "half an interval",
        "decided",
        "repeats of one run differ by at most",
    ]
    return lines_of("### What the authors' seeds could decide", heads, rows)


def lines_of(title: str, heads: list[str], rows: list[list[str]]) -> str:
    """A title and a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)
