"""Tiny random models, prompts and queries for the tests of this folder."""

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig

from fairseq_icl.models import Model
from fairseq_icl.models.files import ModelFiles
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing import Observation, Observer
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.prompts.encoding import Query
from fairseq_icl.settings import Settings
from tests.prompts.samples import SENTIMENT, spec_of

VOCABULARY = 60
CONTEXT = (0, *random.Random(0).choices(range(4, VOCABULARY), k=40), 2)


def tiny_model(seed: int = 0, **changes: object) -> PretrainedLM:
    """Three layers of width 16 with 4 heads; every weight is random, biases and norms too."""
    options = {
        "decoder_layers": 3,
        "decoder_embed_dim": 16,
        "decoder_ffn_embed_dim": 32,
        "decoder_input_dim": 16,
        "decoder_output_dim": 16,
        "decoder_attention_heads": 4,
        "decoder_normalize_before": True,
        "share_decoder_input_output_embed": True,
        "activation_fn": "gelu",
        "dropout": 0.0,
        "max_target_positions": 128,
        "tokens_per_sample": 128,
    }
    dictionary = Dictionary()
    for number in range(VOCABULARY - len(dictionary)):
        dictionary.add_symbol(f"word{number}")
    vocabulary = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    torch.manual_seed(seed)
    model = TransformerLanguageModel.build_model(TransformerLanguageModelConfig(**options | changes), vocabulary)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return PretrainedLM(model.decoder).eval()


def words(draw: random.Random, fewest: int = 1, most: int = 9) -> tuple[int, ...]:
    """Some random tokens."""
    return tuple(draw.choices(range(4, VOCABULARY), k=draw.randint(fewest, most)))


def make_queries(kind: str, count: int = 6, options: int = 3, seed: int = 0) -> list[Query]:
    """Queries with labels of one token ("single"), of several ("multi"), or with an input per option ("inputs")."""
    draw = random.Random(seed)
    queries = []
    for row in range(count):
        inputs = (words(draw),) * options
        if kind == "inputs":
            inputs = tuple(words(draw) for _ in range(options))
        labels = tuple(words(draw, 1, 1 if kind == "single" else 3) for _ in range(options))
        queries.append(Query(row, draw.randrange(options), inputs, labels))
    return queries


def as_model(lm: PretrainedLM, **facts: object) -> Model:
    """The module as what the instrument works with; it has no files."""
    return Model(lm, ModelFiles("tiny", Path("model.pt"), Path("dict.txt")), **facts)


def make_prompts(queries: Sequence[Query] = (), context: Sequence[int] = CONTEXT, **settings: object) -> Prompts:
    """Prompts of these queries after the context, which counts as one demonstration."""
    return Prompts(
        spec=spec_of(SENTIMENT),
        settings=Settings(**settings),
        start=(0,),
        context=tuple(context),
        context_rows=(7,),
        context_spans=((1, len(context) - 1),),
        queries=tuple(queries),
        finetuning=(),
    )


def look(
    lm: PretrainedLM, queries: Sequence[Query], position: str = "option0", context: Sequence[int] = CONTEXT, **how: bool
) -> Observation:
    """What the module shows on one batch of queries: zero-shot, or as `how` says (arguments of Observer)."""
    return Observer(as_model(lm), make_prompts(queries, context, position=position), **how)(queries)
