"""A gated MLP whose projections have low-rank adapters, which does not keep the product behind its activation.

::

    gate, up = two layers of x (`lora`)            h = act(gate) * up            y = h @ W^T + b + s (h @ A^T) @ B^T

Of the down projection's gradients only those of the adapters (and dW, where W is trained) need h, which the elementwise
pass of the backward builds again over dh, as in `gated_down`. Kept between forward and backward: x, gate and up. Eager
code keeps, beside these, act(gate), h, and x and h once more in the adapters' dtype.

Where gate and up have one adapter each, or one of the two has, the adapters' products ``s z @ B^T`` are added by the
elementwise kernels of forward and backward. That saves a pass over gate and one over up, and again where a checkpoint
repeats them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.autocast import as_autocast
from liger_trainer.kernels.lora import lora_down as operators
from liger_trainer.kernels.lora.base_weights import flat_weights
from liger_trainer.kernels.lora.lora import (
    LoRA,
    LoRALayer,
    check_adapters,
    lora_linears,
    lora_linears_operator,
    lora_linears_reference,
)
from liger_trainer.kernels.lora.lora_gated_kernels import MAX_RANK
from liger_trainer.kernels.mlp import gated_activation as gated
from liger_trainer.kernels.mlp.gated_down import kernel_takes
from liger_trainer.kernels.mlp.geglu import activation_name, geglu, geglu_fused, geglu_reference
from liger_trainer.kernels.mlp.swiglu import swiglu, swiglu_fused, swiglu_reference
from liger_trainer.kernels.runtime import use_triton


def lora_down(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: LoRALayer,
    activation: str = "silu",
    *,
    limit: float | None = None,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """``act(gate) * up`` through a down projection with adapters, whose input is not kept but built again.

    Args:
        gate: (..., intermediate), or, with `up` None, a whole fused projection; see `swiglu_down`.
        up: Shaped as `gate`, or None.
        down: The down projection. All products are in `gate`'s dtype, under autocast in autocast's; see `lora_linear`.
        activation: ``"silu"``, or ``"tanh"`` or ``"none"`` for GELU with and without the approximation.
        limit: See `swiglu`; for SiLU only.
        inplace_backward: Let the backward write the gradients over `gate` and `up`; see `swiglu`.

    Returns:
        (..., hidden), in the dtype of the products.

    Raises:
        ValueError: For another activation, a limit of GELU, or if shapes or devices do not fit.
        RuntimeError: In the backward, if it runs with ``create_graph=True``.
    """
    name = _activation(activation, limit)
    gate, up = as_autocast(gate), as_autocast(up)
    takes = kernel_takes(gate, up, down.weight, down.bias, inplace_backward)
    if not takes or not down.adapters:
        return lora_linears(_product(gate, up, activation, limit, inplace_backward), [down])[0]
    return _down(gate, up, down, name, limit, inplace_backward)


def _down(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: LoRALayer,
    activation: str,
    limit: float | None,
    inplace_backward: bool,
    z: torch.Tensor | None = None,
    added: Sequence[LoRA | None] = (None, None),
) -> torch.Tensor:
    check_adapters(gate if up is not None else gate.detach().narrow(-1, 0, gate.shape[-1] // 2), down)
    adapters = down.adapters
    (memory,), statistics, layouts = flat_weights([down.weight])
    operands = (
        *(gate, up, memory, down.bias, z),
        [adapter.b for adapter in added if adapter is not None],
        [adapter.a for adapter in adapters],
        [adapter.b for adapter in adapters],
        [adapter.mask for adapter in adapters if adapter.mask is not None],
        *(statistics, layouts),
        [0.0 if adapter is None else float(adapter.scaling) for adapter in added],
        [float(adapter.scaling) for adapter in adapters],
        [adapter.mask is not None for adapter in adapters],
        *(activation, gated.scalars(limit=limit)),
    )
    return operators.lora_down_product(operators.lora_down_save(*operands, inplace_backward), *operands)


def lora_mlp(
    x: torch.Tensor,
    gate: LoRALayer,
    up: LoRALayer,
    down: LoRALayer,
    activation: str = "silu",
    *,
    limit: float | None = None,
) -> torch.Tensor:
    """``down(act(gate(x)) * up(x))`` of layers with adapters, each with or without.

    Args:
        x: (..., hidden). All products are in its dtype; under autocast, in autocast's.
        gate: The gate projection.
        up: The up projection.
        down: The down projection.
        activation: See `lora_down`.
        limit: See `lora_down`.

    Returns:
        (..., hidden), in the dtype of the products.

    Raises:
        ValueError: As `lora_down`.
        RuntimeError: In a backward of the backward.
    """
    x = as_autocast(x)
    if not _is_added_later(x, gate, up, down):
        gated_by, multiplied = lora_linears(x, [gate, up])
        return lora_down(gated_by, multiplied, down, activation, limit=limit, inplace_backward=True)
    name = _activation(activation, limit)
    for layer in (gate, up):  # the operator below knows neither B, and the elementwise kernels no bounds but W's
        check_adapters(x, layer)
    adapters = [next(iter(layer.adapters), None) for layer in (gate, up)]
    stacked = torch.cat([adapter.a for adapter in adapters if adapter is not None])
    layers = [LoRALayer(gate.weight, gate.bias), LoRALayer(up.weight, up.bias), LoRALayer(stacked)]
    gated_by, multiplied, z = lora_linears_operator(x, layers)
    kernel_takes(gated_by, multiplied, down.weight, down.bias, False)  # checks the shapes
    return _down(gated_by, multiplied, down, name, limit, True, z, adapters)


def _is_added_later(x: torch.Tensor, gate: LoRALayer, up: LoRALayer, down: LoRALayer) -> bool:
    """Whether the products of gate's and up's adapters are left to the elementwise kernels."""
    adapters = [*gate.adapters, *up.adapters]
    if not adapters or not down.adapters or max(len(gate.adapters), len(up.adapters)) > 1:
        return False
    # A factor of 0 says that there is no adapter.
    plain = all(each.mask is None and each.scaling and each.a.shape[0] <= MAX_RANK for each in adapters)
    return plain and use_triton(x)


def lora_mlp_reference(
    x: torch.Tensor,
    gate: LoRALayer,
    up: LoRALayer,
    down: LoRALayer,
    activation: str = "silu",
    *,
    limit: float | None = None,
) -> torch.Tensor:
    """`lora_mlp` in plain torch, with a derivative of every order."""
    _activation(activation, limit)
    halves = lora_linears_reference(x, [gate, up])
    silu = activation == "silu"
    h = swiglu_reference(*halves, limit=limit) if silu else geglu_reference(*halves, activation)
    return lora_linears_reference(h, [down])[0]


def _activation(activation: str, limit: float | None) -> str:
    """The kernel's name of the activation."""
    if activation == "silu":
        return activation
    if activation not in ("tanh", "none"):
        raise ValueError(f"`activation` is {activation!r}; it must be 'silu', 'tanh' or 'none'.")
    if limit is not None:
        raise ValueError(f"`limit` is {limit!r}, but only 'silu' takes one; the activation is GELU ({activation!r}).")
    return activation_name(activation)


def _product(
    gate: torch.Tensor, up: torch.Tensor | None, activation: str, limit: float | None, inplace_backward: bool
) -> torch.Tensor:
    silu = activation == "silu"
    options: dict[str, Any] = {"limit": limit} if silu else {"approximate": activation}
    options["inplace_backward"] = inplace_backward
    if up is None:
        return (swiglu_fused if silu else geglu_fused)(gate, **options)
    return (swiglu if silu else geglu)(gate, up, **options)
