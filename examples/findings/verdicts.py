"""The papers' claims, asked of the cells of a model at its searched rates or at the papers'."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from examples.findings.cells import run_of, written_rates
from fairseq_icl.prompts.catalogue import dataset_names, load_spec
from fairseq_icl.replication.report.claims import NO_DATA, Verdict, corrected, judge
from fairseq_icl.replication.report.claims import verdicts as run_verdicts
from fairseq_icl.replication.report.effects import Sample
from fairseq_icl.replication.report.published import Term, claims, inits_of
from fairseq_icl.replication.report.rates import choose_rates
from fairseq_icl.replication.report.run import Run
from fairseq_icl.training.methods import get_method

EQUAL_LENGTH = "_equal_length"  # how the names of claims end that are of many rates
Rates = dict[tuple[str, str], float]  # of a dataset and method


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


def searched_rates(cells: pd.DataFrame) -> Rates:
    """What the searches among one model's cells chose."""
    searched = cells[cells["queries"] == "train"]
    choices = choose_rates(run_of(searched)) if len(searched) else []
    return {(choice.dataset, choice.method): choice.rate for choice in choices if choice.rate is not None}


def papers_rates(cells: pd.DataFrame) -> Rates:
    """Those of the second paper, which has one a dataset for all methods."""
    known = sorted({*cells["dataset"]} & {*dataset_names()})
    published = {name: load_spec(name).papers.get("deutch2024", {}) for name in known}
    return {
        (name, method): float(said["learning_rate"])
        for name, said in published.items()
        for method in ("gd", "lcgd")
        if said.get("learning_rate")
    }


def at_rates(cells: pd.DataFrame, rates: Rates) -> pd.Series:
    """Which cells have their method's rate, or those of the two that they compare, or read none."""
    at_them = []
    for dataset, method, lr in cells[["dataset", "method", "lr"]].itertuples(index=False):
        own = {name: rates.get((dataset, name)) for name in get_method(method).trained}
        at_them.append(None not in own.values() and lr == (written_rates(own) if own else ""))
    return pd.Series(at_them, index=cells.index, dtype=bool)


def at_equal_length(run: Run, model: str) -> list[Verdict]:
    """Whether layer-causal descent is the closer one where both methods move the model as far as ICL does."""
    found = run_verdicts(run, model) if len(run.values) else []
    return [v for v in found if v.claim.name.endswith(EQUAL_LENGTH) and v.status != NO_DATA]


def verdicts(cells: pd.DataFrame, rates: Rates, equal: Sequence[Verdict] = ()) -> list[Verdict]:
    """Those of the papers' claims that one model's cells at these rates can be asked, and what they say.

    Some claims are of many rates: `equal` is what is said of these.
    """
    plain = cells[(cells["queries"] != "train") & (cells["others"] == "") & at_rates(cells, rates)]
    evidence = CellEvidence(plain[(plain["perturbation"] == 0) & (plain["layer_step_size"] == "")])
    found = [judge(claim, evidence) for claim in claims() if not claim.name.endswith(EQUAL_LENGTH)]
    return [verdict for verdict in corrected([*found, *equal]) if verdict.status != NO_DATA]
