"""Cross entropy: on given logits, mean over the tokens."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider, wide


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


library("cross_entropy", "liger-kernel", "liger_kernel.transformers.functional:liger_cross_entropy")
library("cross_entropy", "quack", "quack:cross_entropy")
# Not `inplace`: the logits are a leaf, which cannot be overwritten.
library("cross_entropy", "liger_trainer", "liger_trainer.functional:cross_entropy")
library("cross_entropy", "liger_trainer", "liger_trainer.functional:cross_entropy", expected_grad=1.0)
