"""The divergence between the logits of a student and a teacher, computed from both heads if both are deferred."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from liger_trainer.head.chunked_module import chunked_rows
from liger_trainer.head.deferred_logits import DeferredLogits, build, recordable
from liger_trainer.head.fused_loss import labelled_rows
from liger_trainer.head.lm_head import through_owner
from liger_trainer.head.step import expected_gradient
from liger_trainer.head.vocab_parallel import VocabParallelCall
from liger_trainer.kernels.head.elementwise_divergence import jsd
from liger_trainer.kernels.head.linear_jsd import DivergenceOutput, linear_jsd


def divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    beta: float,
    temperature: float = 1.0,
    num_items: int | torch.Tensor | None = None,
    ignore_index: int = -100,
) -> DivergenceOutput:
    """Generalised Jensen-Shannon divergence between next-token distributions, and the student's entropy.

    If both models deferred the logits of plain heads, this is one `linear_jsd`: the logits of both exist one chunk of
    tokens at a time, with the soft-cap and scale that each model's forward applied. If the student's head is of another
    kind (with an adapter, say), or its chain is longer, its module runs on one chunk of tokens at a time, together with
    the teacher's. Logits that the student has built are compared whole.

    Args:
        student: `(..., V)` logits, deferred or not.
        teacher: `(..., V)`, likewise; it gets no gradient.
        labels: `(...)`, `ignore_index` where a token does not count; otherwise any number.
        beta: A number in [0, 1]; 0 is ``KL(teacher || student)``, 1 ``KL(student || teacher)``.
        temperature: Divides the logits of both.
        num_items: Divides the sum of the token divergences, a number or a 0-d tensor; by default the number of tokens
            that count.
        ignore_index: See `labels`.

    Returns:
        `loss`, fp32 and 0-d, and `entropy`, fp32 `(...)` and 0 where a token does not count.

    Raises:
        ValueError: if the two differ in tokens or vocabulary.
    """
    if student.shape[-1] != teacher.shape[-1]:
        raise ValueError(
            f"The student's logits are over {student.shape[-1]} tokens and the teacher's over {teacher.shape[-1]}. "
            "Distributions can be compared over one vocabulary only: use a teacher of the student's tokenizer, whose "
            "head has as many rows."
        )
    labels = labels.to(student.device)
    deferred, deferred_teacher = recordable(student), recordable(teacher)
    if _fuses(deferred) and _fuses(deferred_teacher):
        return _of_heads(deferred, deferred_teacher, labels, beta, temperature, num_items, ignore_index)
    of_rows = functools.partial(_of_rows, beta=beta, temperature=temperature, ignore_index=ignore_index)
    if deferred is not None:
        tokens, entropy = _of_chunks(deferred, teacher, labels, ignore_index, of_rows)
    else:
        tokens, entropy = of_rows(build(student), labels, build(teacher))
    count = (labels != ignore_index).sum().clamp(min=1) if num_items is None else num_items
    return DivergenceOutput(tokens.sum() / count, entropy=entropy)


def _fuses(logits: DeferredLogits | None) -> bool:
    """Whether `logits` are deferred, of a fused head that is not split, with a soft-cap and a scale at most."""
    if logits is None or isinstance(logits.recorded.call, VocabParallelCall):
        return False
    return logits.recorded.call.fused and logits.recorded.chain.fused_form is not None


def _of_heads(
    student: Any,
    teacher: Any,
    labels: torch.Tensor,
    beta: float,
    temperature: float,
    num_items: int | torch.Tensor | None,
    ignore_index: int,
) -> DivergenceOutput:
    forms = [logits.recorded.chain.fused_form for logits in (student, teacher)]
    calls = [logits.recorded.call for logits in (student, teacher)]
    with (
        student.operands() as (hidden, weight, bias),
        teacher.operands() as (teacher_hidden, teacher_weight, teacher_bias),
    ):
        memory = sum(call.logits_memory for call in calls)
        teacher_hidden = teacher_hidden.detach()
        rows = labelled_rows(hidden, labels, ignore_index, memory, teacher_hidden)
        if rows is not None:
            hidden, teacher_hidden = rows.gathered(hidden), rows.gathered(teacher_hidden)
            labels, memory = rows.target, rows.logits_memory
        found = linear_jsd(
            hidden,
            weight,
            teacher_hidden,
            teacher_weight,
            labels,
            beta=beta,
            temperature=temperature,
            student_bias=bias,
            teacher_bias=teacher_bias,
            ignore_index=ignore_index,
            num_items=num_items,
            student_softcap=forms[0].softcap,
            teacher_softcap=forms[1].softcap,
            student_logit_scale=forms[0].logit_scale,
            teacher_logit_scale=forms[1].logit_scale,
            outputs=("entropy",),
            logits_memory=memory,
            expected_grad=expected_gradient("mean"),
        )
    assert isinstance(found, DivergenceOutput)
    assert found.entropy is not None
    calls[0].has_loss = calls[0].has_loss or found.loss.requires_grad
    entropy = found.entropy if rows is None else rows.scattered(found.entropy)
    return DivergenceOutput(through_owner(calls[0].head, found.loss), entropy=entropy)


def _of_chunks(
    student: DeferredLogits,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    of_rows: Callable[..., list[torch.Tensor]],
) -> list[torch.Tensor]:
    """`of_rows`, with the logits of one chunk of tokens in memory at a time."""
    memory = student.recorded.call.logits_memory
    rows = labelled_rows(student.recorded.hidden, labels.reshape(-1), ignore_index, memory)
    deferred_teacher = recordable(teacher)
    if deferred_teacher is None:
        return chunked_rows(student, of_rows, labels, build(teacher).detach(), rows=rows)
    recorded = deferred_teacher.recorded
    recorded.check()
    with torch.no_grad():
        product = recorded.call.gathered_product()

    def of_hidden(own: torch.Tensor, labels: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            teacher_rows = recorded.chain.replay(product(hidden))
        return of_rows(own, labels, teacher_rows)

    return chunked_rows(student, of_hidden, labels, recorded.hidden.detach(), rows=rows)


def _of_rows(
    student: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor,
    beta: float,
    temperature: float,
    ignore_index: int,
) -> list[torch.Tensor]:
    """Divergence and entropy of each token of logits `(..., V)`, 0 where it does not count."""
    log_probs = (student.float() / temperature).log_softmax(-1)
    teacher_log_probs = (teacher.detach().float() / temperature).log_softmax(-1)
    found = jsd(log_probs, teacher_log_probs, labels, beta, ignore_index, reduction="none").sum(-1)
    with torch.no_grad():
        entropy = torch.special.entr(log_probs.exp()).sum(-1).masked_fill(labels == ignore_index, 0.0)
    return [found, entropy]
