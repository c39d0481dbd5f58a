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
def eager(
    x: Tensor,
    gate_weight: Tensor,
    gate_a: Tensor,
    gate_b: Tensor,
    up_weight: Tensor,
    up_a: Tensor,
    up_b: Tensor,
    down_weight: Tensor,
    down_a: Tensor,
    down_b: Tensor,
) -> Tensor:
    with autocast(x):
        h = F.silu(adapted(x, gate_weight, gate_a, gate_b)) * adapted(x, up_weight, up_a, up_b)
        return adapted(h, down_weight, down_a, down_b)


@provider("lora_mlp", "liger_trainer")
def ours(
    x: Tensor,
    gate_weight: Tensor,
    gate_a: Tensor,
    gate_b: Tensor,
    up_weight: Tensor,
    up_a: Tensor,
    up_b: Tensor,
    down_weight: Tensor,
    down_a: Tensor,
    down_b: Tensor,
) -> Tensor:
    from liger_trainer.functional import LoRA, LoRALayer, lora_mlp

    gate = LoRALayer(gate_weight, None, (LoRA(gate_a, gate_b, SCALING),))
    up = LoRALayer(up_weight, None, (LoRA(up_a, up_b, SCALING),))
    down = LoRALayer(down_weight, None, (LoRA(down_a, down_b, SCALING),))
    return lora_mlp(x, gate, up, down)
