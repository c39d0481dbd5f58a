"""SwiGLU, ``silu(gate) * up`` (arXiv 2002.05202), on separate projections and on one fused ``gate_up`` projection.

Formulas, bytes moved and what is saved are in ``gated_activation.py``, which holds the kernels.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from liger_trainer.kernels.gated_activation import (
    fused_kernel_takes,
    gated_activation,
    gated_activation_fused,
    kernel_takes,
)


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, inplace_backward: bool = False) -> torch.Tensor:
    """``silu(gate) * up``, one pass forward and one backward.

    Args:
        gate: Gate projection, (..., intermediate), of any strides; what is contiguous in its last dimension, such as
            half of a fused projection, is not copied. float16, bfloat16 or float32 for the kernel; other dtypes, and
            a gate and up of different dtypes, run as the reference.
        up: Up projection, shaped as `gate`.
        inplace_backward: Let the backward write the gradients over `gate` and `up`, which saves two tensors of their
            size. Only for intermediates that nothing else reads afterwards, held in memory of their own. A backward
            that keeps its graph (``retain_graph=True``, ``create_graph=True``) never overwrites. Without effect on the
            reference path.

    Returns:
        A new contiguous tensor shaped as `gate`, in its dtype.

    Raises:
        ValueError: if shapes or devices differ, or `inplace_backward` is asked for while `gate` and `up` share memory.
    """
    if kernel_takes(gate, up, inplace_backward):
        return gated_activation(gate, up, "silu", inplace_backward)
    return swiglu_reference(gate, up)


def swiglu_fused(gate_up: torch.Tensor, *, inplace_backward: bool = False) -> torch.Tensor:
    """``silu(gate) * up`` of a fused projection; its gradient is one tensor, written without a concatenation.

    Args:
        gate_up: Fused projection, (..., 2 * intermediate), gate first, then up; as `gate` of [`swiglu`] otherwise.
        inplace_backward: Let the backward write the gradient over `gate_up`, under the same conditions; see [`swiglu`].

    Returns:
        A new contiguous tensor, (..., intermediate), in `gate_up`'s dtype.

    Raises:
        ValueError: if the last dimension is odd.
    """
    if fused_kernel_takes(gate_up):
        return gated_activation_fused(gate_up, "silu", inplace_backward)
    return swiglu_fused_reference(gate_up)


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[`swiglu`] in plain torch."""
    return F.silu(gate) * up


def swiglu_fused_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """[`swiglu_fused`] in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return swiglu_reference(gate, up)
