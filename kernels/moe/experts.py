"""A block of experts: every token through the gated MLPs of its k experts, and their weighted sum.

With e = top_k_index[t, j] and w = top_k_weights[t, j]::

    pre_tj = x_t @ W1_e^T + b1_e                       h_tj = act(gate) * up, or act(pre)
    o_t = sum over j of w (h_tj @ W2_e^T + b2_e)

Rows are sorted by expert (`moe_routing`), multiplied group by group (`_grouped_matmul`) and summed in fp32 in the order
of j, so that two runs agree bit for bit. Saved: x and pre, ``2 H + 4 k I`` bytes a token with gates in half precision;
not x where W1 is frozen and has no adapters that are trained. The operators are in `_moe_gate_up` and `_moe_down`.

Either projection may have low-rank adapters (LoRA, arXiv 2106.09685), whose weights W_e + s B_e A_e are never made
(`_moe_lora`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from liger_trainer.kernels.autocast import as_autocast
from liger_trainer.kernels.mlp.gated_activation import scalars
from liger_trainer.kernels.moe.activation import ACTIVATIONS, IDENTITY, value
from liger_trainer.kernels.moe.down import moe_down, moe_down_save
from liger_trainer.kernels.moe.gate_up import moe_gate_up
from liger_trainer.kernels.moe.routing import sort_by_expert

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ExpertLoRA(NamedTuple):
    """An adapter of one projection of all experts.

    Args:
        a: A, (E, rank, in_features), of any floating dtype.
        b: B, (E, out_features, rank). Both keep this shape whichever way the weight lies.
        scaling: s.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float = 1.0


def moe_experts(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate_up_adapters: Sequence[ExpertLoRA] = (),
    down_adapters: Sequence[ExpertLoRA] = (),
    activation: str | Callable[[torch.Tensor], torch.Tensor] = "silu",
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
        gate_up_weight: (E, 2 I, H), gate first, then up; (E, I, H) where nothing is gated. Of hidden's dtype, as is the
            next, but under autocast. A frozen weight costs no gradient, here and below.
        down_weight: (E, H, I).
        gate_up_bias: (E, 2 I) or (E, I), or None.
        down_bias: (E, H), or None.
        gate_up_adapters: Adapters of the first projection, whose products are added. They are cast to hidden's dtype
            for these, their ranks together rounded up to a multiple of 16; gradients are returned in their own.
        down_adapters: Those of the second.
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"relu"`` or ``"relu_squared"``; or a function that makes
            h (R, I) of pre (R, 2 I), or (R, I), row by row, which torch runs. What it and torch keep for its gradient
            comes on top of pre then, and the options below, but for gated and transposed, are for it to know.
        gated: Whether the first projection is gate and up.
        interleaved: Whether gate and up take turns, as in GPT-OSS. Of a gated block alone, as are limit and up_offset.
        transposed: Whether the weights lie as (E, H, 2 I) and (E, I, H).
        gate_multiplier: Multiplies the gate, or pre, inside the activation.
        down_multiplier: Multiplies h.
        limit: Clamps the gate from above and up from both sides first.
        up_offset: Added to up.

    Returns:
        (T, H) in hidden's dtype.

    Raises:
        ValueError: If a shape, dtype or device does not fit, the activation is unknown, an option of gate and up is
            given where nothing is gated, or any beside a function.
        RuntimeError: In the backward, if it runs with ``create_graph=True``.
    """
    _check(hidden, top_k_index, top_k_weights, gate_up_weight, down_weight, gate_up_bias, down_bias, gated, transposed)
    _check_adapters("gate_up_adapters", gate_up_adapters, gate_up_weight, transposed)
    _check_adapters("down_adapters", down_adapters, down_weight, transposed)
    of_both = {"interleaved": (interleaved, False), "limit": (limit, None), "up_offset": (up_offset, 0.0)}
    of_any = {"gate_multiplier": (gate_multiplier, 1.0), "down_multiplier": (down_multiplier, 1.0)}
    _check_activation(activation, gated, of_both, of_any)
    hidden, gate_up_weight, down_weight = as_autocast(hidden), as_autocast(gate_up_weight), as_autocast(down_weight)
    gate_up_bias, down_bias = as_autocast(gate_up_bias), as_autocast(down_bias)
    for name, weight in (("gate_up_weight", gate_up_weight), ("down_weight", down_weight)):
        if weight.dtype != hidden.dtype:
            raise ValueError(
                f"`{name}` is of {weight.dtype} and `hidden` of {hidden.dtype}; cast one of them, or use autocast."
            )
    rows = sort_by_expert(top_k_index, gate_up_weight.shape[0])
    values = scalars(gate_multiplier, down_multiplier, limit, up_offset)
    options = activation, values, gated, interleaved, transposed
    if not isinstance(activation, str):
        options = IDENTITY, values, False, False, transposed
    first_a, first_b, first_scalings = _factors(gate_up_adapters)
    second_a, second_b, second_scalings = _factors(down_adapters)
    with torch.autocast(hidden.device.type, enabled=False):
        first = gate_up_weight, gate_up_bias, first_a, first_b, *rows, first_scalings
        pre = moe_gate_up(hidden.contiguous(), *first, top_k_index.shape[1], transposed)
        second = down_weight, down_bias, second_a, second_b, *rows, second_scalings
        if not isinstance(activation, str):
            pre = _applied(activation, pre, down_weight.shape[1 if transposed else 2])
        operands = pre, top_k_weights.contiguous(), *second, *options
        return moe_down(moe_down_save(*operands), *operands)


def _applied(activation: Callable[[torch.Tensor], torch.Tensor], pre: torch.Tensor, width: int) -> torch.Tensor:
    """The h (R, I) of the function `activation`; rows of no expert are whatever they are, here and in its gradient."""
    h = activation(pre)
    if h.shape != (pre.shape[0], width) or h.dtype != pre.dtype:
        raise ValueError(
            f"`activation` gives {tuple(h.shape)} of {h.dtype} for {tuple(pre.shape)} of {pre.dtype}; it must give "
            f"{(pre.shape[0], width)} of the same dtype."
        )
    return h.contiguous()


def _check(hidden, top_k_index, top_k_weights, gate_up_weight, down_weight, gate_up_bias, down_bias, gated, transposed):
    if hidden.dim() != 2:
        raise ValueError(f"`hidden` is {tuple(hidden.shape)}; it must be (tokens, hidden).")
    if hidden.dtype not in _DTYPES:
        raise ValueError(f"`hidden` is of {hidden.dtype}; it must be of one of {', '.join(map(str, _DTYPES))}.")
    if top_k_index.dim() != 2 or top_k_index.shape[0] != hidden.shape[0]:
        raise ValueError(f"`top_k_index` is {tuple(top_k_index.shape)}; it must be ({hidden.shape[0]}, k).")
    if top_k_index.shape[1] == 0:
        raise ValueError("`top_k_index` has no columns; give every token at least one choice.")
    if top_k_index.is_floating_point():
        raise ValueError(f"`top_k_index` is of {top_k_index.dtype}; it must be of an integer dtype.")
    if top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"`top_k_weights` is {tuple(top_k_weights.shape)}; it must be shaped as `top_k_index`, "
            f"{tuple(top_k_index.shape)}."
        )
    if not top_k_weights.is_floating_point():
        raise ValueError(f"`top_k_weights` is of {top_k_weights.dtype}; it must be of a floating dtype.")
    _check_devices(
        *(hidden.device, ("top_k_index", top_k_index), ("top_k_weights", top_k_weights)),
        *(("gate_up_weight", gate_up_weight), ("down_weight", down_weight)),
        *(("gate_up_bias", gate_up_bias), ("down_bias", down_bias)),
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


def _check_devices(device: torch.device, *tensors: tuple[str, torch.Tensor | None]) -> None:
    for name, tensor in tensors:
        if tensor is not None and tensor.device != device:
            raise ValueError(f"`{name}` is on {tensor.device} and `hidden` on {device}; move one of them.")


def _check_activation(activation: str | Callable, gated: bool, of_both: dict, of_any: dict) -> None:
    """Options of gate and up, and others, are given with their value and that of an absent one."""
    limit, _ = of_both["limit"]
    if limit is not None and not limit >= 0:
        raise ValueError(f"`limit` is {limit}; it must be 0 or more, or None for no clamps.")
    if activation in ACTIVATIONS:
        refused = {} if gated else of_both
        reason = "with `gated=False` there is no gate and no up"
    elif not callable(activation):
        raise ValueError(f"`activation` is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}, or a function.")
    else:
        refused, reason = {**of_both, **of_any}, "`activation` is a function, which does that itself"
    for name, (given, absent) in refused.items():
        if given != absent:
            raise ValueError(f"`{name}` is {given}, but {reason}; leave it out.")


def _check_adapters(name: str, adapters: Sequence[ExpertLoRA], weight: torch.Tensor, transposed: bool) -> None:
    experts, outputs, inputs = weight.mT.shape if transposed else weight.shape
    for adapter in adapters:
        if not isinstance(adapter, ExpertLoRA):
            raise ValueError(f"`{name}` holds a {type(adapter).__name__}; give an ExpertLoRA(a, b, scaling) each.")
        a, b, _ = adapter
        rank = a.shape[1] if a.dim() == 3 else 0
        if a.shape != (experts, rank, inputs) or b.shape != (experts, outputs, rank):
            raise ValueError(
                f"`{name}` has an A of {tuple(a.shape)} and a B of {tuple(b.shape)}; they must be "
                f"({experts}, rank, {inputs}) and ({experts}, {outputs}, rank)."
            )
        for factor in (a, b):
            if not factor.is_floating_point() or factor.device != weight.device:
                raise ValueError(
                    f"`{name}` has a factor of {factor.dtype} on {factor.device}; it must be floating, on the device "
                    f"of its weight, {weight.device}."
                )


def _factors(adapters: Sequence[ExpertLoRA]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """The adapters as an operator's lists."""
    return [each.a for each in adapters], [each.b for each in adapters], [float(each.scaling) for each in adapters]


def moe_experts_reference(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate_up_adapters: Sequence[ExpertLoRA] = (),
    down_adapters: Sequence[ExpertLoRA] = (),
    activation: str | Callable[[torch.Tensor], torch.Tensor] = "silu",
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
    gate_up_weight = _adapted(gate_up_weight, gate_up_adapters, transposed)
    down_weight = _adapted(down_weight, down_adapters, transposed)
    for expert in range(gate_up_weight.shape[0]):
        tokens, choices = torch.where(top_k_index == expert)
        first, second = gate_up_weight[expert], down_weight[expert]
        pre = hidden[tokens] @ (first if transposed else first.T)
        if gate_up_bias is not None:
            pre = pre + gate_up_bias[expert]
        if not isinstance(activation, str):
            h = activation(pre)
        elif gated:
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


def _adapted(weight: torch.Tensor, adapters: Sequence[ExpertLoRA], transposed: bool) -> torch.Tensor:
    """W + s B A of every expert, which the operators never make."""
    for a, b, scaling in adapters:
        delta = (b @ a * scaling).to(weight.dtype)
        weight = weight + (delta.mT if transposed else delta)
    return weight
