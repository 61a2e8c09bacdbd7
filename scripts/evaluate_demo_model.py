#!/usr/bin/env python3
"""The tables of docs/demo_model.md: in-context accuracy by number of demonstrations, fine-tuning, rate search."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fairseq_icl.demo import DEMO_DATASETS, demo_data, demo_model
from fairseq_icl.demo.evaluation import BOS, accuracy, finetune, load_model, tokenize_dataset
from fairseq_icl.demo.tokenizer import Tokenizer
from fairseq_icl.prompts.catalogue import load_spec

DEMONSTRATIONS = (0, 1, 2, 4, 8, 16, 32)
REPORTED_SEEDS, SEARCH_SEEDS = (1, 2, 3), (101, 102, 103, 104, 105, 106)
RATES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)


def print_row(cells: Iterable[str | int | float]) -> None:
    print("|", " | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=demo_model(), help="checkpoint, with its tokenizer beside it")
    parser.add_argument("--search", action="store_true", help="search the learning rates, on seeds not reported")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, untrained = load_model(args.model), load_model(args.model, untrained=True)
    tokenizer = Tokenizer(args.model.parent / "sentencepiece.bpe.model")
    data = {name: tokenize_dataset(name, demo_data(), tokenizer) for name in DEMO_DATASETS}

    def finetuned(name: str, rate: float, seeds: tuple[int, ...]) -> float:
        return mean(accuracy(finetune(model, data[name], 32, seed, rate), data[name], [BOS]) for seed in seeds)

    if args.search:
        print_row(["fine-tuning accuracy at rate", *map(str, RATES)])
        for name in DEMO_DATASETS:
            print_row([name, *(finetuned(name, rate, SEARCH_SEEDS) for rate in RATES)])
        return
    for title, evaluated in (("shipped", model), ("untrained", untrained)):
        print_row([f"{title}, k =", *DEMONSTRATIONS])
        for name, dataset in data.items():
            contexts = [[dataset.context(k, seed) for seed in REPORTED_SEEDS] for k in DEMONSTRATIONS]
            print_row([name, *(mean(accuracy(evaluated, dataset, c) for c in group) for group in contexts)])
    print_row(["fine-tuning", "learning rate", "before", "after"])
    for name, dataset in data.items():
        rate = load_spec(str(demo_data() / f"{name}.yaml")).papers["demo"]["learning_rate"]
        print_row([name, str(rate), accuracy(model, dataset, [BOS]), finetuned(name, rate, REPORTED_SEEDS)])


if __name__ == "__main__":
    main()
