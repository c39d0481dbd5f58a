"""GeGLU: gelu_tanh(gate) * up, given apart."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.swiglu import gated_cases
from liger_trainer.benchmarks.registry import Case, Data, operation, provider


@operation("geglu")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    return gated_cases(data, model, tokens)


@provider("geglu", "torch")
def eager(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


@provider("geglu", "liger-kernel")
def liger(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_geglu

    return liger_geglu(gate, up)


@provider("geglu", "liger_trainer", inplace_backward=True)
@provider("geglu", "liger_trainer")
def ours(gate: Tensor, up: Tensor, inplace_backward: bool = False) -> Tensor:
    from liger_trainer.functional import geglu

    return geglu(gate, up, inplace_backward=inplace_backward)
