"""The kernels of `moe_router`: the k best experts of a row of logits and their weights, and the gradient."""

from __future__ import annotations

import torch

from liger_trainer.kernels.runtime import cdiv, next_power_of_2, on_device, tl, triton

EPS = 1e-20
"""What sigmoid weights are divided by beside their sum; DeepSeek's."""

_EPS = tl.constexpr(EPS)
_LEAST = tl.constexpr(-(2**63))


@triton.jit
def ordered(x):
    """int32 that compare as the fp32 `x` do; -0 as 0, NaN above all."""
    x = tl.where(x == 0.0, 0.0, tl.where(x != x, float("nan"), x))
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(x, lanes, valid, LOG_LANES: tl.constexpr):
    """int64 that order by `x` and, where it is equal, the lower lane first; lanes that are not valid come last.

    No two valid ones are equal, so that a maximum says which lane it is.
    """
    keys = (ordered(x).to(tl.int64) << LOG_LANES) | ((1 << LOG_LANES) - 1 - lanes)
    return tl.where(valid, keys, _LEAST)


@triton.jit
def _number(keys, LOG_LANES: tl.constexpr):
    """The fp32 numbers that `_keys` were made of."""
    bits = (keys >> LOG_LANES).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _in_best_groups(
    keys,
    num_groups,
    TOP_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    LOG_GROUPS: tl.constexpr,
    LOG_LANES: tl.constexpr,
):
    """The keys (rows, lanes) of the groups whose two largest numbers have the largest sums; the others last."""
    GROUPS: tl.constexpr = 1 << LOG_GROUPS
    LANES: tl.constexpr = 1 << LOG_LANES
    grouped = tl.reshape(keys, (ROWS, GROUPS, LANES // GROUPS))
    first = tl.max(grouped, axis=2)
    second = tl.max(tl.where(grouped == first[:, :, None], _LEAST, grouped), axis=2)
    groups = tl.arange(0, GROUPS)[None, :]
    scores = _number(first, LOG_LANES) + _number(second, LOG_LANES)
    left = _keys(scores, groups, groups < num_groups, LOG_GROUPS)
    allowed = tl.zeros((ROWS, GROUPS), tl.int32)
    for _ in range(TOP_GROUPS):
        is_best = left == tl.max(left, axis=1)[:, None]
        allowed = tl.where(is_best, 1, allowed)
        left = tl.where(is_best, _LEAST, left)
    return tl.reshape(tl.where(allowed[:, :, None] == 1, grouped, _LEAST), (ROWS, LANES))


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    index_ptr,
    logits_stride,
    num_rows,
    num_groups,
    members,
    scale,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    LOG_GROUPS: tl.constexpr,
    LOG_LANES: tl.constexpr,
):
    # A group's members take a power of two of lanes, so that lanes, like experts, are in the order of the groups.
    LANES: tl.constexpr = 1 << LOG_LANES
    MEMBERS: tl.constexpr = LANES >> LOG_GROUPS
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, LANES)
    experts = (lanes // MEMBERS) * members + lanes % MEMBERS
    present = (lanes // MEMBERS < num_groups) & (lanes % MEMBERS < members)
    there = (rows < num_rows)[:, None]
    logits_ptr += rows[:, None] * logits_stride
    logits = tl.load(logits_ptr + experts[None, :], mask=there & present[None, :], other=-float("inf")).to(tl.float32)

    choice = logits
    if SIGMOID:
        choice = tl.sigmoid(logits)
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + experts, mask=present, other=0.0).to(tl.float32)[None, :]
    keys = _keys(choice, lanes[None, :], present[None, :], LOG_LANES)
    if LOG_GROUPS > 0:
        keys = _in_best_groups(keys, num_groups, TOP_GROUPS, ROWS, LOG_GROUPS, LOG_LANES)
    columns = tl.arange(0, COLUMNS)[None, :]
    chosen = tl.zeros((ROWS, COLUMNS), tl.int32)
    for column in range(TOP_K):
        best = tl.max(keys, axis=1)[:, None]
        chosen = tl.where(columns == column, (LANES - 1 - (best & (LANES - 1))).to(tl.int32), chosen)
        keys = tl.where(keys == best, _LEAST, keys)
    index = (chosen // MEMBERS) * members + chosen % MEMBERS

    written = there & (columns < TOP_K)
    top = tl.load(logits_ptr + index, mask=written, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        weights = tl.sigmoid(top)
        if NORMALISE:
            weights = weights / (tl.sum(weights, axis=1) + _EPS)[:, None]
    elif NORMALISE:
        weights = tl.exp(top - tl.max(top, axis=1)[:, None])
        weights = weights / tl.sum(weights, axis=1)[:, None]
    else:
        largest = tl.max(logits, axis=1)[:, None]
        weights = tl.exp(top - largest) / tl.sum(tl.exp(logits - largest), axis=1)[:, None]
    places = rows[:, None] * TOP_K + columns
    tl.store(weights_ptr + places, (scale * weights).to(weights_ptr.dtype.element_ty), mask=written)
    tl.store(index_ptr + places, index, mask=written)


@triton.jit
def _route_backward_kernel(
    d_weights_ptr,
    logits_ptr,
    index_ptr,
    d_logits_ptr,
    logits_stride,
    num_rows,
    num_experts,
    scale,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    there = (rows < num_rows)[:, None]
    written = there & (columns < TOP_K)
    places = rows[:, None] * TOP_K + columns
    index = tl.load(index_ptr + places, mask=written, other=-1)
    upstream = scale * tl.load(d_weights_ptr + places, mask=written, other=0.0).to(tl.float32)
    logits_ptr += rows[:, None] * logits_stride
    top = tl.load(logits_ptr + index, mask=written, other=-float("inf")).to(tl.float32)

    experts = tl.arange(0, LANES)[None, :]
    stored = there & (experts < num_experts)
    gradient = tl.zeros((ROWS, LANES), tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(top)
        if NORMALISE:
            total = (tl.sum(scores, axis=1) + _EPS)[:, None]
            upstream = (upstream - tl.sum(upstream * scores, axis=1)[:, None] / total) / total
        chosen = upstream * scores * tl.sigmoid(-top)
    elif NORMALISE:
        weights = tl.exp(top - tl.max(top, axis=1)[:, None])
        weights = weights / tl.sum(weights, axis=1)[:, None]
        chosen = weights * (upstream - tl.sum(upstream * weights, axis=1)[:, None])
    else:
        logits = tl.load(logits_ptr + experts, mask=stored, other=-float("inf")).to(tl.float32)
        largest = tl.max(logits, axis=1)[:, None]
        exponentials = tl.exp(logits - largest)
        total = tl.sum(exponentials, axis=1)[:, None]
        chosen = upstream * tl.exp(top - largest) / total
        gradient -= exponentials / total * tl.sum(chosen, axis=1)[:, None]
    of_expert = index[:, :, None] == experts[:, None, :]
    gradient += tl.sum(tl.where(of_expert, chosen[:, :, None], 0.0), axis=1)
    d_logits_ptr += rows[:, None] * num_experts + experts
    tl.store(d_logits_ptr, gradient.to(d_logits_ptr.dtype.element_ty), mask=stored)


def _log2(number: int) -> int:
    """Of the smallest power of two that is not less than `number`."""
    return next_power_of_2(number).bit_length() - 1


def _rows(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _config(lanes: int, numbers: int) -> tuple[int, int]:
    """(rows a program, warps) where a row has `numbers` numbers: a row to a warp, or to several where it is long."""
    rows = max(1, min(64, numbers // lanes))
    return rows, max(min(4, rows), min(8, lanes // 1024))


def launch_route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    index: torch.Tensor,
    sigmoid: bool,
    normalise: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> None:
    """Writes the experts of the rows of `logits` to `index` (rows, k), and their weights to `weights` (rows, k)."""
    num_rows, num_experts = logits.shape
    if num_rows == 0:
        return
    top_k, members = index.shape[1], num_experts // num_groups
    log_groups = _log2(num_groups)
    log_lanes = log_groups + _log2(members)
    rows, num_warps = _config(1 << log_lanes, 1024)
    logits = _rows(logits)
    with on_device(logits):
        _route_kernel[(cdiv(num_rows, rows),)](
            *(logits, bias, weights, index, logits.stride(0), num_rows, num_groups, members, scale),
            SIGMOID=sigmoid,
            NORMALISE=normalise,
            TOP_K=top_k,
            COLUMNS=next_power_of_2(top_k),
            TOP_GROUPS=top_groups,
            ROWS=rows,
            LOG_GROUPS=log_groups,
            LOG_LANES=log_lanes,
            num_warps=num_warps,
        )


def launch_route_backward(
    d_weights: torch.Tensor,
    logits: torch.Tensor,
    index: torch.Tensor,
    d_logits: torch.Tensor,
    sigmoid: bool,
    normalise: bool,
    scale: float,
) -> None:
    """Writes the gradient of the contiguous weights (rows, k) to the contiguous `d_logits` (rows, experts)."""
    num_rows, num_experts = logits.shape
    if num_rows == 0:
        return
    top_k, lanes = index.shape[1], next_power_of_2(num_experts)
    columns = next_power_of_2(top_k)
    rows, num_warps = _config(lanes * columns, 4096)
    logits = _rows(logits)
    with on_device(logits):
        _route_backward_kernel[(cdiv(num_rows, rows),)](
            *(d_weights, logits, index, d_logits, logits.stride(0), num_rows, num_experts, scale),
            SIGMOID=sigmoid,
            NORMALISE=normalise,
            TOP_K=top_k,
            COLUMNS=columns,
            ROWS=rows,
            LANES=lanes,
            num_warps=num_warps,
        )
