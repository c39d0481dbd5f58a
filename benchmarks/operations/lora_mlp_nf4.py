"""SwiGLU MLP with QLoRA: three projections in 4 bits (NF4, doubly quantised) with fp32 adapters of rank 16."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.lora_linear import SCALING, adapter, autocast
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider
from liger_trainer.functional import NestedAbsmax, NF4Weight
from liger_trainer.kernels.lora.nf4 import NF4_CODE

_BLOCKSIZE, _NESTED_BLOCKSIZE = 64, 256


def random_weight(data: Data, inputs: int, outputs: int) -> NF4Weight:
    """A matrix of random codes, with values as large as those of a projection."""
    blocks, scale = inputs * outputs // _BLOCKSIZE, inputs**-0.5
    nested = NestedAbsmax(
        torch.linspace(-1, 1, 256, device=data.device),
        torch.full((-(-blocks // _NESTED_BLOCKSIZE),), 0.5 * scale, device=data.device),
        torch.tensor(2.0 * scale, device=data.device),
        _NESTED_BLOCKSIZE,
    )
    packed = data.integers(256, inputs * outputs // 2, 1).to(torch.uint8)
    absmax = data.integers(256, blocks).to(torch.uint8)
    return NF4Weight(packed, absmax, torch.tensor(NF4_CODE, device=data.device), (outputs, inputs), _BLOCKSIZE, nested)


@operation("lora_mlp_nf4")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The floor is the products with weights in the activation's dtype, forward and backward."""
    hidden, intermediate = model.hidden, model.intermediate
    arguments: dict[str, Any] = {"x": data.normal(tokens, hidden)}
    sizes = {"gate": (hidden, intermediate), "up": (hidden, intermediate), "down": (intermediate, hidden)}
    for name, (inputs, outputs) in sizes.items():
        arguments[f"{name}_weight"] = random_weight(data, inputs, outputs)
        arguments[f"{name}_a"], arguments[f"{name}_b"] = adapter(data, inputs, outputs)
    gradient, wide = data.upstream(tokens, hidden), data.upstream(tokens, intermediate)
    dense = data.upstream(intermediate, hidden)

    def matmuls() -> None:
        x = arguments["x"].detach()
        for _ in ("gate", "up"):
            x @ dense.T
            wide @ dense
        wide @ dense
        gradient @ dense.T

    yield Case(arguments, f"{tokens}×{hidden}→{intermediate}", Floor(matmuls=matmuls), (gradient,))


def _mlp(x: Tensor, parts: dict[str, Any], product: Callable[[Tensor, NF4Weight], Tensor]) -> Tensor:
    """The MLP with PEFT's layers, whose base layers compute `product`."""

    def adapted(x: Tensor, name: str) -> Tensor:
        base, a, b = (parts[f"{name}_{part}"] for part in ("weight", "a", "b"))
        base = product(x, base)
        return (base + F.linear(F.linear(x.to(a.dtype), a), b) * SCALING).to(base.dtype)

    with autocast(x):
        return adapted(F.silu(adapted(x, "gate")) * adapted(x, "up"), "down")


@provider("lora_mlp_nf4", "torch")
def dense(x: Tensor, **parts: Any) -> Tensor:
    from liger_trainer.kernels.lora.nf4 import nf4_dequantize_reference

    return _mlp(x, parts, lambda x, weight: F.linear(x, nf4_dequantize_reference(weight, x.dtype)))


def quant_state(weight: NF4Weight, dtype: torch.dtype) -> Any:
    """The weight's state in bitsandbytes' form."""
    from bitsandbytes.functional import QuantState

    _, absmax, code, shape, blocksize, nested = weight
    assert nested is not None
    inner = QuantState(nested.absmax, code=nested.code, blocksize=nested.blocksize, dtype=torch.float32)
    return QuantState(absmax, torch.Size(shape), code, blocksize, "nf4", dtype, nested.offset, inner)


@provider("lora_mlp_nf4", "bitsandbytes")
def eager(x: Tensor, **parts: Any) -> Tensor:
    from bitsandbytes import matmul_4bit

    return _mlp(x, parts, lambda x, weight: matmul_4bit(x, weight.packed, quant_state(weight, x.dtype)))


@provider("lora_mlp_nf4", "liger_trainer")
def ours(x: Tensor, **parts: Any) -> Tensor:
    from liger_trainer.functional import LoRA, LoRALayer, lora_mlp

    def layer(name: str) -> LoRALayer:
        weight, a, b = (parts[f"{name}_{part}"] for part in ("weight", "a", "b"))
        return LoRALayer(weight, None, (LoRA(a, b, SCALING),))

    return lora_mlp(x, layer("gate"), layer("up"), layer("down"))
