#!/usr/bin/env python3
"""Score ZSL, ICL and FT of a checkpoint side by side: the same as `fairseq-icl score`, without installing anything.

python scripts/score_similarity.py DATA --path FINETUNED.pt --results RUN/results.parquet
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fairseq_icl.commands import main

if __name__ == "__main__":
    sys.exit(main(["score", *sys.argv[1:]]))
