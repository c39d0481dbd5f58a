"""Load-balancing loss: of the routers' logits of all layers of a mixture of experts."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider


@operation("moe_load_balancing", tokens=16384)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Every logit is read once in each pass, and its gradient written. Models without experts have no case."""
    if not model.experts:
        return
    size = model.layers * tokens * model.experts
    layers = {f"layer_{index}": data.normal(tokens, model.experts) for index in range(model.layers)}
    arguments = {"top_k": model.experts_per_token, **layers}
    shape = f"{model.layers} layers, {tokens}×{model.experts}, {model.experts_per_token} of {model.experts}"
    yield Case(arguments, shape, Floor(size, 2 * size))


@provider("moe_load_balancing", "torch")
def eager(top_k: int, **layers: Tensor) -> Any:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits: Any = tuple(layers.values())
    return load_balancing_loss_func(logits, logits[0].shape[-1], top_k)


@provider("moe_load_balancing", "liger_trainer")
def ours(top_k: int, **layers: Tensor) -> Tensor:
    from liger_trainer.functional import load_balancing_loss

    return load_balancing_loss(tuple(layers.values()), top_k)
