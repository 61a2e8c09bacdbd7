"""Models: checkpoints as data, decoders that learn, and `Model`, what the rest of the instrument works with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from torch import Tensor

from fairseq_icl import compat  # noqa: F401 - before anything imports fairseq
from fairseq_icl.devices import choose_device, within_memory
from fairseq_icl.models.files import ModelFiles, find_files
from fairseq_icl.models.pretrained_lm import PretrainedLM, Result
from fairseq_icl.models.state_edits import StateEdit
from fairseq_icl.prompts import Writing
from fairseq_icl.settings import Settings


@dataclass(frozen=True)
class Model:
    """A language model with its tokenizer and dictionary, under one set of weights.

    The module `lm` is shared by the base model and what was fine-tuned from it; `weights` are those of this one.
    """

    lm: PretrainedLM
    files: ModelFiles
    init: str = "pretrained"
    seed: int = 1
    """Of the random weights, where `init` has any."""
    attention: str = "softmax"
    """Its own attention, or "linear": softmax and scale omitted."""
    precision: str = "fp32"
    """Of its weights and of everything that it computes."""
    weights: Mapping[str, Tensor] | None = None
    """Values that stand in for the parameters of these names; None: the module's own."""
    edit: StateEdit | None = None
    """What is done to its states at the last token of a query's input, by a method that changes no weight."""
    method: str = "none"
    """How it was fine-tuned, or its states are edited; "none": not at all."""
    training_queries: Mapping[int, Tensor] | None = None
    """Recorded in fine-tuning: row of the train file -> scaled query vectors (layers, tokens, width), BOS included."""
    gradients: pd.DataFrame | None = None
    """Recorded in fine-tuning: gradient norms by step, layer and parameter (training/gradient_record.py)."""
    skipped_updates: int = 0
    """Steps that fine-tuning did not take, because their gradients overflowed in fp16."""

    def __repr__(self) -> str:
        parts = [f"{len(self.lm.decoder.layers)} layers", self.init, self.precision]
        parts += [f"attention {self.attention}"] * (self.attention != "softmax")
        parts += [f"fine-tuned by {self.method}"] * (self.method != "none")
        return f"Model({self.name}: {', '.join(parts)})"

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.files.name

    @property
    def writing(self) -> Writing:
        """How it wants its text written in tokens."""
        return self.files.writing

    def evaluate(self, function: Callable[[], Result]) -> Result:
        """What `function`, which runs the decoder, computes under this model's weights."""
        return self.lm.evaluate(function, self.weights)

    def under(self, weights: Mapping[str, Tensor] | None, method: str = "none") -> "Model":
        """The same model under other weights."""
        plain = replace(self, edit=None, training_queries=None, gradients=None, skipped_updates=0)
        return replace(plain, weights=weights, method=method)


def load_model(
    path: str | Path = "demo",
    *,
    init: str = "pretrained",
    seed: int = 1,
    final_norm: str = "lost",
    attention: str = "softmax",
    precision: str = "fp32",
    name: str | None = None,
    bpe: str | None = "auto",
    tokenizer: str | Path | None = None,
    device: str | None = None,
) -> Model:
    """Load the model in a checkpoint or a Hugging Face folder.

    Args:
        path: A fairseq checkpoint (`model.pt`), the folder it lies in, a Hugging Face folder (config.json, tokenizer,
            safetensors), "demo" for the shipped one, or "hub:OWNER/NAME", which is fetched.
        init: What is kept of the checkpoint: "pretrained" (everything) or one of the papers' baselines.
        seed: Of the weights that a baseline draws at random.
        final_norm: What becomes of the final layer norm in two of the baselines: "lost" (as in the authors' runs) or
            "kept".
        attention: "softmax", the model's own attention, or "linear": softmax and scale omitted (the relaxation).
        precision: "fp32", "fp16" (as the authors) or "bf16": of the weights, of fine-tuning and of what is observed.
        name: What tables call the model; by default the name of its folder.
        bpe: fairseq's tokenizer, "gpt2" or "sentencepiece"; "auto" takes the one whose files are there, None splits
            text at white space. A Hugging Face folder brings its own.
        tokenizer: Folder with dict.txt and the tokenizer's files, if they do not lie beside the checkpoint.
        device: "cpu", "cuda" or, of several GPUs, "cuda:1"; by default a GPU if there is one. A model runs on
            one device: it is not spread over several.

    Returns:
        The model, ready to be observed; it has learnt nothing yet.

    Example:
        ```python
        model = fi.load_model("MODEL_DIR/model.pt")
        baseline = fi.load_model("MODEL_DIR", init="untrained", seed=2)
        ```
    """
    files = find_files(path, name=name, bpe=bpe, tokenizer=tokenizer)
    settings = Settings(init=init, seed=seed, final_norm=final_norm, attention=attention, precision=precision)  # type: ignore[arg-type]
    return load_from(files, settings, device or str(choose_device()))


def load_from(files: ModelFiles, settings: Settings, device: str | None = None) -> Model:
    """The model in `files`, as the settings that affect weights say (`init`, `seed`, `precision`, ...)."""
    where = choose_device(device or settings.device)
    with within_memory("loading the model"):
        lm = PretrainedLM.load(files.source, files.load_dictionary(), settings, where).to(where)
    return Model(lm.eval(), files, *facts_of(settings))


def facts_of(settings: Settings) -> tuple[str, int, str, str]:
    """What a `Model` says of itself, in the order of its fields: init, seed, attention, precision."""
    return settings.init, settings.seed, settings.attention, settings.precision
