"""What fairseq registers: the task, and with it the models and criterions of the plugin.

fairseq imports this folder and `models/` for `--user-dir`, unless the package was imported before; whoever trains in
this process imports it as well. It is the one place that changes fairseq's commands (compat.apply).
"""

from fairseq_icl import compat

compat.apply()

from fairseq_icl.criterions import icl_similarity, layer_causal_ce  # noqa: E402
from fairseq_icl.models import linearized_lm, pretrained_lm  # noqa: E402
from fairseq_icl.tasks import demonstration_prompting  # noqa: E402

__all__ = ["demonstration_prompting", "icl_similarity", "layer_causal_ce", "linearized_lm", "pretrained_lm"]
