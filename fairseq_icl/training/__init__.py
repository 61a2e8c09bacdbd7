"""Fine-tuning in this process: methods, losses, gradients controlled and recorded. `fine_tuning.fine_tuned` does it."""

from fairseq_icl import compat  # noqa: F401 - before anything imports fairseq
