"""Where kernels can run (Triton, its interpreter, the devices that Triton drives), and what every operator needs.

That is checks of arguments, autocast, and matmuls whose sums stay in fp32.

Every kernel file imports ``triton`` and ``tl`` from here, so that the package also imports without Triton; its
operators then run their plain torch references.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import torch
from torch.autograd.graph import saved_tensors_hooks

from liger_trainer.compat.private import available, require
from liger_trainer.compat.rebound import rebound, used_globals
from liger_trainer.compat.torch import FUNCTION_TRANSFORMS, RELEASED_GRAPHS, SAVED_AS_IS, SHARED_MEMORY

require(SHARED_MEMORY)
require(FUNCTION_TRANSFORMS)
require(SAVED_AS_IS)

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

TRITON_DEVICES = ("cuda", "xpu", *(("cpu",) if INTERPRETED else ())) if HAS_TRITON else ()
"""The types of devices that Triton runs kernels on, whatever the dtype; ROCm devices are called "cuda" by torch."""

_FLAGS = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}
_ALIGNED = 8  # elements: the 16 bytes that a matmul's fast kernels load at once

_plain_thread: int | None = None  # the thread whose operators run in plain torch
_plain_lock = threading.Lock()
_lock = threading.Lock()
_inside: collections.Counter[str] = collections.Counter()
_before: dict[str, bool] = {}

MAX_HIDDEN_SIZE = 65536
"""Longest row that one program can hold; longer rows run the torch reference."""


F = TypeVar("F", bound=Callable[..., Any])


def reference_of(function: F, *asking: str, **others: Any) -> F:
    """The ``_reference`` of `function`: a copy of it that asks for no kernel and so computes in plain torch.

    Args:
        function: Computes in plain torch what its kernel does not take.
        asking: The names by which it asks whether its kernel runs. They still check what they check.
        others: Values that it finds at other names, such as the reference of a function that it calls.
    """
    known = used_globals(function)  # type: ignore[arg-type]
    refusing = {name: lambda *args, asked=known[name], **kwargs: asked(*args, **kwargs) and False for name in asking}
    return rebound(function, refusing | others)  # type: ignore[arg-type, return-value]


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether operators on `tensor` run as Triton kernels rather than the torch reference.

    DTensors and the tensors inside a transform of `torch.func` run as the reference, and so do all in [`plain_torch`].
    """
    if tensor.device.type not in TRITON_DEVICES or is_dtensor(tensor) or torch._C._are_functorch_transforms_active():
        return False
    if _plain_thread is not None and _plain_thread == threading.get_ident():
        return False
    return tensor.dtype in (torch.float16, torch.bfloat16, torch.float32)


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Operators that this thread calls inside run in plain torch on every device, backward included.

    So a formula is compared without compiling a kernel for it. Where another thread is inside, it waits.
    """
    global _plain_thread
    if _plain_thread == threading.get_ident():
        yield
        return
    # A backward asks too, and autograd would run it in a thread of the device.
    with _plain_lock, torch.autograd.set_multithreading_enabled(False):
        _plain_thread = threading.get_ident()
        try:
            yield
        finally:
            _plain_thread = None


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is spread over a mesh of processes, where only torch's own operators run."""
    return type(tensor).__name__ == "DTensor"


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def check_norm_arguments(name: str, x: torch.Tensor, **parameters: torch.Tensor | None) -> bool:
    """Checks a norm's input and its per-column parameters (given by their argument names).

    Returns:
        Whether the norm runs as a Triton kernel, if these are all its tensors.

    Raises:
        ValueError: If `x` is not a floating point tensor of shape (..., hidden_size) with hidden_size >= 1, or a
            parameter is not a floating point tensor of shape (hidden_size,) on the device of `x`.
    """
    if not x.is_floating_point():
        raise ValueError(f"`x` of {name} has dtype {x.dtype}; give a floating point tensor, such as `x.float()`.")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"`x` of {name} has shape {tuple(x.shape)}; give (..., hidden_size) with hidden_size >= 1.")
    on_triton, split = use_triton(x) and x.shape[-1] <= MAX_HIDDEN_SIZE, is_dtensor(x)
    for argument, parameter in parameters.items():
        if parameter is None:
            continue
        if is_dtensor(parameter) != split:
            raise _mixture(name, argument, split)
        if parameter.dim() != 1 or parameter.shape[0] != x.shape[-1]:
            raise ValueError(
                f"`{argument}` of {name} has shape {tuple(parameter.shape)}, but the last dimension of `x` is "
                f"{x.shape[-1]}; give a tensor of shape ({x.shape[-1]},), or None."
            )
        if not parameter.is_floating_point():
            raise ValueError(f"`{argument}` of {name} has dtype {parameter.dtype}; give a floating point tensor.")
        if parameter.device != x.device:
            raise ValueError(
                f"`{argument}` of {name} is on {parameter.device}, but `x` is on {x.device}; move one to the other."
            )
        on_triton = on_triton and use_triton(parameter)
    return on_triton


def check_all_dtensors(name: str, x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raises ValueError if `x` is a DTensor and one of the other arguments is not, or the other way round."""
    for argument, other in others.items():
        if other is not None and is_dtensor(other) != is_dtensor(x):
            raise _mixture(name, argument, is_dtensor(x))


def _mixture(name: str, argument: str, x_is_split: bool) -> ValueError:
    """The error where one of `x` and `argument` is a DTensor and the other is not."""
    plain, split = (argument, "x") if x_is_split else ("x", argument)
    return ValueError(
        f"`{split}` of {name} is a DTensor, but `{plain}` is a plain tensor; make both DTensors, such as by "
        f"`distribute_tensor({plain}, {split}.device_mesh)` if every process holds the whole tensor."
    )


def check_like(name: str, x: torch.Tensor, what: Sequence[str], **others: torch.Tensor) -> None:
    """Checks tensors that lie beside a norm's input, such as a residual (given by their argument names).

    Args:
        name: The norm.
        x: Its input.
        what: Which of shape, dtype and device must agree.
        others: The tensors.

    Raises:
        ValueError: If one of them does not agree with `x`, is not a floating point tensor, or is a DTensor where `x` is
            none, or the other way round.
    """
    check_all_dtensors(name, x, **others)
    for argument, other in others.items():
        for each in what:
            if getattr(other, each) != getattr(x, each):
                raise ValueError(
                    f"`{argument}` of {name} has {each} {getattr(other, each)}, but `x` has {getattr(x, each)}; the "
                    "two must agree, so expand, cast or move one of them."
                )
        if not other.is_floating_point():
            raise ValueError(f"`{argument}` of {name} has dtype {other.dtype}; give a floating point tensor.")


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


@overload
def as_autocast(x: torch.Tensor) -> torch.Tensor: ...
@overload
def as_autocast(x: None) -> None: ...
def as_autocast(x: torch.Tensor | None) -> torch.Tensor | None:
    """`x` as autocast, which does not know our operators, would pass it to a linear layer; float64 is unchanged."""
    if x is None or x.dtype == torch.float64:
        return x
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # asking about the meta device is an error
        return x
    return x.to(torch.get_autocast_dtype(device))


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


def sent(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A table of the host on `device`; from pinned memory, so that the host waits for nothing that the device does.

    One that is on a device already, as where that is torch's default, is copied as usual.
    """
    pinned = device.type == "cuda" and table.device.type == "cpu"
    return (table.pin_memory() if pinned else table).to(device, non_blocking=True)


def graph_is_kept() -> bool:
    """Whether the running backward keeps its graph for another one (``retain_graph=True``).

    If it does, a backward must not overwrite what it saved. True if torch does not say, and outside of any backward.
    """
    if not available(RELEASED_GRAPHS):
        return True
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # type: ignore[attr-defined]


def saved_as_is() -> contextlib.AbstractContextManager:
    """A context in which no outer hooks change saved tensors.

    Activation offloading installs hooks for a whole step. They would needlessly move tensors that the backward needs at
    once, such as a tile's intermediates or the gradients of the LM head.
    """
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    if not enabled:  # inside torch.func, which disables such hooks
        return contextlib.nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def cdiv(numerator: int, denominator: int) -> int:
    """The quotient, rounded up. Triton's own function takes microseconds per call, and a launch needs several."""
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


# ---------------------------------------------------------------------------------------------------------------------
# Matmuls of half precision whose sums stay in fp32
# ---------------------------------------------------------------------------------------------------------------------


def fp32_reductions(weight: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """A context for the matmuls of a head `(V, H)` in which cuBLAS adds up the parts of a sum in fp32.

    Where a matmul has few tiles and many terms, as an LM head with a chunk of few tokens has, cuBLAS splits the terms
    over more multiprocessors and adds up the parts. With a vocabulary that is no multiple of 8, the parts are rounded
    to half precision first, and the gradients are less exact than those of one matmul over all tokens. PyTorch's flags
    `torch.backends.cuda.matmul.allow_*_reduced_precision_reduction` switch that off.

    It does nothing if V is a multiple of 8, for fp32 and float64, and if cuBLAS does not run the matmuls.
    """
    flag = _FLAGS.get(weight.dtype)
    if flag is None or weight.shape[0] % _ALIGNED == 0 or not uses_cublas(weight.device):
        return contextlib.nullcontext()
    return _disallowed(flag)


@contextlib.contextmanager
def _disallowed(flag: str) -> Iterator[None]:
    """Switches `flag` off. It belongs to the process, so the last of several threads to leave restores it."""
    matmul = torch.backends.cuda.matmul
    with _lock:
        if not _inside[flag]:
            _before[flag] = getattr(matmul, flag)
            if _before[flag]:  # else it stays as it is, including its setting for splitting
                setattr(matmul, flag, False)
        _inside[flag] += 1
    try:
        yield
    finally:
        with _lock:
            _inside[flag] -= 1
            if not _inside[flag] and _before.pop(flag):
                setattr(matmul, flag, True)


def uses_cublas(device: torch.device) -> bool:
    """Whether cuBLAS runs the matmuls of `device`."""
    return device.type == "cuda" and torch.version.hip is None


def multiplies_into_fp32(device: torch.device) -> bool:
    """Whether `matmul_into` on `device` sums products of half-precision operands in fp32 without rounding them."""
    return device.type == "cpu" or uses_cublas(device)


def matmul_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, add: bool = False) -> None:
    """``out = left @ right``, or ``out += left @ right``; `out` may be fp32 where the operands are half precision.

    Operands are as torch.mm takes them. What lies between the rows of one may be uninitialised.
    """
    if out.device.type == "cpu":  # whose matmuls have no fp32 result for half-precision operands
        left, right = left.to(out.dtype), right.to(out.dtype)
        if left.stride(1) == 1:
            # With AMX, torch 2.13 reads past the rows of a bf16 operand that is not contiguous. It multiplies what it
            # finds there by 0, which makes NaN of NaN.
            left = left.contiguous()
    if out.dtype == left.dtype:
        if add:
            torch.addmm(out, left, right, out=out)
        else:
            torch.mm(left, right, out=out)
        return
    if uses_cublas(out.device):
        if add:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
        return
    # Elsewhere no matmul writes fp32 either: the product is rounded to half precision, but the sum is not.
    product = torch.mm(left, right)
    if add:
        out.add_(product)
    else:
        out.copy_(product)
