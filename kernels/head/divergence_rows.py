"""The row step of distillation: divergence and student gradient of one row of logits of two heads, as a Triton kernel.

The divergences are those of `_divergence_options`. With respect to the student's transformed logits z their
gradients are

    forward_kl    s - t                          reverse_kl    s * (log(s / t) - KL(s || t))
    probs_kl      s * sum(q) - q                 jsd           (1 - beta) * s * (log(s / m) - KL(s || m))
    cosine        beta * (cos * z_s / |z_s|**2 - z_t / (|z_s| * |z_t|))

One program takes a row of both models. Pass 1 keeps, per lane, a running maximum and sum of exponentials of each, and
with it the sums that KL(t || s) or KL(s || t) needs, so the last pass can already write the gradient over the student's
logits. The JSD is not linear in the normalisers and takes one pass more for KL(s || m) and KL(t || m). Every pass goes
the other way than the one before, as its last tiles are still in cache.

The gradient of fp32 logits may be written in half precision, into the half of their memory that the last pass has read
by then (`gradient_memory`): the low half where it goes up the columns, the high half where it goes down.

Bytes moved for N rows of V logits of b bytes in both models and a gradient of g: N*V * (4*b + g), jsd N*V * (6*b + g),
less what is in L2.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.fast_math import has_lg2
from liger_trainer.kernels.head.divergence_options import DivergenceOptions, DivergenceStats
from liger_trainer.kernels.head.divergence_reference import divergence_rows_torch_
from liger_trainer.kernels.head.divergence_row_kernel import divergence_row_kernel
from liger_trainer.kernels.head.logit_rows import row_config
from liger_trainer.kernels.head.logit_transform import transform_factors
from liger_trainer.kernels.runtime import on_device, use_triton


def gradient_memory(logits: torch.Tensor, dtype: torch.dtype, divergence: str) -> torch.Tensor:
    """The memory of whole rows of logits as that of their gradient in `dtype`, as wide or half as wide."""
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
    """Fills `stats`; with a `coefficient` it also writes the student's gradient times it to `out`, else over `student`.

    Args:
        student: `(N, V)` logits, last stride 1.
        teacher: `(N, V)` logits (for "probs_kl" probabilities), last stride 1, of any floating dtype.
        labels: `(N,)` contiguous labels, or None where every token counts; needed where `stats.hard` is not empty.
        stats: Statistics of N tokens, filled; its empty fields are not computed.
        options: The loss.
        student_bias: `(V,)`, added to the student's logits in fp32.
        teacher_bias: `(V,)`, likewise.
        coefficient: Upstream gradient of the token losses, 0-d or `(N,)`; None for statistics alone.
        student_width: Columns of memory each row of `student` owns, at least V (the default); those from V on are
            scratch.
        teacher_width: Columns of memory each row of `teacher` owns.
        out: `(N, V)`, rows of the `gradient_memory` of the student's logits; they own `student_width` columns too.
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
        divergence_row_kernel[(tokens,)](
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
