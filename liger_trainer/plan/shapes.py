"""The sizes of a decoder layer that its activations depend on, read from a model on meta and its configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from liger_trainer.plan.parameters import decoder_layers

_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """One decoder layer, the largest of the model, in elements a token.

    Args:
        hidden: Size H of the residual stream.
        query: Width of all query heads.
        key_value: Width of all key heads; that of the value heads is the same.
        intermediate: Width I of the dense MLP, or of the expert that every token takes; 0 for none.
        experts: How many experts it has; 0 in a dense layer.
        experts_per_token: How many experts a token takes; 0 in a dense layer.
        expert_intermediate: Width of each.
        heads: Query heads.
        qk_norm: Whether queries and keys are normalised.
        post_norms: Whether attention and MLP are followed by norms, as in Gemma 2 and 3.
        sliding_window: Tokens a sliding-window layer sees; None where there is no such layer.
        full_layers: Fraction of the layers that see the whole sequence.
        adapted_attention: Input widths of the adapters in front of the attention (of q, k and v), summed.
        adapted_output: The same of the attention's output projection.
        adapted_mlp: The same of the gate and up projections.
        adapted_down: The same of the down projection.
        adapted_experts: Whether the experts have adapters.
        fused_adapters: Whether adapters run in our operators, which keep no copies of their inputs; else PEFT's do.
        fused_experts: Whether experts run in our operator; else in transformers' grouped matmul.
        exchanged_experts: Whether the experts' rows are those of other GPUs too (expert parallelism).
        adapter_dropout: Whether adapters have dropout, whose mask is kept.
        trained: Whether the layer's own weights are trained.
        vocab: Size V of the vocabulary.
    """

    hidden: int
    query: int
    key_value: int
    intermediate: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    heads: int = 1
    qk_norm: bool = False
    post_norms: bool = False
    sliding_window: int | None = None
    full_layers: float = 1.0
    adapted_attention: int = 0
    adapted_output: int = 0
    adapted_mlp: int = 0
    adapted_down: int = 0
    adapted_experts: bool = False
    fused_adapters: bool = True
    fused_experts: bool = True
    exchanged_experts: bool = False
    adapter_dropout: bool = False
    trained: bool = True
    vocab: int = 0


def read_layer_shape(model: Any, fused_adapters: bool = True, fused_experts: bool = True) -> LayerShape:
    """The [`LayerShape`] of a model.

    Args:
        model: On any device.
        fused_adapters: Whether its adapters, if it has some, will run in our operators.
        fused_experts: The same of its experts.

    Raises:
        ValueError: if its configuration lacks what a decoder has.
    """
    config = model.config.get_text_config()
    for needed in ("hidden_size", "num_attention_heads"):
        if not isinstance(getattr(config, needed, None), int):
            raise ValueError(f"The configuration of {type(model).__name__} has no `{needed}`; it cannot be planned.")
    layer = max(decoder_layers(model), key=lambda one: sum(p.numel() for p in one.parameters()))
    names = {name.rsplit(".", 1)[-1] for name, _ in layer.named_modules()}
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    sparse = any(_is_of_experts(name) for name, _ in layer.named_parameters())
    own = [p for name, p in layer.named_parameters() if "lora_" not in name]
    window, full = _windows(config)
    return LayerShape(
        hidden=config.hidden_size,
        query=heads * head_dim,
        key_value=(getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        intermediate=_shared_width(config) if sparse else _width(config),
        experts=_first(config, "num_experts", "num_local_experts", "n_routed_experts") if sparse else 0,
        experts_per_token=_first(config, "num_experts_per_tok", "num_experts_per_token", "top_k") if sparse else 0,
        expert_intermediate=_first(config, "moe_intermediate_size", "intermediate_size") if sparse else 0,
        heads=heads,
        qk_norm=bool(names & {"q_norm", "q_layernorm"}),
        post_norms="post_feedforward_layernorm" in names,
        sliding_window=window,
        full_layers=full,
        **_adapted(layer),
        adapted_experts=any(_is_of_experts(name) and "lora_" in name for name, _ in layer.named_parameters()),
        fused_adapters=fused_adapters,
        fused_experts=fused_experts,
        exchanged_experts=False,  # a setting says so
        adapter_dropout=_has_dropout(layer),
        trained=any(parameter.requires_grad for parameter in own),
        vocab=config.vocab_size,
    )


def _is_of_experts(name: str) -> bool:
    return ".experts" in f".{name}"


def _first(config: Any, *names: str) -> int:
    return next((int(value) for name in names if (value := getattr(config, name, None))), 0)


def _width(config: Any) -> int:
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return max(width) if isinstance(width, (list, tuple)) else int(width)


def _shared_width(config: Any) -> int:
    shared = _first(config, "shared_expert_intermediate_size")
    return shared or _first(config, "n_shared_experts") * _first(config, "moe_intermediate_size")


def _windows(config: Any) -> tuple[int | None, float]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or []
    if not window or "sliding_attention" not in kinds:
        return None, 1.0
    return int(window), kinds.count("full_attention") / len(kinds)


def _adapted(layer: nn.Module) -> dict[str, int]:
    """Input widths of the linear layers that have a LoRA adapter, by the place where they read."""
    widths = dict.fromkeys(("adapted_attention", "adapted_output", "adapted_mlp", "adapted_down"), 0)
    for name, module in layer.named_modules():
        if not getattr(module, "lora_A", None) or _is_of_experts(name):
            continue
        last = name.rsplit(".", 1)[-1]
        if last in _ATTENTION:
            place = "adapted_attention"
        elif "attn" in name or "attention" in name:
            place = "adapted_output"
        else:
            place = "adapted_down" if "down" in last or last in ("w2", "fc2") else "adapted_mlp"
        widths[place] += int(getattr(module, "in_features", 0))
    return widths


def _has_dropout(layer: nn.Module) -> bool:
    found = (dropout for module in layer.modules() for dropout in getattr(module, "lora_dropout", {}).values())
    return any(getattr(dropout, "p", 0) for dropout in found)
