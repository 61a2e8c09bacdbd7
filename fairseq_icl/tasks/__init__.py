"""What fairseq registers: the task, and with it the models and criterions of the plugin.

fairseq imports this folder and `models/` for `--user-dir`, unless the package was imported before; whoever trains in
this process imports it as well. It is the one place that changes fairseq's commands (compat.apply).
"""

from fairseq_icl import compat
from fairseq_icl.criterions import icl_similarity, layer_causal_ce
from fairseq_icl.models import attention, linearized_lm, pretrained_lm
from fairseq_icl.tasks import demonstration_prompting
from fairseq_icl.tasks.restore import restore

compat.apply(restore)
