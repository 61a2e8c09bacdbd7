#!/usr/bin/env bash
# For whoever has a GPU first: the doctor, and the demo on CPU and GPU side by side, in some three minutes.
# The last lines are a short text to paste into an issue.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
python - <<'EOF' | tee "$out/report"
import platform, torch
if not torch.cuda.is_available():
    raise SystemExit("torch sees no GPU: check nvidia-smi, and that torch is a build with CUDA")
print(f"python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
for number in range(torch.cuda.device_count()):
    known = torch.cuda.get_device_properties(number)
    print(f"GPU {number}: {known.name}, {known.total_memory / 2**30:.0f} GiB, capability {known.major}.{known.minor}")
EOF
fairseq-icl doctor fairseq_icl/demo/model | grep -E "gpu|PROBLEM" | tee -a "$out/report"
python - <<'EOF' | tee -a "$out/report"
import time
import torch
import fairseq_icl as fi

def run(device, precision):
    model = fi.load_model("demo", device=device, precision=precision)
    prompts = fi.build_prompts(model, "demo_sentiment", k=8, limit=60)
    start = time.perf_counter()
    zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    with fi.fine_tuned(model, prompts, "gd", lr=0.3) as tuned:
        ft = fi.observe(tuned, prompts)
    table = fi.compare(prompts, zsl, icl, ft)
    seconds = time.perf_counter() - start
    means = table[table["example"].isna() & table["layer"].isna()].set_index("metric")["value"]
    return icl, means, seconds

plain, expected, seconds = run("cpu", "fp32")
print(f"cpu fp32: {seconds:.1f} s")
for precision in ("fp32", "fp16", "bf16"):
    torch.cuda.reset_peak_memory_stats()
    seen, means, seconds = run("cuda", precision)
    away = float((seen.option_logprobs - plain.option_logprobs).abs().max())
    shown = ", ".join(f"{name} {means[name]:.4f} (cpu {expected[name]:.4f})" for name in ("accuracy_ft", "sim_aou", "sim_am_delta"))
    memory = torch.cuda.max_memory_allocated() / 2**20
    print(f"gpu {precision}: {seconds:.1f} s, {memory:.0f} MiB, ICL's scores differ by at most {away:.1e}; {shown}")
EOF
echo
echo "Please paste this into an issue:"
cat "$out/report"
