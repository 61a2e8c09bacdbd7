"""The authors' way of scoring and fine-tuning, rewritten from docs/protocol.md as a yardstick for speed and numbers.

Scoring: every query runs alone behind the whole prompt; every layer forms its whole map of attention scores; every
position gets its logits; what is recorded goes to disk as JSON lines, which a second script reads to compute the
metrics. Fine-tuning: gradients of all weights, an update of k and v. Vanilla and layer-causal steps run on the model
itself; the linearized one needs its own copies of the weights.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor

from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing.prefix import positions_from
from fairseq_icl.prompts import BOS, PAD
from fairseq_icl.prompts.encoding import Query

AuthorsRecord = dict[str, Any]
"""What one query left in one setting: a line of JSON."""
Sample = dict[str, Any]
"""A batch as fairseq's datasets make it."""
LEARNING_RATE = 0.2
"""The papers' largest: time does not depend on it, and an update is far above the rounding of the weights."""
LINEARIZED_LIMIT = 4 * 2**30
"""Bytes of weights from which on the linearized model, with its copy, gradients and tangents, is not tried."""


@contextmanager
def whole_maps(decoder: Any) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
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
def score(model: PretrainedLM, query: Query, context: Sequence[int] = (BOS,)) -> AuthorsRecord:
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


def score_to_file(model: PretrainedLM, queries: Sequence[Query], context: Sequence[int], path: Path) -> None:
    """One setting's pass over the validation set, a line of JSON an example."""
    with path.open("w") as file:
        for query in queries:
            file.write(json.dumps(score(model, query, context)) + "\n")


def read_records(path: Path) -> list[AuthorsRecord]:
    """All records of one setting."""
    with path.open() as file:
        return [json.loads(line) for line in file]


def metrics_from_files(zsl: Path, icl: Path, ft: Path) -> dict[str, float]:
    """The metric script: the records of the three conditions are read back and compared."""
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


@contextmanager
def all_weights_learn(model: PretrainedLM) -> Iterator[None]:
    """Inside, every weight receives a gradient."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.requires_grad_(True)
    model.zero_grad()
    try:
        yield
    finally:
        model.zero_grad()
        for parameter, learns in before.items():
            parameter.requires_grad_(learns)


def nll(decoder: Any, logits: Tensor, target: Tensor) -> Tensor:
    """Sum of the negative log-likelihoods: logits (B, T, V), target (B, T)."""
    log_probs = decoder.get_normalized_probs((logits, None), log_probs=True)
    return F.nll_loss(log_probs.view(-1, log_probs.size(-1)), target.view(-1), ignore_index=PAD, reduction="sum")


def vanilla_loss(decoder: Any, sample: Sample) -> Tensor:
    """Cross entropy of the decoder's output."""
    with whole_maps(decoder):
        logits = decoder(sample["net_input"]["src_tokens"])[0]
    return nll(decoder, logits, sample["target"])


def layer_causal_loss(decoder: Any, sample: Sample) -> Tensor:
    """Cross entropies of all layers' outputs, added; the input of every layer is detached, all logits live at once."""
    outputs: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:])) for layer in decoder.layers]
    hooks += [layer.register_forward_hook(lambda _, __, result: outputs.append(result[0])) for layer in decoder.layers]
    try:
        with whole_maps(decoder):
            decoder.extract_features(sample["net_input"]["src_tokens"], None)
    finally:
        for hook in hooks:
            hook.remove()
    logits = [decoder.output_layer(decoder.layer_norm(output).transpose(0, 1)) for output in outputs]  # L x (B, T, V)
    return torch.stack([nll(decoder, layer, sample["target"]) for layer in logits]).sum()


def step(model: PretrainedLM, sample: Sample, loss_of: Callable[[Any, Sample], Tensor], learning_rate: float) -> float:
    """One step of SGD on k and v, with the gradients of everything; returns the loss."""
    with all_weights_learn(model):
        loss = loss_of(model.decoder, sample)
        loss.backward()
        updated = [p for name, p in model.named_parameters() if "k_proj" in name or "v_proj" in name]
        sgd(updated, sample["ntokens"], learning_rate)
    return float(loss.detach())


def step_of(model: PretrainedLM, method: str, learning_rate: float = LEARNING_RATE) -> Callable[[Sample], float]:
    """The step of a method, a function from a sample to its loss before the step."""
    if method == "linearized":
        return Linearized(model, learning_rate).step
    loss_of = layer_causal_loss if method == "lcgd" else vanilla_loss
    return lambda sample: step(model, sample, loss_of, learning_rate)


@torch.no_grad()
def sgd(parameters: list[Tensor], num_tokens: int, learning_rate: float) -> None:
    """What fairseq's trainer does: gradients divided by the number of tokens, their norm taken, one plain SGD step."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_div_(gradients, float(num_tokens))
    torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
    torch._foreach_add_(parameters, gradients, alpha=-learning_rate)


class Linearized:
    """f(w0) + J(w0) (w - w0) by one forward-mode pass over all weights; training differentiates through it."""

    def __init__(self, model: PretrainedLM, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self.decoder = model.decoder
        self.base = {name: parameter.detach() for name, parameter in self.decoder.named_parameters()}
        self.weights = {name: parameter.clone().requires_grad_() for name, parameter in self.base.items()}

    def step(self, sample: Sample) -> float:
        """One step of SGD on k and v of the linearized model; returns the loss."""
        loss = nll(self.decoder, self.logits(sample["net_input"]["src_tokens"]), sample["target"])
        loss.backward()
        updated = [weight for name, weight in self.weights.items() if "k_proj" in name or "v_proj" in name]
        sgd(updated, sample["ntokens"], self.learning_rate)
        for weight in self.weights.values():
            weight.grad = None
        return float(loss.detach())

    def logits(self, tokens: Tensor) -> Tensor:
        """Linearized logits (B, T, V); what is recorded is linearized along with them."""
        differences = {name: weight - self.base[name] for name, weight in self.weights.items()}

        def run(weights: dict[str, Tensor]) -> tuple[Tensor, list[Any]]:
            with whole_maps(self.decoder) as seen, positions_from(self.decoder, 0):
                return torch.func.functional_call(self.decoder, weights, (tokens,))[0], seen

        values, tangents = torch.func.jvp(run, (self.base,), (differences,))[:2]
        logits: Tensor = values[0] + tangents[0]
        return logits
