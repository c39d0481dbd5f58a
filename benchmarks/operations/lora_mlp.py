"""SwiGLU MLP with LoRA: three frozen projections with fp32 adapters of rank 16, as PEFT and the Trainer run them."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.lora_linear import SCALING, adapted, adapter, autocast, frozen
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider


@operation("lora_mlp")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The floor is the products with the weights forward and backward."""
    hidden, intermediate = model.hidden, model.intermediate
    arguments = {"x": data.normal(tokens, hidden)}
    for name, inputs, outputs in (
        ("gate", hidden, intermediate),
        ("up", hidden, intermediate),
        ("down", intermediate, hidden),
    ):
        arguments[f"{name}_weight"] = frozen(data, inputs, outputs)
        arguments[f"{name}_a"], arguments[f"{name}_b"] = adapter(data, inputs, outputs)
    gradient, wide = data.upstream(tokens, hidden), data.upstream(tokens, intermediate)

    def matmuls() -> None:
        x = arguments["x"].detach()
        for name in ("gate", "up"):
            x @ arguments[f"{name}_weight"].T
            wide @ arguments[f"{name}_weight"]
        wide @ arguments["down_weight"].T
        gradient @ arguments["down_weight"]

    yield Case(arguments, f"{tokens}×{hidden}→{intermediate}", Floor(matmuls=matmuls), (gradient,))


@provider("lora_mlp", "torch")
def eager(x: Tensor, **parts: Tensor) -> Tensor:
    def layer(x: Tensor, name: str) -> Tensor:
        return adapted(x, parts[f"{name}_weight"], parts[f"{name}_a"], parts[f"{name}_b"])

    with autocast(x):
        return layer(F.silu(layer(x, "gate")) * layer(x, "up"), "down")


@provider("lora_mlp", "liger_trainer")
def ours(x: Tensor, **parts: Tensor) -> Tensor:
    from liger_trainer.functional import LoRA, LoRALayer, lora_mlp

    def layer(name: str) -> LoRALayer:
        return LoRALayer(parts[f"{name}_weight"], None, (LoRA(parts[f"{name}_a"], parts[f"{name}_b"], SCALING),))

    return lora_mlp(x, layer("gate"), layer("up"), layer("down"))
