"""Mends of Triton's interpreter, for the tests that run kernels under ``TRITON_INTERPRET=1``."""

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

_convert_float = interpreter._convert_float
_create_dot = interpreter.InterpreterBuilder.create_dot
_launch = interpreter.GridExecutor.__call__
_patch_lang = interpreter._patch_lang
_FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_patched = set()
"""The namespaces of the functions for which the running launch has patched the language."""


def _convert_like_hardware(data, source, target, rounding_mode):
    """The interpreter truncates fp32 to bf16, and loses carries of fp8; GPUs, and torch, round to nearest even."""
    if source == tl.float32 and target in _FP8:
        return torch.from_numpy(np.array(data, np.float32)).to(_FP8[target]).view(torch.uint8).numpy()
    if source == tl.float32 and target == tl.bfloat16:
        rounded = torch.from_numpy(np.array(data, np.float32)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)
    return _convert_float(data, source, target, rounding_mode)


def _create_dot_of_values(self, a, b, total, *rest):
    """The interpreter keeps bf16 as 16-bit integers and would multiply those.

    The products of 16-bit numbers are summed in float64: in fp32, some CPUs sum in another order at another place of a
    tile, which no GPU does.
    """

    def values(operand):
        if operand.dtype.scalar == tl.bfloat16:
            return (operand.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return operand.data.astype(np.float64)

    if not {a.dtype.scalar, b.dtype.scalar} <= {tl.bfloat16, tl.float16}:
        return _create_dot(self, a, b, total, *rest)
    summed = np.matmul(values(a), values(b)) + total.data
    return interpreter.TensorHandle(summed.astype(total.data.dtype), total.dtype.scalar)


def _launch_on_its_own(self, *arguments, **options):
    _patched.clear()  # a launch restores the language at its end
    _launch(self, *arguments, **options)


def _patch_lang_once(function):
    """The interpreter patches the whole language again at every call of a helper, which is half of its time."""
    namespace = id(function.__globals__)
    if namespace in _patched:
        return None
    _patched.add(namespace)
    return _patch_lang(function)


def mend_interpreter():
    """Makes the interpreter round and multiply bf16 as a GPU does, and patch the language once a launch."""
    interpreter.GridExecutor.__call__ = _launch_on_its_own
    interpreter._patch_lang = _patch_lang_once
    interpreter._convert_float = _convert_like_hardware
    interpreter.InterpreterBuilder.create_dot = _create_dot_of_values
