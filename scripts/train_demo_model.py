#!/usr/bin/env python3
"""Rebuild the demo from nothing: tokenizer, datasets, and the model pretrained with plain `fairseq-train`."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from fairseq_icl.demo import DEMO_DATASETS  # noqa: E402
from fairseq_icl.demo.curve import plot_curve  # noqa: E402
from fairseq_icl.demo.datasets import write_datasets  # noqa: E402
from fairseq_icl.demo.export import export_checkpoint  # noqa: E402
from fairseq_icl.demo.tokenizer import tokenizer_texts, train_tokenizer  # noqa: E402

MODEL = """--arch transformer_lm --decoder-layers 6 --decoder-embed-dim 128 --decoder-ffn-embed-dim 256
    --decoder-attention-heads 4 --decoder-input-dim 128 --decoder-output-dim 128 --share-decoder-input-output-embed
    --decoder-normalize-before --activation-fn gelu --dropout 0 --attention-dropout 0"""
"""A small dense LM: pre-norm with a final norm, gelu, sinusoidal positions, tied embeddings."""

OPTIMIZATION = """--optimizer adam --adam-betas (0.9,0.98) --weight-decay 0.01 --clip-norm 1.0 --lr 2e-3
    --lr-scheduler tri_stage --phase-ratio (0.02,0.68,0.3) --final-lr-scale 0.02"""


def pretraining_command(*, seed: int, max_update: int, every: int) -> list[str]:
    """The `fairseq-train` command, for the tokenizer's folder; run again after a stop, it goes on from there."""
    fairseq_train = shutil.which("fairseq-train", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    saving = f"""--save-dir checkpoints --no-epoch-checkpoints --keep-interval-updates 1
        --save-interval 100000 --save-interval-updates {every} --validate-interval 100000
        --valid-subset {",".join(DEMO_DATASETS)}"""
    data = f"--task demo_pretraining --user-dir {REPOSITORY / 'fairseq_icl' / 'demo' / 'pretraining'} --batch-size 1"
    run = f"""--criterion demo_label_cross_entropy --seed {seed} --max-update {max_update} --num-workers 0 --cpu
        --log-format simple --log-interval {min(50, max_update // 4)}"""
    return [str(fairseq_train), ".", *f"{data} {run} {MODEL} {OPTIMIZATION} {saving}".split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where everything is written")
    parser.add_argument("--seed", type=int, default=1, help="of corpus, tokenizer text and training")
    parser.add_argument("--max-update", type=int, default=5000, help="length of the pretraining")
    parser.add_argument("--every", type=int, default=500, help="updates between two validations and checkpoints")
    args = parser.parse_args()
    train_tokenizer(tokenizer_texts(args.seed), args.folder)
    write_datasets(args.folder / "data", args.seed)
    command = pretraining_command(seed=args.seed, max_update=args.max_update, every=args.every)
    # One thread, as the shipped model was trained: more would add up in another order, and gain little at this size.
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with (args.folder / "train.log").open("a") as log:
        subprocess.run(command, check=True, cwd=args.folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    plot_curve(args.folder / "train.log", args.folder / "curve.png")
    export_checkpoint(args.folder / "checkpoints" / "checkpoint_last.pt", args.folder / "model" / "model.pt")
    for name in ("dict.txt", "sentencepiece.bpe.model"):
        shutil.copy(args.folder / name, args.folder / "model")


if __name__ == "__main__":
    main()
