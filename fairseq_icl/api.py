"""The public Python functions: load a model, build prompts, observe, fine-tune, compare, draw.

They are what the fairseq criterion, the replication engine and the benchmark call; a number computed in a notebook, one
printed by `fairseq-validate` and one in a report come from the same lines of code.
"""

import logging
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from fairseq_icl import (
    models,
    tasks,  # noqa: F401 - registers task and criterions, which training asks fairseq for
)
from fairseq_icl.errors import UserError
from fairseq_icl.fetching import HUB, split_name
from fairseq_icl.files import DEMO_DATA
from fairseq_icl.models import Model
from fairseq_icl.observing import observe
from fairseq_icl.prompts import build
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.prompts.catalogue import find_spec
from fairseq_icl.results import collector
from fairseq_icl.results.drawing import layers_figure
from fairseq_icl.settings import Settings
from fairseq_icl.training.fine_tuning import fine_tuned

logger = logging.getLogger(__name__)

__all__ = ["build_prompts", "compare", "fine_tuned", "load_model", "observe", "plot_layers"]


@wraps(models.load_model)
def load_model(path: str | Path = "demo", **options: Any) -> Model:
    """`models.load_model`; "hub:OWNER/NAME" is fetched into the hub's own cache if it is not there."""
    if str(path).startswith(HUB):
        from fairseq_icl.fetching.models import cached_hub_model

        options["name"] = options.get("name") or split_name(str(path))[0].rpartition("/")[2]
        path = cached_hub_model(str(path))
    return models.load_model(path, **options)


@wraps(collector.compare)
def compare(prompts: Prompts, zsl: Any, icl: Any, ft: Any | None = None, **options: Any) -> pd.DataFrame:
    """`results.collector.compare`; a fine-tuned model that answers as before is worth a word (reports say it too)."""
    if ft is not None and torch.equal(ft.prediction, zsl.prediction):
        problem = "changed no prediction: Rec2FTP and the like are undefined; a higher lr may change some"
        logger.warning("%s %s", ft.method, problem)
    return collector.compare(prompts, zsl, icl, ft, **options)


def build_prompts(
    model: Model,
    dataset: str,
    *,
    data: str | Path | None = None,
    k: int = 32,
    seed: int = 1,
    reading: str = "authors",
    **settings: Any,
) -> Prompts:
    """Demonstrations and queries of a dataset in the model's tokens.

    Args:
        model: Of `load_model`: its tokenizer writes them, its length decides how many demonstrations fit.
        dataset: A name of the catalogue (`fairseq-icl datasets`), or the path of a YAML file of your own.
        data: Folder with the datasets' files; by default the shipped one, which has the demo datasets.
        k: Number of demonstrations.
        seed: Of their draw.
        reading: "authors" (what was run) or "paper" (what the text says), for every setting in which they differ.
        settings: Any other setting by name, e.g. `limit=60`, `permutation=1`, `position="query"`,
            `switch_labels="demonstrations"`: those of the page "Settings" that affect prompts or observing.

    Returns:
        Queries, ICL context and fine-tuning sequences; `prompts.text(0)` shows them.

    Example:
        ```python
        prompts = fi.build_prompts(model, "sst2", data="DATA", k=32, seed=1, limit=60)
        print(prompts.text(0))
        ```
    """
    if not isinstance(data, str | Path | None):
        raise UserError(f"data={data!r}: not a path; give the folder with the dataset's files")
    folder = DEMO_DATA if data is None or str(data) == "demo" else Path(data)
    for name in ("num_demonstrations", "init", "attention", "precision"):
        if name in settings:
            where = "k=..." if name == "num_demonstrations" else f"{name}= to load_model"
            raise UserError(f"{name}: give {where} instead")
    if not isinstance(dataset, str) or not folder.is_dir():
        wrong = f"data={folder}: no such folder" if isinstance(dataset, str) else f"dataset={dataset!r}: not a name"
        raise UserError(f"{wrong}; give a dataset's name or YAML, and the folder with its files")
    of_model = {"init": model.init, "attention": model.attention, "precision": model.precision}
    chosen = Settings.of(reading, num_demonstrations=k, seed=seed, **of_model, **settings)
    built = build.build_prompts(find_spec(dataset, folder), folder, model.writing, chosen)
    return replace(built, spell=model.files.spell)


def plot_layers(table: pd.DataFrame, metric: str, path: str | Path | None = None) -> Figure:
    """A metric by layer with its 95 % interval over examples: one line per dataset, method, init and seed of the table.

    Args:
        table: Of `compare`, or several of them joined by `pandas.concat`.
        metric: A name with one value per layer, e.g. "sim_aou".
        path: Also save the figure there (.png, .svg, .pdf), which is how a script shows it.

    Returns:
        A matplotlib figure, which a notebook shows by itself.

    Example:
        ```python
        fi.plot_layers(pd.concat([table_of_gd, table_of_lcgd]), "sim_aou", "sim_aou.png")
        ```
    """
    return layers_figure(table, metric, path)
