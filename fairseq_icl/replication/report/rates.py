"""What experiment=rate_search found: a table of likelihoods, and a model's YAML file with the chosen learning rates."""

from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from fairseq_icl.files import write_atomically
from fairseq_icl.replication.report.run import Run
from fairseq_icl.replication.report.tables import Entry, Table
from fairseq_icl.replication.report.text import file_name

CRITERION = "demonstration_log_likelihood_ft"
HEADER = """\
# Learning rates that experiment=rate_search chose: for every dataset and method the one of its grid after which
# demonstrations that were not trained on are most likely (the fine-tuning loss, negated). Those of linearized methods
# were not searched: they are those of the method that is linearized, as in the paper.
"""


class Choice(NamedTuple):
    """The rate chosen for one model, dataset and method, out of those that all its seeds have finished."""

    model: str
    dataset: str
    method: str
    likelihoods: pd.DataFrame  # index lr, ascending; columns mean, sd, runs, keys
    rate: float

    @property
    def at_edge(self) -> bool:
        """Whether a rate beyond the grid might be better still."""
        return self.rate in (self.likelihoods.index[0], self.likelihoods.index[-1])


def choose_rates(run: Run) -> list[Choice]:
    """The best rate of every model, dataset and method that was tried with several, on rows of the train split."""
    cells = {key: said["cell"]["settings"] for key, said in run.configurations.items()}
    searched = {key for key, cell in cells.items() if cell.get("queries") == "train" and cell.get("lr") is not None}
    values = run.values[run.values["key"].isin(searched) & (run.values["metric"] == CRITERION)]
    values = values[values["layer"].isna() & (values["init"] == "pretrained")].drop_duplicates("key")
    values = values.assign(lr=[cells[key]["lr"] for key in values["key"]])
    choices = []
    for (model, dataset, method), group in values.groupby(["model", "dataset", "method"], sort=False):
        by_rate = group.groupby("lr").agg(
            mean=("value", "mean"), sd=("value", "std"), runs=("value", "size"), keys=("key", tuple)
        )
        complete = by_rate[by_rate["runs"] == by_rate["runs"].max()]
        if len(by_rate) > 1:
            choices.append(Choice(model, dataset, method, by_rate, float(complete["mean"].idxmax())))
    return choices


def rate_tables(run: Run) -> list[Table]:
    """One table a model: the likelihood under every rate, and the rate chosen."""
    choices = choose_rates(run)
    tables = []
    for model in dict.fromkeys(choice.model for choice in choices):
        own = [choice for choice in choices if choice.model == model]
        rates = sorted({rate for choice in own for rate in choice.likelihoods.index})
        rows = [
            (f"{choice.dataset}: {choice.method}", (*_entries(choice, rates), Entry(choice.rate))) for choice in own
        ]
        notes = ["The fine-tuning loss, negated, on demonstrations that were not trained on: log-likelihood a token."]
        if edge := [f"{choice.dataset}: {choice.method}" for choice in own if choice.at_edge]:
            notes.append(f"Best at the edge of the grid, a wider one (vary.lr) may find better: {', '.join(edge)}.")
        columns = (*(f"{rate:g}" for rate in rates), "chosen rate")
        title = f"Learning rates for {model}"
        tables.append(Table(f"rates_{model}", title, columns, tuple(rows), 4, notes=tuple(notes)))
    return tables


def _entries(choice: Choice, rates: list[float]) -> list[Entry]:
    found: dict[float, Any] = choice.likelihoods.to_dict("index")
    entries = []
    for rate in rates:
        row = found.get(rate)
        sd = None if row is None or pd.isna(row["sd"]) else row["sd"]
        entries.append(Entry() if row is None else Entry(row["mean"], sd, runs=row["runs"], keys=row["keys"]))
    return entries


def write_model_files(run: Run, folder: Path) -> list[Path]:
    """FOLDER/MODEL.yaml for every model of which rates were searched: what `model=` was, with the rates."""
    choices, written = choose_rates(run), []
    for name, model in run.models.items():
        rates: dict[str, dict[str, float]] = {}
        for choice in (choice for choice in choices if choice.model == name):
            rates.setdefault(choice.dataset, {}).update(dict.fromkeys(_learn_alike(choice.method), choice.rate))
        if rates:
            written.append(folder / f"{file_name(name)}.yaml")
            text = yaml.safe_dump({**model, "learning_rates": rates}, sort_keys=False, allow_unicode=True)
            write_atomically(written[-1], HEADER + text)
    return written


def _learn_alike(method: str) -> list[str]:
    """The method and the one that does the same with the linearized model."""
    from fairseq_icl.training.methods import get_method, method_names  # fairseq, which other reports can do without

    linearized = {**get_method(method).options, "linearize": True}
    others = [name for name in method_names() if name != method and get_method(name).trains]
    return [method, *(name for name in others if get_method(name).options == linearized)]
