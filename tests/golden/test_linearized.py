"""Training and scoring the linearized model gives the authors' losses, gradients, weights and records."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.pretrained_lm import load_decoder
from fairseq_icl.observing.probe import AttentionProbe, AttentionRecord
from fairseq_icl.tasks.restore import restore
from tests.commands import PLUGIN, succeeded
from tests.commands import run as run_command
from tests.golden.folder import Golden

PARTS = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def assert_close(seen: Tensor, expected: np.ndarray, whole: np.ndarray) -> None:
    """Equal up to rounding, which is that of the largest value of the `whole` recorded array."""
    np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-5 * max(1.0, float(np.abs(whole).max())))


@dataclass
class Run:
    """The linearized model after one epoch of plain SGD, and what was seen on the way."""

    model: LinearizedLM
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)  # (L, tokens, d) a step


def stacked(model: LinearizedLM, part: str) -> list[Tensor]:
    """The trained parameters of one kind, layer by layer."""
    return [parameter for name, parameter in model.named_parameters() if name.endswith(f"self_attn.{part}")]


def weights(model: LinearizedLM, part: str) -> Tensor:
    """Base plus delta of the parameters of one kind, layers stacked."""
    module, name = part.split(".")
    bases = [getattr(getattr(layer.self_attn, module), f"{name}_base") for layer in model.decoder.layers]
    return torch.stack(bases) + torch.stack(stacked(model, part)).detach()


def observe(model: LinearizedLM, tokens: Tensor, positions: list[int]) -> tuple[Tensor, AttentionRecord]:
    """Linearized logits (1, T, V) and attention records at the positions."""

    def run() -> tuple[Tensor, AttentionRecord]:
        with AttentionProbe(model.decoder, torch.zeros(len(positions), dtype=int), torch.tensor(positions)) as probe:
            return model.decoder(tokens)[0], probe.record()

    return model.evaluate(run)


@pytest.fixture
def run(golden: Golden, golden_case: tuple[str, int]) -> Run:
    task, permutation = golden_case
    decoder = load_decoder(golden.root / "model" / "model.pt", golden.dictionary)
    names = [f"decoder.{name}" for name, _ in decoder.named_parameters() if name.endswith(PARTS)]
    run = Run(LinearizedLM(decoder, names))
    optimizer = torch.optim.SGD([run.model.get_parameter(name) for name in names], lr=golden.setting("lr", task))
    for sequence in golden.tokens(task, permutation)["ft"]["src_tokens"]:
        tokens = torch.tensor([sequence])
        run.queries.append(observe(run.model, tokens, list(range(len(sequence))))[1].query.transpose(0, 1).detach())
        optimizer.zero_grad()
        loss = cross_entropy(run.model(tokens)[0][0, :-1], tokens[0, 1:], reduction="sum")
        (loss / (len(sequence) - 1)).backward()
        run.losses.append(loss.item())
        run.gradients.append({part: torch.stack([p.grad.clone() for p in stacked(run.model, part)]) for part in PARTS})
        optimizer.step()
    return run


def test_training_gives_the_authors_losses_gradients_and_weights(
    golden: Golden, golden_case: tuple[str, int], run: Run
) -> None:
    task, permutation = golden_case
    expected = np.load(golden.root / "ft" / f"{task}_p{permutation}_linearized.npz")
    np.testing.assert_allclose(run.losses, expected["step_loss_sum"], **CLOSE)
    np.testing.assert_allclose(torch.cat(run.queries, dim=1), expected["attn_q"], **CLOSE)
    for part in PARTS:
        norms = [gradients[part].flatten(1).norm(dim=1).numpy() for gradients in run.gradients]
        np.testing.assert_allclose(norms, expected[f"grad_norm.{part}"], **CLOSE)
        np.testing.assert_allclose(run.gradients[0][part], expected[f"step0_grad.{part}"], **CLOSE)
        np.testing.assert_allclose(weights(run.model, part), expected[f"final.{part}"], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_scoring_gives_the_authors_records(golden: Golden, golden_case: tuple[str, int], run: Run) -> None:
    task, permutation = golden_case
    expected = np.load(golden.root / "records" / f"{task}_p{permutation}_ftzs_linearized.npz")
    zero_shot = golden.tokens(task, permutation)["zs"]
    num_options = expected["option_scores"].shape[1]
    for example in range(len(expected["gold"])):
        options = zero_shot["src_tokens"][example * num_options : (example + 1) * num_options]
        logits, record = observe(run.model, torch.tensor([options[0]]), [len(options[0]) - 1])
        scores = log_softmax(logits[0, -2], dim=-1)[[option[-1] for option in options]]
        assert_close(scores, expected["option_scores"][example], expected["option_scores"])
        assert scores.argmax() == expected["pred"][example]
        assert_close(record.output[0], expected["self_attn_out"][example], expected["self_attn_out"])
        assert_close(record.query[0], expected["attn_q"][example], expected["attn_q"])
        row = expected["attn_map"][example][..., -expected["query_len"][example] :]
        assert_close(record.scores[0, :, :, 1:], row, expected["attn_map"])
        context = expected["attn_map_ctx"]
        assert_close(record.scores[0, :, :, :1].sum(1), context[example], context)


def test_commands_train_to_the_authors_weights_and_restore_them(
    golden: Golden, golden_spec: Callable[[str], Path], tmp_path: Path
) -> None:
    task, permutation = golden.cases[0]
    expected = np.load(golden.root / "ft" / f"{task}_p{permutation}_linearized.npz")
    flags = {
        "user-dir": PLUGIN, "task": "demonstration_prompting", "arch": "pretrained_lm", "criterion": "cross_entropy",
        "pretrained": golden.root / "model" / "model.pt", "dataset": golden_spec(task), "permutation": permutation,
        "num-demonstrations": len(expected["step_loss_sum"]), "seed": golden.setting("seed", task),
        "optimizer": "sgd", "lr": golden.setting("lr", task), "max-epoch": 1, "batch-size": 1, "save-dir": tmp_path,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    switches = ("--linearize", "--cpu", "--disable-validation")
    succeeded(run_command("fairseq-train", golden.root / "data", *words, *switches))
    (model,), _, _ = restore(str(tmp_path / "checkpoint_last.pt"), {})
    assert isinstance(model, LinearizedLM)
    for part in PARTS:
        np.testing.assert_allclose(weights(model, part), expected[f"final.{part}"], rtol=1e-5, atol=1e-6)
