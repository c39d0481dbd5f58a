"""The row kernel of distillation: divergence and student gradient of one row of logits of two heads.

The divergences are those of `divergence`. Their gradients with respect to the student's transformed logits z
are

    forward_kl    s - t                          reverse_kl    s * (log(s / t) - KL(s || t))
    probs_kl      s * sum(q) - q                 jsd           (1 - beta) * s * (log(s / m) - KL(s || m))
    cosine        beta * (cos * z_s / |z_s|**2 - z_t / (|z_s| * |z_t|))

One program takes one row of both models. Pass 1 keeps, per lane, a running maximum and sum of exponentials of each, and
the sums that KL(t || s) or KL(s || t) needs, so the last pass can already write the gradient over the student's logits.
The JSD is not linear in the normalisers and takes one more pass for KL(s || m) and KL(t || m). Each pass runs in the
opposite direction to the one before, because its last tiles are still in cache.

The gradient of fp32 logits may be written in half precision, into the half of their memory that the last pass has
already read (`gradient_memory`): the low half if it goes up the columns, the high half if it goes down.

Bytes moved for N rows of V logits of b bytes in both models and a gradient of g bytes an element: N*V * (4*b + g), jsd
N*V * (6*b + g), less what is in L2.

Shapes: N tokens, V classes that are compared.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.activation import has_lg2, log2
from liger_trainer.kernels.head.divergence import DivergenceOptions, DivergenceStats, divergence_rows_torch_
from liger_trainer.kernels.head.logit_rows import fold, load_logits, row_config, transform_factors, transform_logits
from liger_trainer.kernels.runtime import on_device, tl, triton, use_triton


@triton.jit
def _scores(row_ptr, bias_ptr, columns, width, vocab_size, inner, outer, SOFTCAP: tl.constexpr, BIAS: tl.constexpr):
    """log2(e) * z of one tile and a quarter of the soft-cap's slope; padding and -inf become a finite floor."""
    FLOOR: tl.constexpr = -1.0e30  # so that differences of two masked logits are 0 and not NaN
    x = load_logits(row_ptr, bias_ptr, columns, width, vocab_size, BIAS)
    z, slope = transform_logits(x, inner, outer, SOFTCAP)
    return tl.where((columns >= vocab_size) | (z < FLOOR), FLOOR, z), slope  # NaN stays NaN


@triton.jit
def _mixture(ls, lt, beta, LG2: tl.constexpr):
    """s, t, log2(s / m) and log2(t / m) from log2(s) and log2(t)."""
    s, t = tl.exp2(ls), tl.exp2(lt)
    log_m = log2((1.0 - beta) * s + beta * t, LG2)  # where m underflows, so do s and t, and their terms are 0
    return s, t, ls - log_m, lt - log_m


@triton.jit
def _divergence_row_kernel(
    s_ptr,
    s_stride,
    s_width,
    t_ptr,
    t_stride,
    t_width,
    gradient_ptr,
    gradient_stride,
    vocab_size,
    s_bias_ptr,
    t_bias_ptr,
    label_ptr,
    coefficient_ptr,
    coefficient_stride,
    soft_ptr,
    hard_ptr,
    entropy_ptr,
    ignore_index,
    beta,
    temperature,
    soft_weight,
    hard_weight,
    eps,
    s_inner,
    s_outer,
    slope_scale,
    t_inner,
    t_outer,
    DIVERGENCE: tl.constexpr,
    GRADIENT: tl.constexpr,
    LABELS: tl.constexpr,
    HARD: tl.constexpr,
    ENTROPY: tl.constexpr,
    S_SOFTCAP: tl.constexpr,
    T_SOFTCAP: tl.constexpr,
    S_BIAS: tl.constexpr,
    T_BIAS: tl.constexpr,
    LG2: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    LN2: tl.constexpr = 0.6931471805599453
    LOG2E: tl.constexpr = 1.4426950408889634
    LOWEST: tl.constexpr = -3.0e38
    row = tl.program_id(0).to(tl.int64)
    s_ptr += row * s_stride
    t_ptr += row * t_stride
    gradient_ptr += row * gradient_stride
    lanes = tl.arange(0, BLOCK)
    tiles = tl.cdiv(s_width, BLOCK)

    if LABELS:
        label = tl.load(label_ptr + row).to(tl.int64)
        if label == ignore_index:
            tl.store(soft_ptr + row, 0.0)
            if HARD:
                tl.store(hard_ptr + row, 0.0)
            if ENTROPY:
                tl.store(entropy_ptr + row, 0.0)
            if GRADIENT:
                for start in tl.range(0, s_width, BLOCK):
                    columns = start + lanes
                    zeros = tl.zeros([BLOCK], dtype=gradient_ptr.dtype.element_ty)
                    tl.store(gradient_ptr + columns, zeros, mask=columns < s_width)
            return

    s_peaks = tl.full([BLOCK], LOWEST, tl.float32)
    t_peaks = tl.full([BLOCK], LOWEST, tl.float32)
    s_sums = tl.zeros([BLOCK], tl.float32)
    t_sums = tl.zeros([BLOCK], tl.float32)  # cosine: squares of the teacher's logits; probs_kl: the sum of q
    crosses = tl.zeros([BLOCK], tl.float32)  # the sum that the divergence needs besides the normalisers
    squares = tl.zeros([BLOCK], tl.float32)
    moments = tl.zeros([BLOCK], tl.float32)
    hard_sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, s_width, BLOCK, num_stages=STAGES):
        columns = start + lanes
        zs, _ = _scores(s_ptr, s_bias_ptr, columns, s_width, vocab_size, s_inner, s_outer, S_SOFTCAP, S_BIAS)
        grows = zs > s_peaks
        distance = -tl.abs(zs - s_peaks)
        decay = tl.exp2(distance)
        s_sums = fold(s_sums, 1.0, decay, grows)
        if ENTROPY:
            moments = fold(moments, zs, decay, grows)
        if HARD:
            hard_sums = fold(hard_sums, 1.0, tl.exp2(distance * temperature), grows)
        s_peaks = tl.where(grows, zs, s_peaks)
        if DIVERGENCE == "probs_kl":
            q = tl.load(t_ptr + columns, mask=columns < t_width, other=0.0).to(tl.float32)
            q = tl.where(columns < vocab_size, q, 0.0)
            t_sums += q
            crosses += q * (log2(tl.maximum(q, eps), LG2) - zs)
        else:
            zt, _ = _scores(t_ptr, t_bias_ptr, columns, t_width, vocab_size, t_inner, t_outer, T_SOFTCAP, T_BIAS)
            if DIVERGENCE == "cosine":
                zs = tl.where(columns < vocab_size, zs, 0.0)
                zt = tl.where(columns < vocab_size, zt, 0.0)
                t_sums += zt * zt
                squares += zs * zs
                crosses += zs * zt
            else:
                if DIVERGENCE == "reverse_kl":
                    crosses = fold(crosses, zs - zt, decay, grows)
                grows = zt > t_peaks
                decay = tl.exp2(-tl.abs(zt - t_peaks))
                t_sums = fold(t_sums, 1.0, decay, grows)
                if DIVERGENCE == "forward_kl":
                    crosses = fold(crosses, zt - zs, decay, grows)
                t_peaks = tl.where(grows, zt, t_peaks)

    s_peak = tl.max(s_peaks, 0)
    s_scale = tl.exp2(s_peaks - s_peak)
    s_total = tl.sum(s_sums * s_scale, 0)
    s_lse = s_peak + tl.log2(s_total)
    t_peak = tl.max(t_peaks, 0)
    t_scale = tl.exp2(t_peaks - t_peak)
    t_lse = t_peak
    t_total = 0.0
    if DIVERGENCE == "probs_kl" or DIVERGENCE == "cosine":
        t_total = tl.sum(t_sums, 0)
    else:
        t_total = tl.sum(t_sums * t_scale, 0)
        t_lse = t_peak + tl.log2(t_total)
    if ENTROPY:
        tl.store(entropy_ptr + row, (s_lse - tl.sum(moments * s_scale, 0) / s_total) * LN2)

    student_kl = 0.0  # KL(s || m), in nats
    s_norm = 1.0
    t_norm = 1.0
    if DIVERGENCE == "probs_kl":
        soft = (tl.sum(crosses, 0) + s_lse * t_total) * LN2
    elif DIVERGENCE == "forward_kl":
        soft = (tl.sum(crosses * t_scale, 0) / t_total + (s_lse - t_lse)) * LN2
    elif DIVERGENCE == "reverse_kl":
        soft = (tl.sum(crosses * s_scale, 0) / s_total + (t_lse - s_lse)) * LN2
    elif DIVERGENCE == "cosine":
        s_norm = 1.0 / tl.maximum(tl.sqrt(tl.sum(squares, 0)), 1.0e-8)
        t_norm = 1.0 / tl.maximum(tl.sqrt(t_total), 1.0e-8)
        student_kl = tl.sum(crosses, 0) * s_norm * t_norm  # the cosine
        soft = beta * (1.0 - student_kl)
    else:
        s_terms = tl.zeros([BLOCK], tl.float32)
        t_terms = tl.zeros([BLOCK], tl.float32)
        for tile in tl.range(0, tiles, num_stages=STAGES):
            columns = (tiles - 1 - tile) * BLOCK + lanes
            zs, _ = _scores(s_ptr, s_bias_ptr, columns, s_width, vocab_size, s_inner, s_outer, S_SOFTCAP, S_BIAS)
            zt, _ = _scores(t_ptr, t_bias_ptr, columns, t_width, vocab_size, t_inner, t_outer, T_SOFTCAP, T_BIAS)
            s, t, s_log, t_log = _mixture(zs - s_lse, zt - t_lse, beta, LG2)
            s_terms += s * s_log
            t_terms += t * t_log
        student_kl = tl.sum(s_terms, 0) * LN2
        soft = (1.0 - beta) * student_kl + beta * (tl.sum(t_terms, 0) * LN2)
    tl.store(soft_ptr + row, tl.where(soft > 1.0e20, float("inf"), soft))  # the floor stands for minus infinity

    hard_lse = s_lse
    target = tl.full([], -1, tl.int32)
    in_range = True
    if HARD:
        in_range = (label >= 0) & (label < vocab_size)
        target = tl.where(in_range, label, 0).to(tl.int32)
        label_z, _label_slope = _scores(
            s_ptr, s_bias_ptr, target, s_width, vocab_size, s_inner, s_outer, S_SOFTCAP, S_BIAS
        )
        hard_scale = tl.exp2((s_peaks - s_peak) * temperature)
        hard_lse = s_peak * temperature + tl.log2(tl.sum(hard_sums * hard_scale, 0))
        nll = (hard_lse - label_z * temperature) * LN2
        tl.store(hard_ptr + row, tl.where(in_range, nll, float("nan")))

    if GRADIENT:
        coefficient = tl.load(coefficient_ptr + row * coefficient_stride).to(tl.float32) * slope_scale
        soft_coefficient = tl.where(soft == soft, coefficient * soft_weight, soft)  # NaN makes the whole row NaN
        hard_coefficient = coefficient * hard_weight * temperature
        if HARD:
            hard_coefficient = tl.where(in_range, hard_coefficient, float("nan"))
        for tile in tl.range(0, tiles, num_stages=STAGES):
            # `gradient_memory` relies on this direction.
            columns = (tile if DIVERGENCE == "jsd" else tiles - 1 - tile) * BLOCK + lanes
            zs, slope = _scores(s_ptr, s_bias_ptr, columns, s_width, vocab_size, s_inner, s_outer, S_SOFTCAP, S_BIAS)
            if DIVERGENCE == "probs_kl":
                q = tl.load(t_ptr + columns, mask=columns < t_width, other=0.0).to(tl.float32)
                gradient = tl.exp2(zs - s_lse) * t_total - q
            else:
                zt, _ = _scores(t_ptr, t_bias_ptr, columns, t_width, vocab_size, t_inner, t_outer, T_SOFTCAP, T_BIAS)
                if DIVERGENCE == "forward_kl":
                    gradient = tl.exp2(zs - s_lse) - tl.exp2(zt - t_lse)
                elif DIVERGENCE == "reverse_kl":
                    ls = zs - s_lse
                    gradient = tl.exp2(ls) * ((ls - (zt - t_lse)) * LN2 - soft)
                elif DIVERGENCE == "cosine":
                    gradient = (beta * LOG2E) * s_norm * (student_kl * s_norm * zs - t_norm * zt)
                else:
                    s, t, s_log, t_log = _mixture(zs - s_lse, zt - t_lse, beta, LG2)
                    gradient = (1.0 - beta) * s * (s_log * LN2 - student_kl)
            gradient *= soft_coefficient
            if HARD:
                hit = tl.where(columns == target, 1.0, 0.0)
                gradient += hard_coefficient * (tl.exp2(zs * temperature - hard_lse) - hit)
            if S_SOFTCAP:
                gradient *= slope
            if gradient_ptr.dtype.element_ty != s_ptr.dtype.element_ty:
                tl.debug_barrier()  # threads write over logits of this tile, and of earlier ones, that others load
            tl.store(gradient_ptr + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=columns < s_width)


def gradient_memory(logits: torch.Tensor, dtype: torch.dtype, divergence: str) -> torch.Tensor:
    """Memory for the gradient in `dtype` within the memory of the padded `logits`: all of it, or half of each row."""
    if dtype == logits.dtype:
        return logits
    low, high = logits.view(dtype).chunk(2, 1)
    return low if divergence == "jsd" else high


def divergence_rows_(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor | None,
    stats: DivergenceStats,
    options: DivergenceOptions,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    coefficient: torch.Tensor | None = None,
    student_width: int | None = None,
    teacher_width: int | None = None,
    out: torch.Tensor | None = None,
) -> None:
    """Fills `stats`; with a `coefficient`, also writes the student's gradient times it to `out`, or over `student`.

    Args:
        student: `(N, V)` logits, last stride 1.
        teacher: `(N, V)` logits (for "probs_kl" probabilities), last stride 1, of any floating dtype.
        labels: `(N,)` contiguous labels, or None if every token counts; needed if `stats.hard` is not empty.
        stats: Statistics of N tokens, filled; its empty fields are not computed.
        options: The loss.
        student_bias: `(V,)`, added to the student's logits in fp32.
        teacher_bias: `(V,)`, likewise.
        coefficient: Upstream gradient of the token losses, 0-d or `(N,)`; None for statistics alone.
        student_width: Columns of memory that belong to a row of `student`, at least V (the default); those from V on
            are overwritten.
        teacher_width: Columns of memory that belong to a row of `teacher`.
        out: `(N, V)`, rows of the `gradient_memory` of the student's logits, `student_width` columns each.
    """
    out = student if out is None else out
    if not use_triton(student):
        divergence_rows_torch_(student, teacher, labels, stats, options, student_bias, teacher_bias, coefficient, out)
        return
    tokens, vocab_size = student.shape
    if tokens == 0:
        return
    block, warps, stages = row_config(student_width or vocab_size)
    student_factors = transform_factors(options.student_softcap, options.student_logit_scale, options.temperature)
    teacher_factors = transform_factors(options.teacher_softcap, options.teacher_logit_scale, options.temperature)
    with on_device(student):
        _divergence_row_kernel[(tokens,)](
            student,
            student.stride(0),
            student_width or vocab_size,
            teacher,
            teacher.stride(0),
            teacher_width or vocab_size,
            out,
            out.stride(0),
            vocab_size,
            student_bias,
            teacher_bias,
            labels,
            coefficient,
            coefficient.stride(0) if coefficient is not None and coefficient.dim() else 0,
            stats.soft,
            stats.hard,
            stats.entropy,
            options.ignore_index,
            options.beta,
            options.temperature,
            options.soft_weight,
            options.hard_weight,
            options.eps,
            *student_factors,
            *teacher_factors[:2],
            DIVERGENCE=options.divergence,
            GRADIENT=coefficient is not None,
            LABELS=labels is not None,
            HARD=stats.hard.numel() > 0,
            ENTROPY=stats.entropy.numel() > 0,
            S_SOFTCAP=options.student_softcap is not None,
            T_SOFTCAP=options.teacher_softcap is not None,
            S_BIAS=student_bias is not None,
            T_BIAS=teacher_bias is not None,
            LG2=has_lg2(student),
            BLOCK=block,
            STAGES=stages,
            num_warps=warps,
        )
