"""A whole paper in one command: plan the cells, run them, store each once, report them beside the published figures."""

import logging

# Some of fairseq's modules turn on debug messages for everybody while they are imported; these four are talkative.
for _name in ("fairseq", "filelock", "hydra", "matplotlib"):
    logging.getLogger(_name).setLevel(logging.WARNING)
