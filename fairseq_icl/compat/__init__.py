"""Every workaround for a version of fairseq, torch or Hydra, by what it repairs, each with its reason.

Written against fairseq-fixed 0.12.3.1 (fairseq 0.12.2 repaired for Python 3.11) and torch 2.13. Whatever uses fairseq
imports this package first. `apply` changes fairseq's own commands; it is called when our task is registered (fairseq
does that for `--user-dir`), never by `import fairseq_icl`, and may be called again harmlessly.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fairseq_icl.compat import imports  # before all others

# isort: split
from fairseq_icl.compat import command_line, half_precision, models


@cache
def apply(restore: Callable[[str, dict[str, Any]], Any]) -> None:
    """Change fairseq's commands, once; `restore` makes model and task of a checkpoint for `fairseq-validate`."""
    imports.silence_warnings_about_fairseq()
    torch.serialization.add_safe_globals(models.CHECKPOINT_CLASSES)  # for fairseq's own reading of checkpoints
    command_line.watch_command_lines()
    command_line.log_configurations_at_debug_level()
    command_line.honour_flags_in_validate(restore)
    models.resume_tasks()
    half_precision.gather_without_cuda()
    models.tell_failed_saves()
    half_precision.train_in_half_precision_without_cuda()
    half_precision.clip_on_the_cpu_beside_a_gpu()
    half_precision.tell_lost_loss_scale()
