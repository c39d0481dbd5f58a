"""Embedding: of tokens, with the gradient of the whole table."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from liger_trainer import functional
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider


@operation("embedding", "Embedding: of tokens, with the gradient of the whole table")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Random tokens of the whole vocabulary; the gradient of every row is written."""
    size, table = tokens * model.hidden, model.vocab * model.hidden
    yield Case(
        {"weight": data.normal(model.vocab, model.hidden), "tokens": data.integers(model.vocab, tokens)},
        f"{tokens} of {model.vocab}×{model.hidden}",
        Floor(2 * size, size + table),
        (data.upstream(tokens, model.hidden),),
    )


@provider("embedding", "torch")
def eager(weight: Tensor, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, weight)


@provider("embedding", "liger-kernel")
def liger(weight: Tensor, tokens: Tensor) -> Tensor:
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

    return LigerEmbeddingFunction.apply(weight, tokens)


@provider("embedding", "liger_trainer")
def ours(weight: Tensor, tokens: Tensor) -> Tensor:
    return functional.embedding(tokens, weight)
