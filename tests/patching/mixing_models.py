"""Tiny models whose layers mix tokens without attention, of every family that we know."""

from __future__ import annotations

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.tiny_models import COMMON, VOCAB

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
_HYBRID = {"layer_types": _DELTA["layer_types"]}
_LATENT = {
    **{"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4},
    **{"linear_head_dim": 8, "linear_num_heads": 4},
}
_SLIDING = {
    **{"layer_types": ["hybrid_sliding", "hybrid"], "sliding_window_size": 8, "d_rel": 4, "rel_extent": 16},
    **{"head_dim": 8, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2},
}
_INDEXED = {"layer_types": ["linear_attention", "indexed_attention"]}
_MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2},
    "mamba_chunk_size": 8,
}
FIELDS = {
    "lfm2": {**_CONV, "block_ff_dim": 48, "block_multiple_of": 8},
    "lfm2_moe": {**_CONV, **_MIXTURE, "num_dense_layers": 1},
    "lfm3": {**_CONV, "head_dim": 8},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_MIXTURE},
    "qwen3_next": {**_DELTA, **_MIXTURE},
    "olmo_hybrid": {**_HYBRID, **_APART},
    "kimi_linear": {**_HYBRID, **_LATENT},
    "bailing_hybrid": {**_HYBRID, **_LATENT, "head_dim": 8, "n_group": 2, "topk_group": 1},
    "nemotron_h": {
        **{"layers_block_type": ["linear_attention", "full_attention", "mlp"], "head_dim": 8, "mamba_num_heads": 8},
        **{"mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8, "num_hidden_layers": 3},
    },
    "granitemoehybrid": {
        **{**_MAMBA, **_HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2},
        "shared_intermediate_size": 32,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "zamba2": {
        **{"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 2, "chunk_size": 8, "num_mem_blocks": 1},
        **{"num_hidden_layers": 3, "num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid", "mamba"]},
        "use_mem_rope": True,
    },
    "minimax": {**_HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8, "head_dim": 8},
    "lara_mini": {**_DELTA, **_MIXTURE},
    "inkling_text": {**_SLIDING, "mlp_layer_types": ["dense", "dense"]},
    "inkling2_text": {
        **{**_SLIDING, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "unpadded_vocab_size": VOCAB,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "qwen4_exp_text": {
        **{**_DELTA, **_MIXTURE, **_INDEXED, "output_gate_type": "sigmoid", "hc_count": 2, "hc_lowrank": 4},
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 8, "indexer_compress_ratio": 4},
    },
    "glm5_next": {
        "text_config": {
            **{**COMMON, **_LATENT, **_INDEXED, "qk_rope_head_dim": 0, "q_lora_rank": 8, "n_routed_experts": 4},
            **{"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2, "index_kpool": 4, "hc_mult": 2},
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
        },
    },
}
UNPACKED = ("inkling_text", "inkling2_text", "mamba2", "qwen4_exp_text", "glm5_next")
"""Families of which batches stay padded: their attention is not ours, or there is none, or layers get no keywords."""
_BY_CHANNEL, _STATE_SPACE = "delta_rule (a decay for each channel, 4 taps)", "state_space (2 groups)"
_RULE = "delta_rule (one decay a head, 4 taps)"
ROWS = {  # of the report: the target, the kernel, and how many
    "lfm2": ("Lfm2ShortConv", "gated_short_conv (3 taps)", 1),
    "lfm2_moe": ("Lfm2MoeShortConv", "gated_short_conv (3 taps)", 1),
    "lfm3": ("Lfm3ShortConv", "gated_short_conv (7 taps)", 1),
    "qwen3_5_text": ("Qwen3_5GatedDeltaNet", _RULE, 1),
    "qwen3_5_moe_text": ("Qwen3_5MoeGatedDeltaNet", _RULE, 1),
    "qwen3_next": ("Qwen3NextGatedDeltaNet", _RULE, 1),
    "kimi_linear": ("KimiLinearDeltaAttention", _BY_CHANNEL, 1),
    "bailing_hybrid": ("BailingHybridDeltaAttention", _BY_CHANNEL, 1),
    "nemotron_h": ("NemotronHMamba2Mixer", _STATE_SPACE, 1),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", _STATE_SPACE, 1),
    "falcon_h1": ("FalconH1Mixer", _STATE_SPACE, 2),
    "bamba": ("BambaMixer", _STATE_SPACE, 1),
    "zamba2": ("Zamba2MambaMixer", _STATE_SPACE, 3),
    "minimax": ("MiniMaxLightningAttention", "decayed_attention", 1),
    "lara_mini": ("LaraMiniGatedDeltaNet", _RULE, 1),
    "inkling_text": ("InklingShortConvolution", "short_conv (4 taps, with residual)", 8),
    "inkling2_text": ("Inkling2ShortConvolution", "short_conv (4 taps, with residual, scaled)", 6),
    "mamba2": ("Mamba2Mixer", _STATE_SPACE, 2),
    "qwen4_exp_text": ("Qwen4ExpTextGatedDeltaNet", _RULE, 1),
    "glm5_next": ("Glm5NextTextLinearAttention", _BY_CHANNEL, 1),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet", _RULE.replace(")", ", steps up to 2)"), 1),
}
MULTIPLE = {"short_conv": ("lfm2", "lfm2_moe", "lfm3", "inkling_text", "inkling2_text")}


def component_of(name: str) -> str:
    """The component of the report that a family's layers are."""
    return next((component for component, names in MULTIPLE.items() if name in names), "recurrence")


def built(name: str, dtype: torch.dtype = torch.float32, **fields):
    """A model whose parameters all differ from what they are when a model is made."""
    common = {} if "text_config" in FIELDS[name] else COMMON
    config = CONFIG_MAPPING[name](**{**common, **FIELDS[name], **fields})
    auto = AutoModelForImageTextToText if "text_config" in FIELDS[name] else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0 if parameter.dim() > 1 else 1.0).add_(0.05 * torch.randn_like(parameter))
    model.to(dtype)
    in_fp32 = model._keep_in_fp32_modules_strict or ()
    for name, parameter in model.named_parameters():
        if any(f".{part}." in f".{name}." for part in in_fp32):
            parameter.data = parameter.data.float()
    return model


def mixers(model):
    """The layers that mix tokens without attention."""
    targets = {target for target, *_ in ROWS.values()}
    return [module for module in model.modules() if type(module).__name__ in targets]
