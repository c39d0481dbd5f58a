"""Configurations of models that are known offline: published ones, and tiny ones of each family for ``--smoke``."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from liger_trainer.recipe.file import RecipeError, first_line
from liger_trainer.recipe.schema import mapping

_LLAMA_3_1_8B: dict[str, Any] = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    },
    "mm_tokens_per_image": 256,
}
_QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
}

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
}
_QWEN3_0_6B: dict[str, Any] = {
    **_QWEN3,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
_QWEN3_4B: dict[str, Any] = {
    **_QWEN3,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": True,
}
_QWEN3_8B: dict[str, Any] = {**_QWEN3_4B, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
_SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}

PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2_135M,
    "Qwen/Qwen3-0.6B": _QWEN3_0_6B,
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-8B": _QWEN3_8B,
    "meta-llama/Llama-3.1-8B": _LLAMA_3_1_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_3_1_8B,
    "google/gemma-3-4b-pt": _GEMMA_3_4B,
    "google/gemma-3-4b-it": _GEMMA_3_4B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
}
"""Hub id to configuration; `tests/tools/cli/test_plan.py` compares the parameter counts with the published ones."""


_SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_GEMMA: dict[str, Any] = {**_SIZE, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}

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
    "granite": {
        **_SIZE,
        "logits_scaling": 8.0,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.125,
    },
    "olmo2": _SIZE,
    "glm4": {**_SIZE, "head_dim": 8},
    "cohere": {**_SIZE, "logit_scale": 0.0625},
    "gpt_oss": {**_SIZE, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}

# Prefixes of Hub names; a longer prefix comes before a shorter one that it starts with.
_PREFIXES = (
    ("qwen3-30b-a3b", "qwen3_moe"),
    ("qwen3-235b-a22b", "qwen3_moe"),
    ("qwen3-coder", "qwen3_moe"),
    ("qwen3", "qwen3"),
    ("qwen2-vl", "qwen2_vl"),
    ("qwen2", "qwen2"),
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
    ("granite", "granite"),
    ("olmo-2", "olmo2"),
    ("glm-4", "glm4"),
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
