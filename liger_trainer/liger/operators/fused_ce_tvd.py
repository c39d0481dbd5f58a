"""Cross entropy with labels and total variation distance to a teacher, from logits, for each token.

With p and q the softmax of the student's logits x and of the teacher's logits y, and t the label:

    ce = lse(x) - x[t]                      d ce / dx[c]  = p[c] - [c == t]
    tvd = sum_c |p[c] - q[c]| / 2           d tvd / dx[c] = p[c] * (sign(p[c] - q[c]) - sigma) / 2
                                            sigma = sum_c p[c] * sign(p[c] - q[c]), and sign(0) = 0

The forward reads both logits twice: for the normalisers, then for the distances, the second time from the last tile to
the first, as the last tiles are still in cache. Saved for backward: both logits, and per token two normalisers and
sigma. The backward reads the logits once and writes the gradient. Bytes moved for (N, V) logits of b bytes: at most
4*N*V*b forward, 3*N*V*b backward. The teacher gets no gradient.

Shapes: N tokens, V vocabulary; logits (N, V), labels and losses (N,).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from liger_trainer.kernels.autograd import input_gradients, refuse_double_backward
from liger_trainer.kernels.head.logit_rows import fold, row_config, row_layout, row_start, row_view
from liger_trainer.kernels.head.loss_options import check_target
from liger_trainer.kernels.head.token_statistics import check_labels_on_cpu
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import has_elements, on_device, reference_of, tl, triton, use_triton


@triton.jit
def _sign(x):
    """The sign of x: 0 at 0, NaN for NaN."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, x))


@triton.jit
def _load(ptr, columns, vocab_size):
    """log2(e) times one tile of logits, minus infinity past the last."""
    LOG2E: tl.constexpr = 1.4426950408889634
    x = tl.load(ptr + columns, mask=columns < vocab_size, other=0.0).to(tl.float32)
    return tl.where(columns < vocab_size, x * LOG2E, float("-inf"))


@triton.jit
def _forward_kernel(
    x_ptr,
    x_inner_rows,
    x_outer_stride,
    x_inner_stride,
    y_ptr,
    y_inner_rows,
    y_outer_stride,
    y_inner_stride,
    target_ptr,
    out_ptr,
    tokens,
    vocab_size,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """Writes one token's column of `out`, whose rows are ce, tvd, the log2-sum-exp2 of x and of y, and sigma."""
    LN2: tl.constexpr = 0.6931471805599453
    LOWEST: tl.constexpr = -3.0e38
    row = tl.program_id(0).to(tl.int64)
    x_ptr = row_start(x_ptr, row, x_inner_rows, x_outer_stride, x_inner_stride)
    y_ptr = row_start(y_ptr, row, y_inner_rows, y_outer_stride, y_inner_stride)
    out_ptr += row
    label = tl.load(target_ptr + row).to(tl.int64)
    if label == ignore_index:
        for field in range(5):
            tl.store(out_ptr + field * tokens, 0.0)
        return
    lanes = tl.arange(0, BLOCK)
    x_peaks = tl.full([BLOCK], LOWEST, tl.float32)
    y_peaks = tl.full([BLOCK], LOWEST, tl.float32)
    x_sums = tl.zeros([BLOCK], tl.float32)
    y_sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab_size, BLOCK):
        x = _load(x_ptr, start + lanes, vocab_size)
        y = _load(y_ptr, start + lanes, vocab_size)
        x_sums = fold(x_sums, 1.0, tl.exp2(-tl.abs(x - x_peaks)), x > x_peaks)
        y_sums = fold(y_sums, 1.0, tl.exp2(-tl.abs(y - y_peaks)), y > y_peaks)
        x_peaks = tl.where(x > x_peaks, x, x_peaks)
        y_peaks = tl.where(y > y_peaks, y, y_peaks)
    x_peak = tl.max(x_peaks, 0)
    y_peak = tl.max(y_peaks, 0)
    x_lse = x_peak + tl.log2(tl.sum(x_sums * tl.exp2(x_peaks - x_peak), 0))
    y_lse = y_peak + tl.log2(tl.sum(y_sums * tl.exp2(y_peaks - y_peak), 0))
    distances = tl.zeros([BLOCK], tl.float32)
    signs = tl.zeros([BLOCK], tl.float32)
    tiles = tl.cdiv(vocab_size, BLOCK)
    for tile in tl.range(0, tiles):
        columns = (tiles - 1 - tile) * BLOCK + lanes
        p = tl.exp2(_load(x_ptr, columns, vocab_size) - x_lse)
        q = tl.exp2(_load(y_ptr, columns, vocab_size) - y_lse)
        distances += tl.abs(p - q)
        signs += p * _sign(p - q)
    in_range = (label >= 0) & (label < vocab_size)
    label_x = _load(x_ptr, tl.where(in_range, label, 0).to(tl.int32), vocab_size)
    tl.store(out_ptr, tl.where(in_range, (x_lse - label_x) * LN2, float("nan")))
    tl.store(out_ptr + tokens, 0.5 * tl.sum(distances, 0))
    tl.store(out_ptr + 2 * tokens, x_lse)
    tl.store(out_ptr + 3 * tokens, y_lse)
    tl.store(out_ptr + 4 * tokens, tl.sum(signs, 0))


@triton.jit
def _backward_kernel(
    x_ptr,
    x_inner_rows,
    x_outer_stride,
    x_inner_stride,
    y_ptr,
    y_inner_rows,
    y_outer_stride,
    y_inner_stride,
    target_ptr,
    saved_ptr,
    ce_grad_ptr,
    tvd_grad_ptr,
    gradient_ptr,
    tokens,
    vocab_size,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """Writes one token's gradient."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr = row_start(x_ptr, row, x_inner_rows, x_outer_stride, x_inner_stride)
    y_ptr = row_start(y_ptr, row, y_inner_rows, y_outer_stride, y_inner_stride)
    gradient_ptr += row * vocab_size
    saved_ptr += row
    label = tl.load(target_ptr + row).to(tl.int64)
    ignored = label == ignore_index
    in_range = (label >= 0) & (label < vocab_size)
    target = tl.where(in_range, label, 0).to(tl.int32)
    ce_grad = tl.where(in_range, tl.load(ce_grad_ptr + row), float("nan"))
    tvd_grad = 0.5 * tl.load(tvd_grad_ptr + row)
    x_lse = tl.load(saved_ptr)
    y_lse = tl.load(saved_ptr + tokens)
    sigma = tl.load(saved_ptr + 2 * tokens)
    lanes = tl.arange(0, BLOCK)
    for start in tl.range(0, vocab_size, BLOCK):
        columns = start + lanes
        p = tl.exp2(_load(x_ptr, columns, vocab_size) - x_lse)
        q = tl.exp2(_load(y_ptr, columns, vocab_size) - y_lse)
        gradient = ce_grad * (p - tl.where(columns == target, 1.0, 0.0)) + tvd_grad * p * (_sign(p - q) - sigma)
        gradient = tl.where(ignored, 0.0, gradient)
        tl.store(gradient_ptr + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=columns < vocab_size)


@operator("liger_trainer::fused_ce_tvd")
def _fused_ce_tvd(
    student: torch.Tensor, teacher: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ce and tvd of every token, and what the backward saves of it, `(3, N)`."""
    tokens, vocab_size = target.numel(), student.shape[-1]
    out = student.new_empty(5, tokens, dtype=torch.float32)
    if has_elements(target):
        block, warps, _ = row_config(vocab_size)
        with on_device(student):
            _forward_kernel[(tokens,)](
                student, *row_layout(student), teacher, *row_layout(teacher), target, out,
                tokens, vocab_size, ignore_index, BLOCK=block, num_warps=warps,
            )  # fmt: skip
    return out[0].clone(), out[1].clone(), out[2:].clone()  # an operator's results may not share memory


@operator("liger_trainer::fused_ce_tvd_backward")
def _fused_ce_tvd_backward(
    ce_grad: torch.Tensor,
    tvd_grad: torch.Tensor,
    student: torch.Tensor,
    teacher: torch.Tensor,
    target: torch.Tensor,
    saved: torch.Tensor,
    ignore_index: int,
) -> torch.Tensor:
    """The gradient of `student`, contiguous."""
    tokens, vocab_size = target.numel(), student.shape[-1]
    out = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    if has_elements(target):
        block, warps, _ = row_config(vocab_size)
        with on_device(student):
            _backward_kernel[(tokens,)](
                student, *row_layout(student), teacher, *row_layout(teacher), target, saved,
                ce_grad.contiguous(), tvd_grad.contiguous(), out,
                tokens, vocab_size, ignore_index, BLOCK=block, num_warps=warps,
            )  # fmt: skip
    return out


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    student, teacher, target, ctx.ignore_index = inputs
    _, _, saved = output
    ctx.mark_non_differentiable(saved)
    ctx.save_for_backward(student, teacher, target, saved)


def _backward(
    ctx: Any, ce_grad: torch.Tensor | None, tvd_grad: torch.Tensor | None, _: None
) -> tuple[torch.Tensor | None, ...]:
    refuse_double_backward("fused_ce_tvd")
    student, teacher, target, saved = ctx.saved_tensors
    zero = saved.new_zeros(saved.shape[1])
    ce_grad = zero if ce_grad is None else ce_grad
    tvd_grad = zero if tvd_grad is None else tvd_grad
    gradient = _fused_ce_tvd_backward(ce_grad, tvd_grad, student, teacher, target, saved, ctx.ignore_index)
    return input_gradients(ctx, gradient)


_fused_ce_tvd.register_autograd(_backward, setup_context=_setup_context)


def fused_ce_tvd(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy and total variation distance of each token, from the logits of a student and a teacher.

    Neither softmax is stored. The caller weights, masks and reduces the results.

    Args:
        student_logits: `(..., V)` of fp16, bf16 or fp32 (float64 runs the reference).
        teacher_logits: `(..., V)` of any floating dtype; it gets no gradient.
        target: `(...)` of int64 or int32. On the CPU a label outside [0, V) is an error; on an accelerator it makes
            the token's cross entropy NaN.
        ignore_index: Tokens with this label have cross entropy 0, distance 0 and no gradient.

    Returns:
        The cross entropies and the distances, fp32 (float64 for float64 logits), each shaped as `target`.

    Raises:
        ValueError: For a shape, dtype, device or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    if student_logits.shape != teacher_logits.shape or student_logits.dim() < 1:
        raise ValueError(
            f"`student_logits` has shape {tuple(student_logits.shape)} and `teacher_logits` "
            f"{tuple(teacher_logits.shape)}; both must be the same (..., V)."
        )
    if not (student_logits.is_floating_point() and teacher_logits.is_floating_point()):
        raise ValueError(f"The logits are {student_logits.dtype} and {teacher_logits.dtype}; both must be floating.")
    if student_logits.device != teacher_logits.device:
        raise ValueError(
            f"`student_logits` is on {student_logits.device} but `teacher_logits` on {teacher_logits.device}; move one."
        )
    vocab_size = student_logits.shape[-1]
    check_target(target, student_logits.shape[:-1], vocab_size, student_logits, "student_logits")
    check_labels_on_cpu(target, vocab_size, ignore_index)
    if use_triton(student_logits) and use_triton(teacher_logits):
        labels = target.reshape(-1).contiguous()
        ce, tvd, _ = _fused_ce_tvd(row_view(student_logits), row_view(teacher_logits.detach()), labels, ignore_index)
        return ce.view(target.shape), tvd.view(target.shape)
    dtype = torch.promote_types(student_logits.dtype, torch.float32)
    ignored = target == ignore_index
    in_range = (target >= 0) & (target < student_logits.shape[-1])
    x, y = (
        logits.to(dtype).masked_fill(ignored.unsqueeze(-1), 0.0) for logits in (student_logits, teacher_logits.detach())
    )
    label = torch.where(in_range, target, 0).long().unsqueeze(-1)
    ce = -torch.log_softmax(x, -1).gather(-1, label).squeeze(-1)
    tvd = 0.5 * (x.softmax(-1) - y.softmax(-1)).abs().sum(-1)
    ce = torch.where(in_range, ce, math.nan)
    return torch.where(ignored, 0.0, ce), torch.where(ignored, 0.0, tvd)


fused_ce_tvd_reference = reference_of(fused_ce_tvd, "use_triton")
