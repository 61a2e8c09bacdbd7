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

IDENTITY = ["model", "init", "dataset", "method", "variant"]
"""What a number in a table belongs to; seeds are averaged over."""
AVERAGED = ("seed", "permutation", "init")
"""Settings that are told apart elsewhere, or averaged over."""
BY_KEY = ("configurations", "gradients", "whole_layers", "models", "curves", "step_sizes", "steps")
"""What a run has by the keys of cells (or the names of models)."""
MOST_NAMED = 5
"""Cells that a warning names."""
Part = TypeVar("Part", bound=Callable[..., Any])


@dataclass(frozen=True)
class Run:
    """Planned cells and their results."""

    folder: Path
    planned: pd.DataFrame
    """One row a planned cell: IDENTITY, plain_model (its name without what tells it apart), seed, permutation, key,
    finished."""
    configurations: dict[str, dict[str, Any]]
    """Key -> the cell's configuration, with the command that fine-tunes it."""
    values: pd.DataFrame
    """Means of all finished cells: IDENTITY, seed, permutation, key, metric, layer, value, low, high."""
    experiments: list[str]
    tables: list[str]
    """Names of the published tables to show."""
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """Key -> l2 norm of each layer's gradient at each step: (steps, layers)."""
    whole_layers: dict[str, np.ndarray] = field(default_factory=dict)
    """The same of all parameters of a layer, summed over tokens; of cells with gradient_norms=all."""
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a model -> what `model` was in the configuration."""
    curves: dict[str, pd.DataFrame] = field(default_factory=dict)
    """Key -> metrics after each demonstration (CURVE_COLUMNS)."""
    step_sizes: dict[str, np.ndarray] = field(default_factory=dict)
    """Key -> relative size |dW| / |W| of each layer's step: (steps, layers)."""
    steps: dict[str, pd.DataFrame] = field(default_factory=dict)
    """Key -> loss_bits, sample_size and gradient_norm of each step of fine-tuning."""
    folders: dict[str, Path] = field(default_factory=dict)
    """Model -> the results folder it comes from, where there are several."""

    def cell_folder(self, model: str, key: str) -> CellFolder:
        """The files of a finished cell."""
        return ResultsFolder(self.folders.get(model, self.folder), create=False).cell(key)

    def setting(self, name: str, keys: pd.Series) -> pd.Series:
        """The value of a setting of the cells with these keys."""
        return keys.map(lambda key: self.configurations[key]["cell"]["settings"].get(name))

    @cached_property
    def content(self) -> dict[str, set[str]]:
        """What there is to show: metrics, what differs between cells, values of settings, records and experiments."""
        settings = pd.DataFrame([said["cell"]["settings"] for said in self.configurations.values()]).astype(str)
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
    def precisions(self) -> list[str]:
        """In which the finished cells were computed; results from before there was a choice are in fp32."""
        return sorted({said["cell"]["settings"].get("precision", "fp32") for said in self.configurations.values()})

    @property
    def computed_in(self) -> str:
        """The precisions in words."""
        return f"Computed in {', '.join(self.precisions)}." if self.precisions else ""

    @property
    def warnings(self) -> list[str]:
        """What a reader of the tables has to know: cells rounded differently, rows that are not those of the papers."""
        warnings = []
        machines = [said.get("machine") for said in self.configurations.values()]
        for name in ("threads", "device", "precision"):
            found = {str(machine[name]) for machine in machines if isinstance(machine, dict) and name in machine}
            if len(found) > 1:
                warnings.append(
                    f"The cells of this folder were computed with different {name} ({', '.join(sorted(found))}): they "
                    "differ by rounding, which fine-tuning amplifies (experiment=stability measures it)."
                )
        versions = [said.get("versions") for said in self.configurations.values()]
        for name in dict.fromkeys(name for said in versions if isinstance(said, dict) for name in said):
            found = {str(said[name]) for said in versions if isinstance(said, dict) and name in said}
            if len(found) > 1:
                told = ", ".join(sorted(found))
                warnings.append(f"The cells of this folder were computed with several versions of {name} ({told}).")
        skipped = self.values[(self.values["metric"] == "skipped_updates") & (self.values["value"] > 0)]
        if len(skipped):
            worst = skipped.drop_duplicates("key").sort_values("value", ascending=False).head(MOST_NAMED)
            named = [f"{row.dataset}, {row.method}, seed {row.seed}: {row.value:g}" for row in worst.itertuples()]
            warnings.append(
                f"Updates of fine-tuning were skipped in {skipped['key'].nunique()} cells, whose demonstrations were "
                f"not all learnt from ({'; '.join(named)})."
            )
        cells = [(said["cell"], said.get("lr_made_for")) for said in self.configurations.values()]
        rates = [(cell["dataset"], cell["model"], lender) for cell, lender in cells if lender]
        warnings += [borrowed_rate(*of) for of in dict.fromkeys(rates) if of[1] != of[2]]
        return warnings + self._warnings_of_rows()

    def _warnings_of_rows(self) -> list[str]:
        """Datasets whose rows differ within the folder, or from those of the papers: a seed draws others."""
        seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for said in self.configurations.values():
            rows = said.get("rows")  # results of earlier versions have none
            for split, record in rows.items() if isinstance(rows, dict) else ():
                if isinstance(record, dict):
                    seen.setdefault((str(said["cell"].get("dataset")), str(split)), []).append(record)
        warnings = []
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
        return groups.agg(
            mean=("value", "mean"),
            sd=("value", "std"),
            least=("value", "min"),
            runs=("value", "size"),
            low=("low", "mean"),
            high=("high", "mean"),
            keys=("key", list),
        ).reset_index()

    @cached_property
    def layers(self) -> pd.DataFrame:
        """For every IDENTITY, metric and layer: mean, sd and runs over seeds."""
        single = self.values[self.values["layer"].notna()]
        groups = single.groupby([*IDENTITY, "metric", "layer"], sort=False)
        return groups.agg(mean=("value", "mean"), sd=("value", "std"), runs=("value", "size")).reset_index()

    def against(self, *settings: str) -> pd.DataFrame:
        """Means by IDENTITY without the variant, metric and the values of `settings`: mean, sd and runs over seeds."""
        overall = self.values[self.values["layer"].isna()]
        cells = {key: configuration["cell"]["settings"] for key, configuration in self.configurations.items()}
        if "perturbation" not in settings:  # a cell with its weights moved is no further seed
            overall = overall[[not cells[key].get("perturbation") for key in overall["key"]]]
        # Other variants (a clipped one, say) are told apart by all settings but these.
        others = {key: json.dumps({n: v for n, v in cell.items() if n not in settings}) for key, cell in cells.items()}
        overall = overall.assign(
            others=overall["key"].map(others),
            **{setting: [cells[key].get(setting) for key in overall["key"]] for setting in settings},
        )
        plain = overall.loc[overall["variant"] == "", "others"]
        if not plain.empty:
            overall = overall[overall["others"].isin(set(plain))]
        identity = [name for name in IDENTITY if name != "variant"]
        told_by = [f"{name}=" for name in settings]
        plain_name = overall["model"].map(lambda model: not any(word in model for word in told_by))
        overall = overall.assign(model=overall["model"].where(plain_name, overall["plain_model"]))
        groups = overall.groupby([*identity, "metric", *settings], sort=False)
        return groups.agg(mean=("value", "mean"), sd=("value", "std"), runs=("value", "size")).reset_index()


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
    names = ["key", "metric", "layer", "value", "low", "high"]
    tables = [cell.means.assign(key=key) for key, cell in cells.items()]
    numbers = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=names)
    records = {key: cell.record for key, cell in cells.items() if cell.record is not None}
    sizes = {key: step_size_matrix(record) for key, record in records.items()}
    whole = {key: whole_layer_matrix(record) for key, record in records.items()}
    return Run(
        folder=Path(folder),
        planned=planned,
        configurations={key: cell.configuration for key, cell in cells.items()},
        values=planned.drop(columns="finished").merge(numbers, on="key", how="inner"),
        experiments=list(dict.fromkeys(plan.experiment for plan in plans)),
        tables=list(dict.fromkeys(name for plan in plans for name in plan.tables if isinstance(name, str))),
        gradients={key: heatmap_matrix(record) for key, record in records.items()},
        models=models,
        curves={key: cell.curve for key, cell in cells.items() if cell.curve is not None},
        step_sizes={key: size for key, size in sizes.items() if size is not None},
        whole_layers={key: norms for key, norms in whole.items() if norms is not None},
        steps={key: steps_of(record) for key, record in records.items()},
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
    cells = [cell for _, cell in group]
    for part in ("settings", "prints"):
        said = [getattr(cell, part) for cell in cells]
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
    folders: dict[str, Path] = {}
    renamed = []
    for number, run in enumerate(runs):
        same = [other for other in runs if other is not run and other.folder.name == run.folder.name]
        label = f"{run.folder.name} ({number + 1})" if same else run.folder.name
        new = {model: f"{model} [{label}]" if names.count(model) > 1 else model for model in set(names)}
        folders |= {new[model]: run.folder for model in run.planned["model"].drop_duplicates()}
        frames = (run.planned.replace({"model": new}), run.values.replace({"model": new}))
        models = {new.get(name, name): said for name, said in run.models.items()}
        renamed.append(replace(run, planned=frames[0], values=frames[1], models=models))

    def joined(name: str) -> dict[str, Any]:
        return {key: value for run in renamed for key, value in getattr(run, name).items()}

    return Run(
        folder=runs[0].folder,
        planned=pd.concat([run.planned for run in renamed], ignore_index=True),
        values=pd.concat([run.values for run in renamed], ignore_index=True),
        experiments=list(dict.fromkeys(name for run in renamed for name in run.experiments)),
        tables=list(dict.fromkeys(name for run in renamed for name in run.tables)),
        folders=folders,
        **{name: joined(name) for name in BY_KEY},
    )


def steps_of(record: pd.DataFrame) -> pd.DataFrame:
    """Loss (bits a token, summed over layers where they have losses), tokens and gradient norm of every step."""
    groups = record.sort_values("step").groupby("step")
    first = groups[["loss_sum", "sample_size"]].first()
    return pd.DataFrame(
        {
            "loss_bits": first["loss_sum"] / first["sample_size"] / np.log(2),
            "sample_size": first["sample_size"],
            "gradient_norm": np.sqrt(groups["norm"].agg(lambda norms: float((norms**2).sum()))),
        }
    )


FIRST_COLUMNS = ["model", "dataset", "method", "init", "variant", "seed", "permutation"]
LAST_COLUMNS = ["metric", "layer", "value", "low", "high", "key"]


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
    settings = {key: said["cell"]["settings"] for key, said in run.configurations.items()}
    cells = pd.DataFrame.from_dict(settings, orient="index", columns=list(SETTINGS)).rename_axis("key")
    differing = [name for name in SETTINGS if cells[name].astype(str).nunique() > 1 and name not in FIRST_COLUMNS]
    shown = list(dict.fromkeys(["num_demonstrations", "lr", *differing]))
    values = run.values.assign(model=run.values["plain_model"]).merge(cells[shown].reset_index(), on="key")
    return values[[*FIRST_COLUMNS, *shown, *LAST_COLUMNS]].rename(columns={"num_demonstrations": "k"})
