"""TVD: total variation distance of given probabilities, mean over the tokens."""

from collections.abc import Iterator

from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider, wide


@operation("tvd", tokens=8192)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Both are read once, and the gradient is written."""
    size = tokens * model.vocab
    student, teacher = (data.normal(tokens, model.vocab, scale=3.0, grad=False).softmax(-1) for _ in range(2))
    arguments = {"probs": student.requires_grad_(), "target": teacher}
    yield Case(arguments, f"{tokens}×{model.vocab}", Floor(2 * size, size))


@provider("tvd", "torch")
def eager(probs: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (wide(probs) - wide(target)).abs().sum(-1).mean()


@provider("tvd", "liger-kernel")
def liger(probs: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_tvd

    return liger_tvd(probs, target, reduction="batchmean")


@provider("tvd", "liger_trainer")
def ours(probs: Tensor, target: Tensor) -> Tensor:
    from liger_trainer.functional import tvd

    return tvd(probs, target, reduction="batchmean")
