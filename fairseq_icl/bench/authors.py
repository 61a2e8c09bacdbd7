"""The authors' way of scoring, rewritten from docs/protocol.md as a yardstick for speed and numbers.

Every query runs alone behind the whole prompt; every layer forms its whole map of attention scores; every position
gets its logits; what is recorded goes to disk as JSON lines, which a second script reads to compute the metrics.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_icl.prompts.build import Query
from fairseq_icl.prompts.tokens import BOS

Record = dict[str, Any]


@contextmanager
def whole_maps(decoder: nn.Module) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """Inside, attention runs step by step and leaves (output, scores, queries) of all positions, layer by layer."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []  # per layer (T, B, d), (B, H, T, T), (T, B, d)
    modules = [layer.self_attn for layer in decoder.layers]
    for module in modules:

        def forward(query: Tensor, *_: object, _module: MultiheadAttention = module, **__: object) -> Any:
            seen.append(attend(_module, query))
            return seen[-1][0], None

        module.forward = forward
    try:
        yield seen
    finally:
        for module in modules:
            del module.forward


def attend(module: MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Causal self-attention of x (T, B, d): its output, the scores of all pairs before the mask, and the queries."""
    length, batch, width = x.shape
    query = module.q_proj(x) * module.scaling

    def heads(tensor: Tensor) -> Tensor:  # (T, B, d) -> (B, H, T, d/H)
        return tensor.view(length, batch, module.num_heads, module.head_dim).permute(1, 2, 0, 3)

    scores = heads(query) @ heads(module.k_proj(x)).transpose(2, 3)  # (B, H, T, T)
    future = torch.full((length, length), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
    weights = (scores + future).softmax(dim=-1)
    attended = (weights @ heads(module.v_proj(x))).permute(2, 0, 1, 3).reshape(length, batch, width)
    return module.out_proj(attended), scores, query


@torch.no_grad()
def score(model: nn.Module, query: Query, context: Sequence[int] = (BOS,)) -> Record:
    """One query in one setting: the prompt with option 0 runs whole, and its last token is recorded."""
    tokens = torch.tensor([[*context, *query.inputs[0], *query.labels[0]]])
    with whole_maps(model.decoder) as seen:
        output = model.decoder(tokens)
    log_probs = model.decoder.get_normalized_probs(output, log_probs=True)[0]  # (T, V)
    scores = [float(log_probs[-2, label[0]]) for label in query.labels]
    start = len(context)
    return {
        "gold": query.gold,
        "option_scores": scores,
        "prediction": int(np.argmax(scores)),
        "hidden": [attended[-1, 0].tolist() for attended, _, _ in seen],  # (L, d)
        "attention": [scores[0, :, -1, start:].tolist() for _, scores, _ in seen],  # (L, H, Q)
        "context_attention": [scores[0, :, -1, :start].sum(0).tolist() for _, scores, _ in seen],  # (L, P)
        "query": [queries[-1, 0].tolist() for _, _, queries in seen],  # (L, d)
    }


def score_to_file(model: nn.Module, queries: Sequence[Query], context: Sequence[int], path: Path) -> None:
    """One setting's pass over the validation set, a line of JSON an example."""
    with path.open("w") as file:
        for query in queries:
            file.write(json.dumps(score(model, query, context)) + "\n")


def read_records(path: Path) -> list[Record]:
    """All records of one setting."""
    with path.open() as file:
        return [json.loads(line) for line in file]


def metrics_from_files(zsl: Path, icl: Path, ft: Path) -> dict[str, float]:
    """The metric script: the records of the three settings are read back and compared."""
    before, shown, trained = read_records(zsl), read_records(icl), read_records(ft)
    result = {
        f"accuracy_{name}": float(np.mean([record["prediction"] == record["gold"] for record in records]))
        for name, records in (("zsl", before), ("icl", shown), ("ft", trained))
    }
    similarities: dict[str, list[np.ndarray]] = {"sim_aou": [], "sim_aou_norm": [], "sim_am_delta": []}
    similarities |= {"sim_am_before": [], "sim_am_after": [], "sim_aou_random": []}
    for a, b, c in zip(before, shown, trained, strict=True):
        z, i, f = (np.array(record["hidden"]) for record in (a, b, c))  # (L, d)
        similarities["sim_aou"].append(_cosine(i - z, f - z))
        similarities["sim_aou_random"].append(_cosine(i - z, np.random.rand(*z.shape)))
        z, i, f = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (z, i, f))
        similarities["sim_aou_norm"].append(_cosine(i - z, f - z))
        z, i, f = (np.array(record["attention"]) for record in (a, b, c))  # (L, H, Q)
        similarities["sim_am_before"].append(_cosine(i, z).mean(-1))
        similarities["sim_am_after"].append(_cosine(i, f).mean(-1))
        similarities["sim_am_delta"].append(_cosine(i - z, f - z).mean(-1))
    return result | {name: float(np.mean(values)) for name, values in similarities.items()}


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1) + 1e-20)
