"""GeGLU: gelu_tanh(gate) * up, given apart."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.swiglu import gated_cases
from liger_trainer.benchmarks.registry import Case, Data, library, operation, provider


@operation("geglu")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    return gated_cases(data, model, tokens)


@provider("geglu", "torch")
def eager(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


library("geglu", "liger-kernel", "liger_kernel.transformers.functional:liger_geglu")
library("geglu", "liger_trainer", "liger_trainer.functional:geglu")
library("geglu", "liger_trainer", "liger_trainer.functional:geglu", inplace_backward=True)
