"""The tokenizer and the dictionary of a Hugging Face folder.

A `fairseq.data.Dictionary` is made whose symbol i belongs to row i of the embedding matrix. No row is added: zeros in a
tied matrix would have the logit 0, far above those of real tokens, and take all the probability. A model without
symbols for padding and unknown words gets names for them from tokens that no text contains.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from fairseq.data import Dictionary
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fairseq_icl.errors import UserError

BYTES_IN_NO_TEXT = (0xFF, 0xFE, 0xFD, 0xFC, 0xFB, 0xFA, 0xF9, 0xF8, 0xF7, 0xF6, 0xF5, 0xC1, 0xC0)
"""Bytes that UTF-8 never uses."""
KNOWN_SHARE = 0.9
"""Share of the embedding rows that the tokenizer must have a token for; another model's has fewer, or too many."""
GPT2_FAMILIES = ("gpt2", "opt", "dense")
"""Families whose vocab.json and merges.txt are GPT-2's byte-level BPE; others split text by rules of their own."""
FAIRSEQ_SPECIALS = {0: "<s>", 1: "<pad>", 2: "</s>", 3: "<unk>"}
TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("sentencepiece.bpe.model",))
"""The files that a tokenizer may be in, the preferred ones first."""


@dataclass(frozen=True)
class Vocabulary:
    """Text <-> rows of the embedding matrix of one model.

    `encode_text` and `decode_text` work on the tokenizer's own ids, of which row i is number `order[i]`.
    """

    dictionary: Dictionary
    separator: tuple[int, ...]
    """Rows of what stands between two demonstrations: EOS, or the tokens of a line break."""
    newline: tuple[int, ...]
    """Rows of a line break; empty if the tokenizer has none."""
    encode_text: Callable[[str], list[int]]
    decode_text: Callable[[list[int]], str]
    order: Sequence[int]
    row_of: Sequence[int]
    known: frozenset[int]

    def encode_line(self, text: str) -> list[int]:
        """Rows of the text's tokens, without special ones; names of special tokens in it are read as plain text."""
        return [self.row_of[token] for token in self.encode_text(text)]

    def decode(self, rows: Iterable[int]) -> str:
        """The text of the rows; rows without a token of the tokenizer are shown by their symbol."""
        parts = []
        for is_token, run in groupby(map(int, rows), key=lambda row: self.order[row] in self.known):
            if is_token:
                parts.append(self.decode_text([self.order[row] for row in run]))
            else:
                parts += [self.dictionary[row] for row in run]
        return "".join(parts)


def read_vocabulary(
    folder: Path, family: str, num_rows: int, bos: int, eos: int, pad: int | None, separator_is_eos: bool
) -> Vocabulary:
    """The vocabulary of the model in `folder` with `num_rows` embeddings.

    `bos`, `eos` and `pad` are the tokenizer's ids in config.json; `family` decides where special rows are.
    """
    encode_text, decode_text, tokens, special = _load(folder, family)
    _check_match(folder, tokens, num_rows)
    order = [*range(num_rows - 4, num_rows), *range(num_rows - 4)] if family == "dense" else list(range(num_rows))
    row_of = [0] * num_rows
    for row, token in enumerate(order):
        row_of[token] = row
    # The dense LMs' specials are rows of their own whether or not the tokenizer knows them.
    symbols = _unique([tokens.get(token, f"<row {row}>") for row, token in enumerate(order)])
    if family in ("opt", "xglm", "dense"):
        symbols[:4] = FAIRSEQ_SPECIALS.values()
        symbols = _unique(symbols)
    encode = _without_doubled_space(encode_text, tokens)
    line_break = _line_break(encode, tokens)
    separator = [eos] if separator_is_eos else line_break
    if not separator:
        raise UserError(f"{folder}: the tokenizer has no token for a line break; use another tokenizer file")
    dictionary = Dictionary(add_special_symbols=False)
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    dictionary.bos_index, dictionary.eos_index = row_of[bos], row_of[eos]
    if family in ("opt", "xglm", "dense"):
        dictionary.pad_index, dictionary.unk_index = 1, 3
    else:
        used = {bos, eos, *separator}
        dictionary.pad_index, dictionary.unk_index = _spare_rows(folder, tokens, num_rows, encode, used, pad, special)
    dictionary.nspecial = 0  # special symbols are not the first ones here
    dictionary.bos_word, dictionary.eos_word = symbols[dictionary.bos_index], symbols[dictionary.eos_index]
    dictionary.pad_word, dictionary.unk_word = symbols[dictionary.pad_index], symbols[dictionary.unk_index]
    rows = tuple(row_of[token] for token in separator)
    newline = tuple(row_of[token] for token in line_break)
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


Loaded = tuple[Callable[[str], list[int]], Callable[[list[int]], str], dict[int, str], list[int]]
"""Text -> ids, ids -> text, all tokens by id, and the ids of special ones, which no text becomes."""


def _load(folder: Path, family: str) -> Loaded:
    files = tokenizer_files(folder)
    if files[0].name == "sentencepiece.bpe.model":
        return _load_sentencepiece(files[0], family)
    try:
        if files[0].name == "tokenizer.json":
            tokenizer = Tokenizer.from_file(str(files[0]))
        elif family in GPT2_FAMILIES:
            tokenizer = _gpt2_tokenizer(files[0], files[1], family)
        else:
            raise UserError(
                f"{files[0]}: how {family} splits text is written in tokenizer.json only; copy that file too"
            )
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"{files[0]}: not a tokenizer ({_one_line(error)}); download it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # a text that says "</s>" does not end here

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    tokens = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    special = [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return encode, decode, tokens, special


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
        raise UserError(f"{path}: not a sentencepiece model ({_one_line(error)}); download it again") from error
    shift, unknown = 1, 3  # the file starts <unk>, <s>, </s>; the model <s>, <pad>, </s>, <unk>
    tokens = FAIRSEQ_SPECIALS | {
        number + shift: pieces.id_to_piece(number) for number in range(3, pieces.get_piece_size())
    }

    def encode(text: str) -> list[int]:
        return [number + shift if number else unknown for number in pieces.encode(text)]

    def decode(ids: list[int]) -> str:
        return "".join(
            tokens[number] if number <= unknown else pieces.id_to_piece(number - shift).replace("▁", " ")
            for number in ids
        )

    return encode, decode, tokens, list(FAIRSEQ_SPECIALS)


def _without_doubled_space(encode: Callable[[str], list[int]], tokens: dict[int, str]) -> Callable[[str], list[int]]:
    """`encode`; where the tokenizer begins every text with a space of its own, without the text's first space.

    Label words come with their space (" great"), which must not become two.
    """
    first = tokens.get((encode("a") or [-1])[0], "")
    return (lambda text: encode(text.removeprefix(" "))) if first.startswith(("▁", "Ġ")) else encode


def _line_break(encode: Callable[[str], list[int]], tokens: dict[int, str]) -> list[int]:
    """Ids of a line break inside a text: without the space that some tokenizers begin with."""
    ids = encode("\n")
    return ids[1:] if len(ids) > 1 and tokens.get(ids[0]) == "▁" else ids


def _spare_rows(
    folder: Path,
    tokens: dict[int, str],
    num_rows: int,
    encode: Callable[[str], list[int]],
    used: set[int],
    pad: int | None,
    special: list[int],
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
    without_token = [row for row in range(num_rows) if row not in tokens]
    unreachable = [number for number in sorted(special, reverse=True) if number not in encode(tokens[number])]
    own_pad = [pad] if pad is not None and pad < num_rows else []
    spare = [number for number in [*own_pad, *bytes_in_no_text, *without_token, *unreachable] if number not in used]
    if len(spare) < 2:
        raise UserError(
            f"{folder}: no token is free to stand for padding (pad_token_id in config.json is missing or used in "
            "prompts, and every other token may occur in a text); set pad_token_id to an unused token"
        )
    unknown = next((ids[name] for name in ("<unk>", "[UNK]") if name in ids and ids[name] not in used), None)
    second = next(number for number in spare[1:] if number != spare[0])
    return spare[0], second if unknown is None or unknown == spare[0] else unknown


def _check_match(folder: Path, tokens: dict[int, str], num_rows: int) -> None:
    """Refuse the tokenizer of another model: it would turn every text into nonsense."""
    if max(tokens, default=-1) >= num_rows or len(tokens) < KNOWN_SHARE * num_rows:
        raise UserError(
            f"{tokenizer_files(folder)[0]}: {len(tokens):,} tokens with ids up to {max(tokens, default=-1):,}, but the "
            f"model has {num_rows:,} embeddings: the tokenizer is of another model; copy the model's own"
        )


def _unique(symbols: list[str]) -> list[str]:
    """The symbols, with a number after those that were there before: a dictionary would merge them."""
    seen: set[str] = set()
    unique = []
    for row, symbol in enumerate(symbols):
        symbol = f"{symbol}#{row}" if symbol in seen else symbol
        seen.add(symbol)
        unique.append(symbol)
    return unique


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
