"""Generalised JSD, KL and cosine distance of two LM heads, from hidden states (operator: `linear_divergence`).

Shapes: N tokens, H hidden size, V vocabulary; H_teacher hidden size of the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.head.divergence import (
    DivergenceOptions,
    DivergenceOutput,
    common_vocab_size,
)
from liger_trainer.kernels.head.linear_divergence import reduced_divergence, reduced_divergence_reference
from liger_trainer.kernels.head.loss_options import check_head
from liger_trainer.kernels.runtime import as_autocast, reference_of


def _of_two_heads(
    divergence: str,
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    labels: torch.Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    token_weights: torch.Tensor | None = None,
    vocab_size: int | None = None,
    outputs: Sequence[str] = (),
    logits_memory: int = 2**30,
    expected_grad: float | torch.Tensor | None = None,
) -> torch.Tensor | DivergenceOutput:
    """Any divergence of two heads; the other arguments are those of `linear_jsd`."""
    student = as_autocast(student_hidden), as_autocast(student_weight), as_autocast(student_bias)
    teacher = as_autocast(teacher_hidden), as_autocast(teacher_weight), as_autocast(teacher_bias)
    check_head(*student, "student_")
    check_head(*teacher, "teacher_")
    if student_hidden.shape[:-1] != teacher_hidden.shape[:-1] or student_hidden.device != teacher_hidden.device:
        raise ValueError(
            f"`student_hidden` of shape {tuple(student_hidden.shape)} on {student_hidden.device} and `teacher_hidden` "
            f"of shape {tuple(teacher_hidden.shape)} on {teacher_hidden.device} must be the same tokens on one device."
        )
    options = DivergenceOptions(
        divergence, beta, temperature, soft_weight, hard_weight, student_softcap, student_logit_scale,
        teacher_softcap, teacher_logit_scale, 0.0, ignore_index,
    )  # fmt: skip
    return reduced_divergence(
        student,
        teacher,
        labels,
        options,
        common_vocab_size(student_weight.shape[0], teacher_weight.shape[0], vocab_size),
        reduction,
        num_items,
        token_weights,
        outputs,
        logits_memory,
        expected_grad,
    )


def linear_jsd(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    labels: torch.Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    token_weights: torch.Tensor | None = None,
    vocab_size: int | None = None,
    outputs: Sequence[str] = (),
    logits_memory: int = 2**30,
    expected_grad: float | torch.Tensor | None = None,
) -> torch.Tensor | DivergenceOutput:
    """Generalised Jensen-Shannon divergence between the next-token distributions of a student and a teacher.

    With s and t the softmax of the two models' logits at the temperature and ``m = (1 - beta) * s + beta * t``, a
    token's divergence is ``beta * KL(t || m) + (1 - beta) * KL(s || m)``; `beta` 0 means ``KL(t || s)`` and 1 means
    ``KL(s || t)`` (arXiv 2306.13649, as in TRL and Liger; no factor of ``temperature**2``). The logits and everything
    computed from them are fp32; the gradient of the logits is rounded once, to the dtype of `student_hidden`, for its
    matmuls. On AMD and Intel GPUs the logits of a half-precision head are rounded as well. The gradients are computed
    in the forward; double backward is an error. The teacher gets no gradient.

    Args:
        student_hidden: `(..., H)` of fp16, bf16, fp32 or float64.
        student_weight: `(V, H)` of the dtype of `student_hidden`; under autocast, here and for the teacher, as in
            `linear_cross_entropy`.
        teacher_hidden: `(..., H_teacher)`, the same tokens; its dtype may be another.
        teacher_weight: `(V, H_teacher)` of the dtype of `teacher_hidden`.
        labels: `(...)` of int64 or int32; by default every token counts. If `hard_weight` is 0, a label only says
            whether its token counts. Otherwise a label outside [0, V) is an error on the CPU and a NaN loss elsewhere.
        beta: A number in [0, 1].
        temperature: Divides the logits of both models after the soft-cap, more than 0.
        student_bias: `(V,)`, floating.
        teacher_bias: `(V,)`, floating.
        ignore_index: Tokens with this label give no loss and no gradient.
        reduction: "mean" (over valid tokens, whatever their weights) or "sum".
        num_items: Divides the sum of the token losses by this instead; a number or a 0-d tensor.
        student_softcap: Soft-cap of the student's logits, more than 0.
        teacher_softcap: Soft-cap of the teacher's.
        student_logit_scale: Factor of the student's logits before the soft-cap.
        teacher_logit_scale: Factor of the teacher's.
        soft_weight: Factor of the divergence.
        hard_weight: Factor of the student's cross entropy with `labels`, which takes its logits before the temperature.
        token_weights: `(...)`, floating, factors of the token losses, not differentiated.
        vocab_size: Compares only this many classes, the first; for heads that share a vocabulary but pad it
            differently. By default both heads must have the same number of rows.
        outputs: Names among "soft_loss", "hard_loss", "entropy", "token_divergence".
        logits_memory: Bytes for the two chunks of fp32 logits, 1 GiB by default. Half-precision weight gradients of
            more than 8 chunks are summed in fp32 (not on NVIDIA GPUs from Hopper on, which need no fp32 sum); if larger
            buffers cost less memory than that sum, they exceed this.
        expected_grad: The upstream gradient to expect in the backward, a number or a 0-d tensor; default 1. If the
            upstream gradient is exactly that, the backward does not touch the gradients; otherwise it rescales them in
            one pass.

    Returns:
        The fp32 0-d loss (float64 for float64 inputs); with `outputs` a `DivergenceOutput`. If every token is ignored
        it is 0, with zero gradients.

    Raises:
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    return _of_two_heads(
        {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd"),
        student_hidden, student_weight, teacher_hidden, teacher_weight, labels, beta, temperature,
        student_bias, teacher_bias, ignore_index, reduction, num_items, student_softcap, teacher_softcap,
        student_logit_scale, teacher_logit_scale, soft_weight, hard_weight, token_weights, vocab_size,
        outputs, logits_memory, expected_grad,
    )  # fmt: skip


def linear_kl(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    labels: torch.Tensor | None = None,
    reverse: bool = False,
    **options: Any,
) -> torch.Tensor | DivergenceOutput:
    """Kullback-Leibler divergence between the next-token distributions of a student and a teacher.

    This is `linear_jsd` with `beta` 0 or 1, which takes one pass over the logits less than a `beta` in between.

    Args:
        student_hidden: `(..., H)`.
        student_weight: `(V, H)`.
        teacher_hidden: `(..., H_teacher)`.
        teacher_weight: `(V, H_teacher)`.
        labels: `(...)`, or None if every token counts.
        reverse: False is ``KL(teacher || student)``, which covers the teacher's modes; True is
            ``KL(student || teacher)``, which seeks one of them.
        options: The other arguments of `linear_jsd`, by name.

    Returns:
        The loss as `linear_jsd` returns it.

    Raises:
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    return linear_jsd(
        student_hidden, student_weight, teacher_hidden, teacher_weight, labels, beta=float(reverse), **options
    )


def linear_cosine_distance(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    labels: torch.Tensor | None = None,
    beta: float = 1.0,
    **options: Any,
) -> torch.Tensor | DivergenceOutput:
    """``beta * (1 - cos)`` between the logits of a student and of a teacher.

    Args:
        student_hidden: `(..., H)`.
        student_weight: `(V, H)`.
        teacher_hidden: `(..., H_teacher)`.
        teacher_weight: `(V, H_teacher)`.
        labels: `(...)`, or None if every token counts.
        beta: A number in [0, 1].
        options: The other arguments of `linear_jsd`, by name.

    Returns:
        The loss as `linear_jsd` returns it.

    Raises:
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    heads = (student_hidden, student_weight, teacher_hidden, teacher_weight)
    return _of_two_heads("cosine", *heads, labels, beta, **options)


linear_jsd_reference = reference_of(
    linear_jsd, _of_two_heads=reference_of(_of_two_heads, reduced_divergence=reduced_divergence_reference)
)
