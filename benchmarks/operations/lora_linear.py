"""Linear layer with LoRA: a frozen projection and an adapter of rank 16 in fp32, as PEFT and the Trainer run them."""

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider

RANK, SCALING = 16, 2.0


def frozen(data: Data, inputs: int, outputs: int) -> Tensor:
    """The weight of a frozen projection."""
    return data.normal(outputs, inputs, scale=inputs**-0.5, grad=False)


def adapter(data: Data, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    """A and B, in fp32 if the model is in half precision, as PEFT makes them."""
    dtype = torch.promote_types(data.dtype, torch.float32)
    return (
        data.normal(RANK, inputs, scale=inputs**-0.5, dtype=dtype),
        data.normal(outputs, RANK, scale=RANK**-0.5, dtype=dtype),
    )


def autocast(x: Tensor) -> torch.autocast:
    """The Trainer's autocast for half precision; no context otherwise."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    return torch.autocast(x.device.type, x.dtype if half else torch.bfloat16, enabled=half)


def adapted(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The forward of PEFT's layer."""
    base = F.linear(x, weight)
    return (base + F.linear(F.linear(x.to(a.dtype), a), b) * SCALING).to(base.dtype)


def _matmuls(x: Tensor, weight: Tensor, gradient: Tensor) -> None:
    x @ weight.T
    gradient @ weight


@operation("lora_linear")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The floor is the product with the weight forward and backward."""
    outputs_of = {"q": model.heads * model.head_dim, "gate": model.intermediate}
    if model.latent_attention:  # its queries come in two steps
        del outputs_of["q"]
    for variant, outputs in outputs_of.items():
        x, weight = data.normal(tokens, model.hidden), frozen(data, model.hidden, outputs)
        a, b = adapter(data, model.hidden, outputs)
        gradient = data.upstream(tokens, outputs)
        floor = Floor(matmuls=functools.partial(_matmuls, x.detach(), weight, gradient))
        arguments = {"x": x, "weight": weight, "a": a, "b": b}
        yield Case(arguments, f"{tokens}×{model.hidden}→{outputs}", floor, (gradient,), variant)


@provider("lora_linear", "torch")
def eager(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    with autocast(x):
        return adapted(x, weight, a, b)


@provider("lora_linear", "liger_trainer")
def ours(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    from liger_trainer.functional import lora_linear

    return lora_linear(x, weight, None, a, b, SCALING)
