"""A block of experts: every token through the gated MLPs of its k experts, and their weighted sum.

With e = top_k_index[t, j] and w = top_k_weights[t, j]::

    pre_tj = x_t @ W1_e^T + b1_e                       h_tj = act(gate) * up, or act(pre)
    o_t = sum over j of w (h_tj @ W2_e^T + b2_e)

Rows are sorted by expert (`moe_routing`), multiplied group by group (`_grouped_matmul`) and summed in fp32 in the order
of j, so that two runs agree bit for bit. Saved: x and pre, ``2 H + 4 k I`` bytes a token with gates in half precision.
The operators are in `_moe_linears`.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels._gated_activation import scalars
from liger_trainer.kernels._moe_activation import ACTIVATIONS, value
from liger_trainer.kernels._moe_linears import moe_down, moe_down_save, moe_gate_up
from liger_trainer.kernels.moe_routing import sort_by_expert


def moe_experts(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> torch.Tensor:
    """The weighted sum of each token's experts.

    Args:
        hidden: (T, H).
        top_k_index: (T, k), the experts of each token. An id of E or more is no expert of this process: it adds
            nothing, and its weight gets no gradient.
        top_k_weights: (T, k), floating.
        gate_up_weight: (E, 2 I, H), gate first, then up; (E, I, H) where nothing is gated. A frozen weight costs no
            gradient, here and below.
        down_weight: (E, H, I).
        gate_up_bias: (E, 2 I) or (E, I), or None.
        down_bias: (E, H), or None.
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"relu"`` or ``"relu_squared"``.
        gated: Whether the first projection is gate and up.
        interleaved: Whether gate and up take turns, as in GPT-OSS.
        transposed: Whether the weights lie as (E, H, 2 I) and (E, I, H).
        gate_multiplier: Multiplies the gate inside the activation.
        down_multiplier: Multiplies h.
        limit: Clamps the gate from above and up from both sides first.
        up_offset: Added to up.

    Returns:
        (T, H) in hidden's dtype.

    Raises:
        ValueError: If a shape does not fit, or the activation is unknown.
        RuntimeError: In the backward, if it runs with ``create_graph=True``.
    """
    _check(hidden, top_k_index, top_k_weights, gate_up_weight, down_weight, gate_up_bias, down_bias, gated, transposed)
    if activation not in ACTIVATIONS:
        raise ValueError(f"`activation` is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}.")
    hidden, gate_up_weight, down_weight, gate_up_bias, down_bias = _as_autocast(
        hidden, gate_up_weight, down_weight, gate_up_bias, down_bias
    )
    rows = sort_by_expert(top_k_index, gate_up_weight.shape[0])
    values = scalars(gate_multiplier, down_multiplier, limit, up_offset)
    options = activation, values, gated, interleaved, transposed
    with torch.autocast(hidden.device.type, enabled=False):
        pre = moe_gate_up(hidden.contiguous(), gate_up_weight, gate_up_bias, *rows, top_k_index.shape[1], transposed)
        operands = pre, top_k_weights.contiguous(), down_weight, down_bias, *rows, *options
        return moe_down(moe_down_save(*operands), *operands)


def _as_autocast(*tensors: torch.Tensor | None) -> list[Any]:
    """The operands as autocast would give them to a linear layer."""
    device = next(x.device.type for x in tensors if x is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def _check(hidden, top_k_index, top_k_weights, gate_up_weight, down_weight, gate_up_bias, down_bias, gated, transposed):
    if hidden.dim() != 2:
        raise ValueError(f"`hidden` is {tuple(hidden.shape)}; it must be (tokens, hidden).")
    if top_k_index.dim() != 2 or top_k_index.shape[0] != hidden.shape[0]:
        raise ValueError(f"`top_k_index` is {tuple(top_k_index.shape)}; it must be ({hidden.shape[0]}, k).")
    if top_k_index.is_floating_point():
        raise ValueError(f"`top_k_index` is of {top_k_index.dtype}; it must be of an integer dtype.")
    if top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"`top_k_weights` is {tuple(top_k_weights.shape)}; it must be shaped as `top_k_index`, "
            f"{tuple(top_k_index.shape)}."
        )
    layout = "(experts, hidden, {})" if transposed else "(experts, {}, hidden)"
    layout = layout.format("2 * intermediate" if gated else "intermediate")
    axis = 2 if transposed else 1
    if gate_up_weight.dim() != 3 or gate_up_weight.shape[3 - axis] != hidden.shape[1]:
        raise ValueError(
            f"`gate_up_weight` is {tuple(gate_up_weight.shape)}; it must be {layout}, with hidden {hidden.shape[1]}."
        )
    width = gate_up_weight.shape[axis]
    if gated and width % 2:
        raise ValueError(f"`gate_up_weight` has {width} rows an expert; gate and up together must be an even number.")
    intermediate = width // 2 if gated else width
    sizes = (intermediate, hidden.shape[1]) if transposed else (hidden.shape[1], intermediate)
    expected = gate_up_weight.shape[0], *sizes
    if down_weight.shape != expected:
        raise ValueError(f"`down_weight` is {tuple(down_weight.shape)}; it must be {expected}.")
    for name, bias, size in (("gate_up_bias", gate_up_bias, width), ("down_bias", down_bias, hidden.shape[1])):
        if bias is not None and bias.shape != (expected[0], size):
            raise ValueError(f"`{name}` is {tuple(bias.shape)}; it must be {(expected[0], size)}.")


def moe_experts_reference(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> torch.Tensor:
    """`moe_experts` in plain torch, expert by expert, at any dtype."""
    out = torch.zeros_like(hidden)
    for expert in range(gate_up_weight.shape[0]):
        tokens, choices = torch.where(top_k_index == expert)
        first, second = gate_up_weight[expert], down_weight[expert]
        pre = hidden[tokens] @ (first if transposed else first.T)
        if gate_up_bias is not None:
            pre = pre + gate_up_bias[expert]
        if gated:
            gate, up = (pre[:, ::2], pre[:, 1::2]) if interleaved else pre.chunk(2, dim=1)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            h = value(gate * gate_multiplier, activation) * down_multiplier * (up + up_offset)
        else:
            h = value(pre * gate_multiplier, activation) * down_multiplier
        y = h @ (second if transposed else second.T)
        if down_bias is not None:
            y = y + down_bias[expert]
        out = out.index_add(0, tokens, (y * top_k_weights[tokens, choices, None]).to(out.dtype))
    return out
