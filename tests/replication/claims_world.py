"""Results folders, written by the real writer, in which every claim holds, fails, or cannot be decided."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from fairseq_icl.replication.folders import ResultsFolder
from fairseq_icl.replication.report.displacement import COSINES, RATIO
from fairseq_icl.replication.report.run import Run, load_run
from fairseq_icl.results import Rows, write_results

LAYERS, EXAMPLES = 24, 12
DATASETS, SEEDS = ("sst2", "mr"), (1, 2, 3)
LAYERED = ("sim_", "kendall_", "alpha")
GD, LCGD, LINEARIZED, ALPHA = (("pretrained", method) for method in ("gd", "lcgd", "linearized", "alpha"))
EMBEDDINGS, NORMS = ("trained-embeddings", "gd"), ("layer-norms", "gd")
Level = dict[tuple[str, str], dict[str, float]]


def levels(
    gd: float, lcgd: float, linearized: float, untrained: float, random: float, alpha: float, up: float, down: float
) -> Level:
    """Every metric of every init and method that a claim looks at; `up` stands where it should be above `down`."""
    shares = {"rec2ftp": up, "accuracy_icl": up, "accuracy_ft": down, "accuracy_zsl": 0.5}
    shares |= {"rpa_correct": up, "rpa_incorrect": down, "sim_am_after": up, "sim_am_before": down}
    shares |= {"kendall_tokens": up, "kendall_tokens_random": down}
    shares |= {"rec2ftp_chance": down}
    similar = dict.fromkeys(("sim_aou", "sim_aou_norm", "sim_aou_projected", "sim_am_delta"), gd)
    similar |= dict.fromkeys(("sim_aou_norm_random", "sim_aou_norm_random_matched"), random)
    other = {"sim_aou": untrained, "sim_aou_norm": untrained}
    return {
        GD: shares | similar,
        LCGD: dict.fromkeys(("sim_aou", "sim_aou_norm", "sim_aou_projected", "sim_am_delta"), lcgd)
        | {"sim_aou_norm_random_matched": random},
        LINEARIZED: {"sim_aou_norm": linearized, "sim_aou_norm_random": random},
        ALPHA: {"alpha": alpha},
        EMBEDDINGS: other,
        NORMS: other,
    }


SATISFIED = levels(gd=0.5, lcgd=0.8, linearized=0.3, untrained=0.7, random=0.0, alpha=0.15, up=0.9, down=0.3)
VIOLATED = levels(gd=0.5, lcgd=0.3, linearized=0.6, untrained=0.2, random=0.7, alpha=0.4, up=0.2, down=0.8)
LEFT_OPEN = levels(gd=0.5, lcgd=0.5, linearized=0.5, untrained=0.5, random=0.5, alpha=0.2, up=0.5, down=0.5)
SPREAD = {"sim_aou_norm_random": 0.0, "sim_am_before": 0.0, "kendall_tokens_random": 0.0, "rpa_incorrect": 0.0}
SPREAD |= {"accuracy_ft": 0.0, "accuracy_zsl": 0.0, "rec2ftp_chance": 0.0, "sim_aou_norm_random_matched": 0.0}


def make(folder: Path, world: Level, spread: float = 0.005, seeds: tuple[int, ...] = SEEDS, noise: float = 0.01) -> Run:
    """A finished results folder. `spread`: how far seeds lie apart, of what stands on a claim's left side."""
    store, entries = ResultsFolder(folder), []
    for dataset in DATASETS:
        for (init, method), means in world.items():
            for seed in seeds:
                key = f"{dataset}{init}{method}{seed}".replace("-", "")
                place = {"model": "1.3b", "init": init, "dataset": dataset, "method": method, "variant": ""}
                entries.append({**place, "seed": seed, "permutation": 0, "key": key})
                # The two sides of a difference move in opposite directions, whichever they are.
                sign = -1 if (init, method) == GD else 1
                shift = {
                    m: sign * SPREAD.get(m, spread) * (seed - np.mean(seeds)) * (-1 if m in ONE_SIDED else 1)
                    for m in means
                }
                finish(store, key, table(means, shift, noise), place | {"seed": seed})
                if (init, method) in (GD, LCGD):  # half as far as ICL, and twice as far
                    swept = {name: means[name] for name in COSINES}
                    for lr, ratio in ((0.001, 0.5), (0.01, 2.0)):
                        of_rate = {**place, "variant": f"lr={lr:g}"}
                        entries.append({**of_rate, "seed": seed, "permutation": 0, "key": f"{key}lr{lr:g}"})
                        frame = table({**swept, RATIO: ratio}, {**shift, RATIO: 0.0}, noise)
                        finish(store, f"{key}lr{lr:g}", frame, of_rate | {"seed": seed}, lr)
    store.add_plan({"experiment": "claims", "tables": ["deutch2024_table1"], "cells": entries})
    return load_run(folder)


ONE_SIDED = ("rec2ftp", "sim_am_after", "kendall_tokens", "accuracy_icl", "rpa_correct")


def table(means: dict[str, float], shift: dict[str, float], noise: float) -> pd.DataFrame:
    generator, rows = np.random.default_rng(0), Rows()
    for metric, mean in means.items():
        per_layer = metric.startswith(LAYERED)
        values = mean + shift[metric] + noise * generator.standard_normal((EXAMPLES, LAYERS if per_layer else 1))
        rows.add(metric, values.mean(), values.mean() - 0.1, values.mean() + 0.1)
        if per_layer:
            means = values.mean(0)
            rows.add(metric, means, means - 0.1, means + 0.1, layer=np.arange(len(means)))
        layer = np.arange(values.shape[1]) if per_layer else -1
        rows.add(metric, values, layer=layer, example=np.arange(EXAMPLES)[:, None])
    rows.add("examples", EXAMPLES)
    return rows.frame(dataset="", seed=0, permutation=0, method="", init="")


def finish(store: ResultsFolder, key: str, frame: pd.DataFrame, place: dict, lr: float = 0.003) -> None:
    settings = {"num_demonstrations": 32, "lr": lr, "clip_norm": 0.0, "seed": place["seed"]}
    settings |= {"switch_labels": "none", "switch_fraction": 1.0}
    configuration = {"cell": {"method": place["method"], "settings": settings}}

    folder = store.cell(key).path  # at once in its place: finishing a cell waits for the disk
    folder.mkdir()
    write_results(folder / "results.parquet", frame, configuration)
    (folder / "cell.json").write_text(json.dumps(configuration))
