"""The configurations of the models that the shipped recipes name, as published, for a plan without a download."""

from __future__ import annotations

from typing import Any

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

PUBLISHED = {
    "meta-llama/Llama-3.1-8B": _LLAMA_3_1_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_3_1_8B,
    "google/gemma-3-4b-pt": _GEMMA_3_4B,
    "google/gemma-3-4b-it": _GEMMA_3_4B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
}
"""Hub id to configuration; `tests/tools/cli/test_plan.py` compares the parameter counts with the published ones."""
