"""In-context learning against gradient descent: a fairseq plugin."""

from fairseq_icl.errors import install_excepthook

__version__ = "0.1.0"

install_excepthook()
