"""SwiGLU and GeGLU, ``act(gate) * up`` (arXiv 2002.05202), on separate projections and on one fused ``gate_up``.

`gated_activation` has the kernels and the operators, `kernels/activation.py` the table of activations. `glu` takes any
row of it; the functions with names of their own are public.

Shapes: gate and up (..., intermediate), gate_up (..., 2 * intermediate).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from liger_trainer.kernels.activation import GATED, SILU, Activation, GatedActivation
from liger_trainer.kernels.mlp.gated_activation import gated_activation
from liger_trainer.kernels.runtime import is_expanded, use_triton


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
    if kernel_takes(gate, up, inplace_backward):
        form = GatedActivation.of(activation.name, gate_multiplier, down_multiplier, limit)
        return gated_activation(gate, up, form, inplace_backward)
    return glu_reference(gate, up, activation, gate_multiplier, down_multiplier, limit)


def kernel_takes(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    inplace_backward: bool,
    *,
    interleaved: bool = False,
    weight_shape: Sequence[int] | None = None,
    bias: torch.Tensor | None = None,
) -> bool:
    """Checks the arguments of a gated activation, and returns whether the kernel runs rather than the reference.

    With `up` None, `gate` is a whole fused projection, whose columns may be `interleaved`. `weight_shape` and `bias`
    are of a down projection that follows.

    Raises:
        ValueError: If shapes or devices do not fit, the last dimension of a fused projection is odd, or the backward
            would overwrite memory that two elements share.
    """
    intermediate = gate.shape[-1] if gate.dim() else 0
    takes = use_triton(gate)
    if up is None:
        if gate.dim() == 0 or intermediate % 2:
            raise ValueError(
                f"`gate_up` is {tuple(gate.shape)}; its last dimension must be twice the intermediate size, "
                + ("gate and up alternating." if interleaved else "gate first, then up.")
            )
        if inplace_backward and is_expanded(gate):
            raise ValueError("`inplace_backward=True` writes a gradient over `gate_up`, but it is expanded.")
        intermediate //= 2
    else:
        if gate.shape != up.shape or gate.dim() == 0:
            raise ValueError(
                f"`gate` is {tuple(gate.shape)} and `up` is {tuple(up.shape)}; they must have the same shape, "
                "(..., intermediate)."
            )
        if gate.device != up.device:
            raise ValueError(f"`gate` is on {gate.device} and `up` on {up.device}; they must be on one device.")
        # A compiled graph gives every mutated tensor memory of its own, and has no storages to compare.
        compared = inplace_backward and not torch.compiler.is_compiling()
        shared = compared and gate.untyped_storage()._cdata == up.untyped_storage()._cdata
        if shared or (inplace_backward and (is_expanded(gate) or is_expanded(up))):
            raise ValueError(
                "`inplace_backward=True` writes gradients over `gate` and `up`, but they share memory or are expanded; "
                "give each its own memory, pass a fused projection to the fused function, or turn `inplace_backward` "
                "off."
            )
        takes = takes and gate.dtype == up.dtype
    if weight_shape is not None and (len(weight_shape) != 2 or weight_shape[1] != intermediate):
        raise ValueError(f"`weight` is {tuple(weight_shape)}; it must be (hidden, {intermediate}).")
    if weight_shape is not None and bias is not None and bias.shape != weight_shape[:1]:
        raise ValueError(f"`bias` is {tuple(bias.shape)}; it must be ({weight_shape[0]},).")
    return takes


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
