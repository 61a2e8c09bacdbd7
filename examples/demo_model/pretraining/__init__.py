"""fairseq plugin for pretraining the demo model: `fairseq-train --user-dir THIS_FOLDER --task demo_pretraining`."""

# By its full name: fairseq imports this folder as top-level "pretraining", and a relative import would register twice.
from examples.demo_model.pretraining import criterion, task  # noqa: F401
from fairseq_icl.models import attention  # noqa: F401 - for examples/momentum_attention
