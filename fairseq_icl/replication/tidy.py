"""A results folder as one tidy frame, for pandas."""

from pathlib import Path

import pandas as pd

from fairseq_icl.replication.report.run import load_run
from fairseq_icl.settings import SETTINGS

PLACE = ["model", "dataset", "method", "init", "variant", "seed", "permutation"]
NUMBERS = ["metric", "layer", "value", "low", "high", "key"]


def read_run(folder: str | Path) -> pd.DataFrame:
    """All finished cells of a results folder: a row for every cell, metric and layer (missing: over all layers).

    Columns: model, dataset, method, init, variant, seed, permutation, k, lr, every other setting that differs between
    cells, metric, layer, value (mean over examples), low, high (its 95 % interval), key (of the cell's folder).

        run = fi.read_run("runs/demo")
        run[(run.metric == "sim_aou") & run.layer.isna()].pivot_table("value", "k", "method").plot()
    """
    run = load_run(folder)
    settings = {key: said["cell"]["settings"] for key, said in run.configurations.items()}
    cells = pd.DataFrame.from_dict(settings, orient="index", columns=list(SETTINGS)).rename_axis("key")
    differing = [name for name in SETTINGS if cells[name].astype(str).nunique() > 1 and name not in PLACE]
    shown = list(dict.fromkeys(["num_demonstrations", "lr", *differing]))
    values = run.values.assign(model=run.values["plain_model"]).merge(cells[shown].reset_index(), on="key")
    return values[[*PLACE, *shown, *NUMBERS]].rename(columns={"num_demonstrations": "k"})
