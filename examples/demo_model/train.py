"""Rebuild the demo from nothing: tokenizer, datasets, and the model pretrained with plain `fairseq-train`.

    python -m examples.demo_model.train FOLDER

writes FOLDER/model and FOLDER/data, which are what ships in fairseq_icl/demo, and the curve of the pretraining.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from fairseq.tasks.language_modeling import LanguageModelingConfig
from matplotlib.backends.backend_agg import FigureCanvasAgg
from omegaconf import OmegaConf

from examples.demo_model import DEMO_DATASETS
from examples.demo_model.datasets import write_datasets
from examples.demo_model.tokenizer import tokenizer_texts, train_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).resolve().parent / "pretraining"

MODEL = """--arch transformer_lm --decoder-layers 6 --decoder-embed-dim 128 --decoder-ffn-embed-dim 256
    --decoder-attention-heads 4 --decoder-input-dim 128 --decoder-output-dim 128 --share-decoder-input-output-embed
    --decoder-normalize-before --activation-fn gelu --dropout 0 --attention-dropout 0"""
"""A small dense LM: pre-norm with a final norm, gelu, sinusoidal positions, tied embeddings."""

OPTIMIZATION = """--optimizer adam --adam-betas (0.9,0.98) --weight-decay 0.01 --clip-norm 1.0 --lr 2e-3
    --lr-scheduler tri_stage --phase-ratio (0.02,0.68,0.3) --final-lr-scale 0.02"""

NUMBER = r"([\d.]+)"


def pretraining_command(
    *, seed: int, max_update: int, every: int, model: str = MODEL, data: str = ".", more: str = ""
) -> list[str]:
    """The `fairseq-train` command, for the tokenizer's folder `data`; run again after a stop, it goes on from there.

    `model` and `more` are flags of fairseq, for a model of another shape and whatever else differs.
    """
    fairseq_train = shutil.which("fairseq-train", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    saving = f"""--save-dir checkpoints --no-epoch-checkpoints --keep-interval-updates 1
        --save-interval 100000 --save-interval-updates {every} --validate-interval 100000
        --valid-subset {",".join(DEMO_DATASETS)}"""
    run = f"""--task demo_pretraining --batch-size 1 --criterion demo_label_cross_entropy
        --seed {seed} --max-update {max_update} --num-workers 0 --cpu
        --log-format simple --log-interval {min(50, max_update // 4)}"""
    words = f"{run} {model} {OPTIMIZATION} {saving} {more}".split()
    return [str(fairseq_train), data, "--user-dir", str(PLUGIN), *words]


def read_log(log: str) -> tuple[list[tuple[int, float, int]], dict[str, list[tuple[int, float]]]]:
    """(update, label loss, level) of the training lines, and dataset -> (update, accuracy at k = 16 to 31)."""
    training = re.findall(rf"train_inner .*? label_loss={NUMBER},.* level=(\d+),.* num_updates=(\d+)", log)
    held_out: dict[str, list[tuple[int, float]]] = {}
    pattern = rf"valid on '(\w+)' subset .*accuracy_k16 {NUMBER} .*num_updates (\d+)"
    for dataset, accuracy, update in re.findall(pattern, log):
        held_out.setdefault(dataset, []).append((int(update), float(accuracy)))
    return [(int(update), float(loss), int(level)) for loss, level, update in training], held_out


def plot_curve(log: Path, picture: Path) -> None:
    """Two panels over the updates: label loss with the levels' beginnings, and accuracy on the held-out datasets."""
    training, held_out = read_log(log.read_text(encoding="utf-8"))
    figure = plt.Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot([update for update, _, _ in training], [loss for _, loss, _ in training], linewidth=1)
    for before, after in pairwise(training):
        if after[2] > before[2]:
            left.axvline(before[0], color="0.8", linewidth=0.8, zorder=0)
    left.set(xlabel="update", ylabel="label loss (nats)", title="pretraining; grey: episodes widen")
    for dataset, points in held_out.items():
        right.plot(*zip(*points, strict=True), label=dataset, linewidth=1)
    right.set(xlabel="update", ylabel="accuracy", ylim=(0, 1.02), title="held-out, 16 to 31 demonstrations")
    right.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


def export_checkpoint(source: Path, target: Path) -> None:
    """Write a training checkpoint's configuration and fp16 weights, as if of fairseq's stock language-modelling task.

    The pretraining task and criterion are left behind, so that stock fairseq loads the model without any plugin; so are
    the folders of the machine it was trained on.
    """
    state = torch.load(source, weights_only=True)
    cfg: dict[str, Any] = state["cfg"]
    task = OmegaConf.to_container(OmegaConf.structured(LanguageModelingConfig), enum_to_str=True)
    trained = cfg["task"]
    sizes = {key: trained[key] for key in ("tokens_per_sample", "max_target_positions", "add_bos_token")}
    cfg["task"] = {**task, "_name": "language_modeling", "data": ".", **sizes}
    cfg["criterion"] = {"_name": "cross_entropy", "sentence_avg": False}
    cfg["common"]["user_dir"] = None
    cfg["checkpoint"]["save_dir"] = "checkpoints"
    target.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: value.half() for name, value in state["model"].items()}
    # fairseq's loader will not do without the last two; neither holds optimizer state.
    kept = {"optimizer_history": state["optimizer_history"], "extra_state": {}}
    torch.save({"cfg": cfg, "model": weights, **kept}, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
