"""SwiGLU, ``silu(gate) * up`` (arXiv 2002.05202), on separate projections and on one fused ``gate_up`` projection.

`gated_activation` has the formulas, the kernels and the operators.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from liger_trainer.kernels.mlp.gated_activation import fused_kernel_takes, gated_activation, kernel_takes, scalars


def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """``silu(gate) * up``, one pass forward and one backward.

    Args:
        gate: Gate projection, (..., intermediate), of any strides. Only a tensor that is not contiguous in its last
            dimension is copied; half of a fused projection is not. float16, bfloat16 or float32 for the kernel; other
            dtypes, and a gate and up of different dtypes, run the reference.
        up: Up projection, shaped as `gate`.
        gate_multiplier: Multiplies the gate before SiLU, as in Falcon-H1.
        down_multiplier: Multiplies the result, at no cost. Falcon-H1 scales the output of its down projection, which
            is the same if that projection has no bias.
        limit: Clamps the gate from above and `up` on both sides first, as in DeepSeek-V4.
        inplace_backward: Lets the backward write the gradients over `gate` and `up`, which saves two tensors of their
            size. Only for intermediates that nothing else reads afterwards, each in memory of its own. A backward that
            keeps its graph (``retain_graph=True``, ``create_graph=True``) never overwrites. No effect on the reference.

    Returns:
        A new contiguous tensor shaped as `gate`, in its dtype.

    Raises:
        ValueError: If shapes or devices differ, or `inplace_backward` is set while `gate` and `up` share memory.
    """
    if kernel_takes(gate, up, inplace_backward):
        values = scalars(gate_multiplier, down_multiplier, limit)
        return gated_activation(gate, up, "silu", values, False, inplace_backward)
    return swiglu_reference(gate, up, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier, limit=limit)


def swiglu_fused(
    gate_up: torch.Tensor,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """``silu(gate) * up`` of a fused projection; its gradient is one tensor, written without a concatenation.

    Args:
        gate_up: Fused projection, (..., 2 * intermediate), gate first, then up; as `gate` of `swiglu` otherwise.
        gate_multiplier: See `swiglu`.
        down_multiplier: See `swiglu`.
        limit: See `swiglu`.
        inplace_backward: Lets the backward write the gradient over `gate_up`, under the same conditions; see `swiglu`.

    Returns:
        A new contiguous tensor, (..., intermediate), in `gate_up`'s dtype.

    Raises:
        ValueError: If the last dimension is odd, or `inplace_backward` is set while `gate_up` is expanded.
    """
    if fused_kernel_takes(gate_up, inplace_backward):
        values = scalars(gate_multiplier, down_multiplier, limit)
        return gated_activation(gate_up, None, "silu", values, False, inplace_backward)
    return swiglu_fused_reference(
        gate_up, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier, limit=limit
    )


def swiglu_reference(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
) -> torch.Tensor:
    """`swiglu` in plain torch."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    h = F.silu(gate if gate_multiplier == 1.0 else gate * gate_multiplier) * up
    return h if down_multiplier == 1.0 else h * down_multiplier


def swiglu_fused_reference(
    gate_up: torch.Tensor, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0, limit: float | None = None
) -> torch.Tensor:
    """`swiglu_fused` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return swiglu_reference(gate, up, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier, limit=limit)
