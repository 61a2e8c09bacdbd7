"""Prompts: rows of a dataset -> templates -> demonstrations -> token sequences. Knows nothing of fairseq."""
