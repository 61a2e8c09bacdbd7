"""Text -> token ids, by the authors' rule for line breaks."""

from collections.abc import Callable, Sequence

Encode = Callable[[str], list[int]]
"""ONE line of text -> dictionary ids, without EOS. The fairseq task supplies it (fairseq_icl/encoding.py)."""

BOS, PAD, EOS, UNKNOWN = 0, 1, 2, 3


def encode_text(text: str, encode: Encode, eos: int = EOS) -> list[int]:
    """Ids of all non-empty lines, joined by EOS.

    `str.splitlines()` decides what a line is, so U+0085 and U+2028 break lines as well as a line feed does. Every line
    is closed by EOS and the last EOS dropped, which is to say that a line break becomes one EOS.
    """
    ids: list[int] = []
    for line in filter(None, text.splitlines()):
        ids += [*encode(line), eos]
    return ids[:-1]


def is_prefix(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether `second` begins with `first` (equal sequences included)."""
    return tuple(second[: len(first)]) == tuple(first)
