"""Tiny models of each family, for ``--smoke``, and the family that a recipe trains, found offline."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from liger_trainer.recipe.file import RecipeError, first_line
from liger_trainer.recipe.schema import mapping

_SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_GEMMA: dict[str, Any] = {**_SIZE, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_QWEN_TOKENS = {"image_token_id": 5, "video_token_id": 5, "vision_start_token_id": 6, "vision_end_token_id": 7}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}

_QWEN3_5: dict[str, Any] = {
    **_SIZE,
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5},
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZE,
    "mistral": {**_SIZE, "head_dim": 8, "sliding_window": None},
    "mixtral": {**_SIZE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": {**_SIZE, "head_dim": 8},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma3": {
        "text_config": _GEMMA,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
        "mm_tokens_per_image": 4,
        "image_token_index": 5,
        "boi_token_index": 6,
        "eoi_token_index": 7,
    },
    "gemma4": {
        "text_config": {
            **_GEMMA,
            "global_head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 512,
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "patch_size": 4,
            "position_embedding_size": 16,
        },
        "audio_config": None,
        **{"image_token_id": 5, "boi_token_id": 6, "eoi_token_id": 7},
        **{"video_token_id": 5, "audio_token_id": 5, "boa_token_id": 6, "eoa_token_index": 7},
    },
    "qwen2": _SIZE,
    "qwen2_vl": {
        "text_config": {**_SIZE, "rope_parameters": _MROPE},
        "vision_config": {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
        },
        "image_token_id": 5,
        "vision_start_token_id": 6,
        "vision_end_token_id": 7,
    },
    "qwen3": {**_SIZE, "head_dim": 8},
    "qwen3_vl": {
        "text_config": {**_SIZE, "head_dim": 8, "rope_parameters": _MROPE},
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
        **_QWEN_TOKENS,
    },
    "qwen3_5": {"text_config": _QWEN3_5, "vision_config": _QWEN_VISION, **_QWEN_TOKENS},
    "qwen3_5_moe": {
        "text_config": {
            **{key: value for key, value in _QWEN3_5.items() if key != "intermediate_size"},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        "vision_config": _QWEN_VISION,
        **_QWEN_TOKENS,
    },
    "qwen3_moe": {
        **_SIZE,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "mllama": {
        "text_config": {
            **_SIZE,
            "cross_attention_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "vision_config": {
            "hidden_size": 32,
            "attention_heads": 4,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "intermediate_size": 64,
            "image_size": 16,
            "patch_size": 4,
            "max_num_tiles": 1,
            "supported_aspect_ratios": [[1, 1]],
            "vision_output_dim": 64,
            "intermediate_layers_indices": [0],
        },
        "image_token_index": 5,
    },
    "phi3": _SIZE,
    "nemotron_h": {
        **{key: value for key, value in _SIZE.items() if key != "num_hidden_layers"},
        "hybrid_override_pattern": "ME*M",
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
    },
    "granitemoehybrid": {
        **_SIZE,
        "intermediate_size": 16,
        "shared_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
    },
    "lfm2": {**_SIZE, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]},
    "granite": {
        **_SIZE,
        "logits_scaling": 8.0,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.125,
    },
    "olmo2": _SIZE,
    "glm4": {**_SIZE, "head_dim": 8},
    "glm4_moe_lite": {
        **_SIZE,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "cohere": {**_SIZE, "logit_scale": 0.0625},
    "gpt_oss": {**_SIZE, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}

# Prefixes of Hub names; a longer prefix comes before a shorter one that it starts with.
_PREFIXES = (
    ("qwen3-30b-a3b", "qwen3_moe"),
    ("qwen3-235b-a22b", "qwen3_moe"),
    ("qwen3-coder", "qwen3_moe"),
    ("qwen3-vl", "qwen3_vl"),
    ("qwen3.5-35b-a3b", "qwen3_5_moe"),
    ("qwen3.5-122b-a10b", "qwen3_5_moe"),
    ("qwen3.5-397b-a17b", "qwen3_5_moe"),
    ("qwen3.5", "qwen3_5"),
    ("qwen3", "qwen3"),
    ("qwen2-vl", "qwen2_vl"),
    ("qwen2", "qwen2"),
    ("gemma-4-e", "gemma4"),
    ("gemma-4-31b", "gemma4"),
    ("gemma-3-1b", "gemma3_text"),
    ("gemma-3-270m", "gemma3_text"),
    ("gemma-3", "gemma3"),
    ("gemma-2", "gemma2"),
    ("gemma", "gemma"),
    ("llama-3.2-11b-vision", "mllama"),
    ("llama-3.2-90b-vision", "mllama"),
    ("llama", "llama"),
    ("smollm2", "llama"),
    ("tinyllama", "llama"),
    ("mixtral", "mixtral"),
    ("mistral", "mistral"),
    ("phi-3", "phi3"),
    ("phi-4", "phi3"),
    ("granite-4.0", "granitemoehybrid"),
    ("granite", "granite"),
    ("nvidia-nemotron-3", "nemotron_h"),
    *((f"lfm2-{size}", "lfm2") for size in ("350m", "700m", "1.2b", "2.6b")),
    ("olmo-2", "olmo2"),
    ("glm-4.7-flash", "glm4_moe_lite"),
    ("glm-4-", "glm4"),  # and not GLM-4.5, 4.6 and 4.7, which are mixtures of other families
    ("c4ai-command", "cohere"),
    ("aya", "cohere"),
    ("gpt-oss", "gpt_oss"),
)


def family_of(values: Mapping[str, Any]) -> str:
    """The ``model_type`` that a recipe trains, found without the network.

    It is ``model_family`` or, without that, comes from ``model_config``, a local folder's ``config.json``, or the
    prefix of the model's id.
    """
    family, name = values.get("model_family"), values.get("model_name_or_path")
    config = values.get("model_config")
    if family is None and config:
        try:
            family = (mapping("model_config", config) or {}).get("model_type")
        except ValueError as error:
            raise RecipeError(str(error)) from error
    if family is None and name and (Path(name) / "config.json").is_file():
        file = Path(name) / "config.json"
        try:
            family = json.loads(file.read_text(encoding="utf-8")).get("model_type")
        except (ValueError, AttributeError) as error:
            raise RecipeError(
                f"`model_name_or_path`: {str(file)!r} is not a JSON object: {first_line(error)}"
            ) from error
    if family is None and name:
        short = str(name).rstrip("/").rsplit("/", 1)[-1].lower()
        family = next((known for prefix, known in _PREFIXES if short.startswith(prefix)), None)
    if family is None:
        raise RecipeError(
            f"--smoke cannot find the family of `model_name_or_path` {name!r} offline; set `model_family` to one of "
            f"{', '.join(FAMILIES)}."
        )
    if family not in FAMILIES:
        near = difflib.get_close_matches(family, FAMILIES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RecipeError(f"--smoke has no tiny model of family {family!r}.{hint} It has {', '.join(FAMILIES)}.")
    return family
