"""The divergences of two heads in plain torch, for devices without Triton, for float64, and as the tests' reference.

The formulas are in `divergence_options`, the gradients in `divergence_kernel`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from liger_trainer.kernels.head.divergence_options import DivergenceOptions, DivergenceStats
from liger_trainer.kernels.head.loss_arguments import inverse_normalizer
from liger_trainer.kernels.head.row_statistics import compute_dtype

_FLOOR = -1.0e30  # stands for minus infinity, so that two masked logits differ by 0


def _scores(x: torch.Tensor, softcap: float | None, logit_scale: float) -> torch.Tensor:
    """``softcap * tanh(x * logit_scale / softcap)``, or ``x * logit_scale`` uncapped."""
    z = x * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z.clamp(min=_FLOOR)


def _mixture_log_probs(ls: torch.Tensor, lt: torch.Tensor, beta: float) -> torch.Tensor:
    return torch.logaddexp(ls + math.log1p(-beta), lt + math.log(beta))


def _token_losses(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor | None, options: DivergenceOptions, hard: bool
) -> DivergenceStats:
    """Every statistic of `(N, V)` logits of the computing dtype; ignored rows must hold something finite."""
    z = _scores(student, options.student_softcap, options.student_logit_scale)
    ls = torch.log_softmax(z / options.temperature, -1)
    kind = options.divergence
    if kind == "probs_kl":
        soft = (teacher * (teacher.clamp(min=options.eps).log() - ls)).sum(-1)
    else:
        zt = _scores(teacher, options.teacher_softcap, options.teacher_logit_scale) / options.temperature
        lt = torch.log_softmax(zt, -1)
        if kind == "forward_kl":
            soft = (lt.exp() * (lt - ls)).sum(-1)
        elif kind == "reverse_kl":
            soft = (ls.exp() * (ls - lt)).sum(-1)
        elif kind == "cosine":
            soft = options.beta * (1.0 - F.cosine_similarity(z / options.temperature, zt, dim=-1))
        else:
            lm = _mixture_log_probs(ls, lt, options.beta)
            soft = options.beta * (lt.exp() * (lt - lm)).sum(-1) + (1 - options.beta) * (ls.exp() * (ls - lm)).sum(-1)
    soft = torch.where(soft > 1e20, math.inf, soft)
    nll = soft.new_zeros(0)
    if hard:
        assert labels is not None
        in_range = (labels >= 0) & (labels < student.shape[-1])
        nll = -torch.log_softmax(z, -1).gather(-1, torch.where(in_range, labels, 0).long().unsqueeze(-1)).squeeze(-1)
        nll = torch.where(in_range, nll, math.nan)
    return DivergenceStats(soft, nll, -(ls.exp() * ls).sum(-1).detach())


def _valid(student: torch.Tensor, labels: torch.Tensor | None, options: DivergenceOptions) -> torch.Tensor:
    if labels is None:
        return torch.ones(student.shape[:1], dtype=torch.bool, device=student.device)
    return labels != options.ignore_index


def logits_reference(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The logits of a head in fp32, as the divergences take them: not rounded to half precision."""
    dtype = compute_dtype(hidden)
    return F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def divergence_of_logits_reference(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor | None,
    options: DivergenceOptions,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
    token_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss of `(..., V)` logits of both models, differentiable in `student`."""
    vocab_size = student.shape[-1]
    flat, labels = student.reshape(-1, vocab_size), None if labels is None else labels.reshape(-1)
    valid = _valid(flat, labels, options)
    dtype = compute_dtype(student)
    ignored = ~valid.unsqueeze(-1)
    hard = options.hard_weight != 0.0
    soft, nll, _ = _token_losses(
        flat.to(dtype).masked_fill(ignored, 0.0),
        teacher.detach().reshape(-1, vocab_size).to(dtype).masked_fill(ignored, 0.0),
        labels,
        options,
        hard,
    )
    losses = options.soft_weight * soft + (options.hard_weight * nll if hard else 0.0)
    losses = torch.where(valid, losses, 0.0)
    if token_weights is not None:
        losses = losses * token_weights.reshape(-1)
    if num_items is None and reduction == "mean" and labels is None:
        num_items = flat.shape[0]
    tokens = flat if labels is None else labels
    return losses.sum() * inverse_normalizer(tokens, options.ignore_index, reduction, num_items, dtype)


def divergence_rows_torch_(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor | None,
    stats: DivergenceStats,
    options: DivergenceOptions,
    student_bias: torch.Tensor | None,
    teacher_bias: torch.Tensor | None,
    coefficient: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> None:
    """`divergence_rows_` of `divergence_kernel.py` in plain torch, with the same arguments.

    `out` may lie in the memory of `student`.
    """
    dtype = compute_dtype(student)
    x, y = student.to(dtype), teacher.to(dtype)
    x = x if student_bias is None else x + student_bias
    y = y if teacher_bias is None else y + teacher_bias
    valid = _valid(student, labels, options)
    hard = stats.hard.numel() > 0
    computed = _token_losses(x, y, labels, options, hard)
    for field, value in zip(stats, computed):
        if field.numel():
            field.copy_(torch.where(valid, value, 0.0))
    if coefficient is None:
        return
    kind, beta, temperature = options.divergence, options.beta, options.temperature
    raw = _scores(x, options.student_softcap, options.student_logit_scale)
    z = raw / temperature
    ls = torch.log_softmax(z, -1)
    s = ls.exp()
    zt = _scores(y, options.teacher_softcap, options.teacher_logit_scale) / temperature
    lt = torch.log_softmax(zt, -1)
    if kind == "probs_kl":
        gradient = s * y.sum(-1, keepdim=True) - y
    elif kind == "forward_kl":
        gradient = s - lt.exp()
    elif kind == "reverse_kl":
        gradient = s * (ls - lt - computed.soft.unsqueeze(-1))
    elif kind == "cosine":
        unit = F.normalize(z, dim=-1, eps=1e-8)
        other = F.normalize(zt, dim=-1, eps=1e-8)
        cosine = (unit * other).sum(-1, keepdim=True)
        gradient = beta * (cosine * unit - other) / z.norm(dim=-1, keepdim=True).clamp(min=1e-8)
    else:
        log_ratio = ls - _mixture_log_probs(ls, lt, beta)
        gradient = (1 - beta) * s * (log_ratio - (s * log_ratio).sum(-1, keepdim=True))
    gradient *= options.soft_weight
    if hard:
        assert labels is not None
        in_range = (labels >= 0) & (labels < student.shape[-1])
        index = torch.where(in_range, labels, 0).long().unsqueeze(-1)
        error = torch.softmax(raw, -1).scatter_add_(-1, index, -torch.ones_like(index, dtype=dtype))
        error *= options.hard_weight * temperature
        gradient += error.masked_fill_(~in_range.unsqueeze(-1), math.nan)
    gradient *= (coefficient * (options.student_logit_scale / temperature)).expand(valid.shape).unsqueeze(-1)
    if options.student_softcap is not None:
        gradient *= 1.0 - (raw / options.student_softcap).square()
    (student if out is None else out).copy_(gradient.masked_fill_(~valid.unsqueeze(-1), 0.0))
