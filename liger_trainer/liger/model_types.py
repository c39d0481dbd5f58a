"""Liger's `apply_liger_kernel_to_*` functions as rows: the parameters of each, and the model types it is for."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Row:
    """One function of Liger 0.8.5.

    Attributes:
        flags: The parameters in Liger's order; what follows `model` says where that is.
        off: The flags that are off by default.
        more_types: Model types beside the row's name that Liger looks the function up by.
        keywords: Flags that are no parameters, but taken as keywords and on by default. None: there are no keywords.
    """

    flags: tuple[str, ...]
    off: tuple[str, ...] = ("cross_entropy",)
    more_types: tuple[str, ...] = ()
    keywords: tuple[str, ...] | None = None


_HEAD = ("rope", "cross_entropy", "fused_linear_cross_entropy")
_TEXT = (*_HEAD, "rms_norm", "swiglu", "model")
_GEMMA = (*_HEAD, "rms_norm", "geglu", "model")
_GEMMA_VISION = (*_HEAD, "layer_norm", "rms_norm", "geglu", "model")
_VISION = (*_HEAD, "layer_norm", "rms_norm", "swiglu", "model")
_LANGUAGE_MODEL = ("cross_entropy", "fused_linear_cross_entropy", "rms_norm", "layer_norm", "model")
_NO_ROPE = ("rope", "cross_entropy")

ROWS: dict[str, Row] = {
    "deepseek_v2": Row(_TEXT, _NO_ROPE),
    "deepseek_v3": Row(_TEXT, _NO_ROPE),
    "deepseek_v4": Row(_TEXT, (*_NO_ROPE, "swiglu")),
    "exaone4": Row(_TEXT),
    "falcon_h1": Row(_TEXT),
    "gemma": Row(_GEMMA),
    "gemma2": Row(_GEMMA),
    "gemma3": Row(_GEMMA_VISION),
    "gemma3_text": Row(_GEMMA),
    "gemma4": Row(_GEMMA_VISION, (*_NO_ROPE, "layer_norm")),
    "gemma4_text": Row(_GEMMA, _NO_ROPE),
    "glm4": Row(_TEXT, _NO_ROPE),
    "glm4v": Row(_TEXT, _NO_ROPE),
    "glm4v_moe": Row(_TEXT, _NO_ROPE),
    "gpt_oss": Row(_TEXT, ("cross_entropy", "swiglu")),
    "granite": Row(_TEXT, ("fused_linear_cross_entropy",)),
    "hunyuan_v1_dense": Row(_TEXT),
    "hunyuan_v1_moe": Row(_TEXT),
    "internvl": Row(_LANGUAGE_MODEL, keywords=("rope", "swiglu", "geglu")),
    "llama": Row(_TEXT),
    "llama4": Row((*_TEXT, "layer_norm"), more_types=("llama4_text",)),
    "llava": Row(
        ("cross_entropy", "fused_linear_cross_entropy", "model"), keywords=("rope", "rms_norm", "swiglu", "geglu")
    ),
    "ministral": Row(_TEXT),
    "mistral": Row(_TEXT),
    "mixtral": Row(_TEXT),
    "mllama": Row(_VISION, more_types=("mllama_text_model",)),
    "muse_glimmer": Row(_VISION),
    "nemotron": Row(("relu_squared", "cross_entropy", "fused_linear_cross_entropy", "model"), keywords=()),
    "olmo2": Row(_TEXT),
    "olmo3": Row(_TEXT),
    "paligemma": Row(_GEMMA_VISION),
    "phi3": Row(_TEXT),
    "pixtral": Row(("rope", "rms_norm", "swiglu", "model")),
    "qwen2": Row(_TEXT),
    "qwen2_5_vl": Row(_TEXT, more_types=("qwen2_5_vl_text",)),
    "qwen2_vl": Row((*_HEAD, "rms_norm", "layer_norm", "swiglu", "model"), more_types=("qwen2_vl_text",)),
    "qwen3": Row(_TEXT),
    "qwen3_5": Row(_TEXT, _NO_ROPE, more_types=("qwen3_5_text",)),
    "qwen3_5_moe": Row(_TEXT, _NO_ROPE, more_types=("qwen3_5_moe_text",)),
    "qwen3_moe": Row(_TEXT),
    "qwen3_next": Row(_TEXT, _NO_ROPE),
    "qwen3_vl": Row(_TEXT, ("cross_entropy", "swiglu"), more_types=("qwen3_vl_text",)),
    "qwen3_vl_moe": Row(_TEXT, more_types=("qwen3_vl_moe_text",)),
    "smollm3": Row(_TEXT),
    "smolvlm": Row(_LANGUAGE_MODEL, keywords=("rope", "swiglu", "geglu")),
}
