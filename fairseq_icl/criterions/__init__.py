"""Losses and measures that fairseq runs: layer-causal training, and the comparison of ICL with fine-tuning."""
