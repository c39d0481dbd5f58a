"""SwiGLU + down projection: `liger_trainer` recomputes the product in the backward pass instead of saving it."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.swiglu import gated_cases
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider


@operation("swiglu_down")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The floor is that of three matmuls."""
    (gated,) = gated_cases(data, model, tokens)
    weight = data.normal(model.hidden, model.intermediate, scale=model.intermediate**-0.5)
    product, gradient = gated.arguments["gate"].detach(), data.upstream(tokens, model.hidden)

    def matmuls() -> None:
        matrix = weight.detach()
        product @ matrix.T
        gradient @ matrix
        gradient.T @ product

    yield Case({**gated.arguments, "weight": weight}, gated.shape, Floor(matmuls=matmuls), (gradient,))


@provider("swiglu_down", "torch")
def eager(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.silu(gate) * up, weight)


@provider("swiglu_down", "liger-kernel")
def liger(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_swiglu

    return F.linear(liger_swiglu(gate, up), weight)


@provider("swiglu_down", "liger_trainer", recompute=False)
def keeping(gate: Tensor, up: Tensor, weight: Tensor, recompute: bool) -> Tensor:
    from liger_trainer.functional import swiglu

    return F.linear(swiglu(gate, up), weight)


library("swiglu_down", "liger_trainer", "liger_trainer.functional:swiglu_down")
