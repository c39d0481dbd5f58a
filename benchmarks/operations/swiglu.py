"""SwiGLU: silu(gate) * up, given apart."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider


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


@provider("swiglu", "liger-kernel")
def liger(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_swiglu

    return liger_swiglu(gate, up)


@provider("swiglu", "liger_trainer", inplace_backward=True)
@provider("swiglu", "liger_trainer")
def ours(gate: Tensor, up: Tensor, inplace_backward: bool = False) -> Tensor:
    from liger_trainer.functional import swiglu

    return swiglu(gate, up, inplace_backward=inplace_backward)
