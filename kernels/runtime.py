"""Where kernels can run (Triton, its interpreter, the devices that Triton drives), and helpers for every launch.

Every kernel file imports ``triton`` and ``tl`` from here, so that the package also imports without Triton; its
operators then run their plain torch references.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from liger_trainer.compat.private import available, require
from liger_trainer.compat.torch import FUNCTION_TRANSFORMS, RELEASED_GRAPHS, SHARED_MEMORY

require(SHARED_MEMORY)
require(FUNCTION_TRANSFORMS)

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Absent:
        """Replaces ``triton`` so that ``@triton.jit`` and ``tl.constexpr`` still evaluate; nothing launches it."""

        def __getattr__(self, name: str) -> _Absent:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args and callable(args[0]) else self

    triton = tl = _Absent()  # type: ignore[assignment]

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton interprets its kernels in Python on the CPU, as in the tests."""

_TRITON_DEVICES = ("cuda", "xpu")  # ROCm devices are called "cuda" by torch


F = TypeVar("F", bound=Callable[..., Any])


def reference_of(function: F) -> Callable[[Callable[..., Any]], F]:
    """Gives a reference in plain torch, which has the parameters of `function`, their defaults and annotations."""

    def like(reference: Any) -> F:
        reference.__defaults__, reference.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        reference.__annotations__ = function.__annotations__
        return reference

    return like


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether operators on `tensor` run as Triton kernels rather than the torch reference.

    DTensors and the tensors inside a transform of `torch.func` run as the reference.
    """
    half_or_single = tensor.dtype in (torch.float16, torch.bfloat16, torch.float32)
    plain = not is_dtensor(tensor) and not torch._C._are_functorch_transforms_active()
    return half_or_single and triton_drives(tensor.device) and plain


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is spread over a mesh of processes, where only torch's own operators run."""
    return type(tensor).__name__ == "DTensor"


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def triton_drives(device: torch.device) -> bool:
    """Whether Triton runs kernels on `device`, whatever the dtype of the tensors."""
    return HAS_TRITON and (device.type in _TRITON_DEVICES or (INTERPRETED and device.type == "cpu"))


def has_elements(tensor: torch.Tensor) -> bool:
    """Whether there is something to launch a kernel on: elements, in memory, which a fake tensor has not."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    fake = tensor.is_meta or (not plain and tensor.untyped_storage().device.type == "meta")
    return not fake and tensor.numel() > 0


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements of `tensor` share memory, as in an expanded dimension; it then cannot be written to."""
    for size, stride in zip(tensor.shape, tensor.stride()):
        if stride == 0 and size > 1:
            return tensor.numel() > 0  # empty ones may have strides of 0
    return False


@functools.cache
def num_sms(device: torch.device) -> int:
    """Number of multiprocessors of `device`, the unit of a persistent grid; 8 under the interpreter."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).gpu_subslice_count
    return 8


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the device of `tensor` current: Triton launches on the current device, wherever its arguments are."""
    if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    if tensor.device.type == "xpu" and tensor.device.index != torch.xpu.current_device():
        return torch.xpu.device(tensor.device)
    return contextlib.nullcontext()


def graph_is_kept() -> bool:
    """Whether the running backward keeps its graph for another one (``retain_graph=True``).

    If it does, a backward must not overwrite what it saved. True if torch does not say, and outside of any backward.
    """
    if not available(RELEASED_GRAPHS):
        return True
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # type: ignore[attr-defined]


def cdiv(numerator: int, denominator: int) -> int:
    """The quotient, rounded up. Triton's own function takes microseconds per call, and a launch needs several."""
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()
