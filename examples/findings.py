"""The tables of docs/findings.md, from the results folders of the runs that the page names.

    python -m examples.findings --searches MODEL_A/rates MODEL_B/rates --page docs/findings.md
    python -m examples.findings --runs DEUTCH LINEARIZED STABILITY AUDIT --papers-rates OTHER --page docs/findings.md

The first writes tables and figures of `rate_search` between the marks for searches, a model a folder, and every cell's
numbers to docs/findings_rates.csv; one more model is one more folder. The second is of the page's older part: it
writes what is in the folders between the marks of the page; what is not there yet is left out. Means and standard
deviations are over seeds. The figures are those that `fairseq-icl report DEUTCH` wrote. The numbers of every cell stand
beside the page (docs/findings.csv); cells that are there and not in the folders are kept, and without folders the page
is made of them. OTHER is a run of the same experiment at the learning rates of the papers; in the file its model's name
says so.
"""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from examples.momentum_attention.tables import MARKS
from fairseq_icl.files import with_part, write_atomically
from fairseq_icl.replication.report.claims import NO_DATA, corrected, judge
from fairseq_icl.replication.report.claims import verdicts as verdicts_of
from fairseq_icl.replication.report.displacement import displacement_figures, displacement_tables
from fairseq_icl.replication.report.effects import Sample
from fairseq_icl.replication.report.plotting import drawings
from fairseq_icl.replication.report.published import Term, claims, inits_of
from fairseq_icl.replication.report.rates import rate_figures, rate_tables
from fairseq_icl.replication.report.run import IDENTITY, Run, load_run
from fairseq_icl.replication.report.text import decided_by, effect_text, file_name, markdown

SEARCH_MARKS = ("<!-- searches: python -m examples.findings -->", "<!-- end of searches -->")
SEARCHED_METRICS = {
    *(f"{metric}_{setting}" for metric in ("log_likelihood", "auc", "accuracy") for setting in ("zsl", "icl", "ft")),
    *(f"demonstration_log_likelihood_{setting}" for setting in ("zsl", "ft")),
    *("length_ratio_sim_aou", "sim_aou", "sim_aou_norm", "sim_am_delta", "sim_aou_projected"),
    *("sim_aou_random_matched", "sim_aou_norm_random_matched"),
}
"""What the searches' file has of every cell."""
COLUMNS = [*IDENTITY, "seed", "permutation", "metric", "value", "key"]
MOVED = "perturbation="
PAPERS_RATES = ", papers' rates"
"""What is added to the model's name in a run at the learning rates of the papers."""
DATASETS = ("sst2", "sst5", "mr", "subj", "agnews", "cb")
FIGURES = ("over_tasks", "layers_sim_aou_norm", "partition")
SHORT = ("sim_aou", "sim_aou_norm", "sim_am_delta")
"""The metrics of the smaller tables."""
ANSWERS = {
    "accuracy": "Accuracy",
    "accuracy_calibrated": "Accuracy, calibrated by inputs without content",
    "auc": "AUC, macro over classes",
}
SIMILARITIES = {
    "sim_aou": "SimAOU",
    "sim_aou_random": "SimAOU of a random update",
    "sim_aou_norm": "SimAOU_norm",
    "sim_am_before": "SimAM before fine-tuning",
    "sim_am_after": "SimAM after it",
    "sim_am_delta": "SimAM_delta",
    "kendall_tokens": "Kendall's tau over training tokens",
    "rec2ftp": "Rec2FTP",
    "rpa": "RPA",
}


def main() -> None:
    """Read the folders, write the page."""
    parser = argparse.ArgumentParser(prog="python -m examples.findings", description=__doc__)
    parser.add_argument("--runs", nargs="*", type=Path, default=[], help="results folders, the one with figures first")
    parser.add_argument("--papers-rates", nargs="*", type=Path, default=[], help="folders of runs at the papers' rates")
    parser.add_argument("--searches", nargs="*", type=Path, default=[], help="folders of rate_search, one a model")
    parser.add_argument("--page", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.searches:
        text = searches(arguments.searches, arguments.page)
        write_atomically(arguments.page, with_part(arguments.page.read_text("utf-8"), *SEARCH_MARKS, f"\n{text}\n"))
        return
    found = cell_values(arguments.runs) if arguments.runs else pd.DataFrame(columns=COLUMNS).astype({"value": float})
    if arguments.papers_rates:
        others = cell_values(arguments.papers_rates).assign(model=found["model"].iloc[0] + PAPERS_RATES)
        found = pd.concat([found, others], ignore_index=True)
    values = with_earlier(found, arguments.page.with_suffix(".csv"))
    at_papers = values["model"].str.endswith(PAPERS_RATES)
    at_papers_rates, values = values[at_papers], values[~at_papers]
    papers = summarised(at_papers_rates)
    summary = summarised(values)
    parts = [answers(summary), similarities(summary), untrained(summary), linearized(summary), audit(values)]
    parts += [stability(summary), papers_rates(papers)]
    parts += [verdicts(values, "searched rates"), verdicts(at_papers_rates, "the papers' rates")]
    parts += figures([run / "report" / "figures" for run in arguments.runs[:1]], arguments.page)
    text = "\n\n".join(part for part in parts if part)
    write_atomically(arguments.page, with_part(arguments.page.read_text("utf-8"), *MARKS, f"\n{text}\n"))


def searches(folders: Sequence[Path], page: Path) -> str:
    """Counts, tables, verdict and figures of every folder; every cell's numbers beside the page."""
    parts, cells = [], []
    for run in map(load_run, folders):
        model = str(run.planned["model"].iloc[0])
        cells.append(searched_cells(run))
        minutes = cells[-1].drop_duplicates("key")["seconds"].sum() / 60
        threads = {str(said["machine"]["threads"]) for said in run.configurations.values()}
        planned = run.planned.drop_duplicates("key")
        counts = planned[planned["finished"]].groupby(["dataset", "method"], sort=False).size()
        told = ", ".join(f"{dataset} {method} {count}" for (dataset, method), count in counts.items())
        parts.append(f"### {model}")
        parts.append(
            f"{planned['finished'].sum()} of {len(planned)} planned cells finished ({told}); {minutes:.0f} minutes "
            f"in cells, {' and '.join(sorted(threads))} thread, on a machine shared with other work."
        )
        parts += [f"#{markdown(table)}" for table in (*rate_tables(run), *displacement_tables(run))]
        found = next(v for v in verdicts_of(run, model) if v.claim.name == "lcgd_sim_aou_equal_length")
        parts.append(f"`{found.claim.name}`: {found.status}, {effect_text(found.average)} ({found.reason}).")
        for drawing in drawings([*rate_figures(run, model), *displacement_figures(run, model)]):
            path = page.with_name(f"{page.stem}_{file_name(drawing.name)}.png")
            drawing.save(path, format="png", dpi=110, metadata={"Software": None})
            parts.append(f"![{drawing.title}]({path.name})")
    table = pd.concat(cells).sort_values(["model", "dataset", "method", "lr", "seed", "perturbation", "metric"])
    write_atomically(page.with_name(f"{page.stem}_rates.csv"), table.to_csv(index=False, lineterminator="\n"))
    return "\n\n".join(parts)


def searched_cells(run: Run) -> pd.DataFrame:
    """One row a finished cell and metric, with its rate, perturbation and seconds."""
    values = run.values[run.values["layer"].isna() & run.values["metric"].isin(SEARCHED_METRICS)]
    values = values.drop_duplicates(["key", "metric"]).round({"value": 6})
    seconds = {key: run.cell_folder(run.planned["model"].iloc[0], key).seconds() for key in values["key"].unique()}
    return values.assign(
        lr=run.setting("lr", values["key"]),
        perturbation=run.setting("perturbation", values["key"]),
        seconds=values["key"].map(seconds).round(1),
    )[["model", "dataset", "method", "lr", "perturbation", "seed", "permutation", "metric", "value", "key", "seconds"]]


def cell_values(runs: Sequence[Path]) -> pd.DataFrame:
    """The page's metrics of all finished cells, means over layers and examples: one row a cell and metric."""
    metrics = {f"{metric}_{setting}" for metric in ANSWERS for setting in ("zsl", "icl", "ft")}
    metrics |= {*SIMILARITIES, "alpha"}
    values = pd.concat([load_run(run).values for run in runs], ignore_index=True)
    return values[values["layer"].isna() & values["metric"].isin(metrics)][COLUMNS].round({"value": 6})


def summarised(values: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation over seeds, and how many they are."""
    groups = values.groupby([*IDENTITY, "metric"], sort=False)["value"]
    return groups.agg(mean="mean", sd="std", runs="size").reset_index()


def with_earlier(values: pd.DataFrame, path: Path) -> pd.DataFrame:
    """The values, and those that `path` has of other cells; all of them are there afterwards."""
    if path.is_file():
        values = pd.concat([values, pd.read_csv(path, keep_default_na=False)], ignore_index=True)
    # Where two folders have the same cell, the first one's counts.
    values = values.drop_duplicates(COLUMNS[:-2]).sort_values(COLUMNS[:-2], ignore_index=True)
    write_atomically(path, values.to_csv(index=False, lineterminator="\n"))
    return values


def answers(summary: pd.DataFrame) -> str:
    """How good the model is: zero-shot, in context, fine-tuned."""
    plain = chosen(summary)
    lines = []
    for metric, name in ANSWERS.items():
        lines.append((f"**{name}**", *[""] * len(DATASETS)))
        for setting, method, title in (
            ("zsl", "gd", "zero-shot"),
            ("icl", "gd", "in context"),
            ("ft", "gd", "fine-tuned, gd"),
            ("ft", "lcgd", "fine-tuned, lcgd"),
        ):
            lines.append((title, *row(plain, method, f"{metric}_{setting}")))
    return table("### How well it answers", lines)


def similarities(summary: pd.DataFrame) -> str:
    """ICL against both ways of fine-tuning."""
    return table("### ICL against fine-tuning", both_methods(summary, SIMILARITIES))


def both_methods(summary: pd.DataFrame, metrics: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Lines of the metrics after gd and after lcgd, and how alike the two are."""
    plain = chosen(summary)
    lines = [
        (f"{name}, {method}", *row(plain, method, metric))
        for metric, name in metrics.items()
        for method in ("gd", "lcgd")
    ]
    return [*lines, ("alpha: SimAM_delta between gd and lcgd", *row(plain, "alpha", "alpha"))]


def untrained(summary: pd.DataFrame) -> str:
    """The trained model beside the two baselines."""
    lines = [
        (f"{SIMILARITIES[metric]}, {init}", *row(chosen(summary, init), "gd", metric))
        for metric in SHORT
        for init in ("pretrained", "trained-embeddings", "layer-norms")
    ]
    baselines = [line for line in lines if "pretrained" not in line[0]]
    return table("### Against models that were not trained", lines) if any(map(known, baselines)) else ""


def linearized(summary: pd.DataFrame) -> str:
    """Linearized fine-tuning, on the seeds that have it."""
    lines = [(f"{SIMILARITIES[metric]}, linearized", *row(chosen(summary), "linearized", metric)) for metric in SHORT]
    return table("### Linearized fine-tuning", lines) if any(map(known, lines)) else ""


def stability(summary: pd.DataFrame) -> str:
    """The same cell with every weight moved by one unit in the last place, in several draws."""
    moved = summary[summary["variant"].str.startswith(MOVED)]
    draws = sorted(moved["variant"].unique())
    lines = [
        (f"{name}, {method}", *(number(moved[moved["variant"] == draw], method, metric, "sst2") for draw in draws))
        for metric, name in ({"auc_ft": "AUC, fine-tuned"} | SIMILARITIES).items()
        for method in ("gd", "lcgd")
    ]
    title = "### How much of it is rounding (SST-2, one seed)"
    return table(title, lines, [f"draw {draw.removeprefix(MOVED)}" for draw in draws]) if draws else ""


def audit(values: pd.DataFrame) -> str:
    """Every difference between the authors' code and the papers' text, one at a time, on the seeds that have them."""
    plain = values[(values["init"] == "pretrained") & (values["method"] == "gd")]
    plain = plain[~plain["variant"].str.startswith(MOVED)]
    variants = plain[plain["variant"] != ""]
    if variants.empty:
        return ""
    summary = summarised(plain.merge(variants[["dataset", "seed", "permutation"]].drop_duplicates()))
    datasets = list(dict.fromkeys(variants["dataset"]))
    lines = []
    for variant in ["", *dict.fromkeys(variants["variant"])]:
        cells = summary[(summary["variant"] == variant) & summary["dataset"].isin(datasets)]
        one = tuple(number(cells, "gd", metric, dataset) for metric in SHORT for dataset in datasets)
        lines.append((f"`{variant}`" if variant else "as the authors ran it", *one))
    heads = [f"{SIMILARITIES[m]}, {d}" for m in SHORT for d in datasets]
    first, *others = lines  # what is no reading of gd, or of a model without biases, cannot differ
    return table("### What each reading does (gd)", [first, *(line for line in others if line[1:] != first[1:])], heads)


def papers_rates(summary: pd.DataFrame) -> str:
    """What another learning rate changes, on the datasets that have it."""
    lines = both_methods(summary, {"auc_ft": "AUC, fine-tuned", **{name: SIMILARITIES[name] for name in SHORT}})
    untrained = chosen(summary, "trained-embeddings")
    lines += [(f"{SIMILARITIES[name]}, trained-embeddings", *row(untrained, "gd", name)) for name in SHORT]
    return table("### The same at the papers' learning rates", lines) if any(map(known, lines)) else ""


class CellEvidence:
    """The values of cells as evidence for claims: means over examples and layers, seed by seed."""

    def __init__(self, values: pd.DataFrame) -> None:
        self.values = values[values["variant"] == ""]
        self.datasets: Sequence[str] = list(dict.fromkeys(self.values["dataset"]))

    def sample(self, term: Term, dataset: str) -> Sample | None:
        """As `Evidence` says."""
        rows = self.values[(self.values["metric"] == term.metric) & (self.values["dataset"] == dataset)]
        rows = rows[rows["method"] == term.method]
        rows = rows[rows["init"] == inits_of(term.init)[0]]
        seeds = tuple((int(row.seed), int(row.permutation)) for row in rows.itertuples())
        return Sample(seeds, np.array([], int), rows["value"].to_numpy(float)[:, None, None]) if seeds else None


def verdicts(values: pd.DataFrame, name: str) -> str:
    """Those of the papers' claims that the cells' means can be asked, and what they say; only seeds vary here."""
    evidence = CellEvidence(values)
    found = corrected([judge(claim, evidence) for claim in claims()])
    asked = [verdict for verdict in found if verdict.status != NO_DATA]
    rows = [(v.claim.says, v.status, decided_by(v), v.reason, v.corrected) for v in asked]
    return table(f"### Do the papers' claims hold? ({name})", rows, ["here", "effect", "why", "all claims together"])


def figures(folders: Sequence[Path], page: Path) -> list[str]:
    """Copies of the report's figures beside the page, and the lines that show them and those of before."""
    shown = []
    for start in FIGURES:
        copy = page.with_name(f"{page.stem}_{start}.png")
        for figure in (figure for folder in folders for figure in sorted(folder.glob(f"{start}_*.png"))):
            shutil.copy(figure, copy)
        shown += [f"![{start.replace('_', ' ')}]({copy.name})"] if copy.is_file() else []
    return shown


def chosen(summary: pd.DataFrame, init: str = "pretrained") -> pd.DataFrame:
    """The plain cells of an init; where two folders have them, those with more seeds."""
    plain = summary[(summary["init"] == init) & (summary["variant"] == "")]
    return plain.sort_values("runs", ascending=False).drop_duplicates(["dataset", "method", "metric"])


def row(cells: pd.DataFrame, method: str, metric: str) -> list[str]:
    """One number a dataset."""
    return [number(cells, method, metric, dataset) for dataset in DATASETS]


def number(cells: pd.DataFrame, method: str, metric: str, dataset: str) -> str:
    """Mean ± standard deviation over seeds; a single seed has none."""
    found = cells[(cells["method"] == method) & (cells["metric"] == metric) & (cells["dataset"] == dataset)]
    if found.empty or pd.isna(found.iloc[0]["mean"]):
        return "–"
    spread = found.iloc[0]["sd"]
    return f"{found.iloc[0]['mean']:.3f}" + ("" if pd.isna(spread) else f" ± {spread:.3f}")


def known(line: Sequence[str]) -> bool:
    """Whether any number of a line is there."""
    return any(cell != "–" for cell in line[1:])


def table(title: str, lines: Sequence[Sequence[str]], heads: Sequence[str] = DATASETS) -> str:
    """A Markdown table of the lines that have numbers."""
    kept = [line for line in lines if known(line)]
    cells = [("", *heads), ("---", *["---"] * len(heads)), *kept]
    return f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in cells)


if __name__ == "__main__":
    main()
