"""Kernel tests: on a GPU they run natively; without one they need ``TRITON_INTERPRET=1`` set before Triton is imported.

Anywhere else this folder is not collected. ``make test`` runs it as a second pytest call.
"""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]

if INTERPRETED:
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    _convert_float = interpreter._convert_float

    def _convert_like_hardware(data, source, target, rounding_mode):
        """The interpreter truncates fp32 to bf16; GPUs, and torch, round to nearest even."""
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.array(data, np.float32)).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view(np.uint16)
        return _convert_float(data, source, target, rounding_mode)

    interpreter._convert_float = _convert_like_hardware

    _create_dot = interpreter.InterpreterBuilder.create_dot

    def _create_dot_of_values(self, a, b, *rest):
        """The interpreter keeps bf16 as 16-bit integers and would multiply those."""

        def values(operand):
            if operand.dtype.scalar != tl.bfloat16:
                return operand
            wide = (operand.data.astype(np.uint32) << 16).view(np.float32)
            return interpreter.TensorHandle(wide, tl.float32)

        return _create_dot(self, values(a), values(b), *rest)

    interpreter.InterpreterBuilder.create_dot = _create_dot_of_values


def pytest_sessionfinish(session, exitstatus):
    """Nothing collected here is no failure: pytest's exit code 5 becomes 0."""
    ignored = "collect_ignore_glob" in globals()
    if ignored and exitstatus == 5:
        session.exitstatus = 0
