"""fairseq's tokenizers and dictionaries as the one function that prompts need: a line of text -> dictionary ids."""

from argparse import Namespace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from fairseq.data.encoders import build_bpe
from fairseq.tokenizer import tokenize_line

from fairseq_icl.errors import UserError
from fairseq_icl.prompts.tokens import Encode

KNOWN_SHARE = 0.9
"""Share of a tokenizer's pieces that its own dictionary must hold; another model's holds far fewer."""

TOKENIZER_FILES = {
    "gpt2": {"gpt2_encoder_json": "encoder.json", "gpt2_vocab_bpe": "vocab.bpe"},
    "sentencepiece": {"sentencepiece_model": "sentencepiece.bpe.model"},
}
"""The flags of fairseq's tokenizers and the names their files have beside a published checkpoint."""


def line_encoder(dictionary: Dictionary, bpe: Any | None) -> Encode:
    """line -> ids of its pieces in the dictionary, without EOS; without `bpe` the pieces are its words.

    `bpe` is what fairseq's `build_bpe` returns. Lines that recur (label words, shared inputs) are encoded once.
    """
    if bpe is not None:
        _check_match(dictionary, bpe)

    @lru_cache(maxsize=4096)
    def encode(line: str) -> tuple[int, ...]:
        pieces = line if bpe is None else bpe.encode(line)
        return tuple(dictionary.index(piece) for piece in tokenize_line(pieces))

    return lambda line: list(encode(line))


def load_dictionary(path: str | Path) -> Dictionary:
    """The dictionary in a fairseq dict.txt."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; give the dict.txt that came with the model")
    try:
        return Dictionary.load(str(path))
    except Exception as error:  # fairseq raises a bare Exception for a wrong encoding
        raise UserError(f"{path}: not a fairseq dictionary ({error}); its lines must read TOKEN COUNT") from error


def load_bpe(name: str | None, **files: str | None) -> Any | None:
    """fairseq's tokenizer `name` built from its files (`gpt2_encoder_json=...`); None without a name."""
    if not name:
        return None
    for flag, path in files.items():
        shown = f"--{flag.replace('_', '-')}"
        if path is None:
            raise UserError(f"--bpe {name} needs {shown} FILE; give the file that came with the model")
        if not Path(path).is_file():
            raise UserError(f"{shown} {path}: no such file; give the file that came with the model")
    options = {"sentencepiece_enable_sampling": False, "sentencepiece_alpha": None} if name == "sentencepiece" else {}
    try:
        return build_bpe(Namespace(bpe=name, **files, **options))
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError, OSError) as error:
        named = ", ".join(map(str, files.values()))
        raise UserError(f"{named}: not the files of a {name} tokenizer ({error}); download them again") from error


def _check_match(dictionary: Dictionary, bpe: Any) -> None:
    """Refuse BPE files that do not belong together or to the dictionary: they would turn every text into nonsense."""
    pieces: list[str] = []
    if hasattr(bpe, "bpe") and hasattr(bpe.bpe, "bpe_ranks"):  # gpt2
        pieces = [str(number) for number in bpe.bpe.encoder.values()]
        if any("".join(pair) not in bpe.bpe.encoder for pair in bpe.bpe.bpe_ranks):
            raise UserError("--gpt2-vocab-bpe has merges that --gpt2-encoder-json does not know; use one model's files")
    elif hasattr(bpe, "sp"):  # sentencepiece
        pieces = [bpe.sp.id_to_piece(number) for number in range(bpe.sp.get_piece_size())]
    known = sum(piece in dictionary for piece in pieces)
    if known < KNOWN_SHARE * len(pieces):
        raise UserError(
            f"the dictionary holds only {known} of the tokenizer's {len(pieces)} pieces: dict.txt and BPE files are of "
            f"different models; use the files that came with the model"
        )
