"""Matmuls of half precision whose sums stay in fp32.

`matmul_into` writes a product of half-precision operands to an fp32 result without rounding it in between.

`fp32_reductions` keeps cuBLAS from adding up parts of a half-precision matmul in half precision. Where a matmul has few
tiles and many terms, as an LM head with a chunk of few tokens has, cuBLAS splits the terms over more multiprocessors
and adds up the parts. With a vocabulary that is no multiple of 8, the parts are rounded to half precision first, and
the gradients are less exact than those of one matmul over all tokens. PyTorch's flags
`torch.backends.cuda.matmul.allow_*_reduced_precision_reduction` switch that off.

Shapes: a head (V, H), V vocabulary, H hidden size; operands of products as torch.mm takes them.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator

import torch

_FLAGS = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}
_ALIGNED = 8  # elements: the 16 bytes that a matmul's fast kernels load at once

_lock = threading.Lock()
_inside: collections.Counter[str] = collections.Counter()
_before: dict[str, bool] = {}


def fp32_reductions(weight: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """A context for the matmuls of a head `(V, H)` in which cuBLAS adds up the parts of a sum in fp32.

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

    What lies between the rows of an operand may be uninitialised.
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
