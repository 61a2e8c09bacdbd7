"""Does the demo model learn in context? The tables of docs/demo_model.md.

    python -m examples.demo_model.evaluate [--model MODEL.pt] [--search]

Accuracy on the held-out datasets by number of demonstrations, before and after fine-tuning, and the search for the
learning rates. Prompts are run whole, one per query: slow and simple, with nothing shared with the package, so that
these tables and the package's own observations check each other.
"""

import argparse
import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy
import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModel
from omegaconf import OmegaConf
from torch import Tensor

from examples.demo_model import DEMO_DATASETS
from examples.demo_model.episodes import HELD_OUT, fill
from examples.demo_model.tokenizer import Tokenizer
from fairseq_icl.prompts.catalogue import load_spec

SHIPPED = Path(__file__).parents[2] / "fairseq_icl" / "demo"
BOS, EOS = 0, 2
DEMONSTRATIONS = (0, 1, 2, 4, 8, 16, 32)
REPORTED_SEEDS, SEARCH_SEEDS = (1, 2, 3), (101, 102, 103, 104, 105, 106)
RATES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)


class _Vocabulary:
    """The two attributes of a task that the stock language model asks for when it is built."""

    def __init__(self, dictionary: Dictionary) -> None:
        self.source_dictionary = self.target_dictionary = dictionary


def load_model(path: Path, *, untrained: bool = False) -> TransformerLanguageModel:
    """The model of a checkpoint, in fp32; untrained: the same model with fresh random weights (seed 0)."""
    state = torch.load(path, weights_only=True)
    torch.manual_seed(0)
    dictionary = Dictionary.load(str(path.parent / "dict.txt"))
    model = TransformerLanguageModel.build_model(OmegaConf.create(state["cfg"]["model"]), _Vocabulary(dictionary))
    if not untrained:
        model.load_state_dict({name: value.float() for name, value in state["model"].items()})
    return model.eval()


@dataclass(frozen=True)
class TokenizedDataset:
    """A held-out dataset in tokens: (input, class) of each row, and the label word's token of each class."""

    train: list[tuple[list[int], int]]
    valid: list[tuple[list[int], int]]
    label_tokens: list[int]

    def demonstrations(self, k: int, seed: int) -> list[tuple[list[int], int]]:
        order = numpy.random.default_rng(seed).permutation(len(self.train))[:k]
        return [self.train[i] for i in order]

    def context(self, k: int, seed: int) -> list[int]:
        """BOS, then input, label and EOS of k demonstrations."""
        tokens = [BOS]
        for text, label in self.demonstrations(k, seed):
            tokens += [*text, self.label_tokens[label], EOS]
        return tokens


def tokenize_dataset(name: str, folder: Path, tokenizer: Tokenizer) -> TokenizedDataset:
    """Read FOLDER/NAME/{train,valid}.jsonl."""
    task = HELD_OUT[name]
    splits = {}
    for split in ("train", "valid"):
        rows = [json.loads(line) for line in (folder / name / f"{split}.jsonl").read_text("utf-8").splitlines()]
        texts = [row.get("text") or f"{row['premise']} | {row['hypothesis']}" for row in rows]
        inputs = tokenizer.encode([fill(task.template, text) for text in texts])
        splits[split] = [(tokens, row["label"]) for tokens, row in zip(inputs, rows, strict=True)]
    labels = [tokens[0] for tokens in tokenizer.encode(list(task.label_words))]
    return TokenizedDataset(splits["train"], splits["valid"], labels)


@torch.no_grad()
def accuracy(model: TransformerLanguageModel, data: TokenizedDataset, context: list[int], limit: int = 204) -> float:
    """Share of the first `limit` validation rows whose own label word is the likeliest of the label words."""
    by_length: dict[int, list[tuple[list[int], int]]] = {}
    for text, label in data.valid[:limit]:
        by_length.setdefault(len(text), []).append((text, label))
    correct = 0
    for rows in by_length.values():
        for start in range(0, len(rows), 16):
            batch = rows[start : start + 16]
            tokens = torch.tensor([context + text for text, _ in batch])  # (rows, tokens)
            features = model(tokens, features_only=True)[0][:, -1]  # (rows, width)
            logits = model.decoder.output_layer(features)[:, data.label_tokens]  # (rows, classes)
            correct += int((logits.argmax(-1) == torch.tensor([label for _, label in batch])).sum())
    return correct / min(limit, len(data.valid))


def finetune(
    model: TransformerLanguageModel, data: TokenizedDataset, k: int, seed: int, lr: float
) -> TransformerLanguageModel:
    """A copy of the model after one SGD step a demonstration on keys and values, with the loss on all tokens."""
    model = copy.deepcopy(model)
    learning: list[Tensor] = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("k_proj" in name or "v_proj" in name)
        learning += [parameter] if parameter.requires_grad else []
    optimizer = torch.optim.SGD(learning, lr=lr)
    for text, label in data.demonstrations(k, seed):
        tokens = torch.tensor([[BOS, *text, data.label_tokens[label]]])
        logits = model(tokens[:, :-1])[0][0]  # (tokens, vocabulary)
        optimizer.zero_grad()
        F.cross_entropy(logits, tokens[0, 1:]).backward()
        optimizer.step()
    return model


def print_row(cells: Iterable[str | int | float]) -> None:
    print("|", " | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=SHIPPED / "model" / "model.pt", help="checkpoint, with its tokenizer beside it"
    )
    parser.add_argument("--search", action="store_true", help="search the learning rates, on seeds not reported")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, untrained = load_model(args.model), load_model(args.model, untrained=True)
    tokenizer = Tokenizer(args.model.parent / "sentencepiece.bpe.model")
    data = {name: tokenize_dataset(name, SHIPPED / "data", tokenizer) for name in DEMO_DATASETS}

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
        rate = load_spec(str(SHIPPED / "data" / f"{name}.yaml")).papers["demo"]["learning_rate"]
        print_row([name, str(rate), accuracy(model, dataset, [BOS]), finetuned(name, rate, REPORTED_SEEDS)])


if __name__ == "__main__":
    main()
