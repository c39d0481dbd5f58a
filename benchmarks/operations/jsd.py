"""JSD: Jensen-Shannon divergence of given log-probabilities, mean over the tokens."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider, wide


@operation("jsd", tokens=8192)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Both are read once, and the gradient is written."""
    size = tokens * model.vocab
    student, teacher = (data.normal(tokens, model.vocab, scale=3.0, grad=False).log_softmax(-1) for _ in range(2))
    arguments = {"log_probs": student.requires_grad_(), "target": teacher, "beta": 0.5}
    yield Case(arguments, f"{tokens}×{model.vocab}", Floor(2 * size, size))


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The divergence of each token, from log-probabilities."""
    mixture = torch.log(beta * teacher.exp() + (1 - beta) * student.exp())
    terms = beta * teacher.exp() * (teacher - mixture) + (1 - beta) * student.exp() * (student - mixture)
    return terms.sum(-1)


@provider("jsd", "torch")
def eager(log_probs: Tensor, target: Tensor, beta: float) -> Tensor:
    return divergence(wide(log_probs), wide(target), beta).mean()


@provider("jsd", "liger-kernel")
def liger(log_probs: Tensor, target: Tensor, beta: float) -> Tensor:
    from liger_kernel.transformers.functional import liger_jsd

    return liger_jsd(log_probs, target, beta=beta)


@provider("jsd", "liger_trainer")
def ours(log_probs: Tensor, target: Tensor, beta: float) -> Tensor:
    from liger_trainer.functional import jsd

    return jsd(log_probs, target, beta=beta)
