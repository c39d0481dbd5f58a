"""The model families as tiny random models, built from configs offline; weights are the same at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

VOCAB = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


def _build(architecture: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = architecture(config)
        # Fresh norms are all ones (or zeros) and biases zero: make every parameter count in the comparison.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                else:
                    parameter.mul_(3.0)
    return model


def _causal(config_class: type, architecture: type[PreTrainedModel], **extra: Any) -> Callable[..., PreTrainedModel]:
    return lambda **overrides: _build(architecture, config_class(**{**COMMON, **extra, **overrides}))


def _gemma3(**overrides: Any) -> PreTrainedModel:
    config = tf.Gemma3Config(
        text_config={**COMMON, **_GEMMA, **overrides},
        vision_config=_SIGLIP,
        mm_tokens_per_image=4,
        boi_token_index=120,
        eoi_token_index=121,
        image_token_index=122,
    )
    return _build(tf.Gemma3ForConditionalGeneration, config)


def _qwen2_vl(**overrides: Any) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    config = tf.Qwen2VLConfig(
        text_config={**COMMON, "rope_parameters": rope, **overrides},
        vision_config=vision,
        image_token_id=120,
        video_token_id=121,
        vision_start_token_id=122,
        vision_end_token_id=123,
    )
    return _build(tf.Qwen2VLForConditionalGeneration, config)


def _mllama(**overrides: Any) -> PreTrainedModel:
    text = {**COMMON, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    vision = {
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
    }
    config = tf.MllamaConfig(text_config={**text, **overrides}, vision_config=vision, image_token_index=120)
    return _build(tf.MllamaForConditionalGeneration, config)


TINY_MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": _causal(tf.LlamaConfig, tf.LlamaForCausalLM),
    "qwen2": _causal(tf.Qwen2Config, tf.Qwen2ForCausalLM),
    "qwen3": _causal(tf.Qwen3Config, tf.Qwen3ForCausalLM, head_dim=8),
    "qwen3_moe": _causal(
        tf.Qwen3MoeConfig,
        tf.Qwen3MoeForCausalLM,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        output_router_logits=True,
    ),
    "gemma": _causal(tf.GemmaConfig, tf.GemmaForCausalLM, head_dim=8),
    "gemma2": _causal(tf.Gemma2Config, tf.Gemma2ForCausalLM, **_GEMMA),
    "gemma3_text": _causal(tf.Gemma3TextConfig, tf.Gemma3ForCausalLM, **_GEMMA),
    "gemma3": _gemma3,
    "mistral": _causal(tf.MistralConfig, tf.MistralForCausalLM, head_dim=8, sliding_window=None),
    "mixtral": _causal(
        tf.MixtralConfig,
        tf.MixtralForCausalLM,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    ),
    "phi3": _causal(tf.Phi3Config, tf.Phi3ForCausalLM),
    "granite": _causal(
        tf.GraniteConfig,
        tf.GraniteForCausalLM,
        logits_scaling=8.0,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.125,
    ),
    "olmo2": _causal(tf.Olmo2Config, tf.Olmo2ForCausalLM),
    "glm4": _causal(tf.Glm4Config, tf.Glm4ForCausalLM, head_dim=8),
    "cohere": _causal(tf.CohereConfig, tf.CohereForCausalLM, logit_scale=0.0625),
    "gpt_oss": _causal(
        tf.GptOssConfig,
        tf.GptOssForCausalLM,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
    ),
    "qwen2_vl": _qwen2_vl,
    "mllama": _mllama,
}
"""Family name → builder. Keyword arguments override fields of the (text) config."""


def tiny_batch(name: str, model: PreTrainedModel, batch: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """Inputs for one training forward of `model`, a `TINY_MODELS[name]()`: text only, some labels ignored.

    The first row starts with three ignored labels (a prompt) and the last row ends in two padding tokens.
    """
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, 110, (batch, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    input_ids[-1, -2:] = 0
    attention_mask[-1, -2:] = 0
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[0, :3] = -100
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    if name == "gemma3":
        inputs["token_type_ids"] = torch.zeros_like(input_ids)
    return {key: value.to(model.device) for key, value in inputs.items()}
