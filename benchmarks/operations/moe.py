"""Mixtures of experts: the block of experts, and the load-balancing loss of its routers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_trainer import functional
from liger_trainer.benchmarks.models import Model, model_config
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider, reference
from liger_trainer.compat.private import available
from liger_trainer.compat.transformers import EXPERTS


@operation(
    "moe_experts",
    "Mixture-of-experts block: each token through the gated MLPs of its experts, and their weighted sum",
    tokens=8192,
)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Experts chosen by random logits, trained and frozen; then every token to the same experts.

    Frozen experts still give a gradient to their input and to the router's weights. Models without experts have no
    case.
    """
    if not model.experts:
        return
    for variant, frozen, skewed in (("", False, False), ("frozen", True, False), ("skewed", False, True)):
        yield _case(data, model, tokens, variant, frozen, skewed)


def _case(data: Data, model: Model, tokens: int, variant: str, frozen: bool, skewed: bool) -> Case:
    """The floor is the matmuls in cuBLAS, with the same number of rows for every chosen expert."""
    experts, top_k = stock_experts(model), model.experts_per_token
    logits = data.normal(tokens, model.experts, grad=False, dtype=torch.float32)
    weights, index = logits.softmax(dim=-1).topk(top_k)
    if skewed:
        index = torch.arange(top_k, device=index.device).expand(tokens, top_k).contiguous()
    arguments: dict[str, Any] = {
        "experts": experts,
        "hidden": data.normal(tokens, model.hidden),
        "top_k_index": index,
        "top_k_weights": (weights / weights.sum(dim=-1, keepdim=True)).to(data.dtype).requires_grad_(),
    }
    for name, parameter in experts.named_parameters():
        fan_in = model.expert_intermediate if name.startswith("down") else model.hidden
        arguments[name] = data.normal(*parameter.shape, scale=fan_in**-0.5, grad=not frozen)
    chosen, gated = top_k if skewed else model.experts, "gate_up_proj" in arguments
    floor = Floor(matmuls=_products(data, model, tokens, chosen, gated, frozen))
    shape = f"{tokens}×{model.hidden}→{model.expert_intermediate}, {top_k} of {model.experts}"
    return Case(arguments, shape, floor, (data.upstream(tokens, model.hidden),), variant)


def _products(data: Data, model: Model, tokens: int, experts: int, gated: bool, frozen: bool) -> Callable[[], None]:
    """The matmuls of both passes, with rows spread evenly over the experts."""
    rows = -(-tokens * model.experts_per_token // experts)
    hidden, inner = model.hidden, model.expert_intermediate
    first = 2 * inner if gated else inner
    x, pre, h = (data.normal(experts, rows, width, grad=False) for width in (hidden, first, inner))
    gate_up = data.normal(experts, first, hidden, grad=False)
    down = data.normal(experts, hidden, inner, grad=False)

    def run() -> None:
        x @ gate_up.mT
        h @ down.mT
        x @ down  # a gradient has the size of its tensor
        pre @ gate_up
        if not frozen:
            x.mT @ h
            pre.mT @ x

    return run


def stock_experts(model: Model) -> Any:
    """The experts of a layer in transformers, without memory for their weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(model_config(model, layers=model.first_with_experts + 1))
    return next(module for name, module in whole.named_modules() if name.endswith(".experts"))


def _see_every_token(experts: Any) -> bool:
    """Whether the experts are Llama 4's: each gets every token, multiplied by its score."""
    return not hasattr(experts, "is_transposed")


def _transposed(experts: Any) -> bool:
    return _see_every_token(experts) or experts.is_transposed


def _run(
    implementation: str, experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **weights: Tensor
) -> Tensor:
    if not _see_every_token(experts):
        assert available(EXPERTS)
        experts.config._experts_implementation = implementation
        return torch.func.functional_call(experts, weights, (hidden, top_k_index, top_k_weights))
    scores = top_k_weights.new_zeros(len(hidden), experts.num_experts).scatter(1, top_k_index, top_k_weights)
    scaled = hidden.repeat(experts.num_experts, 1) * scores.mT.reshape(-1, 1)
    return torch.func.functional_call(experts, weights, (scaled,)).view(experts.num_experts, *hidden.shape).sum(0)


# The default of transformers, and its only implementation for Llama 4; then one expert at a time.
grouped_mm = provider("moe_experts", "torch")(partial(_run, "grouped_mm"))
provider("moe_experts", "transformers loop")(partial(_run, "eager"))
reference("moe_experts")(partial(_run, "eager"))


@provider("moe_experts", "liger-kernel")
def liger(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **weights: Tensor) -> Tensor:
    """The call that `LigerExperts` makes."""
    from liger_kernel.ops import LigerFusedMoEFunction

    if set(weights) != {"gate_up_proj", "down_proj"} or _transposed(experts):
        raise ValueError("takes no biases and no transposed weights")
    return LigerFusedMoEFunction.apply(
        hidden, weights["gate_up_proj"], weights["down_proj"], top_k_index.int(), top_k_weights
    )


@provider("moe_experts", "liger_trainer")
def ours(
    experts: Any,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    down_proj: Tensor,
    gate_up_proj: Tensor | None = None,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    up_proj: Tensor | None = None,
) -> Tensor:
    gate: dict[str, Any] = {}
    if up_proj is not None:  # Nemotron-H: relu(up)^2
        gate, gate_up_proj = {"gated": False, "activation": "relu_squared"}, up_proj
    assert gate_up_proj is not None
    if hasattr(experts, "limit"):  # GPT-OSS: gate * sigmoid(alpha * gate) * (up + 1)
        alpha = experts.alpha
        gate = {"gate_multiplier": alpha, "down_multiplier": 1 / alpha, "limit": experts.limit, "up_offset": 1.0}
    scores = top_k_weights
    if _see_every_token(experts):  # the chosen inputs times their scores, one expert per row
        hidden = (hidden.unsqueeze(1) * scores.unsqueeze(2)).flatten(0, 1)
        top_k_index, top_k_weights = top_k_index.reshape(-1, 1), scores.new_ones(len(hidden), 1)
    out = functional.moe_experts(
        *(hidden, top_k_index, top_k_weights, gate_up_proj, down_proj),
        gate_up_bias=gate_up_proj_bias,
        down_bias=down_proj_bias,
        interleaved=not getattr(experts, "is_concatenated", True),
        transposed=_transposed(experts),
        **gate,
    )
    return out.view(*scores.shape, -1).sum(1) if _see_every_token(experts) else out


@operation("moe_load_balancing", "Load-balancing loss: of the routers' logits of all layers of a mixture of experts")
def load_balancing_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Every logit is read once in each pass, and its gradient written. Models without experts have no case."""
    if not model.experts:
        return
    size = model.layers * tokens * model.experts
    layers = {f"layer_{index}": data.normal(tokens, model.experts) for index in range(model.layers)}
    shape = f"{model.layers} layers, {tokens}×{model.experts}, {model.experts_per_token} of {model.experts}"
    yield Case({"top_k": model.experts_per_token, **layers}, shape, Floor(size, 2 * size))


@provider("moe_load_balancing", "torch")
def eager_load_balancing(top_k: int, **layers: Tensor) -> Any:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits: Any = tuple(layers.values())
    return load_balancing_loss_func(logits, logits[0].shape[-1], top_k)


@provider("moe_load_balancing", "liger_trainer")
def our_load_balancing(top_k: int, **layers: Tensor) -> Tensor:
    return functional.load_balancing_loss(tuple(layers.values()), top_k)
