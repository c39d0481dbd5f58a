"""Whether cuBLAS may add up parts of a half-precision matmul in half precision.

Where a matmul has few tiles and many terms, cuBLAS splits the terms over more multiprocessors and adds the parts up. A
head with a chunk of few tokens is such a case. With a vocabulary that is no multiple of 8, parts are rounded to half
precision before they are added, and the gradients are further from the truth than those of one matmul over all tokens.
PyTorch's `torch.backends.cuda.matmul.allow_*_reduced_precision_reduction` tells cuBLAS not to.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator

import torch

from liger_trainer.kernels.head.weight_gradient import uses_cublas

_FLAGS = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}
_ALIGNED = 8  # elements: the 16 bytes that a matmul's fast kernels load at once

_lock = threading.Lock()
_inside: collections.Counter[str] = collections.Counter()
_before: dict[str, bool] = {}


def fp32_reductions(weight: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """A context for the matmuls of a head `(V, H)`, in which parts of a sum are added in fp32.

    It does nothing where V is a multiple of 8, for fp32 and float64, and where cuBLAS does not run the matmuls.
    """
    flag = _FLAGS.get(weight.dtype)
    if flag is None or weight.shape[0] % _ALIGNED == 0 or not uses_cublas(weight.device):
        return contextlib.nullcontext()
    return _disallowed(flag)


@contextlib.contextmanager
def _disallowed(flag: str) -> Iterator[None]:
    """The flag is one of the process, and heads may run in several threads: the last one to leave puts it back."""
    matmul = torch.backends.cuda.matmul
    with _lock:
        if not _inside[flag]:
            _before[flag] = getattr(matmul, flag)
            if _before[flag]:  # else it stays as it is, with what it says of splitting
                setattr(matmul, flag, False)
        _inside[flag] += 1
    try:
        yield
    finally:
        with _lock:
            _inside[flag] -= 1
            if not _inside[flag] and _before.pop(flag):
                setattr(matmul, flag, True)
