#!/usr/bin/env python3
"""The same as `fairseq-icl bench`."""

import sys

from fairseq_icl.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
