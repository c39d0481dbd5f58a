"""Cross entropy: on given logits, mean over the tokens."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider, wide


@operation("cross_entropy", tokens=8192)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The logits of the whole vocabulary, which the gradient reads a second time."""
    size = tokens * model.vocab
    yield Case(
        {"logits": data.normal(tokens, model.vocab, scale=3.0), "target": data.integers(model.vocab, tokens)},
        f"{tokens}×{model.vocab}",
        Floor(forward=size, backward=2 * size),
    )


@provider("cross_entropy", "torch")
def eager(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits), target)


@provider("cross_entropy", "liger-kernel")
def liger(logits: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(logits, target)


@provider("cross_entropy", "quack")
def quack(logits: Tensor, target: Tensor) -> Tensor:
    from quack import cross_entropy

    return cross_entropy(logits, target)


@provider("cross_entropy", "liger_trainer", expected_grad=1.0)
@provider("cross_entropy", "liger_trainer")
def ours(logits: Tensor, target: Tensor, expected_grad: float | None = None) -> Tensor:
    # Not `inplace`: the logits are a leaf, which cannot be overwritten.
    from liger_trainer.functional import cross_entropy

    return cross_entropy(logits, target, expected_grad=expected_grad)
