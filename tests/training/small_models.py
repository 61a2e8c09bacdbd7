"""Small random models of the three kinds of decoder, in fp64, and one update of them as fairseq's trainer makes it."""

from typing import Any

import torch
from fairseq.optim import FairseqOptimizer, build_optimizer
from omegaconf import OmegaConf

from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.results.gradient_record import GradientRecorder
from fairseq_icl.training.gradients import GradientControl
from fairseq_icl.training.layer_causal import sequential_step
from tests.criterions.tiny_model import sample_of
from tests.models.tiny_linearized import build_decoder
from tests.models.tiny_transformers import tiny_decoder

TOKENS = [[0, 5, 7, 4, 9, 11], [0, 8, 6, 10]]
SAMPLE = sample_of(TOKENS) | {"rows": [7, 3]}
RATE = 0.5
KINDS = ("fairseq", "stablelm", "linearized")
"""stablelm: rotated heads, a gated MLP, and norms that compute in the precision they are given."""


def small_model(kind: str, layers: int = 2) -> PretrainedLM:
    """A model whose keys and values learn; the same weights at every call. `kind` may be a family of transformers."""
    if kind not in ("fairseq", "linearized"):
        decoder = tiny_decoder(kind, num_hidden_layers=layers).double()
    else:
        decoder = build_decoder(decoder_layers=layers).double()
    model = PretrainedLM(decoder)
    model.freeze_all_but("self_attn.k_proj,self_attn.v_proj", biases=True)
    return LinearizedLM.around(model) if kind == "linearized" else model


def optimizer_of(model: PretrainedLM, lr: float = RATE, **options: Any) -> FairseqOptimizer:
    """fairseq's plain SGD, or what `options` make of it."""
    momentum = {"momentum": 0.0} if options.get("_name", "sgd") == "sgd" else {}
    chosen = {"_name": "sgd", "lr": [lr], "weight_decay": 0.0} | momentum | options
    return build_optimizer(OmegaConf.create(chosen), [p for p in model.parameters() if p.requires_grad])


def update(
    model: PretrainedLM,
    criterion: Any,
    optimizer: FairseqOptimizer | None = None,
    control: GradientControl | None = None,
    steps: int = 1,
) -> GradientControl:
    """Updates as the task and fairseq's trainer make them: backward, division by the sample size, limits, step."""
    optimizer = optimizer or optimizer_of(model)
    control = control or GradientControl(model.decoder, recorder=GradientRecorder(model.decoder))
    for step in range(steps):
        optimizer.zero_grad()
        if getattr(criterion, "sequential", False):
            loss, size, _ = sequential_step(SAMPLE, model, criterion, optimizer, step, control)
        else:
            loss, size, _ = criterion(model, SAMPLE)
            optimizer.backward(loss)
        optimizer.multiply_grads(1 / size)
        control.before_step(optimizer, step, (SAMPLE["rows"], float(loss.detach()), size))
        optimizer.step()
        control.after_update()
    return control


def weights_of(model: PretrainedLM) -> dict[str, torch.Tensor]:
    """Copies of what learns (of a linearized model: the deltas)."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
