"""Measure `fairseq-icl replicate` as a user would run it, on random weights and SST-2-like data.

Part `scale`: one seed of the pretrained model, twice in processes of their own, once for its plan and once in earnest:
seconds, peak memory, and how far the plan's estimate was from what the run took.

Part `experiment`: deutch2024 on one dataset with all its seeds, inits and methods, by one worker and by two.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from benchmarks.report import BenchFindings, Limit
from benchmarks.shapes import SPECIAL_SYMBOLS, VALIDATION_SIZE, Shape
from fairseq_icl.models.files import load_dictionary, save_random_model

TEMPLATE_WORDS = ("Sentence:", "Label:", "Negative", "Positive")
SENTENCE_WORDS = (10, 36)
"""Shortest and longest sentence; with the template a demonstration has about 26 tokens."""
TRAIN_ROWS = 200
GIBI = 2**30
MEMORY_LIMIT = 7.5
ONE_SEED = ("init=[pretrained]", "seed=first", "method=[gd,lcgd]")
WORKERS = (1, 2)
LIMIT = 20
"""Queries that the part `experiment` scores in each condition."""
LAUNCHER = """
import glob, pathlib, resource, subprocess, sys, time

def read(path):
    try:
        return pathlib.Path(path).read_text()
    except OSError:  # the process has ended
        return ""

def tree(pid):
    children = " ".join(read(path) for path in glob.glob(f"/proc/{pid}/task/*/children")).split()
    return [pid, *(one for child in children for one in tree(child))]

def memory(pid):
    lines = [line for line in read(f"/proc/{pid}/smaps_rollup").splitlines() if line.startswith("Pss:")]
    return int(lines[0].split()[1]) if lines else 0

started, together = subprocess.Popen(sys.argv[1:]), 0
while started.poll() is None:
    together = max(together, sum(memory(pid) for pid in tree(str(started.pid))))
    time.sleep(0.2)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print("\\n", max(together, used.ru_maxrss), " ", used.ru_utime + used.ru_stime, sep="")
sys.exit(started.returncode)
"""
"""Starts a command and prints its peak memory in KiB and its processor time. The memory is what the kernel counted for
the largest of its processes, or, if that was more, what all of them had together at one of many looks (their Pss: what
two share is counted once).

Linux counts the memory of whoever starts a process as the new one's: a small program must start what is measured."""
FAIRSEQ_ICL = "import sys; from fairseq_icl.commands import main; sys.exit(main())"
UNITS = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True)
class CommandRun:
    """How a command went."""

    seconds: float
    processor_seconds: float
    peak_bytes: int
    output: str

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s and {self.peak_bytes / GIBI:.2f} GiB at its peak"


def measure_scale(findings: BenchFindings, shape: Shape, limit: int, say: Callable[[str], None]) -> None:
    """A note and limits of an experiment with vanilla and layer-causal fine-tuning, `limit` queries scored."""
    with world(shape) as folder:
        words = replicate_words(folder, shape, limit, ONE_SEED)
        shown = shown_command(words, folder)
        say(f"plan of {shown}")
        estimate = estimated_seconds(run_command([*words, "--dry-run"]).output)
        say("the same in earnest")
        taken = run_command([*words, "--quiet"])
    # As everywhere in the benchmark: with one thread other programs hardly disturb processor time.
    seconds = taken.processor_seconds if torch.get_num_threads() == 1 else taken.seconds
    findings.notes.append(
        f"`{shown}` took {taken}; its plan said {estimate:.0f} s. FOLDER holds random weights of this shape and random "
        "sentences."
    )
    findings.limits += [
        Limit("whole experiment, peak memory in GiB", taken.peak_bytes / GIBI, MEMORY_LIMIT),
        Limit("whole experiment, error of the time in its plan", abs(estimate / seconds - 1), 1.0),
    ]


def measure_experiment(findings: BenchFindings, shape: Shape, say: Callable[[str], None]) -> None:
    """A note: deutch2024 with all seeds, inits and methods, each number of workers into a folder of its own."""
    with world(shape) as folder:
        runs: list[CommandRun] = []
        for workers in WORKERS:
            words = replicate_words(folder, shape, LIMIT, (f"workers={workers}",), out=f"out{workers}")
            say(shown_command(words, folder))
            runs.append(run_command([*words, "--quiet"]))
        shown = shown_command(replicate_words(folder, shape, LIMIT, ()), folder)
    taken = [f"with {n} worker{'s' * (n > 1)} {run}" for n, run in zip(WORKERS, runs, strict=True)]
    one, two = (run.peak_bytes for run in runs)
    findings.notes.append(
        f"`{shown}` (three seeds, three inits, gd, lcgd and alpha) took {', '.join(taken)}, all processes together: "
        f"two workers, who share the base model, have {two / one:.2f} times the memory of one. "
        "FOLDER holds random weights of this shape and random sentences."
    )


@contextmanager
def world(shape: Shape) -> Iterator[Path]:
    """Inside, a folder with a model of random weights, its dictionary, and rows of random words in SST-2's layout."""
    with tempfile.TemporaryDirectory(prefix="fairseq-icl-experiment-") as name:
        write_world(Path(name), shape)
        yield Path(name)


def write_world(folder: Path, shape: Shape) -> None:
    """Fill the folder of `world`."""
    words = [f"word{number}" for number in range(shape.vocabulary - SPECIAL_SYMBOLS - len(TEMPLATE_WORDS))]
    (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in (*TEMPLATE_WORDS, *words)))
    save_random_model(folder / "model.pt", load_dictionary(folder / "dict.txt"), shape.sizes())
    (folder / "sst2").mkdir()
    rng = Random(1)
    for split, count in (("train", TRAIN_ROWS), ("validation", VALIDATION_SIZE)):
        with (folder / "sst2" / f"{split}.jsonl").open("w") as file:
            for _ in range(count):
                sentence = " ".join(rng.choices(words, k=rng.randint(*SENTENCE_WORDS)))
                file.write(json.dumps({"sentence": sentence, "label": rng.randrange(2)}) + "\n")


def replicate_words(folder: Path, shape: Shape, limit: int, others: Sequence[str], out: str = "out") -> list[str]:
    """The words of the command after `fairseq-icl`, `others` among them."""
    return [
        "replicate",
        "experiment=deutch2024",
        f"model={folder / 'model.pt'}",
        f"model.name={shape.name}",
        "model.bpe=null",
        f"data={folder}",
        "dataset=[sst2]",
        *others,
        f"limit={limit}",
        f"out={folder / out}",
    ]


def shown_command(words: Sequence[str], folder: Path) -> str:
    """The command as text, without the name of the temporary folder."""
    return " ".join(["fairseq-icl", *words]).replace(str(folder), "FOLDER")


def run_command(words: list[str]) -> CommandRun:
    """Run `fairseq-icl WORDS`; its peak memory is that of its processes alone, see `LAUNCHER`."""
    start = time.perf_counter()
    command = [sys.executable, "-c", LAUNCHER, sys.executable, "-c", FAIRSEQ_ICL, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"fairseq-icl {' '.join(words)} ended with exit code {done.returncode}")
    output, used = done.stdout.rstrip("\n").rsplit("\n", 1)
    peak, processor_seconds = used.split()
    return CommandRun(time.perf_counter() - start, float(processor_seconds), int(peak) * 1024, output)


def estimated_seconds(plan: str) -> float:
    """The time that a printed plan expects."""
    found = re.search(r"^about ([\d.]+) (s|min|h) on this machine", plan, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"no estimate of time in the plan:\n{plan}")
    number, unit = found.groups()
    return float(number) * UNITS[unit]
