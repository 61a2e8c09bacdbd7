"""docs/findings.md from results folders.

    python -m examples.findings FOLDER... --page docs/findings.md
    python -m examples.findings --page docs/findings.md --ask model=gemma-3-270m method=gd lr=0.01 queries=train \\
        auc_icl minus auc_ft

Every finished cell of the folders, of whatever experiment and model, goes to docs/findings_cells.csv, where it takes
the place of an earlier one with the same settings. Tables, figures and verdicts between the page's marks are made of
that file alone: without folders the page is only made anew, and a third model is one more folder. The prose stands
outside the marks. Nothing is averaged but seeds: whatever else differs between cells is a row or a column of its own.

`--ask` prints the rows of the file behind a number of the page, with mean, SD and interval over seeds. After `minus`
stand only the words that differ from those before it. Where nothing is said, cells are pretrained and as plain as any.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fairseq_icl.files import with_part, write_atomically
from fairseq_icl.replication.report.claims import NO_DATA, Verdict, authors_verdicts, corrected, judge
from fairseq_icl.replication.report.claims import verdicts as verdicts_of
from fairseq_icl.replication.report.displacement import displacement_figures, displacement_tables
from fairseq_icl.replication.report.effects import LEVEL, Part, Sample
from fairseq_icl.replication.report.experiments import pooled
from fairseq_icl.replication.report.plotting import drawings
from fairseq_icl.replication.report.published import Claim, Term, authors_noise, authors_runs, claims, inits_of
from fairseq_icl.replication.report.rates import choose_rates, rate_figures, rate_tables
from fairseq_icl.replication.report.run import IDENTITY, Run, load_run
from fairseq_icl.replication.report.text import decided_by, effect_text, file_name, markdown
from fairseq_icl.settings import SETTINGS

MARKS = ("<!-- tables -->", "<!-- end of tables -->")
CELL = ["model", "dataset", "init", "method", "queries", "limit", "lr", "perturbation", "layer_step_size", "others"]
"""What tells cells apart, besides seed and permutation; `others`: any further setting that is not at its default."""
COLUMNS = [*CELL, "seed", "permutation", "metric", "value", "key", "seconds"]
UNSAID = {*CELL, "seed", "permutation", "num_demonstrations", "layer_step", "gradient_norms", "device", "precision"}
"""Settings that stand in a column of their own, or change no number of the page."""
ANSWERS = {"auc": "AUC, macro over classes", "accuracy": "accuracy", "log_likelihood": "log-likelihood of the label"}
SIMILARITIES = {
    "sim_aou": "SimAOU",
    "sim_aou_random_matched": "SimAOU of a random update of that length",
    "sim_aou_projected": "SimAOU_projected",
    "sim_aou_norm": "SimAOU_norm",
    "sim_aou_norm_random_matched": "SimAOU_norm of a random update of that length",
    "length_ratio_sim_aou": "length ratio, FT / ICL",
    "sim_am_before": "SimAM before fine-tuning",
    "sim_am_after": "SimAM after it",
    "sim_am_delta": "SimAM_delta",
    "kendall_tokens": "Kendall's tau over training tokens",
    "rec2ftp": "Rec2FTP",
    "rpa": "RPA",
    "alpha": "alpha: SimAM_delta between gd and lcgd",
}
METRICS = {
    *(f"{metric}_{condition}" for metric in ANSWERS for condition in ("zsl", "icl", "ft")),
    *(f"demonstration_log_likelihood_{condition}" for condition in ("zsl", "ft")),
    *SIMILARITIES,
}
"""What the file has of every cell."""


def main() -> None:
    """Add the folders' cells to the file, write the page."""
    parser = argparse.ArgumentParser(prog="python -m examples.findings", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="results folders of any experiment")
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--ask", nargs="+", metavar="WORD", help="COLUMN=VALUE of the file's cells, and a metric")
    arguments = parser.parse_args()
    file = arguments.page.with_name(f"{arguments.page.stem}_cells.csv")
    found = [cells_of(load_run(folder)) for folder in arguments.folders]
    if file.is_file():
        found.append(pd.read_csv(file, keep_default_na=False, dtype={"others": str, "layer_step_size": str}))
    cells = pd.concat(found, ignore_index=True)
    cells = cells.astype({"layer_step_size": str, "lr": str})
    newest = cells.groupby(COLUMNS[:-4], sort=False)["key"].transform("first")  # the folders' stand first
    cells = cells[cells["key"] == newest].drop_duplicates(COLUMNS[:-3]).sort_values(COLUMNS[:-3], ignore_index=True)
    if arguments.ask:
        try:
            print(answer(cells, arguments.ask))
        except ValueError as error:
            parser.error(f"--ask: {error}")
        return
    write_atomically(file, cells.to_csv(index=False, lineterminator="\n"))
    models = [str(model) for model in cells["model"].unique()]
    judged = {model: verdicts(cells, model) for model in models}
    parts = [side_by_side(judged), authors()]
    parts += [part for model in models for part in parts_of(cells, model, arguments.page, judged[model])]
    text = "\n\n".join(filter(None, parts))
    write_atomically(arguments.page, with_part(arguments.page.read_text("utf-8"), *MARKS, f"\n{text}\n"))


def cells_of(run: Run) -> pd.DataFrame:
    """The run's finished cells, means over examples and layers: COLUMNS, one row a cell and metric."""
    values = run.values[run.values["layer"].isna() & run.values["metric"].isin(METRICS)]
    values = values.drop_duplicates(["key", "metric"]).dropna(subset="value").round({"value": 6})
    rows = {}
    for model, key in values[["model", "key"]].drop_duplicates().itertuples(index=False):
        settings = {name: known.default for name, known in SETTINGS.items()}
        settings |= run.configurations[key]["cell"]["settings"]
        others = {
            name: value
            for name, value in settings.items()
            if name in SETTINGS and name not in UNSAID and value != SETTINGS[name].default
        }
        rows[key] = {name: settings[name] for name in ("queries", "limit", "lr", "perturbation", "layer_step_size")}
        rows[key] |= {"others": " ".join(f"{name}={value}" for name, value in sorted(others.items()))}
        rows[key] |= {"seconds": round(run.cell_folder(model, key).seconds(), 1)}
    said = pd.DataFrame.from_dict(rows, orient="index").rename_axis("key").reset_index()
    said = said.assign(**{name: said[name].map(_written) for name in ("lr", "layer_step_size")})
    return values.assign(model=values["plain_model"]).merge(said, on="key")[COLUMNS]


def answer(cells: pd.DataFrame, words: Sequence[str]) -> str:
    """The rows that the words ask for, and what they are on average; of two askings the difference, paired by seed."""
    sides: list[pd.Series] = []
    wanted = {"init": "pretrained", "perturbation": "0", "layer_step_size": "", "others": ""}
    at = words.index("minus") if "minus" in words else len(words)
    for part in filter(None, (words[:at], words[at + 1 :])):
        rows = cells
        for word in part:
            column, is_column, value = word.partition("=")
            wanted |= {column: value} if is_column else {"metric": word}
        for column, value in wanted.items():
            if column not in rows:
                raise ValueError(f"the file has no column {column}; it has {', '.join(COLUMNS)}")
            known = rows[column].astype(str)
            rows = rows[known == value]
            if rows.empty:
                raise ValueError(
                    f"no cell with {column}={value} is left; there are {', '.join(sorted(known.unique()))}"
                )
        differing = [column for column in [*CELL, "metric"] if rows[column].nunique() > 1]
        if differing:
            some = ", ".join(
                f"{column}={{{'|'.join(sorted(map(str, rows[column].unique())))}}}" for column in differing
            )
            raise ValueError(f"cells of one kind only are averaged; say {some}")
        sides.append(rows.set_index(["seed", "permutation"])["value"])
    values = (sides[0] - sides[1] if len(sides) > 1 else sides[0]).dropna()
    mean, count, told = float(values.mean()), len(values), ""
    if count > 1:
        half = half_interval(values)
        told = f", SD {values.std():.4f}, 95 % [{mean - half:.4f}, {mean + half:.4f}]"
    return f"{values.to_string()}\nmean {mean:.4f}{told} over {count} seed{'s' if count > 1 else ''}"


def _written(value: Any) -> str:
    """A number as the file has it; nothing where there is none."""
    return "" if value is None or pd.isna(value) else f"{float(value):g}"


def run_of(cells: pd.DataFrame) -> Run:
    """The cells as a run that the report's tables and figures can be asked for."""
    names = {"lr": cells["queries"] == "train", "perturbation": cells["perturbation"] != 0}
    names["layer_step_size"] = cells["layer_step_size"] != ""
    words = [
        [f"{name}={value}" for name, is_said in names.items() for value in [row[name]] if is_said[at]]
        + row["others"].split()
        for at, row in cells[[*names, "others"]].iterrows()
    ]
    values = cells.assign(variant=[" ".join(said) for said in words], plain_model=cells["model"])
    values = values.assign(layer=np.nan, low=np.nan, high=np.nan)
    planned = values[[*IDENTITY, "plain_model", "seed", "permutation", "key"]].drop_duplicates().assign(finished=True)
    configurations = {}
    for cell in cells.drop_duplicates("key").to_dict("records"):
        settings = {name: cell[name] for name in ("queries", "limit", "perturbation", "seed", "permutation", "init")}
        settings |= {name: float(cell[name]) if cell[name] else None for name in ("lr", "layer_step_size")}
        configurations[cell["key"]] = {"cell": {"settings": settings, "dataset": cell["dataset"]}}
    return Run(Path(), planned, configurations, values, experiments=[], tables=[])


def parts_of(cells: pd.DataFrame, model: str, page: Path, judged: Sequence[Verdict]) -> Iterator[str]:
    """All of a model: what was computed, rates, equal displacement, answers, similarities, spreads, verdicts."""
    own = cells[cells["model"] == model]
    searched, tested = own[own["queries"] == "train"], own[own["queries"] != "train"]
    yield f"### {model}"
    for part, rows in (("of searches of rates", searched), ("on the validation split", tested)):
        each = rows.drop_duplicates("key")
        counts = each.groupby(["dataset", "method"], sort=False).size()
        told = ", ".join(f"{dataset} {method} {count}" for (dataset, method), count in counts.items())
        if len(each):
            minutes = each["seconds"].sum() / 60
            yield f"{len(each)} cells {part} ({told}), {minutes:.0f} minutes without shared observations."
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
        title = f"#### Do the papers' claims hold on {model}?"
        yield lines_of(title, ["", "here", "effect", "why", "all claims together"], rows)


def equal_length(run: Run, model: str) -> Iterator[str]:
    """Methods where they move the model equally far, and whether the two of the second paper differ there."""
    yield from (f"#{markdown(table)}" for table in displacement_tables(run))
    found = next(v for v in verdicts_of(run, model) if v.claim.name == "lcgd_sim_aou_equal_length")
    yield f"`{found.claim.name}`: {found.status}, {effect_text(found.average)} ({found.reason})."


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
        group = group.assign(column=column)
        named = {f"{m}_{c}": f"{title}, {c.upper()}" for m, title in ANSWERS.items() for c in ("zsl", "icl", "ft")}
        seeds = group["seed"].nunique()
        words = [f"{seeds} seeds", *([others] if others else [])]
        yield table(f"#### {title} ({', '.join(words)})", group, named | SIMILARITIES)
    yield spreads(rows, "perturbation", f"#### {title}: how much is rounding")
    yield spreads(rows[rows["others"].str.contains("order=")], "permutation", f"#### {title}: how much is the order")


def _after(before: str, words: pd.Series) -> pd.Series:
    return words.map(lambda word: f"{before}{word}" if word else "")


def table(title: str, cells: pd.DataFrame, metrics: dict[str, str]) -> str:
    """A Markdown table: a row a metric, a column for each of `column`; mean ± SD over seeds."""
    columns = list(dict.fromkeys(cells["column"]))
    rows = []
    for metric, name in metrics.items():
        values = [cells.loc[(cells["metric"] == metric) & (cells["column"] == one), "value"] for one in columns]
        if any(map(len, values)):
            rows.append([name, *map(number, values)])
    return lines_of(title, ["", *columns], rows)


def number(values: pd.Series) -> str:
    """Mean ± SD; one value has none."""
    if values.empty:
        return "–"
    return f"{values.mean():.3f}" + (f" ± {values.std():.3f}" if len(values) > 1 else "")


def spreads(rows: pd.DataFrame, by: str, title: str) -> str:
    """SD over draws of `by` (perturbation or permutation) at one seed, beside that over seeds at one draw."""
    shown = {"auc_icl": "AUC, ICL", "auc_ft": "AUC, FT", "rpa": "RPA"}
    shown |= {name: SIMILARITIES[name] for name in ("sim_aou", "sim_aou_norm", "sim_am_delta")}
    place = ["method", "init", "lr", "layer_step_size", "others"]
    several = rows[rows.groupby(place)[by].transform("nunique") > 1]
    other = "permutation" if by == "perturbation" else "perturbation"
    lines = []
    for (method, init, lr, *_), group in several.groupby(place, sort=False):
        named = ", ".join([method, *[init] * (init != "pretrained"), f"lr {lr}"])
        for metric, name in shown.items():
            measured = group[group["metric"] == metric]
            within, over = pooled(measured, ["seed", other]), pooled(measured, [by])
            if not pd.isna(within):
                draws = f"{measured[by].nunique()} draws, {measured['seed'].nunique()} seeds"
                lines.append([f"{name}, {named}", f"{within:.3f}", "–" if pd.isna(over) else f"{over:.3f}", draws])
    heads = ["", f"SD by {'rounding' if by == 'perturbation' else 'order'}", "SD by seed", "of"]
    return lines_of(title, heads, lines) if lines else ""


class CellEvidence:
    """Means of cells as evidence for claims, seed by seed; examples are not counted as a source of chance."""

    def __init__(self, values: pd.DataFrame) -> None:
        self.values = values
        self.datasets: Sequence[str] = list(dict.fromkeys(values["dataset"]))

    def sample(self, term: Term, dataset: str) -> Sample | None:
        """As `Evidence` says."""
        rows = self.values[(self.values["metric"] == term.metric) & (self.values["dataset"] == dataset)]
        rows = rows[(rows["method"] == term.method) & (rows["init"] == inits_of(term.init)[0])]
        seeds = tuple((int(row.seed), int(row.permutation)) for row in rows.itertuples())
        return Sample(seeds, np.array([], int), rows["value"].to_numpy(float)[:, None, None]) if seeds else None


def verdicts(cells: pd.DataFrame, model: str) -> list[Verdict]:
    """Those of the papers' claims that the model's cells at the searched rates can be asked, and what they say."""
    own = cells[cells["model"] == model]
    searched = own[own["queries"] == "train"]
    chosen = {(one.dataset, one.method): one.rate for one in choose_rates(run_of(searched))} if len(searched) else {}
    plain = own[(own["queries"] != "train") & (own["others"] == "")]
    plain = plain[(plain["perturbation"] == 0) & (plain["layer_step_size"] == "")]
    rates = [chosen.get((row.dataset, row.method)) for row in plain.itertuples()]
    has_rate = [not lr or rate is None or float(lr) == rate for lr, rate in zip(plain["lr"], rates, strict=True)]
    evidence = CellEvidence(plain[np.array(has_rate, bool)])
    return [found for found in corrected([judge(claim, evidence) for claim in claims()]) if found.status != NO_DATA]


def said(claim: Claim) -> str:
    """The claim and the name that tells it from others which say "the same"."""
    return f"{claim.says} (`{claim.name}`)"


def side_by_side(found: dict[str, list[Verdict]]) -> str:
    """Every claim that some model could be asked, a column a model, and the authors' runs."""
    columns = found | {"the authors' runs, 1.3B": authors_verdicts()}
    rows = []
    for claim in dict.fromkeys(verdict.claim for verdicts in found.values() for verdict in verdicts):
        told = [next((v for v in column if v.claim == claim), None) for column in columns.values()]
        rows.append(
            [said(claim), *(f"{v.status}: {decided_by(v)}" if v and v.status != NO_DATA else "–" for v in told)]
        )
    return lines_of("### The papers' claims, model by model", ["", *columns], rows) if rows else ""


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


def half_interval(values: pd.Series) -> float:
    """Half the interval of the mean of several seeds' values."""
    return Part(float(values.var()) / len(values), len(values) - 1).half(LEVEL)


def lines_of(title: str, heads: list[str], rows: list[list[str]]) -> str:
    """A title and a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
