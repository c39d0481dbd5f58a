"""SwiGLU: silu(gate) * up, given apart."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider


@operation("swiglu")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    return gated_cases(data, model, tokens)


def gated_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """A gate and an up projection of one MLP."""
    shape = tokens, model.intermediate
    size = tokens * model.intermediate
    arguments = {"gate": data.normal(*shape), "up": data.normal(*shape)}
    yield Case(arguments, f"{tokens}×{model.intermediate}", Floor(3 * size, 5 * size), (data.upstream(*shape),))


@provider("swiglu", "torch")
def eager(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


library("swiglu", "liger-kernel", "liger_kernel.transformers.functional:liger_swiglu")
library("swiglu", "liger_trainer", "liger_trainer.functional:swiglu")
library("swiglu", "liger_trainer", "liger_trainer.functional:swiglu", inplace_backward=True)
