"""Models of a given shape with random weights, and prompts of given lengths with random tokens.

Speed and memory do not depend on what the weights are, so nothing has to be downloaded.
"""

from dataclasses import dataclass
from random import Random
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig

from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.prompts.build import FinetuningSequence, PromptSet, Query
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.prompts.tokens import BOS, EOS
from fairseq_icl.tasks.demonstration_prompting import freeze_all_but

SPECIAL_SYMBOLS = 4
TRAINED = "k_proj,v_proj"
DEMONSTRATION_TOKENS, QUERY_TOKENS = 26, 30
"""About what an SST-2 demonstration and query have under GPT-2's BPE."""


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer's size."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int = 50264

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer that multiply activations: four attention projections and a fourfold feed-forward."""
        return 12 * self.width**2

    def scoring_flops(self, rows: int, context: int, logit_rows: int) -> float:
        """Operations of `rows` query tokens after `context` others, `logit_rows` of which reach the vocabulary."""
        linear = 2 * rows * self.layer_parameters * self.layers
        attention = 4 * rows * context * self.width * self.layers
        return float(linear + attention + 2 * logit_rows * self.vocabulary * self.width)

    def training_flops(self, rows: int, method: str) -> float:
        """Operations our way needs for a step on `rows` tokens: forward, backward to inputs, gradients of k and v."""
        forward = 2 * rows * self.layer_parameters * self.layers
        k_and_v = 2 * rows * 2 * self.width**2 * self.layers
        head = 2 * 2 * rows * self.vocabulary * self.width  # logits, and their gradient back to the features
        if method == "lcgd":
            return float(2 * forward + k_and_v + self.layers * head)
        tangents = 2 * forward + head if method == "linearized" else 0  # a forward pass of values and tangents
        return float(2 * forward + k_and_v + head + tangents)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", layers=4, width=128, heads=4, vocabulary=8000),
        Shape("125m", layers=12, width=768, heads=12),
        Shape("355m", layers=24, width=1024, heads=16),
        Shape("1.3b", layers=24, width=2048, heads=32),
    )
}


def dictionary_of(shape: Shape) -> Dictionary:
    """As many symbols as the shape's vocabulary has."""
    dictionary = Dictionary()
    for number in range(shape.vocabulary - len(dictionary)):
        dictionary.add_symbol(f"token{number}")
    return dictionary


def random_model(shape: Shape, seed: int = 1) -> PretrainedLM:
    """A model like fairseq's dense LMs (pre-norm, gelu, sinusoidal positions, tied embeddings); only k and v learn."""
    config = TransformerLanguageModelConfig(
        decoder_embed_dim=shape.width,
        decoder_input_dim=shape.width,
        decoder_output_dim=shape.width,
        decoder_ffn_embed_dim=4 * shape.width,
        decoder_layers=shape.layers,
        decoder_attention_heads=shape.heads,
        decoder_normalize_before=True,
        activation_fn="gelu",
        share_decoder_input_output_embed=True,
        dropout=0.0,
        max_target_positions=2048,
        tokens_per_sample=2048,
        add_bos_token=False,
        tpu=False,
    )
    dictionary = dictionary_of(shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vocabulary = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
        model = PretrainedLM(TransformerLanguageModel.build_model(config, vocabulary).decoder)
    freeze_all_but(model, TRAINED, biases=True)
    model.eval()
    return model


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of the weights, tied ones once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def random_prompts(
    shape: Shape,
    *,
    num_demonstrations: int = 32,
    num_queries: int = 100,
    demonstration_tokens: int = DEMONSTRATION_TOKENS,
    query_tokens: int = QUERY_TOKENS,
    seed: int = 1,
) -> PromptSet:
    """Prompts of a two-class task; lengths are spread evenly from half to one and a half times the given ones."""
    rng = Random(seed)
    label_words = tuple((token,) for token in rng.sample(range(SPECIAL_SYMBOLS, shape.vocabulary), 2))

    def query(row: int, mean: int) -> Query:
        length = rng.randint(mean - mean // 2, mean + mean // 2) - 1  # the label is the last token
        tokens = tuple(rng.randrange(SPECIAL_SYMBOLS, shape.vocabulary) for _ in range(max(1, length)))
        return Query(row, rng.randrange(2), (tokens, tokens), label_words)

    demonstrations = [query(row, demonstration_tokens) for row in range(num_demonstrations)]
    texts = [(*d.inputs[0], *d.labels[d.gold]) for d in demonstrations]
    context, spans = [BOS], []
    for text in texts:
        spans.append((len(context), len(context) + len(text)))
        context += (*text, EOS)
    return PromptSet(
        spec=load_spec("sst2"),
        context=tuple(context),
        context_rows=tuple(range(num_demonstrations)),
        context_spans=tuple(spans),
        queries=tuple(query(row, query_tokens) for row in range(num_queries)),
        finetuning=tuple(sequence(row, text) for row, text in enumerate(texts)),
        num_requested=num_demonstrations,
    )


def sequence(row: int, text: tuple[int, ...]) -> FinetuningSequence:
    """A training sequence whose every token after BOS is scored."""
    return FinetuningSequence(row, (BOS, *text), (False, *[True] * len(text)))


def demonstration(shape: Shape, tokens: int, seed: int = 1) -> FinetuningSequence:
    """One training sequence of `tokens` scored tokens."""
    rng = Random(seed)
    return sequence(0, tuple(rng.randrange(SPECIAL_SYMBOLS, shape.vocabulary) for _ in range(tokens)))
