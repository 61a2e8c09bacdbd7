"""A small world for tests of the commands: a random model, its dictionary, and a toy dataset in files."""

import json
import random
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModel

from fairseq_icl.models.checkpoints import language_model_config
from tests.commands import PLUGIN, Result, run

WORDS = [f"word{number}" for number in range(40)]
LABELS = ["Negative", "Positive"]
TEMPLATE_WORDS = ["Sentence:", "Label:"]

SPEC = """\
name: toy
version: 1
source: made up for tests
fields: [text]
template: "Sentence: {text} Label:"
label: label
label_words: [Negative, Positive]
"""


def model_options(**changes: object) -> dict[str, object]:
    """Options of a dense LM in miniature."""
    options = {
        "arch": "transformer_lm_gpt",
        "task": "language_modeling",
        "decoder_layers": 3,
        "decoder_embed_dim": 16,
        "decoder_ffn_embed_dim": 32,
        "decoder_input_dim": 16,
        "decoder_output_dim": 16,
        "decoder_attention_heads": 2,
        "decoder_normalize_before": True,
        "share_decoder_input_output_embed": True,
        "decoder_learned_pos": False,
        "activation_fn": "gelu",
        "dropout": 0.1,
        "tokens_per_sample": 256,
        "max_target_positions": 256,
    }
    return options | changes


def save_model(path: Path, dictionary: Dictionary, *, style: str = "args", seed: int = 1, **changes: object) -> None:
    """A random model as a fairseq checkpoint that carries its options as `args` or as `cfg`."""
    options = model_options(**changes)
    config = language_model_config({"args": Namespace(**options)}, path)
    torch.manual_seed(seed)
    vocabulary = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = TransformerLanguageModel.build_model(config, vocabulary)
    with torch.no_grad():  # fairseq starts with zero biases and unit norms: make every weight count
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if style == "args":
        described = {"args": Namespace(**options)}
    else:
        described = {"args": None, "cfg": {"model": {"_name": "transformer_lm", **options}, "task": {"_name": "x"}}}
    torch.save({**described, "model": model.state_dict()}, path)


def save_rows(path: Path, count: int, seed: int) -> None:
    """Rows {"text", "label"} of random words, as JSONL."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            text = " ".join(draw.choices(WORDS, k=draw.randint(3, 8)))
            file.write(json.dumps({"text": text, "label": draw.randrange(len(LABELS))}) + "\n")


@dataclass(frozen=True)
class World:
    """Where everything is, and the two commands on it."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model" / "model.pt"

    @property
    def dictionary(self) -> Path:
        return self.root / "model" / "dict.txt"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def spec(self) -> Path:
        return self.root / "toy.yaml"

    def task_flags(self, **changes: object) -> list[object]:
        flags = {"task": "demonstration_prompting", "dataset": self.spec, "num-demonstrations": 6, "seed": 3} | changes
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        return ["--user-dir", PLUGIN, "--cpu", *words]

    def train(
        self,
        save_dir: Path,
        *flags: object,
        criterion: str = "cross_entropy",
        shell_prefix: str = "",
        **changes: object,
    ) -> Result:
        """fairseq-train on the demonstrations."""
        common = ["--arch", "pretrained_lm", "--criterion", criterion, "--save-dir", save_dir]
        sgd = ["--optimizer", "sgd", "--lr", "0.1", "--disable-validation", "--no-epoch-checkpoints"]
        task = self.task_flags(**({"pretrained": self.model} | changes))
        return run("fairseq-train", self.data, *task, *common, *sgd, *flags, shell_prefix=shell_prefix)

    def validate(self, path: Path, *flags: object, criterion: str = "icl_similarity", **changes: object) -> Result:
        """fairseq-validate of a checkpoint."""
        task = self.task_flags(**changes)
        return run("fairseq-validate", self.data, *task, "--path", path, "--criterion", criterion, *flags)


def make_world(root: Path) -> World:
    """Write all files of the world below `root`."""
    world = World(root)
    for folder in (world.model.parent, world.data):
        folder.mkdir(parents=True)
    dictionary = Dictionary()
    for word in [*WORDS, *LABELS, *TEMPLATE_WORDS]:
        dictionary.add_symbol(word)
    dictionary.save(str(world.dictionary))
    save_model(world.model, dictionary)
    save_rows(world.data / "toy_train.jsonl", 20, seed=1)
    save_rows(world.data / "toy_valid.jsonl", 15, seed=2)
    world.spec.write_text(SPEC)
    return world
