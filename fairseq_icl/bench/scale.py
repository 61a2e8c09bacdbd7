"""Measure a whole experiment as a user would run it: `fairseq-icl replicate` on random weights and SST-2-like data.

The command runs twice in processes of their own: once for its plan, once in earnest. Reported are the seconds and the
peak memory of the whole process, and how far the plan's estimate was from what the run took.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fairseq_icl.bench.report import Findings, Limit
from fairseq_icl.bench.shapes import SPECIAL_SYMBOLS, Shape
from fairseq_icl.replication.model_files import make_stand_in

TEMPLATE_WORDS = ("Sentence:", "Label:", "Negative", "Positive")
SENTENCE_WORDS = (10, 36)
"""Shortest and longest sentence; with the template a demonstration has about 26 tokens."""
TRAIN_ROWS, VALID_ROWS = 200, 872
GIBI = 2**30
MEMORY_LIMIT = 9.0
LAUNCHER = """
import os, resource, sys
status = os.spawnv(os.P_WAIT, sys.argv[1], sys.argv[1:])
print("\\n", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, sep="")
sys.exit(status)
"""
"""Linux counts the memory of whoever starts a process as the new one's: a small program must start what is measured."""
UNITS = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True)
class Run:
    """How a command went."""

    seconds: float
    peak_bytes: int
    output: str


def measure_scale(findings: Findings, shape: Shape, limit: int, say: Callable[[str], None]) -> None:
    """A note and limits of an experiment with vanilla and layer-causal fine-tuning, `limit` queries scored."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_world(folder, shape)
        words = command(folder, shape, limit)
        say(f"plan of fairseq-icl {' '.join(words)}")
        estimate = estimated_seconds(run([*words, "--dry-run"]).output)
        say("the same in earnest")
        make_stand_in(folder / "out" / "stand_in" / f"{shape.name}.pt", folder / "dict.txt", sizes(shape))
        taken = run([*words, "--quiet"])
    findings.notes.append(
        f"`{' '.join(_shown(words))}` took {taken.seconds:.0f} s and {taken.peak_bytes / GIBI:.2f} GiB at its peak; "
        f"its plan said {estimate:.0f} s."
    )
    findings.limits += [
        Limit("whole experiment, peak memory in GiB", taken.peak_bytes / GIBI, MEMORY_LIMIT),
        Limit("whole experiment, error of the time in its plan", abs(estimate / taken.seconds - 1), 0.3),
    ]


def write_world(folder: Path, shape: Shape) -> None:
    """A dictionary of the shape's vocabulary and rows of random words, in the layout of SST-2."""
    words = [f"word{number}" for number in range(shape.vocabulary - SPECIAL_SYMBOLS - len(TEMPLATE_WORDS))]
    (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in (*TEMPLATE_WORDS, *words)))
    (folder / "sst2").mkdir()
    rng = Random(1)
    for split, count in (("train", TRAIN_ROWS), ("validation", VALID_ROWS)):
        with (folder / "sst2" / f"{split}.jsonl").open("w") as file:
            for _ in range(count):
                sentence = " ".join(rng.choices(words, k=rng.randint(*SENTENCE_WORDS)))
                file.write(json.dumps({"sentence": sentence, "label": rng.randrange(2)}) + "\n")


def sizes(shape: Shape) -> dict[str, int]:
    """The shape as the model configurations write it."""
    size = {"layers": shape.layers, "width": shape.width, "heads": shape.heads, "ffn": 4 * shape.width}
    return size | {"vocabulary": shape.vocabulary}


def command(folder: Path, shape: Shape, limit: int) -> list[str]:
    """The words of the command after `fairseq-icl`."""
    return [
        "replicate",
        "experiment=deutch2024",
        "model=1.3b",
        f"model.name={shape.name}",
        f"model.shape={{{','.join(f'{name}:{value}' for name, value in sizes(shape).items())}}}",
        "model.random=true",
        "model.bpe=null",
        f"model.tokenizer={folder}",
        f"data={folder}",
        "dataset=[sst2]",
        "init=[pretrained]",
        "seed=first",
        "method=[gd,lcgd]",
        f"limit={limit}",
        f"out={folder / 'out'}",
    ]


def run(words: list[str]) -> Run:
    """Run `fairseq-icl WORDS`; its peak memory is what the kernel counted for that process alone."""
    start = time.perf_counter()
    command = [sys.executable, "-c", LAUNCHER, sys.executable, "-m", "fairseq_icl.cli", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"fairseq-icl {' '.join(words)} ended with exit code {done.returncode}")
    output, peak = done.stdout.rstrip("\n").rsplit("\n", 1)
    return Run(time.perf_counter() - start, int(peak) * 1024, output)


def estimated_seconds(plan: str) -> float:
    """The time that a printed plan expects."""
    number, unit = re.search(r"^estimated time: ([\d.]+) (s|min|h)\b", plan, re.MULTILINE).groups()
    return float(number) * UNITS[unit]


def _shown(words: list[str]) -> list[str]:
    """The command without what concerns the temporary folder."""
    hidden = ("model.tokenizer=", "data=", "out=")
    return ["fairseq-icl", *(word for word in words if not word.startswith(hidden))]
