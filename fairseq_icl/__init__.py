"""In-context learning against gradient descent: a fairseq plugin.

`fairseq-train --user-dir fairseq_icl` imports this package, which registers the task, the models and the criterions.
fairseq itself would import `tasks/` and `models/` only, and nothing more if the package was imported before, so all of
them are imported here; importing twice is harmless.
"""

from fairseq_icl.errors import install_excepthook

__version__ = "0.1.0"

install_excepthook()

from fairseq_icl import compat

compat.apply()

from fairseq_icl.criterions import icl_similarity, layer_causal_ce
from fairseq_icl.models import linearized_lm, pretrained_lm
from fairseq_icl.tasks import demonstration_prompting
