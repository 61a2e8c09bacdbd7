"""`fairseq-icl score`: fairseq-validate with this plugin's task and criterion filled in."""

import logging
import sys

from fairseq_cli import validate

from fairseq_icl import tasks  # noqa: F401 - fairseq does not import a package that is imported already
from fairseq_icl.compat.command_line import TASK
from fairseq_icl.files import PACKAGE

DEFAULTS = {"--user-dir": str(PACKAGE), "--task": TASK, "--criterion": "icl_similarity"}


def main(argv: list[str]) -> int:
    """Score a checkpoint; every flag of fairseq-validate works, and what is not given has our default."""
    given = {word.split("=")[0] for word in argv}
    filled = [word for flag, value in DEFAULTS.items() if flag not in given for word in (flag, value)]
    sys.argv = ["fairseq-icl score", *argv, *filled]  # fairseq reads the command line itself
    logging.getLogger().setLevel(logging.INFO)  # fairseq-validate prints its results as such messages
    validate.cli_main()
    return 0
