"""Linear layers and MLPs with adapters of rank 16 in fp32 on frozen weights, as PEFT and the Trainer run them."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_trainer import functional
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider
from liger_trainer.functional import LoRA, LoRALayer, NestedAbsmax, NF4Weight
from liger_trainer.kernels.lora.nf4 import NF4_CODE, nf4_dequantize_reference

RANK, SCALING = 16, 2.0
BLOCKSIZE, NESTED_BLOCKSIZE = 64, 256


def frozen(data: Data, inputs: int, outputs: int) -> Tensor:
    """The weight of a frozen projection."""
    return data.normal(outputs, inputs, scale=inputs**-0.5, grad=False)


def adapter(data: Data, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    """A and B, in fp32 if the model is in half precision, as PEFT makes them."""
    dtype = torch.promote_types(data.dtype, torch.float32)
    a = data.normal(RANK, inputs, scale=inputs**-0.5, dtype=dtype)
    return a, data.normal(outputs, RANK, scale=RANK**-0.5, dtype=dtype)


def autocast(x: Tensor) -> torch.autocast:
    """The Trainer's autocast for half precision; no context otherwise."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    return torch.autocast(x.device.type, x.dtype if half else torch.bfloat16, enabled=half)


def adapted(x: Tensor, weight: Any, a: Tensor, b: Tensor, product: Callable[..., Tensor] = F.linear) -> Tensor:
    """The forward of PEFT's layer, whose base layer computes `product(x, weight)`."""
    base = product(x, weight)
    return (base + F.linear(F.linear(x.to(a.dtype), a), b) * SCALING).to(base.dtype)


@operation(
    "lora_linear",
    "Linear layer with LoRA: a frozen projection and an adapter of rank 16 in fp32, as PEFT and the Trainer run them",
)
def linear_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The floor is the product with the weight forward and backward."""
    outputs_of = {"q": model.heads * model.head_dim, "gate": model.intermediate}
    if model.latent_attention:  # its queries come in two steps
        del outputs_of["q"]
    for variant, outputs in outputs_of.items():
        x, weight = data.normal(tokens, model.hidden), frozen(data, model.hidden, outputs)
        a, b = adapter(data, model.hidden, outputs)
        gradient = data.upstream(tokens, outputs)
        floor = Floor(matmuls=functools.partial(linear_matmuls, x.detach(), weight, gradient))
        arguments = {"x": x, "weight": weight, "a": a, "b": b}
        yield Case(arguments, f"{tokens}×{model.hidden}→{outputs}", floor, (gradient,), variant)


def linear_matmuls(x: Tensor, weight: Tensor, gradient: Tensor) -> None:
    x @ weight.T
    gradient @ weight


@provider("lora_linear", "torch")
def eager_linear(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    with autocast(x):
        return adapted(x, weight, a, b)


provider("lora_linear", "liger_trainer")(lambda x, weight, a, b: functional.lora_linear(x, weight, None, a, b, SCALING))


def mlp_case(data: Data, model: Model, tokens: int, weight: Callable[[Data, int, int], Any]) -> Case:
    """A gated MLP whose projections are made by `weight`. The floor is the products with them forward and backward."""
    hidden, intermediate = model.hidden, model.intermediate
    arguments: dict[str, Any] = {"x": data.normal(tokens, hidden)}
    sizes = {"gate": (hidden, intermediate), "up": (hidden, intermediate), "down": (intermediate, hidden)}
    for name, (inputs, outputs) in sizes.items():
        arguments[f"{name}_weight"] = weight(data, inputs, outputs)
        arguments[f"{name}_a"], arguments[f"{name}_b"] = adapter(data, inputs, outputs)
    gradient, wide = data.upstream(tokens, hidden), data.upstream(tokens, intermediate)
    gate, up, down = (arguments[f"{name}_weight"] for name in sizes)
    if isinstance(gate, NF4Weight):  # the floor is of weights in the activation's dtype
        gate = up = data.upstream(intermediate, hidden)
        down = gate.T

    def matmuls() -> None:
        x = arguments["x"].detach()
        for matrix in (gate, up):
            x @ matrix.T
            wide @ matrix
        wide @ down.T
        gradient @ down

    return Case(arguments, f"{tokens}×{hidden}→{intermediate}", Floor(matmuls=matmuls), (gradient,))


def eager_mlp(product: Callable[..., Tensor], x: Tensor, **parts: Any) -> Tensor:
    def layer(x: Tensor, name: str) -> Tensor:
        return adapted(x, parts[f"{name}_weight"], parts[f"{name}_a"], parts[f"{name}_b"], product)

    with autocast(x):
        return layer(F.silu(layer(x, "gate")) * layer(x, "up"), "down")


@operation(
    "lora_mlp",
    "SwiGLU MLP with LoRA: three frozen projections with fp32 adapters of rank 16, as PEFT and the Trainer run them",
)
def mlp_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield mlp_case(data, model, tokens, frozen)


provider("lora_mlp", "torch")(functools.partial(eager_mlp, F.linear))


@provider("lora_mlp", "liger_trainer")
def our_mlp(x: Tensor, **parts: Any) -> Tensor:
    def layer(name: str) -> LoRALayer:
        weight, a, b = (parts[f"{name}_{part}"] for part in ("weight", "a", "b"))
        return LoRALayer(weight, None, (LoRA(a, b, SCALING),))

    return functional.lora_mlp(x, layer("gate"), layer("up"), layer("down"))


def random_nf4(data: Data, inputs: int, outputs: int) -> NF4Weight:
    """A matrix of random codes, with values as large as those of a projection."""
    blocks, scale = inputs * outputs // BLOCKSIZE, inputs**-0.5
    nested = NestedAbsmax(
        torch.linspace(-1, 1, 256, device=data.device),
        torch.full((-(-blocks // NESTED_BLOCKSIZE),), 0.5 * scale, device=data.device),
        torch.tensor(2.0 * scale, device=data.device),
        NESTED_BLOCKSIZE,
    )
    packed = data.integers(256, inputs * outputs // 2, 1).to(torch.uint8)
    absmax = data.integers(256, blocks).to(torch.uint8)
    return NF4Weight(packed, absmax, torch.tensor(NF4_CODE, device=data.device), (outputs, inputs), BLOCKSIZE, nested)


@operation(
    "lora_mlp_nf4",
    "SwiGLU MLP with QLoRA: three projections in 4 bits (NF4, doubly quantised) with fp32 adapters of rank 16",
)
def nf4_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield mlp_case(data, model, tokens, random_nf4)


def product_in_torch(x: Tensor, weight: NF4Weight) -> Tensor:
    return F.linear(x, nf4_dequantize_reference(weight, x.dtype))


def quant_state(weight: NF4Weight, dtype: torch.dtype) -> Any:
    """The weight's state in bitsandbytes' form."""
    from bitsandbytes.functional import QuantState

    _, absmax, code, shape, blocksize, nested = weight
    assert nested is not None
    inner = QuantState(nested.absmax, code=nested.code, blocksize=nested.blocksize, dtype=torch.float32)
    return QuantState(absmax, torch.Size(shape), code, blocksize, "nf4", dtype, nested.offset, inner)


def product_in_bitsandbytes(x: Tensor, weight: NF4Weight) -> Tensor:
    from bitsandbytes import matmul_4bit

    return matmul_4bit(x, weight.packed, quant_state(weight, x.dtype))


provider("lora_mlp_nf4", "torch")(functools.partial(eager_mlp, product_in_torch))
provider("lora_mlp_nf4", "bitsandbytes")(functools.partial(eager_mlp, product_in_bitsandbytes))
provider("lora_mlp_nf4", "liger_trainer")(our_mlp)
