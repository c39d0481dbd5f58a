"""SwiGLU and GeGLU, ``act(gate) * up`` (arXiv 2002.05202), on separate projections and on one fused ``gate_up``.

Each also exists with its down projection. `gated_down` implements both, as `glu` and `glu_down`.

Shapes: gate and up (..., intermediate), gate_up (..., 2 * intermediate).
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.activation import GELU, GELU_TANH, SILU, Activation
from liger_trainer.kernels.fp8.modes import Fp8Mode
from liger_trainer.kernels.mlp.gated_down import glu, glu_down, glu_down_reference, glu_reference
from liger_trainer.kernels.runtime import reference_of


def gelu_of(approximate: str) -> Activation:
    """The row of one of the two forms of GELU.

    Raises:
        ValueError: If `approximate` is neither ``"tanh"`` nor ``"none"``.
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(f"`approximate` is {approximate!r}; it must be 'tanh' or, for the exact erf form, 'none'.")
    return GELU_TANH if approximate == "tanh" else GELU


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


swiglu_reference = reference_of(swiglu, glu=glu_reference)


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


swiglu_fused_reference = reference_of(swiglu_fused, glu=glu_reference)


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


geglu_reference = reference_of(geglu, glu=glu_reference)


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


geglu_fused_reference = reference_of(geglu_fused, glu=glu_reference)


def swiglu_down(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
    inplace_backward: bool = False,
    fp8: Fp8Mode | None = None,
) -> torch.Tensor:
    """``linear(swiglu(gate, up), weight, bias)`` that recomputes the product in its backward instead of saving it.

    This saves a third of what a gated MLP holds between forward and backward, for one more store per element in the
    backward. In a layer that is checkpointed as a whole, it saves the recomputation of the matmul instead.

    Args:
        gate: Gate projection, (..., intermediate), or, with `up` None, a whole fused projection, (..., 2 *
            intermediate), gate first; as for `swiglu` otherwise.
        up: Up projection, shaped as `gate`, or None.
        weight: Weight of the down projection, (hidden, intermediate), in the dtype of `gate`; under autocast all inputs
            are cast as for a linear layer. For a frozen weight, neither its gradient nor h is computed.
        bias: (hidden,), or None.
        gate_multiplier: See `swiglu`.
        down_multiplier: See `swiglu`; it does not multiply the bias.
        limit: See `swiglu`.
        inplace_backward: Lets the backward write the gradients over `gate` and `up`; see `swiglu`.
        fp8: The mode in which to multiply in fp8, as `fp8_linear`; None for the dtype of `gate`.

    Returns:
        (..., hidden), in `gate`'s dtype.

    Raises:
        ValueError: If shapes or devices do not fit, or `inplace_backward` is set while `gate` and `up` share memory.
        RuntimeError: In the backward, if it runs with ``create_graph=True``.
    """
    return glu_down(
        *(gate, up, weight, bias, SILU),
        gate_multiplier=gate_multiplier,
        down_multiplier=down_multiplier,
        limit=limit,
        inplace_backward=inplace_backward,
        fp8=fp8,
    )


def geglu_down(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    approximate: str = "tanh",
    *,
    inplace_backward: bool = False,
    fp8: Fp8Mode | None = None,
) -> torch.Tensor:
    """``linear(geglu(gate, up), weight, bias)`` that recomputes the product in its backward; see `swiglu_down`.

    Args:
        gate: See `swiglu_down`.
        up: See `swiglu_down`.
        weight: See `swiglu_down`.
        bias: (hidden,), or None.
        approximate: ``"tanh"`` or ``"none"``; see `geglu`.
        inplace_backward: See `swiglu`.
        fp8: See `swiglu_down`.

    Returns:
        (..., hidden), in `gate`'s dtype.

    Raises:
        ValueError: As `swiglu_down`, and if `approximate` is neither of the two.
        RuntimeError: In the backward, if it runs with ``create_graph=True``.
    """
    return glu_down(gate, up, weight, bias, gelu_of(approximate), inplace_backward=inplace_backward, fp8=fp8)


swiglu_down_reference = reference_of(swiglu_down, glu_down=glu_down_reference)
geglu_down_reference = reference_of(geglu_down, glu_down=glu_down_reference)
