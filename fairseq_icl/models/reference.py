"""Numbers stored beside a Hugging Face folder, by which it can be checked without the library that made them.

`write_reference` asks transformers for the log-probability of every token of two texts and stores them in the folder;
`largest_difference` compares this package's decoder with what is stored there.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq.models import FairseqDecoder
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.files import write_atomically
from fairseq_icl.models.hugging_face import HFModel, read_json

FILE = "fairseq_icl_reference.json"
FORMAT = "fairseq_icl reference 1"
TOLERANCE = 1e-3
"""In nats. Two ways of transformers itself to compute attention (eager, sdpa) differ by 1e-4 on long prompts."""
TEXTS = (
    "The movie was a great surprise.",
    " ".join(f"Review {n}: the film of {1900 + 7 * n} was {('dull', 'great', 'long')[n % 3]}." for n in range(24)),
)


def import_transformers() -> Any:
    """The library, which this package wants for comparisons alone."""
    import transformers
    import transformers.utils

    # Where fairseq's torchaudio is not made for the installed torch, transformers fails on it; no model needs it.
    transformers.utils.is_torchaudio_available = lambda: False
    return transformers


def write_reference(model: HFModel) -> Path:
    """Store transformers' numbers in the model's folder; returns the file."""
    try:
        transformers = import_transformers()
        other = transformers.AutoModelForCausalLM.from_pretrained(
            model.folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
        ).eval()
    except Exception as error:  # absent, too old, or broken in one of many ways
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--write-reference needs transformers ({reason}); pip install transformers") from error
    order, sequences = model.vocabulary.order, []
    for rows in _sequences(model):
        tokens = torch.tensor([[order[row] for row in rows]])
        with torch.no_grad():
            log_probs = _of_next(other(tokens).logits, tokens)
        sequences.append({"tokens": tokens[0].tolist(), "log_probs": [round(x, 7) for x in log_probs.tolist()]})
    made_by = f"transformers {transformers.__version__}"
    content = {"format": FORMAT, "made_by": made_by, "model": model.sha256, "sequences": sequences}
    write_atomically(model.folder / FILE, json.dumps(content, indent=1))
    return model.folder / FILE


def has_reference(model: HFModel) -> bool:
    """Whether there are numbers to compare with."""
    return (model.folder / FILE).is_file()


def largest_difference(model: HFModel, decoder: FairseqDecoder) -> tuple[float, str]:
    """(largest difference of a token's log-probability in nats, what made the stored ones)."""
    path = model.folder / FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; make it where transformers is installed, with --write-reference")
    said = read_json(path)
    row_of, differences = model.vocabulary.row_of, [0.0]
    try:
        if said["format"] != FORMAT:
            raise ValueError("of another version")
        if said["model"] != model.sha256:
            raise UserError(f"{path}: made for other files than those in the folder; make it again")
        for sequence in said["sequences"]:
            tokens = torch.tensor([[row_of[token] for token in sequence["tokens"]]])
            with torch.no_grad():
                own = _of_next(decoder(tokens)[0], tokens)
            differences.append(float((own - torch.tensor(sequence["log_probs"])).abs().max()))
        return max(differences), str(said["made_by"])
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: damaged, or not a reference ({error}); make it again") from error


@torch.no_grad()
def difference_between(decoder: FairseqDecoder, rows: Sequence[int], first: str, second: str) -> float:
    """Largest difference, in nats, of a token's log-probability computed on two devices ("cpu", "cuda").

    `rows` are the tokens of one prompt, BOS first. The decoder ends where it was.
    """
    home = next(decoder.parameters()).device
    found = []
    for device in (first, second):
        tokens = torch.tensor([list(rows)], device=device)
        found.append(_of_next(decoder.to(device)(tokens)[0], tokens).cpu())
    decoder.to(home)
    return float((found[0] - found[1]).abs().max())


def _sequences(model: HFModel) -> list[list[int]]:
    """Rows of BOS and each text, as long as the model allows."""
    longest = min(model.positions, model.window or model.positions)
    return [[model.bos, *model.encode_line(text)][:longest] for text in TEXTS]


def _of_next(logits: Any, tokens: Tensor) -> Tensor:
    """Log-probability of every token but the first: logits (1, T, V), tokens (1, T) -> (T - 1,)"""
    return logits[0, :-1].float().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
