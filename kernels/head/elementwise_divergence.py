"""KL divergence, generalised JSD and total variation distance of given distributions.

With x and y a row of the student's and of the teacher's distribution, as log-probabilities or probabilities, the row's
divergence is the sum over the classes of

    kl        y * (log(max(y, eps)) - x)          x log-probs, y probs          d/dx = -y
    kl_log    exp(y) * (y - x)                    both log-probs                d/dx = -exp(y)
    jsd       beta * P * (y - log M) + (1 - beta) * Q * (x - log M)             d/dx = (1 - beta) * Q * (x - log M)
              with P = exp(y), Q = exp(x), M = beta * P + (1 - beta) * Q; beta 0 is KL(P || Q), beta 1 KL(Q || P)
    tvd       |x - y| / 2                         both probs                    d/dx = sign(x - y) / 2, 0 at a tie

and only x gets a gradient. A class of probability 0 in both contributes 0, the limit of p*log(p).

With reduction "sum", "mean" or "batchmean" the gradient is computed in the forward, for the upstream gradient that is
expected, 1 unless the caller names another. In the backward each row's program compares the two on the device. It
multiplies the gradient if one is 2**k times the other, as for gradients accumulated over 2**k steps, and recomputes it
if they differ otherwise or in fp16, so that it is rounded only once in every case.

Bytes moved for (N, V) of b bytes: 3*N*V*b in all, 5 if the gradient is multiplied, 6 if it is recomputed (5 for KL,
whose gradient does not need x); 5 (KL: 4) if none is expected, in compiled graphs, and with reduction "none". Saved for
backward: the inputs and the gradient.

Shapes: N rows, V classes; inputs (N, V), or (B, S, V) of B sequences of S tokens.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.activation import has_lg2, log2
from liger_trainer.kernels.autograd import input_gradients, refuse_double_backward
from liger_trainer.kernels.head.logit_rows import row_config, row_layout, row_start, row_view
from liger_trainer.kernels.head.loss_options import check_tokens, inverse_normalizer
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import graph_is_kept, has_elements, on_device, tl, triton, use_triton

_FUNCTIONS = "kl_div, jsd and tvd"


@triton.jit
def _terms(x, y, beta, eps, DIVERGENCE: tl.constexpr, LG2: tl.constexpr):
    """The summands of one tile and their derivatives with respect to `x`."""
    LN2: tl.constexpr = 0.6931471805599453
    LOG2E: tl.constexpr = 1.4426950408889634
    if DIVERGENCE == "tvd":
        gap = x - y
        value = 0.5 * tl.abs(gap)
        slope = tl.where(gap > 0.0, 0.5, tl.where(gap < 0.0, -0.5, gap))  # 0 at a tie, NaN for NaN
    elif DIVERGENCE == "kl":
        value = tl.where((y == 0.0) & (x == x), 0.0, y * (LN2 * log2(tl.maximum(y, eps), LG2) - x))
        slope = -y
    elif DIVERGENCE == "kl_log" or DIVERGENCE == "forward_kl":
        p = tl.exp2(y * LOG2E)
        value = tl.where((p == 0.0) & (x == x), 0.0, p * (y - x))
        slope = -p
    elif DIVERGENCE == "reverse_kl":
        q = tl.exp2(x * LOG2E)
        value = tl.where((q == 0.0) & (y == y), 0.0, q * (x - y))
        slope = value + q
    else:
        FLOOR: tl.constexpr = -1.0e30  # instead of minus infinity: times a probability of 0 it must be 0
        x = tl.where(x < FLOOR, FLOOR, x)
        y = tl.where(y < FLOOR, FLOOR, y)
        q, p = tl.exp2(x * LOG2E), tl.exp2(y * LOG2E)
        log_m = LN2 * log2((1.0 - beta) * q + beta * p, LG2)
        slope = (1.0 - beta) * q * (x - log_m)
        value = slope + beta * p * (y - log_m)
    return value, slope


@triton.jit
def _is_power_of_two(number):
    """Whether a multiplication by the fp32 `number` changes exponents alone; not for 0, infinity and NaN."""
    bits = tl.abs(number).to(tl.int32, bitcast=True)
    return ((bits & 0x007FFFFF) == 0) & (bits != 0) & (bits != 0x7F800000)


@triton.jit
def _multiply_row(row_ptr, factor, vocab_size, BLOCK: tl.constexpr):
    """Multiplies a row in place."""
    for start in tl.range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < vocab_size
        value = tl.load(row_ptr + columns, mask=mask, other=0.0).to(tl.float32) * factor
        tl.store(row_ptr + columns, value.to(row_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _elementwise_divergence_kernel(
    x_ptr,
    x_inner_rows,
    x_outer_stride,
    x_inner_stride,
    y_ptr,
    y_inner_rows,
    y_outer_stride,
    y_inner_stride,
    label_ptr,
    grad_ptr,
    scale_ptr,
    expected_ptr,
    sum_ptr,
    out_ptr,
    vocab_size,
    ignore_index,
    beta,
    eps,
    DIVERGENCE: tl.constexpr,
    LG2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row; which of `grad`, `scale`, `expected`, `sum` and `out` are given selects the work, as in `_launch`."""
    row = tl.program_id(0).to(tl.int64)
    coefficient = 1.0
    if scale_ptr is not None:
        upstream = tl.load(grad_ptr).to(tl.float32)
        if expected_ptr is not None:
            expected = tl.load(expected_ptr)
            if upstream == expected:
                return
            if out_ptr.dtype.element_ty != tl.float16:  # in which small gradients have lost bits
                ratio = tl.div_rn(upstream, expected)
                if _is_power_of_two(ratio):
                    _multiply_row(out_ptr + row * vocab_size, ratio, vocab_size, BLOCK)
                    return
        coefficient = upstream * tl.load(scale_ptr)
    x_ptr = row_start(x_ptr, row, x_inner_rows, x_outer_stride, x_inner_stride)
    y_ptr = row_start(y_ptr, row, y_inner_rows, y_outer_stride, y_inner_stride)
    if out_ptr is not None:
        out_ptr += row * vocab_size
    lanes = tl.arange(0, BLOCK)
    if label_ptr is not None:
        label = tl.load(label_ptr + row).to(tl.int64)
        if label == ignore_index:
            if out_ptr is not None:
                for start in tl.range(0, vocab_size, BLOCK):
                    columns = start + lanes
                    zeros = tl.zeros([BLOCK], dtype=out_ptr.dtype.element_ty)
                    tl.store(out_ptr + columns, zeros, mask=columns < vocab_size)
            if sum_ptr is not None:
                tl.store(sum_ptr + row, 0.0)
            return
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab_size, BLOCK):
        columns = start + lanes
        mask = columns < vocab_size
        x = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        value, slope = _terms(x, y, beta, eps, DIVERGENCE, LG2)
        if out_ptr is not None:
            if grad_ptr is None:
                out = value
            elif scale_ptr is None:
                out = slope * tl.load(grad_ptr + row * vocab_size + columns, mask=mask, other=0.0).to(tl.float32)
            else:
                out = slope * coefficient
            tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty), mask=mask)
        if sum_ptr is not None:
            sums += tl.where(mask, value, 0.0)
    if sum_ptr is not None:
        tl.store(sum_ptr + row, tl.sum(sums, 0))


class Pair(NamedTuple):
    """Two distributions and how they are compared.

    Args:
        x: The distribution that gets a gradient, as `row_view` gives it.
        y: The other, shaped as `x`.
        labels: (N,), which rows count, or None if all do.
        divergence: Name of the formula.
        beta: Weight of a generalised JSD.
        eps: Least probability in a logarithm.
        ignore_index: Label of a row that does not count.
    """

    x: torch.Tensor
    y: torch.Tensor
    labels: torch.Tensor | None
    divergence: str
    beta: float
    eps: float
    ignore_index: int


def _launch(
    pair: Pair,
    *,
    sums: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    grad: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    expected: torch.Tensor | None = None,
) -> None:
    """Fills `sums` `(N,)` with the divergences of the rows, and `out` `(N, V)` with what the other arguments select.

    - Nothing else: the summands.
    - `grad` `(N, V)`: the gradient of `x` for that upstream gradient of the summands.
    - `grad` and `scale`, both 0-d: the gradient of `x` for the upstream gradient `grad` of ``sums.sum() * scale``.
    - `expected` as well: `out` already holds that gradient for the upstream gradient `expected`. It is left alone if
      `grad` equals `expected`, multiplied if `grad` is 2**k times `expected` (not in fp16), and recomputed otherwise.
    """
    x, y, labels, divergence, beta, eps, ignore_index = pair
    vocab_size = x.shape[-1]
    if has_elements(x):
        rows = x.numel() // vocab_size
        block, warps, _ = row_config(vocab_size)
        with on_device(x):
            _elementwise_divergence_kernel[(rows,)](
                x,
                *row_layout(x),
                y,
                *row_layout(y),
                labels,
                grad,
                scale,
                expected,
                sums,
                out,
                vocab_size,
                ignore_index,
                beta,
                eps,
                DIVERGENCE=divergence,
                LG2=has_lg2(x),
                BLOCK=block,
                num_warps=warps,
            )


def _empty(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@operator("liger_trainer::divergence_elements")
def _elements(
    pair: Pair,
) -> torch.Tensor:
    """The summands in fp32, shaped as `x`."""
    out = _empty(pair.x, torch.float32)
    _launch(pair, out=out)
    return out


@operator("liger_trainer::divergence_loss")
def _loss(
    scale: torch.Tensor,
    expected: torch.Tensor | None,
    pair: Pair,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fp32 sum of all summands times `scale`, and its gradient times `expected`; empty without one."""
    x = pair.x
    sums = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    if expected is None:
        _launch(pair, sums=sums)
        return sums.sum() * scale, x.new_empty(0)
    gradient = _empty(x, x.dtype)
    _launch(pair, sums=sums, out=gradient, grad=expected, scale=scale)
    return sums.sum() * scale, gradient


@operator("liger_trainer::divergence_backward")
def _backward(
    grad: torch.Tensor,
    scale: torch.Tensor | None,
    pair: Pair,
) -> torch.Tensor:
    """The gradient of `x`, contiguous, for that of `_elements`, or with `scale` for that of `_loss`."""
    out = _empty(pair.x, pair.x.dtype)
    _launch(pair, out=out, grad=grad.contiguous(), scale=scale)
    return out


def _setup_elements(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    (pair,) = inputs
    x, y, labels, *ctx.options = pair
    ctx.save_for_backward(x, y, labels)


def _elements_autograd(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    refuse_double_backward(_FUNCTIONS)
    return input_gradients(ctx, _backward(grad, None, Pair(*ctx.saved_tensors, *ctx.options)))


def _setup_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    scale, expected, (x, y, labels, *ctx.options) = inputs
    _, gradient = output
    ctx.mark_non_differentiable(gradient)
    ctx.save_for_backward(scale, expected, x, y, labels, gradient)


def _loss_autograd(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
    refuse_double_backward(_FUNCTIONS)
    scale, expected, *tensors, gradient = ctx.saved_tensors
    pair = Pair(*tensors, *ctx.options)
    if expected is None or graph_is_kept() or type(grad) is not torch.Tensor:  # the last: while it is traced
        gradient = _backward(grad, scale, pair)
    else:
        gradient = gradient.detach()
        _launch(pair, out=gradient, grad=grad, scale=scale, expected=expected)
    return input_gradients(ctx, None, None, gradient)


_elements.register_autograd(_elements_autograd, setup_context=_setup_elements)
_loss.register_autograd(_loss_autograd, setup_context=_setup_loss)


_FLOOR = -1.0e30  # instead of a log-probability of minus infinity


def _infinite(log_probs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Infinity where a class with a weight above 0 has probability 0 in the other distribution."""
    return torch.where((log_probs.detach() == -math.inf) & (weights.detach() > 0), math.inf, 0.0)


def _elements_reference(
    pair: Pair,
) -> torch.Tensor:
    """The summands `(N, V)`, in fp32 (float64 for float64 `x`), differentiable in `x`."""
    x, y, labels, divergence, beta, eps, ignore_index = pair
    vocab_size, dtype = x.shape[-1], torch.promote_types(x.dtype, torch.float32)
    x = x.reshape(-1, vocab_size).to(dtype)
    y = y.detach().reshape(-1, vocab_size).to(dtype)
    ignored = None if labels is None else (labels == ignore_index).unsqueeze(-1)
    if ignored is not None:
        x, y = x.masked_fill(ignored, 0.0), y.masked_fill(ignored, 0.0)
    if divergence == "tvd":
        values = 0.5 * (x - y).abs()
    elif divergence == "kl":
        values = y * (y.clamp(min=eps).log() - x.clamp(min=_FLOOR)) + _infinite(x, y)
    else:
        floor_x, floor_y = x.clamp(min=_FLOOR), y.clamp(min=_FLOOR)
        if divergence in ("kl_log", "forward_kl"):
            values = y.exp() * (floor_y - floor_x) + _infinite(x, y.exp())
        elif divergence == "reverse_kl":
            values = floor_x.exp() * (floor_x - floor_y) + _infinite(y, x.exp())
        else:
            log_m = torch.logaddexp(floor_y + math.log(beta), floor_x + math.log1p(-beta))
            values = beta * y.exp() * (floor_y - log_m) + (1.0 - beta) * floor_x.exp() * (floor_x - log_m)
    return values if ignored is None else values.masked_fill(ignored, 0.0)


def _row_scale(x: torch.Tensor, labels: torch.Tensor | None, reduction: str, ignore_index: int) -> torch.Tensor:
    """The factor of the summed divergences of the rows of `x` for `reduction`, 0-d on its device."""
    num_items = x.numel() // x.shape[-1] if labels is None and reduction != "sum" else None
    counted = x if labels is None else labels
    name = "sum" if reduction == "sum" else "mean"
    scale = inverse_normalizer(counted, ignore_index, name, num_items, torch.promote_types(x.dtype, torch.float32))
    return scale / x.shape[-1] if reduction == "mean" else scale


@torch.no_grad()
def _expected(x: torch.Tensor, scale: torch.Tensor, expected_grad: float | torch.Tensor | None) -> torch.Tensor | None:
    """`expected_grad` as a 0-d tensor on the device of `scale`; None if the forward computes no gradient."""
    if expected_grad is None or not x.requires_grad or torch.compiler.is_compiling():
        return None
    return torch.ones_like(scale) * expected_grad


def _divergence(
    names: tuple[str, str],
    x: torch.Tensor,
    y: torch.Tensor,
    labels: torch.Tensor | None,
    reduction: str,
    divergence: str,
    beta: float,
    eps: float,
    ignore_index: int,
    expected_grad: float | torch.Tensor | None,
) -> torch.Tensor:
    """Checks the arguments, which `names` names, and runs the kernel or the reference."""
    if reduction not in ("none", "sum", "mean", "batchmean"):
        raise ValueError(f"`reduction` is {reduction!r}; it must be 'none', 'sum', 'mean' or 'batchmean'.")
    if x.shape != y.shape or x.dim() < 1 or not x.shape[-1]:
        raise ValueError(
            f"`{names[0]}` has shape {tuple(x.shape)} and `{names[1]}` {tuple(y.shape)}; both must be one (..., V) "
            "with V at least 1."
        )
    if x.device != y.device or not x.is_floating_point() or not y.is_floating_point():
        raise ValueError(
            f"`{names[0]}` is of {x.dtype} on {x.device} and `{names[1]}` of {y.dtype} on {y.device}; both must be "
            "floating and on one device."
        )
    check_tokens("labels", labels, x, integer=True)
    flat = None if labels is None else labels.reshape(-1).contiguous()
    options = (divergence, beta, eps, ignore_index)
    in_kernel = use_triton(x) and use_triton(y)
    pair = Pair(row_view(x), row_view(y.detach()), flat, *options) if in_kernel else Pair(x, y, flat, *options)
    if reduction == "none":
        return (_elements if in_kernel else _elements_reference)(pair).view(x.shape)
    scale = _row_scale(x, flat, reduction, ignore_index)
    if not in_kernel:
        return _elements_reference(pair).sum() * scale
    needed = expected_grad if torch.is_grad_enabled() else None
    return _loss(scale, _expected(x, scale, needed), pair)[0]


def kl_div(
    y_pred: torch.Tensor,
    y_true: torch.Tensor,
    reduction: str = "batchmean",
    log_target: bool = False,
    eps: float = 1e-10,
    labels: torch.Tensor | None = None,
    ignore_index: int = -100,
    expected_grad: float | torch.Tensor | None = 1.0,
) -> torch.Tensor:
    """Kullback-Leibler divergence ``KL(y_true || exp(y_pred))``, as ``torch.nn.functional.kl_div``.

    Args:
        y_pred: `(..., V)` log-probabilities of fp16, bf16 or fp32 (float64 runs the reference).
        y_true: `(..., V)` probabilities, or log-probabilities with `log_target`; any floating dtype, no gradient.
        reduction: "batchmean" (sum over the valid rows divided by their number), "mean" (that divided by V), "sum", or
            "none" (the summands, shaped as `y_pred`).
        log_target: Whether `y_true` holds log-probabilities.
        eps: Lower bound of the probabilities in the logarithm; not used with `log_target`.
        labels: `(...)` of int64 or int32; rows of label `ignore_index` do not count.
        ignore_index: See `labels`.
        expected_grad: The upstream gradient to expect in the backward, a number or a 0-d tensor, such as the weight of
            this loss in a sum. The forward computes the gradient for it; for another upstream gradient the backward
            multiplies that gradient if this is exact, and recomputes it otherwise. With None the backward computes it.
            Not used by reduction "none".

    Returns:
        The fp32 loss (float64 for float64 inputs).

    Raises:
        ValueError: For a shape, dtype, device or reduction that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    kind = "kl_log" if log_target else "kl"
    names = ("y_pred", "y_true")
    return _divergence(names, y_pred, y_true, labels, reduction, kind, 0.0, eps, ignore_index, expected_grad)


def jsd(
    log_q: torch.Tensor,
    log_p: torch.Tensor,
    labels: torch.Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "batchmean",
    expected_grad: float | torch.Tensor | None = 1.0,
) -> torch.Tensor:
    """Generalised Jensen-Shannon divergence of log-probabilities (arXiv 2306.13649).

    ``beta * KL(P || M) + (1 - beta) * KL(Q || M)`` with ``M = beta * P + (1 - beta) * Q``; `beta` 0 means
    ``KL(P || Q)`` and 1 means ``KL(Q || P)``.

    Args:
        log_q: `(..., V)` log-probabilities of the student, fp16, bf16 or fp32 (float64 runs the reference).
        log_p: `(..., V)` log-probabilities of the teacher, of any floating dtype, no gradient.
        labels: `(...)` of int64 or int32; rows of label `ignore_index` do not count.
        beta: A number in [0, 1].
        ignore_index: See `labels`.
        reduction: As in `kl_div`.
        expected_grad: As in `kl_div`.

    Returns:
        The fp32 loss (float64 for float64 inputs).

    Raises:
        ValueError: For a shape, dtype, device or option that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"`beta` is {beta}; it must lie in [0, 1].")
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    names = ("log_q", "log_p")
    return _divergence(names, log_q, log_p, labels, reduction, kind, beta, 0.0, ignore_index, expected_grad)


def tvd(
    p: torch.Tensor,
    q: torch.Tensor,
    labels: torch.Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    expected_grad: float | torch.Tensor | None = 1.0,
) -> torch.Tensor:
    """Total variation distance of probabilities, half the sum of ``|p - q|``; the gradient is 0 where they are equal.

    Args:
        p: `(..., V)` probabilities of fp16, bf16 or fp32 (float64 runs the reference).
        q: `(..., V)` probabilities, of any floating dtype, no gradient.
        labels: `(...)` of int64 or int32; rows of label `ignore_index` do not count.
        reduction: As in `kl_div`.
        ignore_index: See `labels`.
        expected_grad: As in `kl_div`.

    Returns:
        The fp32 loss (float64 for float64 inputs).

    Raises:
        ValueError: For a shape, dtype, device or reduction that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    return _divergence(("p", "q"), p, q, labels, reduction, "tvd", 0.0, 0.0, ignore_index, expected_grad)
