"""The recipe: the demo model's data, optimizer and criterion at a smaller shape, with and without momentum."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from examples.demo_model.train import REPOSITORY, export_checkpoint, pretraining_command
from fairseq_icl.files import DEMO_MODEL

ETAS, SEEDS = (0.0, 0.1, 0.5, 0.9), (1, 2, 3)
SHAPE = """--decoder-layers 4 --decoder-embed-dim 64 --decoder-ffn-embed-dim 128 --decoder-attention-heads 4
    --decoder-input-dim 64 --decoder-output-dim 64 --share-decoder-input-output-embed --decoder-normalize-before
    --activation-fn gelu --dropout 0 --attention-dropout 0"""
UPDATES, EVERY = 3000, 250
LEVELS = "25,29,33,37,41,45"
"""Epochs of 50 updates at which episodes widen, to the last level: before it some label words of the demo datasets
have never been seen. The demo model widens when it reads well enough; here all models must see the same data, so it is
when ordinary models of this size have begun to read (after about 1,100 updates)."""
LAST_LEVEL = len(LEVELS.split(","))
TOKENS = 2048
"""Per update, as the demo model."""


@dataclass(frozen=True)
class Run:
    """One model: its eta (0: ordinary attention) and the seed of its weights and data."""

    eta: float
    seed: int

    @property
    def name(self) -> str:
        return f"eta{self.eta:g}_seed{self.seed}"

    @property
    def command(self) -> list[str]:
        """`fairseq-train` for the run's folder, with the tokenizer in ../tokenizer."""
        attention = f"--attention momentum --momentum {self.eta}" if self.eta else "--attention softmax"
        more = f"--tokens-per-batch {TOKENS} --widen-at-epochs {LEVELS}"
        model = f"--arch attention_lm {attention} {SHAPE}"
        return pretraining_command(
            seed=self.seed, max_update=UPDATES, every=EVERY, model=model, data="../tokenizer", more=more
        )


RUNS = [Run(eta, seed) for seed in SEEDS for eta in ETAS]
"""Seed by seed, so that an unfinished folder has whole comparisons."""


def train(run: Run, folder: Path) -> Path:
    """The model's folder, FOLDER/NAME/model; trained now, or from where it was stopped, if it is not there."""
    place, tokenizer = folder / run.name, folder / "tokenizer"
    if (place / "model" / "model.pt").is_file():
        return place / "model"
    for target in (tokenizer, place / "model"):
        target.mkdir(parents=True, exist_ok=True)
        for name in ("dict.txt", "sentencepiece.bpe.model"):
            shutil.copy(DEMO_MODEL.parent / name, target)
    # One thread: more would add up in another order, and gain little at this size.
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with (place / "train.log").open("a") as log:
        subprocess.run(run.command, check=True, cwd=place, env=environment, stdout=log, stderr=subprocess.STDOUT)
    export_checkpoint(place / "checkpoints" / "checkpoint_last.pt", place / "model" / "model.pt")
    return place / "model"
