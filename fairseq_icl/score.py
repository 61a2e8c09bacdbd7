"""`fairseq-icl score`: fairseq-validate with this plugin's task and criterion filled in."""

import logging
import sys
from pathlib import Path

from fairseq_cli import validate

from fairseq_icl.compat import TASK

DEFAULTS = {
    "--user-dir": str(Path(__file__).parent),
    "--task": TASK,
    "--criterion": "icl_similarity",
}


def main(argv: list[str]) -> int:
    """Score a checkpoint; every flag of fairseq-validate works, and what is not given has our default."""
    given = {word.split("=")[0] for word in argv}
    filled = [word for flag, value in DEFAULTS.items() if flag not in given for word in (flag, value)]
    sys.argv = ["fairseq-icl score", *argv, *filled]  # fairseq reads the command line itself
    logging.getLogger().setLevel(logging.INFO)  # fairseq-validate prints its results as such messages
    validate.cli_main()
    return 0
