"""GeGLU, ``gelu(gate) * up`` (arXiv 2002.05202), tanh or exact, on separate projections and on one fused ``gate_up``.

`gated_activation` has the formulas, the kernels and the operators.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from liger_trainer.kernels.mlp.gated_activation import fused_kernel_takes, gated_activation, kernel_takes, scalars

_ACTIVATIONS = {"tanh": "gelu_tanh", "none": "gelu"}


def activation_name(approximate: str) -> str:
    """The operators' name for one of the two forms of GELU.

    Raises:
        ValueError: If `approximate` is neither ``"tanh"`` nor ``"none"``.
    """
    if approximate not in _ACTIVATIONS:
        raise ValueError(f"`approximate` is {approximate!r}; it must be 'tanh' or, for the exact erf form, 'none'.")
    return _ACTIVATIONS[approximate]


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
    activation = activation_name(approximate)
    if kernel_takes(gate, up, inplace_backward):
        return gated_activation(gate, up, activation, scalars(), False, inplace_backward)
    return geglu_reference(gate, up, approximate)


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
    activation = activation_name(approximate)
    if fused_kernel_takes(gate_up, inplace_backward):
        return gated_activation(gate_up, None, activation, scalars(), False, inplace_backward)
    return geglu_fused_reference(gate_up, approximate)


def geglu_reference(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """`geglu` in plain torch."""
    return F.gelu(gate, approximate=approximate) * up


def geglu_fused_reference(gate_up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """`geglu_fused` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return geglu_reference(gate, up, approximate)
