"""KL divergence: of given log-probabilities from target probabilities, summed and divided by the tokens."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider, wide


@operation("kl_div", tokens=8192)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Both are read once, and the gradient is written."""
    size = tokens * model.vocab
    student, teacher = (data.normal(tokens, model.vocab, scale=3.0, grad=False) for _ in range(2))
    arguments = {"log_probs": student.log_softmax(-1).requires_grad_(), "target": teacher.softmax(-1)}
    yield Case(arguments, f"{tokens}×{model.vocab}", Floor(2 * size, size))


@provider("kl_div", "torch")
def eager(log_probs: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(wide(log_probs), wide(target), reduction="batchmean")


@provider("kl_div", "liger-kernel")
def liger(log_probs: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_kl_div

    return liger_kl_div(log_probs, target, reduction="batchmean")


@provider("kl_div", "liger_trainer")
def ours(log_probs: Tensor, target: Tensor) -> Tensor:
    from liger_trainer.functional import kl_div

    return kl_div(log_probs, target, reduction="batchmean")
