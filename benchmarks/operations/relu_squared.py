"""ReLU²: the squared ReLU."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider


@operation("relu_squared")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    shape = tokens, model.intermediate
    size = tokens * model.intermediate
    upstream = (data.upstream(*shape),)
    yield Case({"x": data.normal(*shape)}, f"{tokens}×{model.intermediate}", Floor(2 * size, 3 * size), upstream)


@provider("relu_squared", "torch")
def eager(x: Tensor) -> Tensor:
    return F.relu(x).square()


library("relu_squared", "liger-kernel", "liger_kernel.transformers.functional:liger_relu_squared")
library("relu_squared", "liger_trainer", "liger_trainer.functional:relu_squared")
