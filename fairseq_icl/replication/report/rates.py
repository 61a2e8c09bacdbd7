"""experiment=rate_search: which learning rate is chosen, what is still to be tried, table, figure and model file.

A rate is scored by the likelihood of labels that were not trained on, given their inputs (mean over rows and seeds). It
is admitted only if moving every weight by one unit in the last place changes the outcome less than another draw of
demonstrations does: otherwise rounding decides what fine-tuning does, and no score means anything; nor is any rate
above one that is refused, unless it was tested itself. What seeds differ by contains rounding, which is taken out: or,
where there is nothing else, every second rate would pass. The grid grows by half a decade where the best is at an edge.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fairseq_icl.files import write_atomically
from fairseq_icl.replication.report.charts import Chart, Panel, Series
from fairseq_icl.replication.report.experiments import spreads
from fairseq_icl.replication.report.run import Run, needs
from fairseq_icl.replication.report.tables import Entry, Table, number

SEARCHED = "queries=train"  # the setting by which cells of a search are known
LABELS = "log_likelihood_ft"  # the criterion
TEXT = "demonstration_log_likelihood_ft"  # the fine-tuning loss (negated), which counts every token
RANKING = "auc_ft"
OUTCOMES = (LABELS, RANKING)  # what rounding must not decide
UNTRIED: dict[str, Any] = {"keys": (), "runs": 0}
SEEDS = ["seed", "permutation"]
DRAWS = [1, 2]  # perturbations that a rate is tested with, at every seed
HEADER = """\
# Learning rates that experiment=rate_search chose: for every dataset and method the one of its grid after which labels
# that were not trained on are most likely, among those whose outcome depends less on rounding than on the seed.
"""


@dataclass(frozen=True)
class Choice:
    """What the search knows of one model, dataset and method."""

    model: str
    dataset: str
    method: str
    tried: pd.DataFrame
    """Index lr, ascending; columns runs, keys, the mean and the SD over seeds of LABELS, TEXT and RANKING, and of every
    one of OUTCOMES the SDs by rounding and by seed (without what rounding adds to it); NaN where there is none."""

    @property
    def complete(self) -> pd.DataFrame:
        """The rates that all seeds have finished and that leave a model with finite likelihoods."""
        return self.tried[(self.tried["runs"] == self.tried["runs"].max()) & self.tried[LABELS].notna()]

    def is_admitted(self, rate: float) -> bool | None:
        """Whether rounding matters less than the seed at this rate; None if that was not tested."""
        tested = self.tried.loc[rate]
        known = [name for name in OUTCOMES if pd.notna(tested[f"{name} by rounding"])]
        spreads = [(tested[f"{name} by rounding"], tested[f"{name} by seed"]) for name in known]
        return all(rounding == 0 or rounding < seed for rounding, seed in spreads) if known else None

    @property
    def usable(self) -> list[float]:
        """The rates that are admitted, or not tested and below all that are not: longer steps amplify more."""
        tests = {rate: self.is_admitted(rate) for rate in self.tried.index}
        lowest = min((rate for rate, passed in tests.items() if passed is False), default=math.inf)
        return [rate for rate, passed in tests.items() if passed or (passed is None and rate < lowest)]

    @property
    def rate(self) -> float | None:
        """The best of the rates that can be used; None if there is none."""
        left = self.complete[self.complete.index.isin(self.usable)]
        return None if left.empty else float(left[LABELS].astype(float).idxmax())

    @property
    def by_text(self) -> float | None:
        """What the likelihood of all tokens would have chosen, tested or not."""
        scores = self.complete[TEXT].dropna()
        return None if scores.empty else float(scores.idxmax())

    @property
    def beyond(self) -> float | None:
        """The rate to try next: below the grid if none of it is left, else beyond the edge that the best lies at."""
        first, last = float(self.tried.index[0]), float(self.tried.index[-1])
        if self.rate is None or self.rate == first:
            return half_decade(first, -1)
        return half_decade(last, 1) if self.rate == last else None

    @property
    def problem(self) -> str:
        """Why the choice is not what it should be; empty if it is."""
        if self.rate is None:
            return "rounding decides the outcome at every rate that was tried"
        if self.beyond is not None:
            return "best at the edge of the grid, a wider one may find better"
        return "" if self.is_admitted(self.rate) else "not tested against rounding"


def half_decade(rate: float, steps: int) -> float:
    """The rate so many half decades away, on the grid 0.1, 0.3, 1, 3, 10 ..."""
    return float(f"{10 ** ((round(2 * math.log10(rate)) + steps) / 2):.0e}")


def choose_rates(run: Run, keys: Collection[str] | None = None) -> list[Choice]:
    """A choice for every model, dataset and method tried with several rates on train rows, in the cells with `keys`."""
    settings = run.settings
    searched = [key for key, of in settings.items() if of.get("queries") == "train" and of.get("lr") is not None]
    chosen = run.values["key"].isin(searched if keys is None else set(searched) & set(keys))
    values = run.values[chosen & run.values["layer"].isna() & (run.values["init"] == "pretrained")]
    values = values[values["metric"].isin({*OUTCOMES, TEXT})].drop_duplicates(["key", "metric"])
    draws = [settings[key].get("perturbation", 0) for key in values["key"]]
    values = values.assign(lr=[settings[key]["lr"] for key in values["key"]], draw=draws)
    groups = values.groupby(["model", "dataset", "method"], sort=False)
    return [
        Choice(model, dataset, method, pd.DataFrame({rate: _tried(cells) for rate, cells in group.groupby("lr")}).T)
        for (model, dataset, method), group in groups
        if group["lr"].nunique() > 1
    ]


def _tried(cells: pd.DataFrame) -> dict[str, Any]:
    """What is known of one rate: `cells` are those of all seeds, metrics and perturbations."""
    plain = cells[cells["draw"] == 0]
    found: dict[str, Any] = {"runs": plain["key"].nunique(), "keys": tuple(plain["key"].drop_duplicates())}
    for name in (LABELS, TEXT, RANKING):
        measured = plain.loc[plain["metric"] == name, "value"]
        mean = measured.mean(skipna=False) if len(measured) == found["runs"] else math.nan  # a seed without a value
        found |= {name: mean, f"{name} sd": measured.std()}
    moved = cells[cells["draw"] != 0]["key"].nunique()
    for name in OUTCOMES:
        measured = cells[(cells["metric"] == name) & ((cells["draw"] == 0) | (moved >= found["runs"] * len(DRAWS)))]
        found |= dict(zip((f"{name} by rounding", f"{name} by seed"), spreads(measured, SEEDS), strict=True))
    return found


def next_steps(run: Run, keys: Collection[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """(dataset, method, vary) of what the search still has to try: rates beyond an edge, or the best one perturbed."""
    steps: list[tuple[str, str, dict[str, Any]]] = []
    for choice in choose_rates(run, keys):
        if choice.beyond is not None:
            steps.append((choice.dataset, choice.method, {"lr": [choice.beyond]}))
        elif choice.problem and choice.rate is not None and choice.tried.loc[choice.rate, "runs"] > 1:
            # Of one seed there is no spread to compare that of rounding with.
            steps.append((choice.dataset, choice.method, {"lr": [choice.rate], "perturbation": DRAWS}))
    return steps


@needs(settings=[SEARCHED])
def rate_tables(run: Run) -> list[Table]:
    """One table a model: both likelihoods under every rate with the best one, and the spread by rounding."""
    choices = choose_rates(run)
    tables = []
    for model in dict.fromkeys(choice.model for choice in choices):
        own = [choice for choice in choices if choice.model == model]
        rates = sorted({rate for choice in own for rate in choice.tried.index})
        rows = []
        notes = [
            "Log-likelihood of labels given their inputs, on rows that were not trained on; SD over seeds. The best "
            "admitted rate by it is chosen. Text: of all tokens of the row (the fine-tuning loss, negated), and what "
            "that would have chosen. Rounding: SD of the labels' likelihood with every weight moved by one unit in the "
            "last place, in several draws; seeds: SD over seeds beyond that. A rate is admitted if rounding is below "
            "seeds, for these likelihoods and for the AUC."
        ]
        for choice in own:
            lines = {"labels": (LABELS, choice.rate), "text": (TEXT, choice.by_text)}
            lines |= {"rounding": (f"{LABELS} by rounding", None), "seeds": (f"{LABELS} by seed", None)}
            for label, (name, best) in lines.items():
                known: list[Any] = [choice.tried.loc[x] if x in choice.tried.index else UNTRIED for x in rates]
                numbers = [(number(at.get(name)), number(at.get(f"{name} sd"))) for at in known]
                entries = [
                    Entry(*x, runs=int(at["runs"]), keys=at["keys"]) for x, at in zip(numbers, known, strict=True)
                ]
                rows.append((f"{choice.dataset}: {choice.method}, {label}", (*entries, Entry(best))))
            refused = [f"{rate:g}" for rate in choice.tried.index if choice.is_admitted(rate) is False]
            told = [f"not admitted: {', '.join(refused)}"] * bool(refused) + [choice.problem] * bool(choice.problem)
            notes += [f"{choice.dataset}, {choice.method}: {'; '.join(told)}."] * bool(told)
        columns = (*(f"{rate:g}" for rate in rates), "best rate")
        title = f"Learning rates for {model}"
        tables.append(Table(f"rates_{model}", title, columns, tuple(rows), 4, notes=tuple(notes)))
    return tables


@needs(settings=[SEARCHED])
def rate_figures(run: Run, model: str) -> Iterator[Chart]:
    """The likelihoods of labels and of the text and the AUC against the learning rate, with the rate that is chosen."""
    choices = [choice for choice in choose_rates(run) if choice.model == model]
    for name, title in ((LABELS, "Likelihood of labels"), (TEXT, "Likelihood of rows"), (RANKING, "AUC on rows")):
        panels = []  # one a method: where one diverges, nothing could be seen of the others
        for choice in choices:
            best = choice.by_text if name == TEXT else choice.rate
            curve = choice.tried[[name, f"{name} sd"]].astype(float).dropna(subset=[name])
            series = [Series("rates", list(curve.index), list(curve[name]), list(curve[f"{name} sd"]))]
            series += [Series("best", [x], [float(curve.loc[x, name])]) for x in curve.index if x == best]
            method, dataset = choice.method, choice.dataset
            panels.append(Panel(f"{dataset}: {method}", series, tags={"method": method, "dataset": dataset}))
        title, unit = f"{title} that were not trained on", "AUC" if name == RANKING else "log-likelihood (nats)"
        caption = f"{model}. Mean over rows of the train split; error bars: SD over seeds. Best: by likelihood."
        yield Chart(f"rates_{name}_{model}", title, caption, panels, "learning rate", unit, scale="log")


def write_model_files(run: Run, folder: Path) -> list[Path]:
    """FOLDER/MODEL.yaml for every model of which rates were searched: what `model=` was, with the rates."""
    from fairseq_icl.replication.report.text import file_name  # which needs the claims, and they the sweeps of rates

    choices, written = choose_rates(run), []
    for name, model in run.models.items():
        rates: dict[str, dict[str, float]] = {}
        for choice in choices:
            if choice.model == name and choice.rate is not None:
                rates.setdefault(choice.dataset, {})[choice.method] = choice.rate
        if rates:
            written.append(folder / f"{file_name(name)}.yaml")
            text = yaml.safe_dump({**model, "learning_rates": rates}, sort_keys=False, allow_unicode=True)
            write_atomically(written[-1], HEADER + text)
    return written
