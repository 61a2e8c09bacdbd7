"""Prompts: rows of a dataset -> templates -> demonstrations -> token sequences. Knows nothing of fairseq.

Here: how a model wants its text written, and the authors' rule for line breaks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fairseq_icl.errors import UserError

Tokens = tuple[int, ...]
Encode = Callable[[str], list[int]]
"""ONE line of text -> ids of the model's dictionary, without BOS and EOS. A model supplies it."""

BOS, PAD, EOS, UNKNOWN = 0, 1, 2, 3
"""fairseq's ids of the special symbols."""


@dataclass(frozen=True)
class Writing:
    """How a model wants its text written in tokens."""

    encode: Encode
    max_positions: int = 2048
    """Longest sequence."""
    bos: int = BOS
    separator: Tokens = (EOS,)
    """What closes a demonstration in the prompt."""
    line_break: Tokens | None = (EOS,)
    """What a line break in a text becomes; None if `encode` takes text with line breaks as it is."""
    unknown: int | None = UNKNOWN
    eos: int = EOS
    newline: Tokens = ()
    """A line break in tokens; empty if the tokenizer has none."""

    def separated(self, by: str) -> "Writing":
        """The same with another separator: "model" (its own), "eos" or "newline"."""
        if by == "newline" and not self.newline:
            raise UserError("separator=newline: the model's tokenizer has no token for it; use separator=eos")
        tokens = {"model": self.separator, "eos": (self.eos,), "newline": self.newline}
        return replace(self, separator=tokens[by])

    def tokens(self, text: str) -> Tokens:
        """Ids of all non-empty lines, joined by `line_break`.

        `str.splitlines()` decides what a line is, so U+0085 and U+2028 break lines as well as a line feed does. The
        authors close every line by EOS and drop the last one, which is to say that a line break becomes one EOS.
        """
        if self.line_break is None:
            return tuple(self.encode(text))
        ids: list[int] = []
        for line in filter(None, text.splitlines()):
            ids += [*(self.line_break if ids else ()), *self.encode(line)]
        return tuple(ids)
