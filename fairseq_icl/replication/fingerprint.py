"""Fingerprints of what a result depends on: model file, data files, and the code of each stage."""

import ast
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from fairseq_icl.checkpoints import sha256_of
from fairseq_icl.metrics import get_metric, metric_names
from fairseq_icl.prompts.catalogue import DatasetSpec
from fairseq_icl.prompts.readers import find_split

PACKAGE = Path(__file__).parent.parent
OWN = "fairseq_icl."

STAGES: dict[str, tuple[str, ...]] = {
    "prompts": ("prompts",),
    "model": ("models", "checkpoints.py", "compat.py", "encoding.py"),
    "observe": ("observe",),
    "train": ("criterions", "tasks", "gradients.py"),
    "metrics": ("metrics",),
}
"""The parts of the package that each stage of a cell runs through."""


@cache
def code_version(stage: str) -> str:
    """Hash of a stage's source code; comments, docstrings and layout do not count."""
    digest = hashlib.sha256()
    for part in STAGES[stage]:
        path = PACKAGE / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(PACKAGE)).encode())
            digest.update(_code_of(file.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()


def _code_of(source: str) -> str:
    """`source` as a syntax tree without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [x for x in body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    return ast.dump(tree)


def code_versions(stages: Iterable[str]) -> dict[str, str]:
    """{"code.STAGE": hash} of the given stages."""
    return {f"code.{stage}": code_version(stage) for stage in stages}


def foreign_metrics() -> str:
    """Names and code of the metrics that other packages added."""
    added = [metric for metric in map(get_metric, metric_names()) if not metric.compute.__module__.startswith(OWN)]
    return json.dumps({metric.name: _source_of(metric.compute) for metric in added}, sort_keys=True)


def _source_of(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except OSError:  # made in an interactive session
        return f"{function.__module__}.{function.__qualname__}"


@cache
def file_hash(path: Path) -> str:
    """SHA-256 of a file, read once a process."""
    return sha256_of(path)


def data_hash(folder: Path, spec: DatasetSpec) -> str:
    """Hash of a dataset's two files and of what its YAML says, published settings and notes aside."""
    described = {name: value for name, value in asdict(spec).items() if name not in ("papers", "note", "source")}
    parts = [json.dumps(described, sort_keys=True, default=str)]
    parts += [file_hash(file) for split in ("train", "valid") for file in find_split(folder, spec, split)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
