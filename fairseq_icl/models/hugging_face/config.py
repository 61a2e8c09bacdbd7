"""A config.json of which every key has to be read, or to be known as harmless; and the architecture it describes.

Any other key is refused by name: an option that is not understood would make another model of the same weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_icl.errors import UserError
from fairseq_icl.models.rotary_lm import RotaryConfig, Rotation

HARMLESS_FOR = {
    "who wrote the file, with what, and in which precision": """
        _attn_implementation _commit_hash _model_name_or_path _name_or_path _num_labels architectures
        attn_implementation dtype model_type name_or_path tokenizer_class torch_dtype torchscript
        transformers.js_config transformers_version use_bfloat16 use_cache""",
    "initialisation and training; dropout is off in everything this package runs": """
        activation_dropout attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout dropout
        embd_pdrop gradient_checkpointing hidden_dropout hidden_dropout_prob init_std initializer_range layerdrop
        resid_pdrop summary_first_dropout""",
    "heads and tasks other than language modelling": """
        finetuning_task id2label label2id num_labels problem_type summary_activation summary_proj_to_labels
        summary_type summary_use_proj task_specific_params""",
    "what calls return, and how text is generated": """
        bad_words_ids badwordsids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample
        early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
        forced_eos_token_id length_penalty max_length min_length newlinemode no_repeat_ngram_size num_beam_groups
        num_beams num_return_sequences output_attentions output_hidden_states output_past output_scores prefix
        remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
        temperature top_k top_p typical_p unk_token_id welcome""",
}
HARMLESS = frozenset(key for keys in HARMLESS_FOR.values() for key in keys.split())
PLAIN: dict[str, Any] = {
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "is_decoder": (False, True),  # attention is causal in these classes either way
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}
"""Keys of all families with the only values that leave the model as it is implemented here."""
REMEDIES = {
    "quantization_config": "quantised weights are not supported; use the original folder of the model",
    "auto_map": "the folder brings its own code, which is not run; use a model of a known family",
}
SCALINGS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "original_max_position_embeddings": "original_positions",
    },
}
"""Ways to scale rotary frequencies: key in config.json -> field of `Rotation`."""


@dataclass(frozen=True)
class Architecture:
    """What config.json says. Token ids are those of the file, not yet rows of the embedding matrix."""

    family: str
    vocab_size: int
    positions: int
    tied: bool
    bos: int
    eos: int
    pad: int | None
    options: dict[str, Any] | None = None
    """Options of fairseq's `TransformerLanguageModelConfig`; None for a rotary model."""
    rotary: RotaryConfig | None = None
    window: int | None = None


class ConfigFile:
    """The keys of a config.json, each of which has to be taken by somebody before `finish`.

    As in transformers, null stands for "as if the key were not there", but for token ids, where it means "none".
    """

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.path = path
        self._values = dict(values)
        self._taken: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is in the file, be it null."""
        return key in self._values

    def take(self, key: str, default: Any, kind: type = int) -> Any:
        """The key's value, or `default` where it is null or not there; a UserError if it is not of this `kind`."""
        self._taken.add(key)
        value = self._values.get(key)
        if value is None:
            return default
        kinds = (int, float) if kind is float else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"is not of type {kind.__name__}; get the model's own file")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A count of at least one; without a default the key must be there."""
        value = self.take(key, default)
        if value is None:
            raise UserError(f"{self.path}: no {key!r} in it; get the model's own file")
        if value < 1:
            raise self.error(key, "is not a positive number; get the model's own file")
        return int(value)

    def must_be(self, key: str, allowed: Any, why: str = "is not implemented; use another model") -> None:
        """Refuse any value of the key but the allowed one (or one of a tuple of them); null and absence are fine."""
        self._taken.add(key)
        values = allowed if isinstance(allowed, tuple) else (allowed,)
        if self._values.get(key) is not None and self._values[key] not in values:
            raise self.error(key, why)

    def choose(self, key: str, default: str, choices: Mapping[str, str]) -> str:
        """The choice that the key's value (or `default`) stands for."""
        value = self.take(key, default, str)
        if value not in choices:
            raise self.error(key, f"is not implemented (known: {', '.join(choices)}); use another model")
        return choices[value]

    def token(self, key: str, default: int | None) -> int | None:
        """A token id, the first one of a list of them; None for null and for -1, which some files say instead."""
        self._taken.add(key)
        value = self._values.get(key, default)
        if isinstance(value, list) and value:
            value = value[0]
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.error(key, "is not a token id; get the model's own file")
        return None if value is None or value < 0 else value

    def error(self, key: str, why: str) -> UserError:
        """The refusal of a key, on one line."""
        shown = repr(self._values.get(key))
        return UserError(f"{self.path}: {key}={shown if len(shown) < 80 else shown[:77] + '...'} {why}")

    def finish(self) -> None:
        """Refuse keys that nobody took."""
        for key, allowed in PLAIN.items():
            self.must_be(key, allowed)
        given = {key for key, value in self._values.items() if value is not None}
        for key in sorted(given - self._taken - HARMLESS):
            if "expert" in key or "moe" in key.lower():
                raise self.error(key, "makes it a mixture of experts, which is not supported; use a dense model")
            unknown = "is not understood and might change what the model computes; use a model without it"
            raise self.error(key, REMEDIES.get(key, unknown))


def first_and_last(file: ConfigFile, bos: int | None, eos: int | None) -> tuple[int, int]:
    """(BOS, EOS), of which one may stand in for the other."""
    first, last = (eos if bos is None else bos), (bos if eos is None else eos)
    if first is None or last is None:
        raise UserError(f"{file.path}: neither bos_token_id nor eos_token_id in it; add the id a text begins with")
    return first, last


def read_rotation(file: ConfigFile, head_dim: int, theta: float, share: float) -> Rotation:
    """Rotary frequencies, from `rope_parameters` (transformers 5) or `rope_scaling` (4) over the given values."""
    key = "rope_parameters" if file.has("rope_parameters") else "rope_scaling"
    given = dict(file.take(key, {}, dict))
    kind = given.pop("rope_type", given.pop("type", "default"))
    theta = given.pop("rope_theta", theta)
    if given.pop("partial_rotary_factor", share) != share:
        raise file.error(key, f"rotates another part of a head than {share}; get the model's own file")
    if kind not in SCALINGS:
        raise file.error(key, f"scales positions in a way ({kind}) that is not implemented; use a model without it")
    unknown = sorted(set(given) ^ set(SCALINGS[kind]))
    if unknown:
        raise file.error(key, f"has {unknown[0]!r} missing or not understood; get the model's own file")
    values = {SCALINGS[kind][name]: value for name, value in given.items()}
    if not all(isinstance(number, int | float) and number > 0 for number in (theta, *values.values())):
        raise file.error(key, "has a value that is not a positive number; get the model's own file")
    dim = int(head_dim * share)
    if dim % 2 or not 0 < dim <= head_dim:
        raise UserError(f"{file.path}: {dim} of {head_dim} dimensions cannot be rotated in pairs; use another model")
    return Rotation(dim, float(theta), kind, **values)
