"""A whole paper in one command: plan the cells, run them, store each once, report them beside the published figures."""

import logging

logging.getLogger("fairseq").setLevel(logging.WARNING)  # training tells of every step
