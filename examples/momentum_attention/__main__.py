"""Train, measure and show: `python -m examples.momentum_attention FOLDER`; see the package's docstring."""

import argparse
from pathlib import Path

from tqdm import tqdm

from examples.momentum_attention.training import LAST_LEVEL, RUNS, SEEDS, train


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.momentum_attention", description=__doc__)
    parser.add_argument("folder", type=Path, help="where everything is written; what is there already is kept")
    parser.add_argument("--seed", type=int, choices=SEEDS, help="only the models of this seed, and no tables")
    parser.add_argument("--page", type=Path, help="also put the tables into this page, between its two marks")
    arguments = parser.parse_args()
    runs = [run for run in RUNS if arguments.seed in (None, run.seed)]
    models = {run: train(run, arguments.folder) for run in tqdm(runs, desc="training", unit="model")}
    from examples.momentum_attention.measuring import measure

    measured = {run: measure(model, LAST_LEVEL) for run, model in tqdm(models.items(), desc="measuring", unit="model")}
    if arguments.seed is None:
        from examples.momentum_attention.tables import write_tables

        write_tables(measured, arguments.folder, arguments.page)


if __name__ == "__main__":
    main()
