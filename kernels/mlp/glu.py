"""SwiGLU and GeGLU, ``act(gate) * up`` (arXiv 2002.05202), on separate projections and on one fused ``gate_up``.

`gated_activation` has the kernels and the operators, `kernels/activation.py` the table of activations. `glu` takes any
row of it; the functions with names of their own are public.

Shapes: gate and up (..., intermediate), gate_up (..., 2 * intermediate).
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.activation import GATED, SILU, Activation, GatedActivation
from liger_trainer.kernels.mlp.gated_activation import fused_kernel_takes, gated_activation, kernel_takes


def glu(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: Activation,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """``act(gate) * up``; with `up` None, `gate` is a whole fused projection. The options are those of `swiglu`."""
    if fused_kernel_takes(gate, inplace_backward) if up is None else kernel_takes(gate, up, inplace_backward):
        form = GatedActivation.of(activation.name, gate_multiplier, down_multiplier, limit)
        return gated_activation(gate, up, form, inplace_backward)
    return glu_reference(gate, up, activation, gate_multiplier, down_multiplier, limit)


def glu_reference(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: Activation,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
) -> torch.Tensor:
    """`glu` in plain torch."""
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    h = activation.value(gate if gate_multiplier == 1.0 else gate * gate_multiplier) * up
    return h if down_multiplier == 1.0 else h * down_multiplier


def gelu_of(approximate: str) -> Activation:
    """The row of one of the two forms of GELU.

    Raises:
        ValueError: If `approximate` is neither ``"tanh"`` nor ``"none"``.
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(f"`approximate` is {approximate!r}; it must be 'tanh' or, for the exact erf form, 'none'.")
    return GATED[approximate]


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
    return glu(
        *(gate, up, SILU),
        gate_multiplier=gate_multiplier,
        down_multiplier=down_multiplier,
        limit=limit,
        inplace_backward=inplace_backward,
    )


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
    return glu(
        *(gate_up, None, SILU),
        gate_multiplier=gate_multiplier,
        down_multiplier=down_multiplier,
        limit=limit,
        inplace_backward=inplace_backward,
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
    return glu_reference(gate, up, SILU, gate_multiplier, down_multiplier, limit)


def swiglu_fused_reference(
    gate_up: torch.Tensor, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0, limit: float | None = None
) -> torch.Tensor:
    """`swiglu_fused` in plain torch."""
    return glu_reference(gate_up, None, SILU, gate_multiplier, down_multiplier, limit)


def geglu(
    gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh", *, inplace_backward: bool = False
) -> torch.Tensor:
    """``gelu(gate) * up``, one pass forward and one backward.

    Args:
        gate: Gate projection, (..., intermediate), of any strides. Only a tensor that is not contiguous in its last
            dimension is copied; half of a fused projection is not. float16, bfloat16 or float32 for the kernel; other
            dtypes, and a gate and up of different dtypes, run the reference.
        up: Up projection, shaped as `gate`.
        approximate: ``"tanh"`` for the tanh approximation, as Gemma uses, or ``"none"`` for the exact erf form.
        inplace_backward: Lets the backward write the gradients over `gate` and `up`, which saves two tensors of their
            size. Only for intermediates that nothing else reads afterwards, each in memory of its own. A backward that
            keeps its graph (``retain_graph=True``, ``create_graph=True``) never overwrites. No effect on the reference.

    Returns:
        A new contiguous tensor shaped as `gate`, in its dtype.

    Raises:
        ValueError: If shapes or devices differ, `approximate` is neither of the two, or `inplace_backward` is set
            while `gate` and `up` share memory.
    """
    return glu(gate, up, gelu_of(approximate), inplace_backward=inplace_backward)


def geglu_fused(gate_up: torch.Tensor, approximate: str = "tanh", *, inplace_backward: bool = False) -> torch.Tensor:
    """``gelu(gate) * up`` of a fused projection; its gradient is one tensor, written without a concatenation.

    Args:
        gate_up: Fused projection, (..., 2 * intermediate), gate first, then up; as `gate` of `geglu` otherwise.
        approximate: ``"tanh"`` or ``"none"``; see `geglu`.
        inplace_backward: Lets the backward write the gradient over `gate_up`, under the same conditions; see `geglu`.

    Returns:
        A new contiguous tensor, (..., intermediate), in `gate_up`'s dtype.

    Raises:
        ValueError: If the last dimension is odd, `approximate` is neither of the two, or `inplace_backward` is set
            while `gate_up` is expanded.
    """
    return glu(gate_up, None, gelu_of(approximate), inplace_backward=inplace_backward)


def geglu_reference(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """`geglu` in plain torch."""
    return glu_reference(gate, up, gelu_of(approximate))


def geglu_fused_reference(gate_up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """`geglu_fused` in plain torch."""
    return glu_reference(gate_up, None, gelu_of(approximate))
