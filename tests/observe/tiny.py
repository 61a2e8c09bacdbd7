"""Tiny random decoders and queries for the tests of this folder."""

import random
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig

from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.prompts.build import Query

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
