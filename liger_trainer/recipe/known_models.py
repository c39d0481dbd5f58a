"""The published configurations of the models that the shipped recipes name, known offline."""

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
_QWEN3_VL_4B: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "text_config": {
        **{key: value for key, value in _QWEN3_4B.items() if key not in ("dtype", "rope_theta")},
        "model_type": "qwen3_vl_text",
        "max_position_embeddings": 262144,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 5000000.0},
            **{"mrope_section": [24, 20, 20], "mrope_interleaved": True},
        },
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
_QWEN3_5_9B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
            **{"mrope_section": [11, 11, 10], "mrope_interleaved": True},
        },
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
    },
}
_GEMMA_4_E4B: dict[str, Any] = {
    "model_type": "gemma4",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_kv_shared_layers": 18,
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 131072,
    },
    "vision_config": {"model_type": "gemma4_vision", "use_clipped_linears": True},
    "audio_config": {"model_type": "gemma4_audio"},
}
_GEMMA_4_E2B: dict[str, Any] = {
    **_GEMMA_4_E4B,
    "text_config": {
        **_GEMMA_4_E4B["text_config"],
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "use_double_wide_mlp": True,
        "num_hidden_layers": 35,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
    },
}
_GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "dtype": "bfloat16",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "router_aux_loss_coef": 0.9,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
        ],
    },
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
    "Qwen/Qwen3-VL-4B-Instruct": _QWEN3_VL_4B,
    "Qwen/Qwen3.5-9B": _QWEN3_5_9B,
    "google/gemma-4-E2B-it": _GEMMA_4_E2B,
    "google/gemma-4-E4B-it": _GEMMA_4_E4B,
    "openai/gpt-oss-20b": _GPT_OSS_20B,
}
"""Hub id to configuration; `tests/tools/cli/test_plan.py` compares the parameter counts with the published ones."""
