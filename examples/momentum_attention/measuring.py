"""What is measured of one model: perplexity by length, in-context accuracy by k, and ICL against fine-tuning."""

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

import fairseq_icl as fi
from examples.demo_model import DEMO_DATASETS
from examples.demo_model.datasets import LEARNING_RATES
from examples.demo_model.episodes import FORMATS, Level, draw_episode
from examples.demo_model.pretraining.batches import SHORTEST, collate, to_row
from examples.demo_model.tokenizer import Tokenizer
from fairseq_icl.files import write_atomically
from fairseq_icl.training.methods import Method, register_method

LENGTHS = (64, 128, 256, 512)
DEMONSTRATIONS = (0, 1, 2, 4, 8, 16, 32)
ROWS, QUERIES, DRAWS = 64, 102, (1, 2, 3)
MU = 0.9
MOMENTUM = register_method(
    Method(
        "gd_mu", f"vanilla fine-tuning, SGD with momentum {MU}", ("--criterion", "cross_entropy", "--momentum", str(MU))
    )
)
COMPARED = 32
"""Demonstrations of the comparison of ICL with fine-tuning."""
METRICS = ("sim_aou", "sim_am_delta", "accuracy_zsl", "accuracy_icl", "accuracy_ft")


@torch.no_grad()
def perplexity(model: fi.Model, tokenizer: Tokenizer, length: int, level: int) -> dict[str, float]:
    """exp of the mean loss over all tokens, and over label tokens, of episodes of `length` tokens never trained on."""
    rng = Random(f"perplexity {length}")
    widths = Level(level)
    rows = []
    for _ in range(ROWS):
        kind = rng.choices(FORMATS, widths.format_weights)[0]
        episode = draw_episode(rng, widths, length // SHORTEST[kind] + 1, kind)
        rows.append(to_row(episode, tokenizer, length, kind))
    batch = collate(rows)
    logits = model.lm.decoder(batch["net_input"]["src_tokens"])[0]  # (rows, tokens, vocabulary)
    losses = F.cross_entropy(logits.transpose(1, 2), batch["target"], reduction="none")  # (rows, tokens)
    label, real = batch["seen"] >= 0, batch["target"] != model.lm.decoder.padding_idx
    return {"all": math.exp(losses[real].mean()), "labels": math.exp(losses[label].mean())}


def accuracies(model: fi.Model, dataset: str) -> dict[int, float]:
    """k -> in-context accuracy on the validation rows, mean over the draws of demonstrations."""
    found = {}
    for k in DEMONSTRATIONS:
        right = []
        for draw in DRAWS if k else DRAWS[:1]:
            prompts = fi.build_prompts(model, dataset, k=k, seed=draw, limit=QUERIES)
            seen = fi.observe(model, prompts, in_context=k > 0)
            right.append(float((seen.prediction == seen.gold).float().mean()))
        found[k] = sum(right) / len(right)
    return found


def against_fine_tuning(model: fi.Model, dataset: str) -> dict[str, dict[str, float]]:
    """Method -> mean of each metric over layers and queries; with momentum the rate is lr (1 - mu): the same way."""
    prompts = fi.build_prompts(model, dataset, k=COMPARED, seed=DRAWS[0], limit=QUERIES)
    zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    found = {}
    for method, scale in (("gd", 1.0), (MOMENTUM.name, 1 - MU)):
        with fi.fine_tuned(model, prompts, method, lr=LEARNING_RATES[dataset] * scale, record_queries=False) as tuned:
            table = fi.compare(prompts, zsl, icl, fi.observe(tuned, prompts), metrics=list(METRICS))
        means = table[table.example.isna()].groupby("metric").value.mean()
        found[method] = {name: float(means[name]) for name in METRICS if name in means}
    return found


def measure(folder: Path, level: int) -> dict[str, Any]:
    """All of a model's numbers, from FOLDER/measured.json if they are there; `level`: how wide its episodes became."""
    file = folder / "measured.json"
    if file.is_file():
        kept: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return kept
    torch.set_num_threads(1)
    model, tokenizer = fi.load_model(folder, device="cpu"), Tokenizer(folder / "sentencepiece.bpe.model")
    datasets = tqdm(DEMO_DATASETS, desc=folder.parent.name, unit="dataset")
    found = {
        "perplexity": {str(length): perplexity(model, tokenizer, length, level) for length in LENGTHS},
        "datasets": {
            name: {
                "icl": {str(k): value for k, value in accuracies(model, name).items()},
                "against": against_fine_tuning(model, name),
            }
            for name in datasets
        },
    }
    write_atomically(file, json.dumps(found, indent=1))
    return found
