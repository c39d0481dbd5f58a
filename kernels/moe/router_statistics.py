"""What the auxiliary losses of a mixture of experts need of the router logits, in one pass forward and one backward.

For logits x (T, E) of one layer, a weight m_t for each token and the top k experts of each::

    p = softmax(x)    z_t = logsumexp(x_t)
    counts_e = sum_t m_t [e among the top k of t]    sums_e = sum_t m_t p_te    squares = sum_t m_t z_t^2

and all of it summed over the layers. With the upstream gradients a_e of sums_e and b of squares,
``dx_te = m_t p_te (a_e - sum_f a_f p_tf + 2 b z_t)``; the counts have no gradient.

Bytes moved: the logits are read once forward and once backward, and their gradient is written. Saved for backward: the
logits, which exist anyway as the output of the router's matmul. Each program sums its own rows and writes one row of
partial sums, which are added in a fixed order: no atomics.

Shapes: T tokens of a layer, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative
from liger_trainer.kernels.moe.router import ordered, readable_rows
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import cdiv, has_elements, next_power_of_2, num_sms, on_device, tl, triton


@triton.jit
def _load_rows(logits_ptr, row_stride, rows, num_rows, columns, num_experts):
    inside = (rows < num_rows)[:, None] & (columns < num_experts)[None, :]
    offsets = rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    x = tl.load(logits_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    return tl.where((columns < num_experts)[None, :], x, float("-inf"))


@triton.jit
def _load_weights(mask_ptr, rows, num_rows, HAS_MASK: tl.constexpr):
    if HAS_MASK:
        return tl.load(mask_ptr + rows, mask=rows < num_rows, other=0.0)
    return (rows < num_rows).to(tl.float32)


@triton.jit
def _softmax(x):
    """Probabilities and logsumexp of each row."""
    largest = tl.max(x, 1)
    exponentials = tl.exp(x - largest[:, None])
    total = tl.sum(exponentials, 1)
    return exponentials / total[:, None], largest + tl.log(total)


@triton.jit
def _largest(x, columns, top_k, BLOCK_ROWS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr):
    """A mask of the `top_k` largest entries of each row; the first of equal ones."""
    # The upper half of a key orders as the float does, the lower half is the column: no two keys of a row are equal.
    keys = (ordered(x).to(tl.int64) << 32) | (BLOCK_EXPERTS - 1 - columns)[None, :].to(tl.int64)
    least = tl.full([BLOCK_ROWS], 0x7FFFFFFFFFFFFFFF, tl.int64)
    for _ in range(top_k):
        least = tl.max(tl.where(keys < least[:, None], keys, -0x7FFFFFFFFFFFFFFF), 1)
    return keys >= least[:, None]


@triton.jit
def _forward_kernel(
    logits_ptr,
    mask_ptr,
    partials_ptr,
    row_stride,
    num_rows,
    num_experts,
    top_k,
    HAS_MASK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_EXPERTS)
    counts = tl.zeros([BLOCK_EXPERTS], tl.float32)
    sums = tl.zeros([BLOCK_EXPERTS], tl.float32)
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(tl.program_id(0) * BLOCK_ROWS, num_rows, tl.num_programs(0) * BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        weights = _load_weights(mask_ptr, rows, num_rows, HAS_MASK)
        x = _load_rows(logits_ptr, row_stride, rows, num_rows, columns, num_experts)
        probabilities, log_sums = _softmax(x)
        chosen = _largest(x, columns, top_k, BLOCK_ROWS, BLOCK_EXPERTS)
        counts += tl.sum(tl.where(chosen, weights[:, None], 0.0), 0)
        sums += tl.sum(probabilities * weights[:, None], 0)
        squares += weights * log_sums * log_sums
    own_ptr = partials_ptr + tl.program_id(0).to(tl.int64) * (2 * num_experts + 1)
    tl.store(own_ptr + columns, counts, mask=columns < num_experts)
    tl.store(own_ptr + num_experts + columns, sums, mask=columns < num_experts)
    tl.store(own_ptr + 2 * num_experts, tl.sum(squares, 0))


@triton.jit
def _backward_kernel(
    upstream_ptr,
    logits_ptr,
    mask_ptr,
    gradient_ptr,
    row_stride,
    num_rows,
    num_experts,
    HAS_MASK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_EXPERTS)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    weights = _load_weights(mask_ptr, rows, num_rows, HAS_MASK)
    of_sums = tl.load(upstream_ptr + num_experts + columns, mask=columns < num_experts, other=0.0)
    of_squares = tl.load(upstream_ptr + 2 * num_experts)
    x = _load_rows(logits_ptr, row_stride, rows, num_rows, columns, num_experts)
    probabilities, log_sums = _softmax(x)
    mean = tl.sum(probabilities * of_sums[None, :], 1)
    slope = of_sums[None, :] - mean[:, None] + (2.0 * of_squares * log_sums)[:, None]
    gradient = weights[:, None] * probabilities * slope
    offsets = rows.to(tl.int64)[:, None] * num_experts + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < num_experts)[None, :]
    tl.store(gradient_ptr + offsets, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)


def _tile(num_experts: int) -> dict[str, int]:
    columns = next_power_of_2(num_experts)
    return {"BLOCK_ROWS": max(2048 // columns, 1), "BLOCK_EXPERTS": columns, "num_warps": 4}


@operator("liger_trainer::router_statistics")
def router_statistics(layers: Sequence[torch.Tensor], mask: torch.Tensor | None, top_k: int) -> torch.Tensor:
    """The statistics of all layers together.

    Args:
        layers: Logits of each layer, (T, E), all on one device.
        mask: The weight of each token, (T,), fp32 and contiguous; None for ones.
        top_k: Experts per token.

    Returns:
        `counts`, `sums` and `squares`, concatenated, (2E + 1,) in fp32.
    """
    num_experts = layers[0].shape[1]
    tile = _tile(num_experts)
    blocks = [cdiv(logits.shape[0], tile["BLOCK_ROWS"]) for logits in layers]
    programs = [min(count, 2 * num_sms(layers[0].device)) for count in blocks]
    partials = layers[0].new_empty((sum(programs), 2 * num_experts + 1), dtype=torch.float32)
    with on_device(partials):
        for logits, part, count in zip(layers, partials.split(programs), programs):
            if count:
                rows = readable_rows(logits)
                sizes = rows.stride(0), rows.shape[0], num_experts, top_k
                _forward_kernel[(count,)](rows, mask, part, *sizes, HAS_MASK=mask is not None, **tile)
    return partials.sum(0)


@router_statistics.register_fake
def _(layers, mask, top_k):
    return layers[0].new_empty((2 * layers[0].shape[1] + 1,), dtype=torch.float32)


@operator("liger_trainer::router_statistics_backward")
def router_statistics_backward(
    upstream: torch.Tensor, layers: Sequence[torch.Tensor], mask: torch.Tensor | None
) -> list[torch.Tensor]:
    """The gradients of the logits, each in its dtype and contiguous; `upstream` is (2E + 1,) in fp32."""
    upstream, num_experts = upstream.contiguous(), layers[0].shape[1]
    tile = _tile(num_experts)
    gradients = [logits.new_empty(logits.shape) for logits in layers]
    with on_device(upstream):
        for logits, gradient in zip(layers, gradients):
            if has_elements(logits):
                rows = readable_rows(logits)
                grid = (cdiv(rows.shape[0], tile["BLOCK_ROWS"]),)
                sizes = rows.stride(0), rows.shape[0], num_experts
                _backward_kernel[grid](upstream, rows, mask, gradient, *sizes, HAS_MASK=mask is not None, **tile)
    return gradients


refuse_second_derivative(router_statistics_backward, "load_balancing_loss and router_z_loss")


def _setup_context(
    ctx: Any, inputs: tuple[Sequence[torch.Tensor], torch.Tensor | None, int], output: torch.Tensor
) -> None:
    layers, mask, _ = inputs
    ctx.save_for_backward(mask, *layers)


def _backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
    mask, *layers = ctx.saved_tensors
    return input_gradients(ctx, router_statistics_backward(upstream, layers, mask))


router_statistics.register_autograd(_backward, setup_context=_setup_context)


def router_statistics_reference(layers: Sequence[torch.Tensor], mask: torch.Tensor | None, top_k: int) -> torch.Tensor:
    """`router_statistics` in plain torch, in float64 for float64 logits and in fp32 for others."""
    total: Any = 0
    for logits in layers:
        x = logits.to(torch.promote_types(logits.dtype, torch.float32))
        weights = x.new_ones(x.shape[0]) if mask is None else mask.to(x.dtype)
        chosen = x.detach().topk(top_k, dim=-1).indices
        counts = x.new_zeros(x.shape[1]).scatter_add(0, chosen.reshape(-1), weights.repeat_interleave(top_k))
        squares = (weights * x.logsumexp(-1).square()).sum()
        sums = (weights[:, None] * x.softmax(-1)).sum(0)  # no product of matrices, which autocast would round
        total = total + torch.cat([counts, sums, squares[None]])
    return total
