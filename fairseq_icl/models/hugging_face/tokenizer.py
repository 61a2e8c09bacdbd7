"""The tokenizer and the dictionary of a Hugging Face folder.

A `fairseq.data.Dictionary` is made whose symbol i belongs to row i of the embedding matrix. No row is added: zeros in a
tied matrix would have the logit 0, far above those of real tokens, and take all the probability. A model without
symbols for padding and unknown words gets names for them from tokens that no text contains.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fairseq.data import Dictionary
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fairseq_icl.errors import UserError
from fairseq_icl.prompts import Encode

BYTES_IN_NO_TEXT = (0xFF, 0xFE, 0xFD, 0xFC, 0xFB, 0xFA, 0xF9, 0xF8, 0xF7, 0xF6, 0xF5, 0xC1, 0xC0)
"""Bytes that UTF-8 never uses."""
KNOWN_SHARE = 0.9
"""Share of the embedding rows that the tokenizer must have a token for; another model's has fewer, or too many."""
GPT2_FAMILIES = ("gpt2", "opt", "dense")
"""Families whose vocab.json and merges.txt are GPT-2's byte-level BPE; others split text by rules of their own."""
TRAINED_WITH_EOS = ("dense", "xglm")
"""Families whose training texts had no line breaks, but one EOS where a line ended."""
UNKNOWN_WORDS = ("<unk>", "[UNK]")
FAIRSEQ_SPECIALS = {0: "<s>", 1: "<pad>", 2: "</s>", 3: "<unk>"}
TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("sentencepiece.bpe.model",))
"""The files that a tokenizer may be in, the preferred ones first."""


@dataclass(frozen=True)
class Vocabulary:
    """Text <-> rows of the embedding matrix of one model."""

    dictionary: Dictionary
    separator: tuple[int, ...]
    """Rows of what stands between two demonstrations: EOS, or the tokens of a line break."""
    newline: tuple[int, ...]
    """Rows of a line break; empty if the tokenizer has none."""
    encode_text: Encode
    decode_text: Callable[[list[int]], str]
    order: Sequence[int]
    """Row -> id in the tokenizer, whose own ids the two functions work on."""
    row_of: Mapping[int, int]
    known: frozenset[int]


def read_vocabulary(folder: Path, family: str, num_rows: int, bos: int, eos: int, pad: int | None) -> Vocabulary:
    """The vocabulary of a model with `num_rows` embeddings; `bos`, `eos` and `pad` are the ids in config.json."""
    encode_text, decode_text, tokens, special = _load(folder, family)
    if max(tokens, default=-1) >= num_rows or len(tokens) < KNOWN_SHARE * num_rows:  # every text would be nonsense
        raise UserError(
            f"{tokenizer_files(folder)[0]}: {len(tokens):,} tokens with ids up to {max(tokens, default=-1):,}, but the "
            f"model has {num_rows:,} embeddings: the tokenizer is of another model; copy the model's own"
        )
    order = [*range(num_rows - 4, num_rows), *range(num_rows - 4)] if family == "dense" else list(range(num_rows))
    row_of = {token: row for row, token in enumerate(order)}
    # Where the tokenizer begins every text with a space of its own, the one of label words (" great") must not be two.
    adds_space = tokens.get((encode_text("a") or [-1])[0], "").startswith(("▁", "Ġ"))
    encode = (lambda text: encode_text(text.removeprefix(" "))) if adds_space else encode_text
    line_break = encode("\n")
    if len(line_break) > 1 and tokens.get(line_break[0]) == "▁":  # which stands at the beginning of a text only
        line_break = line_break[1:]
    separator = [eos] if family in TRAINED_WITH_EOS else line_break
    if not separator:
        raise UserError(f"{folder}: the tokenizer has no token for a line break; use another tokenizer file")
    dictionary = Dictionary(add_special_symbols=False)
    has_specials_first = family in ("opt", "xglm", "dense")  # whether or not the tokenizer knows them
    for row, token in enumerate(order):
        symbol = FAIRSEQ_SPECIALS[row] if has_specials_first and row < 4 else tokens.get(token, f"<row {row}>")
        # A dictionary would merge symbols of the same name.
        dictionary.add_symbol(f"{symbol}#{row}" if symbol in dictionary else symbol)
    dictionary.bos_index, dictionary.eos_index = row_of[bos], row_of[eos]
    if has_specials_first:
        dictionary.pad_index, dictionary.unk_index = 1, 3
    else:
        used = {bos, eos, *separator}
        dictionary.pad_index, dictionary.unk_index = _spare_rows(folder, tokens, num_rows, encode, used, pad, special)
    dictionary.nspecial = 0  # special symbols are not the first ones here
    for name in ("bos", "eos", "pad", "unk"):
        setattr(dictionary, f"{name}_word", dictionary[getattr(dictionary, f"{name}_index")])
    rows, newline = (tuple(row_of[token] for token in part) for part in (separator, line_break))
    newline = () if dictionary.unk_index in newline else newline
    return Vocabulary(dictionary, rows, newline, encode, decode_text, order, row_of, frozenset(tokens))


def tokenizer_files(folder: Path) -> list[Path]:
    """The files that `read_vocabulary` reads, in a fixed order."""
    for names in TOKENIZER_FILES:
        if all((folder / name).is_file() for name in names):
            return [folder / name for name in names]
    raise UserError(
        f"{folder}: no tokenizer.json (nor vocab.json with merges.txt, nor sentencepiece.bpe.model) in it; "
        "copy the tokenizer's files into the folder"
    )


Loaded = tuple[Encode, Callable[[list[int]], str], dict[int, str], list[int]]
"""Text -> ids, ids -> text, all tokens by id, and the ids of special ones, which no text becomes."""


def _load(folder: Path, family: str) -> Loaded:
    files = tokenizer_files(folder)
    if files[0].name == "sentencepiece.bpe.model":
        return _load_sentencepiece(files[0], family)
    is_whole = files[0].name == "tokenizer.json"
    if not is_whole and family not in GPT2_FAMILIES:
        raise UserError(f"{files[0]}: how {family} splits text is written in tokenizer.json only; copy that file too")
    try:
        tokenizer = Tokenizer.from_file(str(files[0])) if is_whole else _gpt2_tokenizer(files[0], files[1], family)
    except Exception as error:  # the library raises bare Exceptions
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{files[0]}: not a tokenizer ({reason}); download it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # a text that says "</s>" does not end here
    tokens = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    special = [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    return (lambda text: tokenizer.encode(text, add_special_tokens=False).ids), decode, tokens, special


def _gpt2_tokenizer(vocabulary: Path, merges: Path, family: str) -> Tokenizer:
    """GPT-2's byte-level BPE; the special tokens of the family, which text does not reach, are taken as such."""
    tokens = json.loads(vocabulary.read_text(encoding="utf-8"))
    tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>"] if family == "gpt2" else list(FAIRSEQ_SPECIALS.values())
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names if name in tokens])
    return tokenizer


def _load_sentencepiece(path: Path, family: str) -> Loaded:
    """XGLM's tokenizer: fairseq's four specials, then the pieces of the model but its own first three."""
    import sentencepiece

    if family != "xglm":
        raise UserError(f"{path}: XGLM's tokenizer beside a {family} model; copy the model's own tokenizer.json here")
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{path}: not a sentencepiece model ({reason}); download it again") from error
    # The file starts <unk>, <s>, </s>; the model <s>, <pad>, </s>, <unk>.
    tokens = FAIRSEQ_SPECIALS | {n + 1: pieces.id_to_piece(n) for n in range(3, pieces.get_piece_size())}

    def decode(ids: list[int]) -> str:
        return "".join(tokens[number] for number in ids).replace("▁", " ")

    special = list(FAIRSEQ_SPECIALS)
    return (lambda text: [number + 1 if number else 3 for number in pieces.encode(text)]), decode, tokens, special


def _spare_rows(
    folder: Path, tokens: dict[int, str], rows: int, encode: Encode, used: set[int], pad: int | None, special: list[int]
) -> tuple[int, int]:
    """Two rows for padding and unknown words that no prompt contains.

    In this order: the model's own padding and unknown token, bytes that UTF-8 never uses, rows without a token, special
    tokens (the last one first: the first ones begin and end texts).
    """
    ids = {token: number for number, token in tokens.items()}
    # Byte-level BPE writes these bytes as the character of the same number, sentencepiece as <0xFF>.
    names = [name for byte in BYTES_IN_NO_TEXT for name in (chr(byte), f"<0x{byte:02X}>")]
    # A name that is no byte but an ordinary word of this tokenizer comes back from encoding it.
    bytes_in_no_text = [ids[name] for name in names if name in ids and ids[name] not in encode(name)]
    without_token = [row for row in range(rows) if row not in tokens]
    unreachable = [number for number in sorted(special, reverse=True) if number not in encode(tokens[number])]
    own_pad = [pad] if pad is not None and pad < rows else []
    spare = [number for number in [*own_pad, *bytes_in_no_text, *without_token, *unreachable] if number not in used]
    if len(spare) < 2:
        raise UserError(
            f"{folder}: no token is free to stand for padding (pad_token_id in config.json is missing or used in "
            "prompts, and every other token may occur in a text); set pad_token_id to an unused token"
        )
    unknown = next((ids[name] for name in UNKNOWN_WORDS if name in ids and ids[name] not in used), None)
    second = next(number for number in spare[1:] if number != spare[0])
    return spare[0], second if unknown is None or unknown == spare[0] else unknown
