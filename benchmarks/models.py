"""The models whose shapes are benchmarked, by name, and their configurations."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from liger_trainer.errors import UserError
from liger_trainer.recipe.families import FAMILIES
from liger_trainer.recipe.known_models import PUBLISHED

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclasses.dataclass(frozen=True)
class Mixer:
    """What mixes the tokens of a hybrid model in the layers that have no attention."""

    kind: str  # ``"delta_rule"``, ``"state_space"`` or ``"short_conv"``
    layers: str  # a letter for each layer: M for a mixer, * for attention, E for experts alone
    taps: int = 4  # of its convolution
    key_heads: int = 0  # groups, in a state space; a short convolution has no heads
    value_heads: int = 0
    key_dim: int = 0  # size of the state, in a state space
    value_dim: int = 0

    @property
    def channels(self) -> int:
        """Channels of the convolution before a recurrence: those of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of one published model that its kernels see."""

    name: str
    title: str
    hidden: int
    intermediate: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    softcap: float | None = None  # of the final logits
    qk_norm: bool = False
    routed_scale: float = 1.0  # of the weights of a sigmoid router
    shared_intermediate: int = 0  # of a shared expert that is wider than the others
    dense_layers: int = 0  # the first ones, without experts
    latent_attention: bool = False  # number and size of heads are then those of rotated queries and keys
    sliding_window: int | None = None
    global_head_dim: int = 0  # of the layers without a window, if they have another
    attention_softcap: float | None = None  # of the attention's scores
    sinks: bool = False  # a learned number a head in the attention's softmax
    tied: bool = False  # of a Llama or a hybrid: whether the head is the embedding; Gemma's always is
    mixer: Mixer | None = None  # of a hybrid
    known: str = ""  # an id whose configuration the recipes know, or a type of model

    @property
    def first_with_experts(self) -> int:
        """The first layer that has experts."""
        return self.mixer.layers.find("E") if self.mixer and "E" in self.mixer.layers else self.dense_layers


_GEMMA2: dict[str, Any] = {"softcap": 30.0, "attention_softcap": 50.0, "sliding_window": 4096}
_GEMMA: dict[str, Any] = {"softcap": 30.0, "qk_norm": True, "sliding_window": 1024}
_GPT_OSS: dict[str, Any] = {"sliding_window": 128, "sinks": True}
_GLM: dict[str, Any] = {"qk_norm": True, "routed_scale": 2.5, "dense_layers": 3}
_DEEPSEEK: dict[str, Any] = {"routed_scale": 2.5, "dense_layers": 3, "latent_attention": True}
_QWEN3_5: dict[str, Any] = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}
_TINY: dict[str, Any] = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8}
_NEMOTRON_LAYERS = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_LFM2_ATTENTION = (2, 5, 9, 13, 17, 21, 24, 27)
MODELS = {
    model.name: model
    for model in (
        # Name, title, hidden, intermediate and vocabulary size, layers, heads, KV heads and their size; then the number
        # of experts, how many of them a token has, and their intermediate size.
        Model("tiny", "Tiny", 64, 128, 512, 2, 4, 2, 16, softcap=30.0, qk_norm=True),
        Model("tiny-moe", "Tiny MoE", 64, 128, 512, 2, 4, 2, 16, 4, 2, 32, qk_norm=True),
        Model("llama3.2-1b", "Llama-3.2 1B", 2048, 8192, 128256, 16, 32, 8, 64, tied=True),
        Model("llama3-8b", "Llama-3 8B", 4096, 14336, 128256, 32, 32, 8, 128),
        Model("llama3-70b", "Llama-3 70B", 8192, 28672, 128256, 80, 64, 8, 128),
        Model("llama3-405b", "Llama-3 405B", 16384, 53248, 128256, 126, 128, 8, 128),
        Model("qwen3-8b", "Qwen3 8B", 4096, 12288, 151936, 36, 32, 8, 128, qk_norm=True),
        Model("qwen3-30b-a3b", "Qwen3-30B-A3B", 2048, 6144, 151936, 48, 32, 4, 128, 128, 8, 768, qk_norm=True),
        Model("mixtral-8x7b", "Mixtral 8x7B", 4096, 14336, 32000, 32, 32, 8, 128, 8, 2, 14336),
        Model("gpt-oss-20b", "GPT-OSS-20B", 2880, 2880, 201088, 24, 64, 8, 64, 32, 4, 2880, **_GPT_OSS),
        Model("gpt-oss-120b", "GPT-OSS-120B", 2880, 2880, 201088, 36, 64, 8, 64, 128, 4, 2880, **_GPT_OSS),
        Model("deepseek-v3", "DeepSeek-V3", 7168, 18432, 129280, 61, 128, 1, 64, 256, 8, 2048, **_DEEPSEEK),
        Model("glm4.5", "GLM-4.5", 5120, 12288, 151552, 92, 96, 8, 128, 160, 8, 1536, **_GLM),
        Model("glm4.5-air", "GLM-4.5-Air", 4096, 10944, 151552, 46, 96, 8, 128, 128, 8, 1408, dense_layers=1),
        Model("llama4-scout", "Llama 4 Scout", 5120, 8192, 202048, 48, 40, 8, 128, 16, 1, 8192),
        Model(
            *("qwen2-57b-a14b", "Qwen2-57B-A14B", 3584, 18944, 151936, 28, 28, 4, 128, 64, 8, 2560),
            shared_intermediate=20480,
        ),
        Model("olmoe-1b-7b", "OLMoE-1B-7B", 2048, 1024, 50304, 16, 16, 16, 128, 64, 8, 1024),
        Model("gemma2-2b", "Gemma2 2B", 2304, 9216, 256000, 26, 8, 4, 256, **_GEMMA2),
        # Gemma 3's own checkpoints leave `final_logit_softcapping` unset; Gemma 2's and later ones set 30. The shapes
        # are measured with it, as the harder case.
        Model("gemma3-4b", "Gemma3 4B", 2560, 10240, 262208, 34, 8, 4, 256, **_GEMMA),
        Model("gemma3-27b", "Gemma3 27B", 5376, 21504, 262208, 62, 32, 16, 128, **_GEMMA),
        # Configurations that the recipes know, or transformers' own.
        Model(
            *("ministral-3-8b", "Ministral 3 8B", 4096, 14336, 131072, 34, 32, 8, 128),
            known="ministral3",
        ),
        Model(
            *("qwen3-0.6b", "Qwen3-0.6B", 1024, 3072, 151936, 28, 16, 8, 128),
            qk_norm=True,
            tied=True,
            known="Qwen/Qwen3-0.6B",
        ),
        Model(
            *("qwen3-4b", "Qwen3-4B", 2560, 9728, 151936, 36, 32, 8, 128),
            qk_norm=True,
            tied=True,
            known="Qwen/Qwen3-4B",
        ),
        Model(
            *("smollm2-135m", "SmolLM2-135M", 576, 1536, 49152, 30, 9, 3, 64),
            tied=True,
            known="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        Model(
            *("glm-4.7-flash", "GLM-4.7-Flash", 2048, 10240, 154880, 47, 20, 1, 64, 64, 4, 1536),
            routed_scale=1.8,
            dense_layers=1,
            latent_attention=True,
            known="unsloth/GLM-4.7-Flash-FP8-Dynamic",
        ),
        Model(
            *("gemma4-text", "Gemma 4 text", 2304, 9216, 262144, 30, 8, 4, 256),
            qk_norm=True,
            sliding_window=512,
            global_head_dim=512,
            tied=True,
            known="gemma4_text",
        ),
        Model(
            *("gemma4-e2b", "Gemma 4 E2B", 1536, 6144, 262144, 35, 8, 1, 256),
            qk_norm=True,
            sliding_window=512,
            global_head_dim=512,
            tied=True,
            known="google/gemma-4-E2B-it",
        ),
        # Hybrids.
        Model(
            *("tiny-qwen3.5", "Tiny Qwen3.5", 32, 64, 512, 2, 4, 2, 16),
            qk_norm=True,
            mixer=Mixer("delta_rule", "M*", **_TINY),
            known="qwen3_5",
        ),
        Model(
            *("tiny-nemotron", "Tiny Nemotron", 32, 64, 512, 4, 4, 2, 8, 4, 2, 16),
            shared_intermediate=24,
            mixer=Mixer("state_space", "ME*M", **_TINY),
            known="nemotron_h",
        ),
        Model(
            *("tiny-lfm2", "Tiny LFM2", 32, 64, 512, 2, 4, 2, 8),
            qk_norm=True,
            tied=True,
            mixer=Mixer("short_conv", "M*", taps=3),
            known="lfm2",
        ),
        Model(
            *("qwen3.5-9b", "Qwen3.5-9B", 4096, 12288, 248320, 32, 16, 4, 256),
            qk_norm=True,
            mixer=Mixer("delta_rule", 8 * "MMM*", **_QWEN3_5),
            known="Qwen/Qwen3.5-9B",
        ),
        Model(
            *("qwen3.5-35b-a3b", "Qwen3.5-35B-A3B", 2048, 512, 248320, 40, 16, 2, 256, 256, 8, 512),
            qk_norm=True,
            mixer=Mixer("delta_rule", 10 * "MMM*", **_QWEN3_5),
            known="Qwen/Qwen3.5-35B-A3B",
        ),
        Model(
            *("nemotron-3-nano", "Nemotron-3-Nano-30B-A3B", 2688, 1856, 131072, 52, 32, 2, 128, 128, 6, 1856),
            routed_scale=2.5,
            shared_intermediate=3712,
            mixer=Mixer("state_space", _NEMOTRON_LAYERS, key_heads=8, value_heads=64, key_dim=128, value_dim=64),
            known="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        ),
        Model(
            *("granite-4-h-small", "Granite-4.0-H-Small", 4096, 768, 100352, 40, 32, 8, 128, 72, 10, 768),
            shared_intermediate=1536,
            tied=True,
            mixer=Mixer("state_space", 4 * "MMMMM*MMMM", key_heads=1, value_heads=128, key_dim=128, value_dim=64),
            known="ibm-granite/granite-4.0-h-small",
        ),
        Model(
            *("lfm2-2.6b", "LFM2-2.6B", 2048, 10752, 65536, 30, 32, 8, 64),
            qk_norm=True,
            tied=True,
            mixer=Mixer("short_conv", "".join("M*"[layer in _LFM2_ATTENTION] for layer in range(30)), taps=3),
            known="LiquidAI/LFM2-2.6B",
        ),
    )
}


def model_config(model: Model, layers: int = 0) -> PretrainedConfig:
    """The published configuration of a model's shapes."""
    from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, Qwen3Config

    if model.known:
        return _known_config(model, layers or model.layers)
    sizes: dict[str, Any] = {
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": layers or model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "use_cache": False,
    }
    if model.name.startswith("gemma2"):
        return Gemma2Config(**sizes, sliding_window=model.sliding_window, query_pre_attn_scalar=model.head_dim)
    if model.name.startswith("gemma3"):
        return Gemma3TextConfig(**sizes, sliding_window=model.sliding_window)
    if model.experts:
        return _config_with_experts(model, sizes | {"num_experts_per_tok": model.experts_per_token})
    if model.name.startswith("qwen3"):
        return Qwen3Config(**sizes)
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    return LlamaConfig(**sizes, max_position_embeddings=8192, rope_parameters=rope, tie_word_embeddings=model.tied)


def _known_config(model: Model, layers: int) -> PretrainedConfig:
    """The first `layers` of a configuration that is known, so that the kinds of layers keep their order."""
    from transformers import AutoConfig

    if layers > model.layers:
        raise UserError(f"`--layers` is {layers}, but {model.name} has {model.layers} layers; ask for at most as many.")
    values = PUBLISHED.get(model.known) or {"model_type": model.known, **FAMILIES.get(model.known, {})}
    if "text_config" in values:
        values = {"model_type": f"{values['model_type']}_text", **values["text_config"]}
    values = {name: value for name, value in values.items() if name != "quantization_config"}
    values |= {"vocab_size": model.vocab, "tie_word_embeddings": model.tied, "use_cache": False}
    config = AutoConfig.for_model(**values)
    for kinds in ("layer_types", "mlp_layer_types"):
        if getattr(config, kinds, None):
            setattr(config, kinds, getattr(config, kinds)[:layers])
    config.num_hidden_layers = layers
    if getattr(config, "num_kv_shared_layers", None):  # the last ones of the model
        config.num_kv_shared_layers = max(0, layers - (model.layers - config.num_kv_shared_layers))
    return config


def _config_with_experts(model: Model, sizes: dict[str, Any]) -> PretrainedConfig:
    import transformers as tf

    family = model.name.split("-")[0]
    if family in ("mixtral", "gpt", "llama4"):
        sizes["num_local_experts"] = model.experts
    elif family in ("deepseek", "glm4.5"):
        sizes["n_routed_experts"] = model.experts
        sizes["first_k_dense_replace"] = model.dense_layers
        sizes["routed_scaling_factor"] = model.routed_scale
    else:
        sizes["num_experts"] = model.experts
    if family == "mixtral":
        return tf.MixtralConfig(**sizes)
    if family == "gpt":
        return tf.GptOssConfig(**sizes, sliding_window=model.sliding_window)
    if family == "llama4":
        return tf.Llama4TextConfig(**sizes)
    if family == "olmoe":
        return tf.OlmoeConfig(**sizes)
    sizes["moe_intermediate_size"] = model.expert_intermediate
    if model.latent_attention:  # every head has its own keys and values, computed from a token's latent
        return tf.DeepseekV3Config(**sizes | {"num_key_value_heads": model.heads})
    if family == "glm4.5":
        return tf.Glm4MoeConfig(**sizes, use_qk_norm=model.qk_norm, attention_bias=True)
    if family == "qwen2":
        return tf.Qwen2MoeConfig(**sizes, shared_expert_intermediate_size=model.shared_intermediate)
    config = tf.Qwen3MoeConfig(**sizes, norm_topk_prob=True)
    config.head_dim = model.head_dim  # read by the model, though not a declared field
    return config
