"""Losses and measures that fairseq runs: layer-causal training, and the comparison of ICL with fine-tuning."""

from fairseq_icl import compat  # noqa: F401 - before anything imports fairseq
