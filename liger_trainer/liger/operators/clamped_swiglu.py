"""The clamped, biased SwiGLU of GPT-OSS (arXiv 2508.10925) on one projection whose columns alternate gate and up.

With ``g`` and ``u`` clamped to the limit, ``g`` from above and ``u`` on both sides::

    h = (u + 1) * g * sigmoid(alpha * g) = (u + 1) * silu(alpha * g) / alpha

which is `gated_activation` with alpha as the multiplier of the gate and 1 / alpha as that of the result. The columns
are read and written interleaved: per element of h in bf16, 6 bytes forward and 10 backward.

Shapes: projection (..., 2 * intermediate), h (..., intermediate).
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.activation import GatedActivation
from liger_trainer.kernels.mlp.gated_activation import gated_activation
from liger_trainer.kernels.mlp.gated_down import kernel_takes
from liger_trainer.kernels.runtime import reference_of


def clamped_swiglu(
    gate_up: torch.Tensor,
    alpha: float = 1.702,
    limit: float | None = 7.0,
    *,
    up_offset: float = 1.0,
    interleaved: bool = True,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """``(clamp(up) + up_offset) * g * sigmoid(alpha * g)`` with ``g = clamp(gate)``, one pass forward, one backward.

    Args:
        gate_up: Fused projection with its bias added, (..., 2 * intermediate), of any strides. float16, bfloat16 or
            float32 for the kernel; other dtypes run the reference.
        alpha: Steepness of the sigmoid, more than 0.
        limit: Largest gate, and largest magnitude of up; a value that is clamped gets no gradient. None: no clamp.
        up_offset: Added to up.
        interleaved: True (default): gate is ``gate_up[..., ::2]`` and up is ``gate_up[..., 1::2]``, as in GPT-OSS.
            False: gate is the first half and up the second.
        inplace_backward: Lets the backward write the gradient over `gate_up`; see `swiglu`.

    Returns:
        A new contiguous tensor, (..., intermediate), in `gate_up`'s dtype.

    Raises:
        ValueError: If the last dimension is odd, `alpha` is not positive, or `inplace_backward` is set while
            `gate_up` is expanded.
    """
    if not alpha > 0:
        raise ValueError(f"`alpha` is {alpha}; it must be more than 0.")
    if kernel_takes(gate_up, None, inplace_backward, interleaved=interleaved):
        form = GatedActivation.of("silu", alpha, 1.0 / alpha, limit, up_offset, interleaved)
        return gated_activation(gate_up, None, form, inplace_backward)
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + up_offset) * (gate * torch.sigmoid(alpha * gate))


clamped_swiglu_reference = reference_of(clamped_swiglu, "kernel_takes")
