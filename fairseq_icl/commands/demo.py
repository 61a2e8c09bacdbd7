"""`fairseq-icl demo`: the whole instrument on the small model that ships with it.

Zero-shot, in-context and fine-tuned answers (gradient descent, layer-causal, linearized) and the untrained baselines on
the demo datasets; the papers' two tables are printed, an HTML report with figures is written.
"""

import argparse
import time
from pathlib import Path

from fairseq_icl.files import DEMO_DATA

QUICK = ("dataset=[demo_sentiment]", "seed=[1]", "limit=60", "init=[pretrained,untrained]")


def main(argv: list[str]) -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(prog="fairseq-icl demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one dataset, one seed, 60 examples: half a minute")
    parser.add_argument("--out", type=Path, help="results folder (default: runs/demo, or runs/demo-quick)")
    arguments = parser.parse_args(argv)
    out = arguments.out or Path("runs") / ("demo-quick" if arguments.quick else "demo")
    start = time.perf_counter()
    from fairseq_icl.commands import replicate  # six seconds of imports, which --help can do without

    code = replicate.main(["experiment=demo", f"out={out}", *(QUICK if arguments.quick else ())])
    page = out / "report" / "report.html"
    print(f"\nDone in {time.perf_counter() - start:.0f} s. Open {page} in a browser, then try:")
    print("  fairseq-icl replicate experiment=audit model=demo   # what each difference between code and papers does")
    print("  fairseq-icl replicate experiment=accounts model=demo dataset=demo_sentiment   # what ICL is nearest to")
    print("  fairseq-icl doctor demo    # what is in the model's folder")
    print(f"  fairseq-icl datasets --data {DEMO_DATA}   # the data")
    return code
