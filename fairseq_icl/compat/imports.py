"""Importing fairseq without its noise: no debug messages, no warnings of old calls, no libraries of other tasks."""

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

# Before fairseq is imported, which announces at once that an optional package of its speech tasks is missing, and turns
# on the debug messages of every package.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
_level = logging.getLogger().level

# Before torch multiplies: products in bf16 would use AMX where the processor announces it, and virtual machines exist
# that announce it and then kill the process (Illegal instruction). fp32 does not use it. A value of the user's stays.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def _called_later(name: str) -> ModuleType:
    """A stand-in for a module: each of its functions imports it when it is called."""

    def function(attribute: str) -> Callable[..., Any]:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return lambda *args, **kwargs: getattr(importlib.import_module(name), attribute)(*args, **kwargs)

    module = ModuleType(name)
    vars(module)["__getattr__"] = function
    return module


# While fairseq is imported, which imports these for the scores of two tasks, of audio and of sentence pairs: it would
# be a third of the time in which a command starts.
_later: dict[str, ModuleType] = {}
for _package, _part in (("scipy", "stats"), ("sklearn", "metrics")):
    if _package not in sys.modules:
        _later |= {name: _called_later(name) for name in (_package, f"{_package}.{_part}")}
        vars(_later[_package])[_part] = _later[f"{_package}.{_part}"]
sys.modules.update(_later)

import fairseq.trainer  # noqa: F401 - and with it all of fairseq

logging.getLogger().setLevel(_level)
for _name in _later:
    del sys.modules[_name]


def silence_warnings_about_fairseq() -> None:
    """Hide the warnings of fairseq 0.12 about newer hydra and torch, which would bury our own one-line errors."""
    for message in (  # one for each known message; others still show
        r"hydra\.experimental\.",
        r"\s*The version_base parameter is not specified",
        r".*Usage of deprecated keyword in package header",
        r"\s*'config' is validated against ConfigStore schema",
        r"\s*The strict flag in the compose API is deprecated",
        r".*torch\.cuda\.amp\.autocast",
        r"'pin_memory' argument is set as true but no accelerator is found",
        r"Support for mismatched key_padding_mask and attn_mask is deprecated",
        r"`torch\.jit\.script` is deprecated",
        r"amp_C fused kernels unavailable",
    ):
        warnings.filterwarnings("ignore", message=message)
