"""GPUs that are not there: tensors say that they are on cuda:N, mixing devices raises as on CUDA, the CPU computes.

    from tests.gpu import simulated_gpu   # before torch
    gpu = simulated_gpu.start(2)          # from here on torch.cuda.is_available()
    gpu.crossings, gpu.peak               # what moved between host and device, and how much memory was in use

`Simulated` is a wrapper of tensors whose device in C++ is cuda:N, so all of torch above the kernels (autograd's device
threads, composite functions, `.to`, factories) sees CUDA. Where CUDA's kernels would run, `__torch_dispatch__` checks
the devices, runs the CPU's kernel on the tensor inside and wraps what comes out. guard.cpp is what C++ asks besides.

It rests on private parts of torch 2.13. It cannot see rounding, asynchrony, kernels that CUDA lacks, or real memory.
"""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any


def _load_guard() -> ctypes.CDLL:
    """Compile guard.cpp (once) and load it: torch decides while it is imported whether there is an accelerator."""
    if "torch" in sys.modules:
        raise RuntimeError("simulated_gpu has to be imported before torch")
    torch_folder = Path(str(importlib.util.find_spec("torch").origin)).parent
    source = Path(__file__).with_name("guard.cpp")
    made_of = source.read_text() + str(torch_folder) + (torch_folder / "version.py").read_text()
    library = Path(tempfile.gettempdir()) / f"simulated_gpu_{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        new = library.with_suffix(f".{os.getpid()}")  # whole, or not there
        flags = ["-O0", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(source), "-o", str(new)]
        subprocess.run(["g++", *flags, f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"], check=True)
        new.rename(library)
    ctypes.CDLL(str(torch_folder / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library))


_guard = _load_guard()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

aten = torch.ops.aten
KERNELS = torch.library.Library("aten", "IMPL", "CUDA")
CPU = torch.device("cpu")
HALF = (torch.float16, torch.bfloat16)
PROPERTIES = {"name": "Simulated", "major": 8, "minor": 0, "multi_processor_count": 1}


class Machine:
    """The simulated devices: how many there are, and what happened on them."""

    def __init__(self) -> None:
        self.memory = self.current = 0
        self._storages: Counter[int] = Counter()  # address -> tensors on it
        self._lock = threading.RLock()
        self.reset()

    def reset(self, devices: int = 1, total: int = 24 * 2**30) -> None:
        """Forget what was counted."""
        self.devices, self.total, self.kernels, self.peak = devices, total, 0, self.memory
        self.crossings: Counter[tuple[str, str]] = Counter()  # (kind, line of code) -> how often
        self.bytes: Counter[str] = Counter()

    def crossed(self, kind: str, size: int) -> None:
        """Bytes went from the host to a device ("H2D") or back ("D2H"), or the host waits for a device ("wait")."""
        ours = ((f.f_code.co_filename, line) for f, line in walk_stack(None) if "/fairseq_icl/" in f.f_code.co_filename)
        path, line = next(ours, ("elsewhere", 0))
        with self._lock:
            self.crossings[kind, f"{path.rpartition('/fairseq_icl/')[2]}:{line}"] += 1
            self.bytes[kind] += size

    def count(self, inner: Tensor, change: int) -> None:
        """One more tensor on a storage, or one fewer; CUDA's error where there is no more memory."""
        place, size = inner.untyped_storage().data_ptr(), inner.untyped_storage().nbytes()
        with self._lock:
            before, after = self._storages[place], max(0, self._storages[place] + change)
            if after > before == 0 and self.memory + size > self.total:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB.")
            self._storages[place] = after
            self.memory += size * (bool(after) - bool(before))
            self.peak = max(self.peak, self.memory)


GPU = Machine()


class Simulated(Tensor):
    """A tensor on a device that is not there; `inner` is on the CPU."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, inner: Tensor, device: torch.device) -> "Simulated":
        GPU.count(inner, 1)
        facts = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = Tensor._make_wrapper_subclass(cls, inner.size(), layout=inner.layout, device=device, **facts)
        made.inner = inner
        return made

    def __del__(self) -> None:
        if "inner" in self.__dict__ and GPU is not None:
            GPU.count(self.inner, -1)

    def tolist(self) -> Any:  # torch refuses it for subclasses
        GPU.crossed("D2H tolist", self.inner.nbytes)
        return self.inner.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            made: Any = Simulated(self.inner.clone(), self.device)
            memo[id(self)] = nn.Parameter(made, self.requires_grad) if hasattr(self, "_is_param") else made
        return memo[id(self)]

    @property
    def data(self) -> Any:
        return Simulated(self.inner, self.device)

    @data.setter
    def data(self, value: Any) -> None:
        if (value.device, value.dtype, value.shape) == (self.device, self.dtype, self.shape):
            GPU.count(value.inner, 1)
            GPU.count(self.inner, -1)
            self.inner = value.inner
        else:
            _become(self, value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _simulate(func, args, kwargs or {})


def _become(parameter: Any, value: Tensor) -> None:
    """`parameter.data = value` between devices, which torch allows."""
    made = nn.Parameter(value.detach(), requires_grad=parameter.requires_grad)
    parameter.requires_grad_(True)  # swap_tensors asks for its gradient's node, which may be left from before
    torch.utils.swap_tensors(parameter, made)


INDEX_PUT = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
INDEXING = {aten.index.Tensor, *INDEX_PUT}
COPIES = {aten.copy_.default, aten.copy.default, aten._foreach_copy_.default}
ANY_DEVICES = {*COPIES, aten._has_same_storage_numel.default, aten.is_same_size.default, aten.set_.source_Tensor}
SCALAR_VALUE = {aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.fill.Tensor, aten.fill_.Tensor}
"""Operators whose last argument may be a CPU tensor without dimensions; so may any argument of a pointwise one."""
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
WAITS |= {aten._unique2.default, aten.unique_consecutive.default, aten.is_nonzero.default}


def _check(func: Any, args: Any, kwargs: Any) -> torch.device:
    """The device of the result; a RuntimeError where CUDA raises it."""
    name = func.name()
    if func in INDEXING:
        for index in (index for index in args[1] if index is not None):
            if index.device not in (CPU, args[0].device):
                raise RuntimeError(f"{name}: an index on {index.device} into a tensor on {args[0].device}")
            if index.device != args[0].device:
                GPU.crossed("H2D index", index.nbytes)
            elif index.dtype == torch.bool:
                GPU.crossed("wait mask", 0)
        args = (args[0], *args[2:]) if func in INDEX_PUT and args[2].dim() else args[:1]
    if func in ANY_DEVICES:
        if func in COPIES and args[1].device.type != args[0].device.type:
            GPU.crossed("D2H copy_" if args[0].device == CPU else "H2D copy_", args[1].numel() * args[1].itemsize)
        return args[0].device
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    of_scalars = torch.Tag.pointwise in func.tags or name.startswith(("aten::_foreach", "aten::where"))
    meeting = tensors[:-1] if func in SCALAR_VALUE and tensors[-1].dim() == 0 else tensors
    if of_scalars and name != "aten::nextafter":
        meeting = [x for x in tensors if x.dim() or x.device != CPU] or tensors
    devices = {x.device for x in meeting}
    if len(devices) > 1:
        shown = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors)
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found {shown}")
    device = devices.pop() if devices else CPU
    if device.type == "cuda" and ("for_cpu" in name or "mkldnn" in name):
        raise NotImplementedError(f"Could not run {name!r} with arguments from the 'CUDA' backend")
    asked = torch.device(kwargs.get("device") or device)
    return torch.device("cuda", GPU.current) if asked == torch.device("cuda") else asked


def _simulate(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator of which an argument, or the device asked for, is simulated."""
    device = _check(func, args, kwargs)
    wrappers: dict[int, Simulated] = {}

    def inside(x: Any) -> Any:
        if isinstance(x, Simulated):
            wrappers[id(x.inner)] = x
            return x.inner
        return CPU if isinstance(x, torch.device) else x

    if func is aten._to_copy.default and args[0].device.type != device.type:
        GPU.crossed("D2H to" if device == CPU else "H2D to", args[0].numel() * args[0].itemsize)
    if func in WAITS and isinstance(args[0], Simulated):
        GPU.crossed(f"wait {func.name().removeprefix('aten::')}", 0)
    named = {key: value for key, value in kwargs.items() if key not in ("pin_memory", "non_blocking")}
    out = _run(func, tree_map(inside, args), tree_map(inside, named))
    if torch.Tag.inplace_view in func.tags and func is not aten.set_.source_Tensor:
        with torch.utils._mode_utils.no_dispatch():  # squeeze_ and its like: the wrapper's own shape follows
            func(*args, **kwargs)
    GPU.kernels += device.type == "cuda"

    def outside(x: Any) -> Any:
        if not isinstance(x, Tensor) or device == CPU:
            return x
        return wrappers[id(x)] if id(x) in wrappers else Simulated(x, device)

    return tree_map(outside, out)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """The CPU's kernel; where CUDA alone has one, or one of its own kind, what that computes."""
    if func in (aten._softmax.default, aten._log_softmax.default) and args[2]:  # half_to_float
        return func(args[0].float(), args[1], False)
    if func in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
        grad, output, dim, dtype = args
        return func(grad, output, dim, grad.dtype).to(dtype)
    if func is aten.native_layer_norm.default and args[0].dtype in HALF:  # CUDA keeps mean and deviation in fp32
        out, mean, deviation = func(*args, **kwargs)
        return out, mean.float(), deviation.float()
    if func is aten.native_layer_norm_backward.default and args[1].dtype in HALF:
        args = (*args[:3], args[3].to(args[1]), args[4].to(args[1]), *args[5:])
    if func is aten._scaled_dot_product_efficient_attention.default:
        return _efficient_attention(*args, **kwargs)
    if func is aten._efficientzerotensor.default:  # of forward differentiation: has no storage
        return torch.zeros(args[0], dtype=kwargs.get("dtype"))
    return func(*args, **kwargs)


def _efficient_attention(
    q: Any, k: Any, v: Any, bias: Any, wants_lse: bool, p: float = 0.0, causal: bool = False, scale: float = 1.0
) -> Any:
    """Attention by fp32 sums, with its log-sum-exp filled up to a multiple of 32, as on CUDA."""
    if any(part.size(3) % 8 for part in (q, k, v)) or bias is not None or p:
        raise RuntimeError("cutlassF: no kernel found to launch!")
    scores = scale * q.float() @ k.float().transpose(2, 3)  # (B, H, T, K)
    hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1) if causal else torch.tensor(False)
    scores = scores.masked_fill(hidden, -torch.inf)
    total = nn.functional.pad(scores.logsumexp(3), (0, -scores.size(2) % 32))
    return (scores.softmax(3) @ v.float()).to(q), total, torch.tensor(0), torch.tensor(0)


class _Factories(TorchDispatchMode):
    """For operators without a simulated argument: torch.zeros(..., device="cuda"). Other threads have two kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_gpu = torch.device((kwargs or {}).get("device") or CPU).type == "cuda"
        return _simulate(func, args, kwargs or {}) if on_gpu else func(*args, **(kwargs or {}))


def _exchange_device(device: int) -> int:
    """Make a device the current one; returns the one before. torch.cuda's own functions call it."""
    before, GPU.current = GPU.current, device
    _guard.simulated_set_device(device)
    return before


def start(devices: int = 1) -> Machine:
    """From here on torch has so many simulated GPUs, at most 2; there is no way back in this process."""
    GPU.reset(devices)
    idle = "_lazy_init synchronize empty_cache set_rng_state manual_seed manual_seed_all reset_peak_memory_stats"
    answers: dict[str, Any] = dict.fromkeys(idle.split(), lambda: None)
    answers |= dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), lambda: True)
    answers |= {
        "device_count": lambda: GPU.devices,
        "current_device": lambda: GPU.current,
        "mem_get_info": lambda: (GPU.total - GPU.memory, GPU.total),
        "max_memory_allocated": lambda: GPU.peak,
        "memory_summary": lambda: "simulated",
        "get_rng_state": lambda: torch.zeros(16, dtype=torch.uint8),
        "get_device_name": lambda: "Simulated GPU",
        "get_device_properties": lambda: SimpleNamespace(total_memory=GPU.total, **PROPERTIES),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer())
    torch._C._cuda_setDevice = torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = _exchange_device
    Tensor.pin_memory, Tensor.is_pinned = lambda self, *_: self, lambda self, *_: False
    plain = torch._C.TensorBase.data
    nn.Parameter.data = property(
        plain.__get__, lambda self, new: _become(self, new) if isinstance(new, Simulated) else plain.__set__(self, new)
    )
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is made on the CPU, then moved
    for name in ("silu_backward", "mish_backward"):  # CUDA has kernels of these; without, torch takes them apart
        KERNELS.impl(name, lambda *_: NotImplemented)
    for func in (aten.empty.memory_format, aten.empty_strided.default):
        KERNELS.impl(func, lambda *sizes, _func=func, **facts: _simulate(_func, sizes, facts))
    _Factories().__enter__()
    return GPU
