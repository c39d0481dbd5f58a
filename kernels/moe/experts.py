"""A block of experts: each token goes through the gated MLPs of its k experts, whose results are summed by weight.

With e = top_k_index[t, j] and w = top_k_weights[t, j]::

    pre_tj = x_t @ W1_e^T + b1_e                       h_tj = act(gate) * up, or act(pre)
    o_t = sum over j of w (h_tj @ W2_e^T + b2_e)

Rows are sorted by expert (`sort_by_expert.py`), multiplied group by group (`grouped_matmul.py`) and summed in fp32 in
the order of j (`token_rows.py`), so that two runs agree bit for bit. The operators are in `expert_layers.py`. Saved for
backward: x and pre, ``2 H + 4 k I`` bytes per token for gated experts in half precision; x only where W1 or an adapter
of it is trained.

Either projection may have low-rank adapters (LoRA, arXiv 2106.09685), whose sum W_e + s B_e A_e is never built
(`expert_lora.py`). Frozen weights may be packed in 4 or 8 bits (`kernels/lowbit/formats.py`).

Shapes: T tokens, k choices of each, R = T k rows sorted by expert, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from liger_trainer.kernels.activation import ACTIVATIONS, IDENTITY, NAMES, GatedActivation
from liger_trainer.kernels.lowbit.decode import decode_reference
from liger_trainer.kernels.lowbit.formats import PackedWeight, check_packed
from liger_trainer.kernels.moe.expert_layers import ExpertLayer, moe_down, moe_down_save, moe_gate_up
from liger_trainer.kernels.moe.sort_by_expert import ExpertRows, sort_by_expert
from liger_trainer.kernels.runtime import as_autocast

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ExpertLoRA(NamedTuple):
    """A low-rank adapter of one projection of all experts.

    Args:
        a: A, (E, rank, in_features), of any floating dtype.
        b: B, (E, out_features, rank). The shapes of A and B do not depend on how the weight is stored.
        scaling: s, the factor of the product.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float = 1.0


def moe_experts(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_weight: torch.Tensor | PackedWeight,
    down_weight: torch.Tensor | PackedWeight,
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
        top_k_weights: (T, k), floating point.
        gate_up_weight: (E, 2 I, H), gate first, then up; (E, I, H) without a gate. Both weights must have hidden's
            dtype, except under autocast. No gradient is computed for frozen weights, biases and adapters. Either may be
            packed, and is then decoded in hidden's dtype for each product.
        down_weight: (E, H, I).
        gate_up_bias: (E, 2 I) or (E, I), or None.
        down_bias: (E, H), or None.
        gate_up_adapters: Adapters of the first projection, whose products are added. For these products they are cast
            to hidden's dtype, and their summed rank is rounded up to a multiple of 16; gradients have the adapters'
            dtypes.
        down_adapters: Adapters of the second projection.
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"relu"`` or ``"relu_squared"``; or a function, run by
            torch, that maps pre (R, 2 I), or (R, I), to h (R, I) row by row. What torch saves for its backward then
            comes on top of pre, and of the options below only gated and transposed may be given.
        gated: Whether the first projection is gate and up.
        interleaved: Whether the columns of gate and up alternate, as in GPT-OSS. Only for a gated block, as are limit
            and up_offset.
        transposed: Whether the weights are stored as (E, H, 2 I) and (E, I, H).
        gate_multiplier: Multiplies the gate, or pre, inside the activation.
        down_multiplier: Multiplies h.
        limit: Clamps the gate from above and up from both sides, before everything else; None for no clamps.
        up_offset: Added to up.

    Returns:
        (T, H) in hidden's dtype.

    Raises:
        ValueError: If a shape, dtype or device does not fit, the activation is unknown, or an option is given that does
            not apply: one of gate and up without a gate, or any of them with a function.
        RuntimeError: In the backward, if it runs with ``create_graph=True``.
    """
    _check(hidden, top_k_index, top_k_weights, gate_up_weight, down_weight, gate_up_bias, down_bias, gated, transposed)
    _check_adapters("gate_up_adapters", gate_up_adapters, gate_up_weight, transposed)
    _check_adapters("down_adapters", down_adapters, down_weight, transposed)
    of_both = {"interleaved": (interleaved, False), "limit": (limit, None), "up_offset": (up_offset, 0.0)}
    of_any = {"gate_multiplier": (gate_multiplier, 1.0), "down_multiplier": (down_multiplier, 1.0)}
    _check_activation(activation, gated, of_both, of_any)
    hidden = as_autocast(hidden)
    gate_up_weight = _as_hidden("gate_up_weight", gate_up_weight, hidden)
    down_weight = _as_hidden("down_weight", down_weight, hidden)
    gate_up_bias, down_bias = as_autocast(gate_up_bias), as_autocast(down_bias)
    rows = sort_by_expert(top_k_index, gate_up_weight.shape[0])
    options = gate_multiplier, down_multiplier, limit, up_offset, interleaved
    with torch.autocast(hidden.device.type, enabled=False):
        first = _layer(gate_up_weight, gate_up_bias, gate_up_adapters, rows, transposed)
        pre = moe_gate_up(hidden.contiguous(), first, top_k_index.shape[1])
        if isinstance(activation, str):
            last = GatedActivation.of(activation, *options), gated
        else:
            pre = _applied(activation, pre, down_weight.shape[1 if transposed else 2])
            last = GatedActivation.of(IDENTITY, *options), False
        second = _layer(down_weight, down_bias, down_adapters, rows, transposed)
        operands = pre, top_k_weights.contiguous(), second, *last
        return moe_down(moe_down_save(*operands), *operands)


def _as_hidden(name: str, weight: torch.Tensor | PackedWeight, hidden: torch.Tensor) -> torch.Tensor | PackedWeight:
    """A weight in hidden's dtype, to which autocast may cast it; a packed one as it is."""
    if not isinstance(weight, torch.Tensor):
        check_packed(name, weight)
        return weight
    weight = as_autocast(weight)
    if weight.dtype != hidden.dtype:
        raise ValueError(f"`{name}` is {weight.dtype} and `hidden` {hidden.dtype}; cast one of them, or use autocast.")
    return weight


def _applied(activation: Callable[[torch.Tensor], torch.Tensor], pre: torch.Tensor, width: int) -> torch.Tensor:
    """The h (R, I) of the function `activation`; rows of no expert are undefined, in it and in its gradient."""
    h = activation(pre)
    if h.shape != (pre.shape[0], width) or h.dtype != pre.dtype:
        raise ValueError(
            f"`activation` gave {tuple(h.shape)} of {h.dtype} for {tuple(pre.shape)} of {pre.dtype}; it must return "
            f"{(pre.shape[0], width)} of the same dtype."
        )
    return h.contiguous()


def _check(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_weight: torch.Tensor | PackedWeight,
    down_weight: torch.Tensor | PackedWeight,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gated: bool,
    transposed: bool,
) -> None:
    if hidden.dim() != 2:
        raise ValueError(f"`hidden` is {tuple(hidden.shape)}; it must be (tokens, hidden).")
    if hidden.dtype not in _DTYPES:
        raise ValueError(f"`hidden` is {hidden.dtype}; it must be one of {', '.join(map(str, _DTYPES))}.")
    if top_k_index.dim() != 2 or top_k_index.shape[0] != hidden.shape[0]:
        raise ValueError(f"`top_k_index` is {tuple(top_k_index.shape)}; it must be ({hidden.shape[0]}, k).")
    if top_k_index.shape[1] == 0:
        raise ValueError("`top_k_index` has no columns; give every token at least one choice.")
    if top_k_index.is_floating_point():
        raise ValueError(f"`top_k_index` is {top_k_index.dtype}; it must be an integer dtype.")
    if top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"`top_k_weights` is {tuple(top_k_weights.shape)}; it must have the shape of `top_k_index`, "
            f"{tuple(top_k_index.shape)}."
        )
    if not top_k_weights.is_floating_point():
        raise ValueError(f"`top_k_weights` is {top_k_weights.dtype}; it must be a floating dtype.")
    others: dict[str, torch.Tensor | PackedWeight | None] = {"top_k_index": top_k_index, "top_k_weights": top_k_weights}
    others |= {"gate_up_weight": gate_up_weight, "gate_up_bias": gate_up_bias}
    others |= {"down_weight": down_weight, "down_bias": down_bias}
    for name, tensor in others.items():
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"`{name}` is on {tensor.device} and `hidden` on {hidden.device}; move one of them.")
    layout = "(experts, hidden, {})" if transposed else "(experts, {}, hidden)"
    layout = layout.format("2 * intermediate" if gated else "intermediate")
    axis = 2 if transposed else 1
    if len(gate_up_weight.shape) != 3 or gate_up_weight.shape[3 - axis] != hidden.shape[1]:
        raise ValueError(
            f"`gate_up_weight` is {tuple(gate_up_weight.shape)}; it must be {layout}, with hidden {hidden.shape[1]}."
        )
    width = gate_up_weight.shape[axis]
    if gated and width % 2:
        raise ValueError(
            f"`gate_up_weight` has {width} rows per expert; it must be an even number, half gate and half up."
        )
    intermediate = width // 2 if gated else width
    sizes = (intermediate, hidden.shape[1]) if transposed else (hidden.shape[1], intermediate)
    expected = gate_up_weight.shape[0], *sizes
    if down_weight.shape != expected:
        raise ValueError(f"`down_weight` is {tuple(down_weight.shape)}; it must be {expected}.")
    for name, bias, size in (("gate_up_bias", gate_up_bias, width), ("down_bias", down_bias, hidden.shape[1])):
        if bias is not None and bias.shape != (expected[0], size):
            raise ValueError(f"`{name}` is {tuple(bias.shape)}; it must be {(expected[0], size)}.")


def _check_activation(activation: str | Callable, gated: bool, of_both: dict, of_any: dict) -> None:
    """Checks the activation and its options, which are given as name: (value, default).

    `of_both` are the options that need gate and up, `of_any` the others.
    """
    limit, _ = of_both["limit"]
    if limit is not None and not limit >= 0:
        raise ValueError(f"`limit` is {limit}; it must be 0 or more, or None for no clamps.")
    if activation in NAMES:
        refused = {} if gated else of_both
        reason = "with `gated=False` there is no gate and no up"
    elif not callable(activation):
        raise ValueError(f"`activation` is {activation!r}; it must be one of {', '.join(NAMES)}, or a function.")
    else:
        refused, reason = {**of_both, **of_any}, "`activation` is a function, which must do that itself"
    for name, (given, default) in refused.items():
        if given != default:
            raise ValueError(f"`{name}` is {given}, but {reason}; leave it out.")


def _check_adapters(
    name: str, adapters: Sequence[ExpertLoRA], weight: torch.Tensor | PackedWeight, transposed: bool
) -> None:
    experts, first, second = weight.shape
    outputs, inputs = (second, first) if transposed else (first, second)
    for adapter in adapters:
        if not isinstance(adapter, ExpertLoRA):
            raise ValueError(f"`{name}` holds a {type(adapter).__name__}; give ExpertLoRA(a, b, scaling).")
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
                    f"`{name}` has a factor of {factor.dtype} on {factor.device}; it must be floating point and on "
                    f"the device of its weight, {weight.device}."
                )


def _layer(
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None,
    adapters: Sequence[ExpertLoRA],
    rows: ExpertRows,
    transposed: bool,
) -> ExpertLayer:
    """A layer as the operators take it."""
    scalings = [float(each.scaling) for each in adapters]
    lora_a, lora_b = [each.a for each in adapters], [each.b for each in adapters]
    given = bias, lora_a, lora_b, list(rows), scalings, transposed
    if isinstance(weight, torch.Tensor):
        return ExpertLayer(weight, *given, [], [])
    return ExpertLayer(weight[0], *given, weight.statistics, weight.layout)


def moe_experts_reference(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_weight: torch.Tensor | PackedWeight,
    down_weight: torch.Tensor | PackedWeight,
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
    """`moe_experts` in plain torch, expert by expert, in any dtype."""
    out = torch.zeros_like(hidden)
    gate_up_weight = _adapted(_dense(gate_up_weight, hidden.dtype), gate_up_adapters, transposed)
    down_weight = _adapted(_dense(down_weight, hidden.dtype), down_adapters, transposed)
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
            h = ACTIVATIONS[activation].value(gate * gate_multiplier) * down_multiplier * (up + up_offset)
        else:
            h = ACTIVATIONS[activation].value(pre * gate_multiplier) * down_multiplier
        y = h @ (second if transposed else second.T)
        if down_bias is not None:
            y = y + down_bias[expert]
        out = out.index_add(0, tokens, (y * top_k_weights[tokens, choices, None]).to(out.dtype))
    return out


def _dense(weight: torch.Tensor | PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else decode_reference(weight, dtype)


def _adapted(weight: torch.Tensor, adapters: Sequence[ExpertLoRA], transposed: bool) -> torch.Tensor:
    """W + s B A of every expert, which the operators never build."""
    for a, b, scaling in adapters:
        delta = (b @ a * scaling).to(weight.dtype)
        weight = weight + (delta.mT if transposed else delta)
    return weight
