"""Divergences of two heads: formulas, options, results of a token, outputs, checks of the arguments, and plain torch.

With z the transformed logits of a token (`logit_rows`: scaled, soft-capped, then divided by the temperature), s and t
the softmax of the student's and of the teacher's, and m = (1 - beta) * s + beta * t:

    forward_kl    KL(t || s)                                reverse_kl    KL(s || t)
    jsd           beta * KL(t || m) + (1 - beta) * KL(s || m)   of 0 < beta < 1
    probs_kl      sum_c q[c] * (log(max(q[c], eps)) - log s[c])   for given probabilities q
    cosine        beta * (1 - cos(z_student, z_teacher))

and the token's loss is ``soft_weight * divergence + hard_weight * cross entropy``, the cross entropy being that of the
student's logits before the temperature. No factor of temperature**2 is applied.

The functions in plain torch are for devices without Triton, for float64, and the tests' reference. The gradients'
formulas are in `divergence_kernel`.

Shapes: N tokens, V classes that are compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from liger_trainer.kernels.head.loss_options import check_outputs, check_transform, inverse_normalizer

OUTPUTS = ("soft_loss", "hard_loss", "entropy", "token_divergence")
_FLOOR = -1.0e30  # stands for minus infinity, so that two masked logits differ by 0


class DivergenceOptions(NamedTuple):
    """The options of one token's loss, in the order in which the operator takes them."""

    divergence: str
    beta: float
    temperature: float
    soft_weight: float
    hard_weight: float
    student_softcap: float | None
    student_logit_scale: float
    teacher_softcap: float | None
    teacher_logit_scale: float
    eps: float
    ignore_index: int


class DivergenceStats(NamedTuple):
    """Results of every token, fp32 (float64 for float64 logits); 0 at ignored tokens.

    `soft` is the divergence, `hard` the cross entropy, `entropy` that of s. The last two are empty if not asked for.
    """

    soft: torch.Tensor
    hard: torch.Tensor
    entropy: torch.Tensor

    @classmethod
    def allocate(cls, like: torch.Tensor, tokens: int, hard: bool, entropy: bool) -> DivergenceStats:
        """Uninitialised statistics of `tokens` tokens on the device of `like`."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return cls(*(like.new_empty(tokens if wanted else 0, dtype=dtype) for wanted in (True, hard, entropy)))

    def rows(self, start: int, stop: int) -> DivergenceStats:
        """The statistics of tokens `start` to `stop`, as views."""
        return DivergenceStats(*(field[start:stop] for field in self))


@dataclasses.dataclass
class DivergenceOutput:
    """The loss and the outputs that were asked for; the others are None. Only `loss` has a gradient.

    Attributes:
        loss: fp32, 0-d.
        soft_loss: fp32 0-d, the divergences reduced as `loss` is, before `soft_weight`.
        hard_loss: fp32 0-d, the cross entropies reduced as `loss` is, before `hard_weight`.
        entropy: fp32 per token, of the student's softmax at the temperature; 0 at ignored tokens.
        token_divergence: fp32 per token, without any weight; 0 at ignored tokens.
    """

    loss: torch.Tensor
    soft_loss: torch.Tensor | None = None
    hard_loss: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    token_divergence: torch.Tensor | None = None


def check_divergence_options(options: DivergenceOptions, outputs: Sequence[str]) -> None:
    """Raises ValueError unless every option of a divergence is in its range."""
    check_outputs(outputs, OUTPUTS)
    if not 0.0 <= options.beta <= 1.0:
        raise ValueError(f"`beta` is {options.beta}; it must lie in [0, 1].")
    softcaps = {"student_softcap": options.student_softcap, "teacher_softcap": options.teacher_softcap}
    check_transform(options.temperature, **softcaps)


def common_vocab_size(student_vocab: int, teacher_vocab: int, vocab_size: int | None) -> int:
    """How many classes are compared: `vocab_size`, by default all those of both heads.

    Raises:
        ValueError: If the heads differ in size and `vocab_size` is None, or if it is not within both.
    """
    if vocab_size is None:
        if student_vocab != teacher_vocab:
            raise ValueError(
                f"The student's head has {student_vocab} rows and the teacher's {teacher_vocab}. If they "
                f"pad one vocabulary differently, pass vocab_size={min(student_vocab, teacher_vocab)} (or the number "
                "of real tokens) to compare the first rows of both; different tokenizers cannot be compared."
            )
        vocab_size = student_vocab
    if not 1 <= vocab_size <= min(student_vocab, teacher_vocab):
        raise ValueError(
            f"`vocab_size` is {vocab_size}; with heads of {student_vocab} and {teacher_vocab} rows it must lie in "
            f"[1, {min(student_vocab, teacher_vocab)}]."
        )
    return vocab_size


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
    dtype = torch.promote_types(hidden.dtype, torch.float32)
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
    dtype = torch.promote_types(student.dtype, torch.float32)
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
    dtype = torch.promote_types(student.dtype, torch.float32)
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
