"""Routers of mixtures of experts: from the logits to the chosen experts of each token and their weights.

::

    softmax:  p = softmax(l)       index = top k of p         w = c p[index]   ( / their sum)
    sigmoid:  s = sigmoid(l)       index = top k of s + b     w = c s[index]   ( / (their sum + eps))
              or                   index = top k of l + b

The first is the router of Mixtral (arXiv 2401.04088), Qwen-MoE and OLMoE; divided by the sum it is the softmax of the k
largest logits, as in GPT-OSS and Granite. DeepSeek-V2's (arXiv 2405.04434) allows only the groups of experts with the
most probable expert of all. The second is DeepSeek-V3's (arXiv 2412.19437): the bias b balances the load and only
affects the choice; where experts come in groups, only those groups with the largest sums of their two best experts are
allowed. Llama 4's has one group, no bias and no division, and ranks logits: in fp32 all logits above 16.7 have a
sigmoid of 1. Kolibri's ranks logits with a bias. LFM2-MoE's ranks sigmoids that are rounded to the dtype of the logits.

One pass over the logits forward and one backward, in fp32 with a single rounding at the end. Saved for backward: logits
and index. Bytes moved in bf16 for T tokens and E experts: 2 TE forward and 4 TE backward (2 where the weights are
divided by their sum or are sigmoids), plus 10 Tk for weights and index in each.

A program holds whole rows and takes the k largest entries one after the other, each as the maximum of integers that
order by (number, lower expert first). Ties are therefore broken the same way on every device, which torch.topk does not
promise; NaN counts as the largest number, as in torch.topk. Experts come in the order of the choice, best first.

Shapes: T tokens, k choices of each, E experts.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import (
    cdiv,
    has_elements,
    next_power_of_2,
    on_device,
    reference_of,
    tl,
    triton,
    use_triton,
)

EPS = 1e-20
"""Added to the sum that sigmoid weights are divided by, as DeepSeek does."""

_LEAST = tl.constexpr(-(2**63))


@triton.jit
def ordered(x):
    """int32 numbers that compare as the fp32 `x` do, with -0 equal to 0 and NaN above everything."""
    x = tl.where(x == 0.0, 0.0, tl.where(x != x, float("nan"), x))
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(x, lanes, valid, LOG_LANES: tl.constexpr):
    """int64 keys that order by `x` and break ties towards the lower lane; invalid lanes come last.

    No two valid keys are equal, so the maximum of some also tells its lane.
    """
    keys = (ordered(x).to(tl.int64) << LOG_LANES) | ((1 << LOG_LANES) - 1 - lanes)
    return tl.where(valid, keys, _LEAST)


@triton.jit
def _number(keys, LOG_LANES: tl.constexpr):
    """The fp32 numbers that `_keys` made the keys from."""
    bits = (keys >> LOG_LANES).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _in_best_groups(
    keys,
    num_groups,
    SUM_OF_TWO: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    LOG_GROUPS: tl.constexpr,
    LOG_LANES: tl.constexpr,
):
    """`keys` (rows, lanes), where those outside of the best groups become the least.

    These have the largest number or, with `SUM_OF_TWO`, the largest sum of two numbers.
    """
    GROUPS: tl.constexpr = 1 << LOG_GROUPS
    LANES: tl.constexpr = 1 << LOG_LANES
    grouped = tl.reshape(keys, (ROWS, GROUPS, LANES // GROUPS))
    first = tl.max(grouped, axis=2)
    groups = tl.arange(0, GROUPS)[None, :]
    scores = _number(first, LOG_LANES)
    if SUM_OF_TWO:
        second = tl.max(tl.where(grouped == first[:, :, None], _LEAST, grouped), axis=2)
        scores += _number(second, LOG_LANES)
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
    eps,
    SIGMOID: tl.constexpr,
    RANK_LOGITS: tl.constexpr,
    ROUND_SCORES: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    LOG_GROUPS: tl.constexpr,
    LOG_LANES: tl.constexpr,
):
    # Each group gets a power of two of lanes, so lanes are ordered by group, as experts are.
    LANES: tl.constexpr = 1 << LOG_LANES
    MEMBERS: tl.constexpr = LANES >> LOG_GROUPS
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, LANES)
    experts = (lanes // MEMBERS) * members + lanes % MEMBERS
    present = (lanes // MEMBERS < num_groups) & (lanes % MEMBERS < members)
    in_rows = (rows < num_rows)[:, None]
    logits_ptr += rows[:, None] * logits_stride
    logits = tl.load(logits_ptr + experts[None, :], mask=in_rows & present[None, :], other=-float("inf")).to(tl.float32)

    choice = logits
    if not RANK_LOGITS:
        choice = tl.sigmoid(logits)
        if ROUND_SCORES:
            choice = choice.to(logits_ptr.dtype.element_ty).to(tl.float32)
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + experts, mask=present, other=0.0).to(tl.float32)[None, :]
    keys = _keys(choice, lanes[None, :], present[None, :], LOG_LANES)
    if LOG_GROUPS > 0:
        keys = _in_best_groups(keys, num_groups, SIGMOID, TOP_GROUPS, ROWS, LOG_GROUPS, LOG_LANES)
    columns = tl.arange(0, COLUMNS)[None, :]
    chosen = tl.zeros((ROWS, COLUMNS), tl.int32)
    for column in range(TOP_K):
        best = tl.max(keys, axis=1)[:, None]
        chosen = tl.where(columns == column, (LANES - 1 - (best & (LANES - 1))).to(tl.int32), chosen)
        keys = tl.where(keys == best, _LEAST, keys)
    index = (chosen // MEMBERS) * members + chosen % MEMBERS

    written = in_rows & (columns < TOP_K)
    top = tl.load(logits_ptr + index, mask=written, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        weights = tl.sigmoid(top)
        if NORMALISE:
            weights = weights / (tl.sum(weights, axis=1) + eps)[:, None]
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
    eps,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    in_rows = (rows < num_rows)[:, None]
    written = in_rows & (columns < TOP_K)
    places = rows[:, None] * TOP_K + columns
    index = tl.load(index_ptr + places, mask=written, other=-1)
    upstream = scale * tl.load(d_weights_ptr + places, mask=written, other=0.0).to(tl.float32)
    logits_ptr += rows[:, None] * logits_stride
    top = tl.load(logits_ptr + index, mask=written, other=-float("inf")).to(tl.float32)

    experts = tl.arange(0, LANES)[None, :]
    stored = in_rows & (experts < num_experts)
    gradient = tl.zeros((ROWS, LANES), tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(top)
        if NORMALISE:
            total = (tl.sum(scores, axis=1) + eps)[:, None]
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
    """The base-2 logarithm of `number`, rounded up."""
    return next_power_of_2(number).bit_length() - 1


def readable_rows(logits: torch.Tensor) -> torch.Tensor:
    """`logits` with contiguous columns, as kernels read them."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _config(lanes: int, numbers: int) -> tuple[int, int]:
    """(rows a program, warps): about `numbers` numbers a program; one warp a row, or several for a long one."""
    rows = max(1, min(64, numbers // lanes))
    return rows, max(min(4, rows), min(8, lanes // 1024))


@operator("liger_trainer::moe_router")
def _route(
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    k: int,
    sigmoid: bool,
    rank_logits: bool,
    round_scores: bool,
    normalise: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts, both (T, k).

    A softmax router ranks its logits, which order as its probabilities do; it has no use for `eps`.
    """
    num_rows, num_experts = logits.shape
    weights = logits.new_empty((num_rows, k), dtype=dtype)
    index = logits.new_empty((num_rows, k), dtype=torch.int64)
    if not has_elements(logits):
        return weights, index
    bias = None if correction_bias is None else correction_bias.contiguous()
    members = num_experts // num_groups
    log_groups = _log2(num_groups)
    log_lanes = log_groups + _log2(members)
    rows, num_warps = _config(1 << log_lanes, 1024)
    logits = readable_rows(logits)
    with on_device(logits):
        _route_kernel[(cdiv(num_rows, rows),)](
            *(logits, bias, weights, index, logits.stride(0), num_rows, num_groups, members, scale, eps),
            SIGMOID=sigmoid,
            RANK_LOGITS=rank_logits,
            ROUND_SCORES=round_scores,
            NORMALISE=normalise,
            TOP_K=k,
            COLUMNS=next_power_of_2(k),
            TOP_GROUPS=top_groups,
            ROWS=rows,
            LOG_GROUPS=log_groups,
            LOG_LANES=log_lanes,
            num_warps=num_warps,
        )
    return weights, index


@operator("liger_trainer::moe_router_backward")
def _route_backward(
    d_weights: torch.Tensor,
    logits: torch.Tensor,
    index: torch.Tensor,
    sigmoid: bool,
    normalise: bool,
    scale: float,
    eps: float,
) -> torch.Tensor:
    """The gradient of the logits, contiguous."""
    d_logits = logits.new_empty(logits.shape)
    num_rows, num_experts = logits.shape
    if not has_elements(logits):
        return d_logits
    top_k, lanes = index.shape[1], next_power_of_2(num_experts)
    columns = next_power_of_2(top_k)
    rows, num_warps = _config(lanes * columns, 4096)
    logits = readable_rows(logits)
    with on_device(logits):
        _route_backward_kernel[(cdiv(num_rows, rows),)](
            *(d_weights.contiguous(), logits, index, d_logits, logits.stride(0), num_rows, num_experts, scale, eps),
            SIGMOID=sigmoid,
            NORMALISE=normalise,
            TOP_K=top_k,
            COLUMNS=columns,
            ROWS=rows,
            LANES=lanes,
            num_warps=num_warps,
        )
    return d_logits


refuse_second_derivative(_route_backward, "topk_softmax_routing and grouped_topk_sigmoid_routing")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, _, _, ctx.sigmoid, _, _, ctx.normalise, _, _, ctx.scale, ctx.eps, _ = inputs
    ctx.save_for_backward(logits, output[1])


def _backward(ctx: Any, d_weights: torch.Tensor, d_index: None) -> tuple[torch.Tensor | None, ...]:
    logits, index = ctx.saved_tensors
    d_logits = _route_backward(d_weights, logits, index, ctx.sigmoid, ctx.normalise, ctx.scale, ctx.eps)
    return input_gradients(ctx, d_logits)


_route.register_autograd(_backward, setup_context=_setup_context)


def _check(logits: torch.Tensor, k: int) -> None:
    if logits.dim() != 2:
        raise ValueError(f"`logits` is {tuple(logits.shape)}; it must be (tokens, experts).")
    if not logits.is_floating_point():
        raise ValueError(f"`logits` is {logits.dtype}; it must be a floating dtype.")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"`k` is {k}; it must be from 1 to the number of experts, {logits.shape[1]}.")


def _check_groups(
    logits: torch.Tensor, k: int, correction_bias: torch.Tensor | None, num_groups: int, top_groups: int
) -> None:
    num_experts = logits.shape[1]
    if num_groups < 1 or num_experts % num_groups or 1 < num_groups > num_experts // 2:
        raise ValueError(
            f"`num_groups` is {num_groups}; it must divide the {num_experts} experts into groups of at least 2."
        )
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"`top_groups` is {top_groups}; it must be from 1 to `num_groups`, {num_groups}.")
    if k > top_groups * (num_experts // num_groups):
        raise ValueError(f"`k` is {k}, but {top_groups} groups hold {top_groups * num_experts // num_groups} experts.")
    if correction_bias is not None and correction_bias.shape != (num_experts,):
        raise ValueError(
            f"`correction_bias` is {tuple(correction_bias.shape)}; it must be ({num_experts},), one for each expert."
        )


def topk_softmax_routing(
    logits: torch.Tensor,
    k: int,
    *,
    num_groups: int = 1,
    top_groups: int = 1,
    normalise: bool = True,
    softmax_after_topk: bool = False,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most probable experts of each token, in its best groups, and their probabilities.

    Args:
        logits: (T, E), of any strides. The kernel takes float16, bfloat16 and float32; other dtypes run the reference.
        k: Experts per token.
        num_groups: Number of groups, of E / num_groups neighbouring experts each.
        top_groups: How many groups a token may choose from: those with the most probable expert, as in DeepSeek-V2.
        normalise: Divide the probabilities by their sum.
        softmax_after_topk: Take the softmax of the k largest logits, whatever `normalise` is. This equals the
            normalised probabilities; only the reference rounds differently, as models with this order do (GPT-OSS).
        scale: Factor applied to the weights.
        dtype: Dtype of the weights; by default that of `logits`.

    Returns:
        ``(top_k_weights, top_k_index)``, both (T, k), the latter int64; the most probable expert first. The kernel
        breaks ties of experts and groups towards the lower index, the reference as torch.topk does.

    Raises:
        ValueError: If `logits` is not 2-D or not floating point, `k` is less than 1 or more than the experts of
            `top_groups` groups, `num_groups` does not divide E or leaves groups of one expert (several groups need at
            least 2 each), or `top_groups` is not from 1 to `num_groups`.
    """
    _check(logits, k)
    _check_groups(logits, k, None, num_groups, top_groups)
    if use_triton(logits):
        options = (normalise or softmax_after_topk, num_groups, top_groups, scale, 0.0, dtype or logits.dtype)
        return _route(logits, None, k, False, True, False, *options)
    ranked = logits if softmax_after_topk else logits.softmax(-1, dtype=_wide(logits))
    choice = ranked.detach()
    if num_groups > 1:
        choice = _in_best(choice, choice.unflatten(-1, (num_groups, -1)).amax(-1), top_groups)
    index = choice.topk(k).indices
    weights = ranked.gather(-1, index)
    if softmax_after_topk:
        weights = weights.softmax(-1)
    elif normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights * scale).to(dtype or logits.dtype), index


topk_softmax_routing_reference = reference_of(topk_softmax_routing, "use_triton")


def grouped_topk_sigmoid_routing(
    logits: torch.Tensor,
    k: int,
    *,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    sigmoid_after_topk: bool = False,
    round_scores: bool = False,
    normalise: bool = True,
    eps: float = EPS,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts of each token with the largest corrected sigmoids, or logits, in its best groups; their weights.

    Args:
        logits: (T, E), of any strides. The kernel takes float16, bfloat16 and float32; other dtypes run the reference.
        k: Experts per token.
        correction_bias: (E,), any floating dtype; added to what is ranked but not to the weights. It gets no
            gradient.
        num_groups: Number of groups, of E / num_groups neighbouring experts each.
        top_groups: How many groups a token may choose from: those with the largest sum of their two best experts.
        sigmoid_after_topk: Choose by the logits instead of their sigmoids, as Llama 4 does. The two orders differ with
            a bias or groups, and without them where sigmoids round to the same number.
        round_scores: Round the sigmoids to the dtype of `logits` before they are ranked, as LFM2-MoE does. With a bias
            this chooses other experts in half precision. The weights are not rounded so.
        normalise: Divide the weights by their sum + `eps`.
        eps: 0 or more; MiniMax-M2 has 0, where sigmoids that all vanish give NaN.
        scale: Factor applied to the weights.
        dtype: Dtype of the weights; by default that of `logits`.

    Returns:
        ``(top_k_weights, top_k_index)``, both (T, k), the latter int64; the best choice first. The kernel breaks ties
        of experts and groups towards the lower index, the reference as torch.topk does.

    Raises:
        ValueError: If `logits` is not 2-D or not floating point, `k` is less than 1 or more than the experts of
            `top_groups` groups, `num_groups` does not divide E or leaves groups of one expert (several groups need at
            least 2 each), `top_groups` is not from 1 to `num_groups`, `correction_bias` is not (E,), or `eps` is
            negative.
    """
    _check(logits, k)
    _check_groups(logits, k, correction_bias, num_groups, top_groups)
    if eps < 0.0:
        raise ValueError(f"`eps` is {eps}; it must be 0 or more.")
    bias = None if correction_bias is None else correction_bias.detach()
    if use_triton(logits):
        ranked = sigmoid_after_topk, round_scores
        options = (normalise, num_groups, top_groups, scale, eps, dtype or logits.dtype)
        return _route(logits, bias, k, True, *ranked, *options)
    wide = logits.to(_wide(logits))
    scores = wide.sigmoid()
    choice = (wide if sigmoid_after_topk else scores).detach()
    if round_scores:
        choice = choice.to(logits.dtype).to(wide.dtype)
    choice = choice if bias is None else choice + bias
    if num_groups > 1:
        choice = _in_best(choice, choice.unflatten(-1, (num_groups, -1)).topk(2).values.sum(-1), top_groups)
    index = choice.topk(k).indices
    weights = scores.gather(-1, index)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * scale).to(dtype or logits.dtype), index


grouped_topk_sigmoid_routing_reference = reference_of(grouped_topk_sigmoid_routing, "use_triton")


def _in_best(choice: torch.Tensor, groups: torch.Tensor, top_groups: int) -> torch.Tensor:
    """`choice` (T, E), and -inf outside of the groups with the largest numbers in `groups` (T, groups)."""
    allowed = torch.zeros_like(groups, dtype=torch.bool).scatter(-1, groups.topk(top_groups).indices, True)
    grouped = choice.unflatten(-1, (groups.shape[-1], -1))
    return grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)


def _wide(logits: torch.Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)
