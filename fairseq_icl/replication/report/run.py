"""A results folder as data: what was planned, what is finished, and the numbers of all finished cells."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from fairseq_icl.errors import UserError
from fairseq_icl.prompts.readers import DOUBTFUL
from fairseq_icl.replication.artefacts import CellFolder, PlanFile, PlannedCell
from fairseq_icl.replication.configuration import FROM_PAPER
from fairseq_icl.replication.folders import ResultsFolder
from fairseq_icl.replication.plan import borrowed_rate
from fairseq_icl.results import heatmap_matrix, step_size_matrix, whole_layer_matrix
from fairseq_icl.settings import SETTINGS

IDENTITY = ["model", "init", "dataset", "method", "variant"]  # of a number in a table; seeds are averaged over
AVERAGED = ("seed", "permutation", "init")  # settings that are told apart elsewhere, or averaged over
BY_KEY = ("configurations", "gradients", "whole_layers", "models", "curves", "step_sizes", "steps")
"""What a run has by the keys of cells (or the names of models)."""
MOST_NAMED = 5  # cells that a warning names
DIFFERENT = {
    "machine": "The cells of this folder were computed with different {} ({}): they differ by rounding, which "
    "fine-tuning amplifies (experiment=stability measures it).",
    "versions": "The cells of this folder were computed with several versions of {} ({}).",
}
"""Part of a cell's configuration -> the warning if something in it is not the same in all cells."""
Part = TypeVar("Part", bound=Callable[..., Any])


@dataclass(frozen=True)
class Run:
    """Planned cells and their results."""

    folder: Path
    planned: pd.DataFrame
    """One row a planned cell: IDENTITY, plain_model (its name without what tells it apart), seed, permutation, key,
    finished."""
    configurations: dict[str, dict[str, Any]]  # key -> the cell's configuration, with the command that fine-tunes it
    values: pd.DataFrame
    """Means of all finished cells: IDENTITY, seed, permutation, key, metric, layer, value, low, high."""
    experiments: list[str]
    tables: list[str]  # names of the published tables to show
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """Key -> l2 norm of each layer's gradient at each step: (steps, layers)."""
    whole_layers: dict[str, np.ndarray] = field(default_factory=dict)
    """The same of all parameters of a layer, summed over tokens; of cells with gradient_norms=all."""
    models: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> what `model` was in the configuration
    curves: dict[str, pd.DataFrame] = field(default_factory=dict)  # key -> metrics after each demonstration
    step_sizes: dict[str, np.ndarray] = field(default_factory=dict)  # key -> |dW| / |W|: (steps, layers)
    steps: dict[str, pd.DataFrame] = field(default_factory=dict)  # key -> what `steps_of` says
    folders: dict[str, Path] = field(default_factory=dict)  # model -> its results folder, where there are several

    def cell_folder(self, model: str, key: str) -> CellFolder:
        """The files of a finished cell."""
        return ResultsFolder(self.folders.get(model, self.folder), create=False).cell(key)

    @cached_property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Key -> the settings of the cell."""
        return {key: said["cell"]["settings"] for key, said in self.configurations.items()}

    @cached_property
    def content(self) -> dict[str, set[str]]:
        """What there is to show: metrics, what differs between cells, values of settings, records and experiments."""
        settings = pd.DataFrame(list(self.settings.values())).astype(str)
        planned = self.planned[[*IDENTITY, "permutation"]]
        return {
            "metrics": set(self.values["metric"]),
            "differing": {str(name) for frame in (settings, planned) for name in frame if frame[name].nunique() > 1},
            "settings": {f"{name}={value}" for name in settings for value in settings[name].unique()},
            "kept": {name for name in BY_KEY if getattr(self, name)},
            "experiments": set(self.experiments),
        }

    @property
    def missing(self) -> pd.DataFrame:
        """Planned cells without results."""
        return self.planned[~self.planned["finished"]]

    @property
    def computed_in(self) -> str:
        """The precisions of the finished cells in words; results from before there was a choice are in fp32."""
        found = sorted({settings.get("precision", "fp32") for settings in self.settings.values()})
        return f"Computed in {', '.join(found)}." if found else ""

    @property
    def warnings(self) -> list[str]:
        """What a reader of the tables has to know: cells rounded differently, rows that are not those of the papers."""
        said, warnings = list(self.configurations.values()), []
        for part, words in DIFFERENT.items():
            records = [one.get(part, {}) for one in said]
            names = dict.fromkeys(name for record in records for name in record)
            for name in ("threads", "device", "precision") if part == "machine" else names:
                found = sorted({str(record[name]) for record in records if name in record})
                if len(found) > 1:
                    warnings.append(words.format(name, ", ".join(found)))
        skipped = self.values[(self.values["metric"] == "skipped_updates") & (self.values["value"] > 0)]
        if len(skipped):
            worst = skipped.drop_duplicates("key").sort_values("value", ascending=False).head(MOST_NAMED)
            named = [f"{row.dataset}, {row.method}, seed {row.seed}: {row.value:g}" for row in worst.itertuples()]
            warnings.append(
                f"Updates of fine-tuning were skipped in {skipped['key'].nunique()} cells, whose demonstrations were "
                f"not all learnt from ({'; '.join(named)})."
            )
        lent = [(one["cell"], one["lr_made_for"]) for one in said if one.get("lr_made_for")]
        rates = dict.fromkeys((cell["dataset"], cell["model"], lender) for cell, lender in lent)
        warnings += [borrowed_rate(*of) for of in rates if of[1] != of[2]]
        seen: dict[tuple[str, str], list[dict[str, Any]]] = {}  # what is known of the rows of a dataset and split
        for one in said:
            for split, record in one.get("rows", {}).items():  # results of earlier versions have none
                seen.setdefault((str(one["cell"].get("dataset")), split), []).append(record)
        for (dataset, split), records in seen.items():
            if len({str(record.get("sha256")) for record in records}) > 1:
                warnings.append(f"{dataset}: cells of this folder read different {split} rows, or in different orders.")
            if any(record.get("likeness") in DOUBTFUL for record in records):
                warnings.append(
                    f"{dataset}: its {split} rows are not, or not surely, row for row those of the papers; a seed "
                    "draws other ones than theirs (fairseq-icl datasets says what differs)."
                )
        return warnings

    @cached_property
    def summary(self) -> pd.DataFrame:
        """For every IDENTITY and metric: mean, sd, runs over seeds, and the mean bootstrap limits low and high."""
        overall = self.values[self.values["layer"].isna()]
        groups = overall.groupby([*IDENTITY, "metric"], sort=False)
        how = {"mean": "mean", "sd": "std", "least": "min", "runs": "size"}
        of_values = {name: ("value", function) for name, function in how.items()}
        return groups.agg(**of_values, low=("low", "mean"), high=("high", "mean"), keys=("key", list)).reset_index()

    @cached_property
    def layers(self) -> pd.DataFrame:
        """For every IDENTITY, metric and layer: mean, sd and runs over seeds."""
        return over_seeds(self.values[self.values["layer"].notna()], [*IDENTITY, "metric", "layer"])

    def against(self, *settings: str) -> pd.DataFrame:
        """Means by IDENTITY without the variant, metric and the values of `settings`: mean, sd and runs over seeds."""
        overall, cells = self.values[self.values["layer"].isna()], self.settings
        if "perturbation" not in settings:  # a cell with its weights moved is no further seed
            overall = overall[[not cells[key].get("perturbation") for key in overall["key"]]]
        # Other variants (a clipped one, say) are told apart by all settings but these.
        others = {key: json.dumps({n: v for n, v in cell.items() if n not in settings}) for key, cell in cells.items()}
        own = {name: [cells[key].get(name) for key in overall["key"]] for name in settings}
        overall = overall.assign(others=overall["key"].map(others), **own)
        plain = overall.loc[overall["variant"] == "", "others"]
        if not plain.empty:
            overall = overall[overall["others"].isin(set(plain))]
        plain_name = overall["model"].map(lambda model: not any(f"{name}=" in model for name in settings))
        overall = overall.assign(model=overall["model"].where(plain_name, overall["plain_model"]))
        return over_seeds(overall, [*(name for name in IDENTITY if name != "variant"), "metric", *settings])


def over_seeds(values: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Mean, sd and number (runs) of the values of every group, in the order in which groups appear."""
    return values.groupby(list(by), sort=False)["value"].agg(mean="mean", sd="std", runs="size").reset_index()


def needs(**kinds: Iterable[str]) -> Callable[[Part], Part]:
    """Say beside a figure or table what it is made of: of every kind of `Run.content`, one of these at least."""

    def declared(part: Part) -> Part:
        vars(part)["needs"] = {kind: set(names) for kind, names in kinds.items()}
        return part

    return declared


def with_data(run: Run, parts: Iterable[Part]) -> list[Part]:
    """The figures or tables that the run has data for; the others are not called."""
    return [part for part in parts if all(names & run.content[kind] for kind, names in vars(part)["needs"].items())]


def plain(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """The rows of a model's plain cells."""
    return frame[(frame["model"] == model) & (frame["variant"] == "")]


def load_run(folder: str | Path) -> Run:
    """Read a results folder; it may be unfinished, or still be written to."""
    results = ResultsFolder(folder, create=False)
    plans = results.plans()
    if not plans:
        raise UserError(f"{folder}: nothing was planned here yet; start with fairseq-icl replicate out={folder}")
    planned, models = told_apart(plans)
    planned["finished"] = [results.cell(key).path.is_dir() for key in planned["key"]]
    cells = {key: results.cell(key).read() for key in planned.loc[planned["finished"], "key"].drop_duplicates()}
    no_numbers = pd.DataFrame(columns=["key", "metric", "layer", "value", "low", "high"])
    tables = [cell.means.assign(key=key) for key, cell in cells.items()] or [no_numbers]
    records = {key: cell.record for key, cell in cells.items() if cell.record is not None}

    def recorded(matrix_of: Callable[[pd.DataFrame], Any]) -> dict[str, Any]:
        made = {key: matrix_of(record) for key, record in records.items()}
        return {key: matrix for key, matrix in made.items() if matrix is not None}

    return Run(
        folder=Path(folder),
        planned=planned,
        configurations={key: cell.configuration for key, cell in cells.items()},
        values=planned.drop(columns="finished").merge(pd.concat(tables, ignore_index=True), on="key"),
        experiments=list(dict.fromkeys(plan.experiment for plan in plans)),
        tables=list(dict.fromkeys(name for plan in plans for name in plan.tables if isinstance(name, str))),
        gradients=recorded(heatmap_matrix),
        models=models,
        curves={key: cell.curve for key, cell in cells.items() if cell.curve is not None},
        step_sizes=recorded(step_size_matrix),
        whole_layers=recorded(whole_layer_matrix),
        steps=recorded(steps_of),
    )


def told_apart(plans: Sequence[PlanFile]) -> tuple[pd.DataFrame, dict[str, dict[str, Any]]]:
    """All planned cells, and what is known of each model; tables average over nothing but seeds.

    Where cells of one IDENTITY differ in anything else (a learning rate, k, the data), the model's name says in what:
    "demo (lr=0.05)" and "demo (lr=0.2)" are two in every table, figure and verdict. Orders of the demonstrations are
    averaged over where the experiment says so.
    """
    entries = [(plan, cell) for plan in plans for cell in plan.cells]
    groups: dict[tuple[str, ...], list[tuple[PlanFile, PlannedCell]]] = {}
    for plan, cell in entries:
        groups.setdefault(tuple(getattr(cell, name) for name in IDENTITY), []).append((plan, cell))
    differing: dict[str, dict[str, None]] = {}
    for (model, *_), group in groups.items():
        differing.setdefault(model, {}).update(dict.fromkeys(_differences(group)))
    rows, models = [], dict[str, dict[str, Any]]()
    for plan, cell in entries:
        names = [name for name in differing[cell.model] if f"{name}=" not in cell.variant]
        words = [word for name in names if (word := _said(plan, cell, name))]
        model = f"{cell.model} ({', '.join(words)})" if words else cell.model
        models[model] = {**plan.model, "name": cell.model}
        kept = {name: getattr(cell, name) for name in (*IDENTITY, "seed", "permutation", "key")}
        rows.append(kept | {"model": model, "plain_model": cell.model})
    return pd.DataFrame(rows).drop_duplicates().reset_index(drop=True), models


def _differences(group: Sequence[tuple[PlanFile, PlannedCell]]) -> Iterator[str]:
    """In what cells of one IDENTITY differ that must not be averaged over."""
    for part in ("settings", "prints"):
        said = [getattr(cell, part) for _, cell in group]
        for name in dict.fromkeys(name for one in said for name in one):
            if name not in AVERAGED and len({str(one.get(name)) for one in said}) > 1:
                yield name
    orders: dict[int, set[int]] = {}
    for plan, cell in group:
        if "permutation" not in plan.average_over:
            orders.setdefault(cell.seed, set()).add(cell.permutation)
    if any(len(several) > 1 for several in orders.values()):
        yield "permutation"


def _said(plan: PlanFile, cell: PlannedCell, name: str) -> str:
    """How a model's name tells a cell by one of its settings."""
    if name == "permutation":
        return "" if "permutation" in plan.average_over else f"permutation={cell.permutation}"
    if name in cell.prints:
        return f"{name} {cell.prints[name][:8]}"
    if name in FROM_PAPER and plan.asked.get(name) is None:
        return f"{name} of the {'model' if name == 'lr' and plan.model.get('learning_rates') else 'paper'}"
    value = cell.settings.get(name, SETTINGS[name].default)
    return f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"


def side_by_side(runs: Sequence[Run]) -> Run:
    """Several results folders as one run; models of the same name are told apart by their folders."""
    names = [model for run in runs for model in run.planned["model"].drop_duplicates()]
    labels = [run.folder.name for run in runs]
    folders: dict[str, Path] = {}
    renamed = []
    for number, run in enumerate(runs):
        label = labels[number] if labels.count(labels[number]) == 1 else f"{labels[number]} ({number + 1})"
        new = {model: f"{model} [{label}]" if names.count(model) > 1 else model for model in set(names)}
        folders |= {new[model]: run.folder for model in run.planned["model"].drop_duplicates()}
        frames = {name: getattr(run, name).replace({"model": new}) for name in ("planned", "values")}
        models = {new.get(name, name): said for name, said in run.models.items()}
        renamed.append(replace(run, **frames, models=models))
    return Run(
        folder=runs[0].folder,
        planned=pd.concat([run.planned for run in renamed], ignore_index=True),
        values=pd.concat([run.values for run in renamed], ignore_index=True),
        experiments=list(dict.fromkeys(name for run in renamed for name in run.experiments)),
        tables=list(dict.fromkeys(name for run in renamed for name in run.tables)),
        folders=folders,
        **{name: {key: one for run in renamed for key, one in getattr(run, name).items()} for name in BY_KEY},
    )


def steps_of(record: pd.DataFrame) -> pd.DataFrame:
    """Loss (bits a token, summed over layers where they have losses), tokens and gradient norm of every step."""
    groups = record.sort_values("step").groupby("step")
    first = groups[["loss_sum", "sample_size"]].first()
    bits = first["loss_sum"] / first["sample_size"] / np.log(2)
    norms = np.sqrt(groups["norm"].agg(lambda norms: float((norms**2).sum())))
    return pd.DataFrame({"loss_bits": bits, "sample_size": first["sample_size"], "gradient_norm": norms})


def read_run(folder: str | Path) -> pd.DataFrame:
    """All finished cells of a results folder: a row for every cell, metric and layer (missing: over all layers).

    Args:
        folder: What `fairseq-icl replicate` was given as `out`.

    Returns:
        Columns model, dataset, method, init, variant, seed, permutation, k, lr, every other setting that differs
            between cells, metric, layer, value (mean over examples), low, high (its 95 % interval), key (of the cell's
            folder).

    Example:
        ```python
        run = fi.read_run("RUN")
        overall = run[(run["metric"] == "sim_aou") & run["layer"].isna()]
        overall.pivot_table("value", "k", "method").plot()  # a mean over seeds
        ```
    """
    run = load_run(folder)
    first = ["model", "dataset", "method", "init", "variant", "seed", "permutation"]
    cells = pd.DataFrame.from_dict(run.settings, orient="index", columns=list(SETTINGS)).rename_axis("key")
    differing = [name for name in SETTINGS if cells[name].astype(str).nunique() > 1 and name not in first]
    shown = list(dict.fromkeys(["num_demonstrations", "lr", *differing]))
    values = run.values.assign(model=run.values["plain_model"]).merge(cells[shown].reset_index(), on="key")
    last = ["metric", "layer", "value", "low", "high", "key"]
    return values[[*first, *shown, *last]].rename(columns={"num_demonstrations": "k"})
