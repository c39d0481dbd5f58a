"""Where a kernel may run (Triton's presence, the interpreter, the devices Triton drives), and what every launch needs.

Every kernel file imports ``triton`` and ``tl`` from here, so the package also imports where Triton is not installed;
its operators then run their plain torch reference.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Absent:
        """Stands in for ``triton`` so that ``@triton.jit`` and ``tl.constexpr`` still parse; nothing calls it."""

        def __getattr__(self, name: str) -> _Absent:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args and callable(args[0]) else self

    triton = tl = _Absent()  # type: ignore[assignment]

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
"""True when Triton runs its kernels in Python on the CPU, as the tests do."""

_TRITON_DEVICES = ("cuda", "xpu")  # ROCm devices are called "cuda" by torch


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether `tensor`'s operators run as Triton kernels; otherwise the torch reference runs, as for every DTensor."""
    half_or_single = tensor.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return half_or_single and triton_drives(tensor.device) and not is_dtensor(tensor)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` lies on a mesh of processes; torch splits its own operators over one, and no kernel."""
    return type(tensor).__name__ == "DTensor"


def triton_drives(device: torch.device) -> bool:
    """Whether Triton runs kernels on `device`, whatever the dtype."""
    return HAS_TRITON and (device.type in _TRITON_DEVICES or (INTERPRETED and device.type == "cpu"))


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements of `tensor` share memory, as those of an expanded dimension do; then it cannot be written to."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride()))


@functools.cache
def num_sms(device: torch.device) -> int:
    """Number of multiprocessors of `device`, the natural size of a persistent grid (8 under the interpreter)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).gpu_subslice_count
    return 8


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes `tensor`'s device current, as Triton launches on the current device whatever its arguments live on."""
    if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    if tensor.device.type == "xpu" and tensor.device.index != torch.xpu.current_device():
        return torch.xpu.device(tensor.device)
    return contextlib.nullcontext()


def graph_is_kept() -> bool:
    """Whether the running backward keeps its graph for another (``retain_graph=True``).

    Only where it does not may a backward write over what it saved. True where torch does not say, and outside of any
    backward.
    """
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if query is None else bool(query())


def cdiv(numerator: int, denominator: int) -> int:
    """The quotient, rounded up. Triton's own costs microseconds a call, and a launch needs several."""
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not less than `number` >= 1."""
    return 1 << (number - 1).bit_length()
