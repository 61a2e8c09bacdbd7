"""Prompts: rows of a dataset -> templates -> demonstrations -> token sequences. Knows nothing of fairseq."""

from fairseq_icl.prompts.encoding import BOS, EOS, PAD, UNKNOWN, Encode, Tokens, Writing

__all__ = ["BOS", "EOS", "PAD", "UNKNOWN", "Encode", "Tokens", "Writing"]
