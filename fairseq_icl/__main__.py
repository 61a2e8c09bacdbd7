"""`python -m fairseq_icl COMMAND ...`: the same as `fairseq-icl COMMAND ...`, for processes that start others."""

import sys

from fairseq_icl.commands import main

if __name__ == "__main__":
    sys.exit(main())
