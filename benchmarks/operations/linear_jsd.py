"""LM heads + JSD: distillation of a teacher's head into a student's, mean over the tokens."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from liger_trainer.benchmarks.heads import head_logits, in_parts, matmuls
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.jsd import divergence
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider, reference


@operation("linear_jsd", tokens=8192)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield distillation_case(data, model, tokens, beta=0.5)


def distillation_case(data: Data, model: Model, tokens: int, **others: float) -> Case:
    """A student and a teacher of one size. The floor: both logits, and the student's two gradients."""
    hiddens = [data.normal(tokens, model.hidden, grad=name == "student") for name in ("student", "teacher")]
    weights = [
        data.normal(model.vocab, model.hidden, scale=3 * model.hidden**-0.5, grad=name == "student")
        for name in ("student", "teacher")
    ]
    student, teacher = zip(hiddens, weights)
    arguments = {
        "student_hidden": student[0],
        "student_weight": student[1],
        "teacher_hidden": teacher[0],
        "teacher_weight": teacher[1],
        **others,
    }
    return Case(arguments, f"N={tokens} H={model.hidden} V={model.vocab}", Floor(matmuls=matmuls(student, teacher)))


@provider("linear_jsd", "torch")
def eager(
    student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, beta: float
) -> Tensor:
    return divergences(student_hidden, teacher_hidden, student_weight, teacher_weight, beta).mean()


def divergences(
    student_hidden: Tensor, teacher_hidden: Tensor, student_weight: Tensor, teacher_weight: Tensor, beta: float
) -> Tensor:
    """The divergence of each token."""
    student = head_logits(student_hidden, student_weight).log_softmax(-1)
    with torch.no_grad():
        teacher = head_logits(teacher_hidden, teacher_weight).log_softmax(-1)
    return divergence(student, teacher, beta)


@reference("linear_jsd")
def exact(
    student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, beta: float
) -> Tensor:
    hiddens = student_hidden, teacher_hidden
    weights = {"student_weight": student_weight, "teacher_weight": teacher_weight}
    return in_parts(partial(divergences, beta=beta, **weights), *hiddens).mean()


@provider("linear_jsd", "liger-kernel")
def liger(
    student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, beta: float
) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_jsd

    return liger_fused_linear_jsd(student_hidden, student_weight, teacher_hidden, teacher_weight, jsd_beta=beta)


@provider("linear_jsd", "trl")
def trl(
    student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, beta: float
) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    heads = student_hidden, student_weight, None, teacher_hidden, teacher_weight, None
    return ChunkedDivergenceFunction.apply(*heads, beta)[0].mean()


@provider("linear_jsd", "liger_trainer", logits_memory="2GiB")
@provider("linear_jsd", "liger_trainer", logits_memory="512MiB")
@provider("linear_jsd", "liger_trainer")
def ours(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    beta: float,
    logits_memory: str = "1GiB",
) -> Tensor:
    from liger_trainer.configs.kernel_config import parse_bytes
    from liger_trainer.functional import linear_jsd

    heads = student_hidden, student_weight, teacher_hidden, teacher_weight
    loss = linear_jsd(*heads, beta=beta, logits_memory=parse_bytes(logits_memory))
    assert isinstance(loss, Tensor)  # no outputs were asked for
    return loss
