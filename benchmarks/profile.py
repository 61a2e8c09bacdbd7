"""Where the time of scoring goes, by PyTorch's profiler: what stands between it and the GEMM rate."""

from collections import Counter

from torch.profiler import ProfilerActivity, profile

from benchmarks.report import BenchFindings
from benchmarks.scoring import run_batches
from benchmarks.shapes import Shape
from fairseq_icl.models import Model
from fairseq_icl.observing import Observer
from fairseq_icl.prompts.build import Prompts

KINDS = {
    "products with weights": ("aten::addmm", "aten::mm"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::bmm"),
    "activation and norms": ("aten::gelu", "aten::silu", "aten::native_layer_norm"),
    "copies": ("aten::copy_", "aten::index", "aten::cat", "aten::index_select"),
}
"""Operators of torch whose own time is added up; what is left over is "the rest"."""


def measure_profile(findings: BenchFindings, shape: Shape, model: Model, prompts: Prompts) -> None:
    """A note: shares of the time of ICL scoring after the prefix."""
    observer = Observer(model, prompts, in_context=True)
    observer(prompts.queries[:2])  # the prefix is there
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run_batches(observer)
    times = {event.key: event.self_cpu_time_total for event in seen.key_averages()}
    total = sum(times.values())
    shares = Counter({kind: sum(times.get(name, 0.0) for name in names) / total for kind, names in KINDS.items()})
    shares["the rest"] = 1 - shares.total()
    parts = ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in shares.items())
    findings.notes.append(f"Where ICL scoring spends its time (torch.profiler, {shape.name}): {parts}.")
