"""Tiny models whose layers mix tokens without attention, of every family that we know."""

from __future__ import annotations

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.tiny_models import COMMON

_MIXTURE = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "shared_expert_intermediate_size": 16,
}
_CONV = {"layer_types": ["conv", "full_attention"]}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
}
_APART = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 12}
FIELDS = {
    "lfm2": {**_CONV, "block_ff_dim": 48, "block_multiple_of": 8},
    "lfm2_moe": {**_CONV, **_MIXTURE, "num_dense_layers": 1},
    "lfm3": {**_CONV, "head_dim": 8},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_MIXTURE},
    "qwen3_next": {**_DELTA, **_MIXTURE},
    "olmo_hybrid": {"layer_types": _DELTA["layer_types"], **_APART},
}
_RULE = "delta_rule (one decay a head, 4 taps)"
ROWS = {  # of the report: the target, the kernel, and how many
    "lfm2": ("Lfm2ShortConv", "gated_short_conv (3 taps)", 1),
    "lfm2_moe": ("Lfm2MoeShortConv", "gated_short_conv (3 taps)", 1),
    "lfm3": ("Lfm3ShortConv", "gated_short_conv (7 taps)", 1),
    "qwen3_5_text": ("Qwen3_5GatedDeltaNet", _RULE, 1),
    "qwen3_5_moe_text": ("Qwen3_5MoeGatedDeltaNet", _RULE, 1),
    "qwen3_next": ("Qwen3NextGatedDeltaNet", _RULE, 1),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet", _RULE.replace(")", ", steps up to 2)"), 1),
}
MULTIPLE = {"short_conv": ("lfm2", "lfm2_moe", "lfm3")}


def component_of(name: str) -> str:
    """The component of the report that a family's layers are."""
    return next((component for component, names in MULTIPLE.items() if name in names), "recurrence")


def built(name: str, dtype: torch.dtype = torch.float32, **fields):
    """A model whose parameters all differ from what they are when a model is made."""
    config = CONFIG_MAPPING[name](**{**COMMON, **FIELDS[name], **fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0 if parameter.dim() > 1 else 1.0).add_(0.05 * torch.randn_like(parameter))
    return model.to(dtype)


def mixers(model):
    """The layers that mix tokens without attention."""
    targets = {target for target, *_ in ROWS.values()}
    return [module for module in model.modules() if type(module).__name__ in targets]
