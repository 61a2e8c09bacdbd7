"""Models of a given shape with random weights, and prompts of given lengths with random tokens.

Speed and memory do not depend on what the weights are, so nothing has to be downloaded.
"""

import atexit
import shutil
import tempfile
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

import torch
from fairseq.data import Dictionary
from torch import nn

from benchmarks.operations import DecoderSizes, operations
from fairseq_icl.files import PACKAGE, read_yaml
from fairseq_icl.models import Model
from fairseq_icl.models.files import ModelFiles, find_files, random_model, random_model_options
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.prompts import BOS, EOS
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.prompts.encoding import FinetuningSequence, Query
from fairseq_icl.settings import Settings

SPECIAL_SYMBOLS = 4
DEMONSTRATION_TOKENS, QUERY_TOKENS = 26, 30
"""About what an SST-2 demonstration and query have under GPT-2's BPE."""
VALIDATION_SIZE = 872
"""Examples in SST-2's validation set."""
PUBLISHED = ("125m", "355m", "1.3b")
"""Sizes of fairseq's dense language models (config/model) that are measured."""


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer's size."""

    name: str
    layers: int
    width: int
    heads: int
    ffn: int
    vocabulary: int

    def sizes(self) -> dict[str, int]:
        """The numbers, as the model configurations write them."""
        return {name: size for name, size in asdict(self).items() if name != "name"}

    @property
    def decoder(self) -> DecoderSizes:
        """The same for counting operations."""
        return DecoderSizes.of(**self.sizes())

    def scoring_flops(self, rows: int, context: int, logit_rows: int) -> float:
        """Operations of `rows` query tokens after `context` others, `logit_rows` of which reach the vocabulary."""
        forward = self.decoder.forward(rows, rows * context, read=logit_rows)
        return operations(forward + self.decoder.unembedding(logit_rows))

    def training_flops(self, rows: int, method: str) -> float:
        """Operations our way needs for a step on `rows` tokens: forward, backward to inputs, gradients of k and v."""
        losses = rows * (self.layers if method == "lcgd" else 1)
        sizes, linearized = self.decoder, method == "linearized"
        return operations(sizes.training(rows, losses, sizes.learning(), linearized=linearized))


def _published(name: str) -> Shape:
    return Shape(name, **read_yaml(PACKAGE / "config" / "model" / f"{name}.yaml")["shape"])


SHAPES = {
    "tiny": Shape("tiny", layers=4, width=128, heads=4, ffn=512, vocabulary=8000),
    **{name: _published(name) for name in PUBLISHED},
}


@lru_cache
def files_of(shape: Shape) -> ModelFiles:
    """Dictionary and options of a model of the shape, in a folder that goes with the process; no weights are there."""
    folder = Path(tempfile.mkdtemp(prefix="fairseq-icl-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    dictionary = Dictionary()
    for number in range(shape.vocabulary - len(dictionary)):
        dictionary.add_symbol(f"token{number}")
    dictionary.save(str(folder / "dict.txt"))
    torch.save({"args": random_model_options(shape.sizes()), "model": {}}, folder / "model.pt")
    return find_files(folder, name=shape.name, bpe=None)


def model_of(shape: Shape, seed: int = 1) -> Model:
    """A model of the shape with random weights, of which k and v learn."""
    files = files_of(shape)
    lm = PretrainedLM(random_model(files.load_dictionary(), shape.sizes(), seed).decoder).eval()
    let_k_and_v_learn(lm)
    return Model(lm, files)


def let_k_and_v_learn(lm: PretrainedLM) -> None:
    """What learns by default, and nothing else."""
    settings = Settings()
    lm.freeze_all_but(settings.train_parameters, biases=settings.biases == "trained")


def weight_bytes(module: nn.Module) -> int:
    """Bytes of the weights, tied ones once."""
    return sum(parameter.nbytes for parameter in module.parameters())


def random_prompts(
    shape: Shape,
    *,
    num_demonstrations: int = 32,
    num_queries: int = 100,
    demonstration_tokens: int = DEMONSTRATION_TOKENS,
    query_tokens: int = QUERY_TOKENS,
    num_options: int = 2,
    label_tokens: int = 1,
    seed: int = 1,
) -> Prompts:
    """Prompts of a classification task; lengths are spread evenly from half to one and a half times the given ones.

    The labels of the `num_options` classes have `label_tokens` tokens each and none in common.
    """
    rng = Random(seed)
    # From a generator of their own, and one number for each gold label: texts do not depend on the number of options.
    words = Random(-seed).sample(range(SPECIAL_SYMBOLS, shape.vocabulary), num_options * label_tokens)
    labels = tuple(tuple(words[option::num_options]) for option in range(num_options))

    def query(row: int, mean: int) -> Query:
        length = rng.randint(mean - mean // 2, mean + mean // 2) - label_tokens  # the label comes last
        tokens = tuple(rng.randrange(SPECIAL_SYMBOLS, shape.vocabulary) for _ in range(max(1, length)))
        return Query(row, int(num_options * rng.random()), (tokens,) * num_options, labels)

    demonstrations = [query(row, demonstration_tokens) for row in range(num_demonstrations)]
    texts = [(*d.inputs[0], *d.labels[d.gold]) for d in demonstrations]
    context, spans = [BOS], []
    for text in texts:
        spans.append((len(context), len(context) + len(text)))
        context += (*text, EOS)
    return Prompts(
        spec=load_spec("sst2"),
        settings=Settings(num_demonstrations=num_demonstrations, seed=seed),
        start=(BOS,),
        context=tuple(context),
        context_rows=tuple(range(num_demonstrations)),
        context_spans=tuple(spans),
        queries=tuple(query(row, query_tokens) for row in range(num_queries)),
        finetuning=tuple(sequence(row, text) for row, text in enumerate(texts)),
    )


def sequence(row: int, text: tuple[int, ...]) -> FinetuningSequence:
    """A training sequence whose every token after BOS is scored."""
    return FinetuningSequence(row, (BOS, *text), (False, *[True] * len(text)))


def demonstration(shape: Shape, tokens: int, seed: int = 1) -> FinetuningSequence:
    """One training sequence of `tokens` scored tokens."""
    rng = Random(seed)
    return sequence(0, tuple(rng.randrange(SPECIAL_SYMBOLS, shape.vocabulary) for _ in range(tokens)))
