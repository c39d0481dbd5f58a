"""LM heads + KL: forward divergence of a teacher's head from a student's, mean over the tokens."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.heads import head_logits, in_parts
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.linear_jsd import distillation_case
from liger_trainer.benchmarks.registry import Case, Data, library, operation, provider, reference


@operation("linear_kl", tokens=8192)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield distillation_case(data, model, tokens)


@provider("linear_kl", "torch")
def eager(student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    return divergences(student_hidden, teacher_hidden, student_weight, teacher_weight).mean()


def divergences(
    student_hidden: Tensor, teacher_hidden: Tensor, student_weight: Tensor, teacher_weight: Tensor
) -> Tensor:
    """The divergence of each token."""
    student = head_logits(student_hidden, student_weight).log_softmax(-1)
    with torch.no_grad():
        teacher = head_logits(teacher_hidden, teacher_weight).log_softmax(-1)
    return (teacher.exp() * (teacher - student)).sum(-1)


@reference("linear_kl")
def exact(student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    hiddens = student_hidden, teacher_hidden
    return in_parts(divergences, *hiddens, student_weight=student_weight, teacher_weight=teacher_weight).mean()


@provider("linear_kl", "liger-kernel")
def liger(student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_jsd

    return liger_fused_linear_jsd(student_hidden, student_weight, teacher_hidden, teacher_weight, jsd_beta=0.0)


@provider("linear_kl", "trl")
def trl(student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    heads = student_hidden, student_weight, None, teacher_hidden, teacher_weight, None
    return ChunkedDivergenceFunction.apply(*heads, 0.0)[0].mean()


library("linear_kl", "liger_trainer", "liger_trainer.functional:linear_kl")
