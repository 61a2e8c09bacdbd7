"""A results folder as data: what was planned, what is finished, and the numbers of all finished cells."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fairseq_icl.errors import UserError
from fairseq_icl.files import reason_of
from fairseq_icl.prompts.rows import DOUBTFUL
from fairseq_icl.replication.store import Store
from fairseq_icl.results import heatmap_matrix, read_curve, read_gradient_record, step_size_matrix, whole_layer_matrix

IDENTITY = ["model", "init", "dataset", "method", "variant"]
"""What a number in a table belongs to; seeds and permutations are averaged over."""


@dataclass(frozen=True)
class Run:
    """Planned cells and their results."""

    folder: Path
    planned: pd.DataFrame
    """One row a planned cell: IDENTITY, seed, permutation, key, finished."""
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

    def cell_folder(self, model: str, key: str) -> Path:
        """Where the files of a finished cell are."""
        return self.folders.get(model, self.folder) / "cells" / key

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
        groups = overall.groupby([*identity, "metric", *settings], sort=False)
        return groups.agg(mean=("value", "mean"), sd=("value", "std"), runs=("value", "size")).reset_index()


def load_run(folder: str | Path) -> Run:
    """Read a results folder; it may be unfinished, or still be written to."""
    store = Store(folder, create=False)
    plans = store.plans()
    if not plans:
        raise UserError(f"{folder}: nothing was planned here yet; start with fairseq-icl replicate out={folder}")
    planned = pd.DataFrame([entry for plan in plans for entry in plan["cells"]])
    planned = planned.drop_duplicates([*IDENTITY, "seed", "permutation", "key"]).reset_index(drop=True)
    planned = with_precisions_apart(planned)
    planned["finished"] = [store.is_finished(key) for key in planned["key"]]
    configurations, tables = {}, []
    records, curves = dict[str, pd.DataFrame](), dict[str, pd.DataFrame]()
    for key in planned.loc[planned["finished"], "key"].drop_duplicates():
        cell = read_cell(store, key)
        configurations[key] = cell.configuration
        tables.append(cell.means.assign(key=key))
        if cell.record is not None:
            records[key] = cell.record
        if cell.curve is not None:
            curves[key] = cell.curve
    names = ["key", "metric", "layer", "value", "low", "high"]
    numbers = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=names)
    values = planned.drop(columns="finished").merge(numbers, on="key", how="inner")
    shown = dict.fromkeys(name for plan in plans for name in plan["tables"] if isinstance(name, str))
    experiments = dict.fromkeys(plan["experiment"] for plan in plans)
    sizes = {key: step_size_matrix(record) for key, record in records.items()}
    whole = {key: whole_layer_matrix(record) for key, record in records.items()}
    models = {str(said.get("name")): said for plan in plans if isinstance(said := plan.get("model"), dict)}
    for name in planned["model"].drop_duplicates():  # those that got a precision into their name
        models |= {name: models[plain]} if name not in models and (plain := name.rpartition(" (")[0]) in models else {}
    return Run(
        folder=Path(folder),
        planned=planned,
        configurations=configurations,
        values=values,
        experiments=list(experiments),
        tables=list(shown),
        gradients={key: heatmap_matrix(record) for key, record in records.items()},
        models=models,
        curves=curves,
        step_sizes={key: size for key, size in sizes.items() if size is not None},
        whole_layers={key: norms for key, norms in whole.items() if norms is not None},
        steps={key: steps_of(record) for key, record in records.items()},
    )


BY_KEY = ("configurations", "gradients", "whole_layers", "models", "curves", "step_sizes", "steps")
"""What a run has by the keys of cells (or the names of models)."""


def with_precisions_apart(planned: pd.DataFrame) -> pd.DataFrame:
    """Planned cells, with a model's name saying the precision where tables would average over several.

    `precision` is a column where some plan has one other than fp32; it is gone afterwards.
    """
    if "precision" not in planned:
        return planned
    precision = planned["precision"].fillna("fp32")
    mixed = precision.groupby([planned[name] for name in IDENTITY]).transform("nunique") > 1
    of_model = planned["model"].isin(planned.loc[mixed, "model"]) & ~planned["variant"].str.contains("precision=")
    renamed = planned["model"].where(~of_model | (precision == "fp32"), planned["model"] + " (" + precision + ")")
    return planned.drop(columns="precision").assign(model=renamed)


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


@dataclass(frozen=True)
class CellResults:
    """What a finished cell's folder holds."""

    configuration: dict[str, Any]
    means: pd.DataFrame
    record: pd.DataFrame | None = None
    """Of the gradients."""
    curve: pd.DataFrame | None = None


def read_cell(store: Store, key: str) -> CellResults:
    """A finished cell; a UserError names the file that is damaged and what to do about it."""
    folder = store.cell_folder(key)
    try:
        configuration = store.read_json(folder / "cell.json")
        said = configuration.get("cell")
        if not isinstance(said, dict) or not isinstance(said.get("settings"), dict):
            raise UserError(f"{folder / 'cell.json'}: damaged, it has no settings of a cell")
        gradients, over_j = folder / "gradients.parquet", folder / "curve.parquet"
        return CellResults(
            configuration,
            read_means(folder / "results.parquet"),
            record=read_gradient_record(gradients)[0] if os.path.lexists(gradients) else None,
            curve=read_curve(over_j) if os.path.lexists(over_j) else None,
        )
    except UserError as error:
        said_of = str(error).split("; make it with")[0]  # a cell's record is not made by hand
        raise UserError(f"{said_of}; remove the folder {folder} and give the replicate command again") from error


def check_cells(store: Store, keys: Iterable[str]) -> None:
    """Refuse a folder in which one of these cells is there but cannot be read, before others are computed."""
    for key in dict.fromkeys(keys):
        place = store.cell_folder(key)
        if store.is_finished(key):
            read_cell(store, key)
        elif os.path.lexists(place):
            raise UserError(f"{place}: not a folder; remove it and give the replicate command again")


def read_means(path: Path) -> pd.DataFrame:
    """The means over examples in a results file; the many values of single examples stay on disk."""
    columns = ["metric", "layer", "value", "low", "high"]
    try:
        table = pq.read_table(
            path, columns=columns, filters=pc.field("example").is_null(), page_checksum_verification=True
        )
        return table.to_pandas().astype({"layer": "Int64", "low": "float64", "high": "float64"})
    except (pa.ArrowException, OSError, LookupError, ValueError, TypeError) as error:
        raise UserError(f"{path}: damaged, or not a file of results ({reason_of(error)})") from error
