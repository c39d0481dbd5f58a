"""Routers of transformers, small, by the name of their family."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.hy_v3.modeling_hy_v3 import HYV3TopKRouter
from transformers.models.jamba.modeling_jamba import JambaTopKRouter
from transformers.models.kolibri1.modeling_kolibri1 import Kolibri1TopKRouter
from transformers.models.laguna.modeling_laguna import LagunaTopKRouter
from transformers.models.lara_mini.modeling_lara_mini import LaraMiniTopKRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter
from transformers.models.mistral_large4.modeling_mistral_large4 import MistralLarge4TextTopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.accuracy import seeded_randn

HIDDEN = 16
_SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": 3, "num_hidden_layers": 1, "num_attention_heads": 4}


def _router(kind: type[nn.Module], config: Callable[..., Any], **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            router = kind(config(**_SIZES, **sizes))
            for tensor in (*router.parameters(), *router.buffers()):
                tensor.data.normal_().mul_(0.4)
        return router

    return build


_LFM2 = {"num_experts": 12, "layer_types": ["full_attention"]}
_GROUPED = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}

ROUTERS: dict[str, Callable[[], nn.Module]] = {
    "qwen2_moe": _router(Qwen2MoeTopKRouter, tf.Qwen2MoeConfig, num_experts=12),
    "qwen3_moe": _router(Qwen3MoeTopKRouter, tf.Qwen3MoeConfig, num_experts=12, norm_topk_prob=True),
    "olmoe": _router(OlmoeTopKRouter, tf.OlmoeConfig, num_experts=12),
    "mixtral": _router(MixtralTopKRouter, tf.MixtralConfig, num_local_experts=8),
    "gpt_oss": _router(GptOssTopKRouter, tf.GptOssConfig, num_local_experts=8),
    "granitemoe": _router(GraniteMoeTopKRouter, tf.GraniteMoeConfig, num_local_experts=8),
    "jamba": _router(JambaTopKRouter, tf.JambaConfig, num_experts=8),
    "deepseek_v3": _router(DeepseekV3TopkRouter, tf.DeepseekV3Config, n_routed_experts=16, n_group=4, topk_group=2),
    "glm4_moe": _router(Glm4MoeTopkRouter, tf.Glm4MoeConfig, n_routed_experts=12, n_group=1, topk_group=1),
    "llama4": _router(Llama4Router, tf.Llama4TextConfig, num_local_experts=8),
    "deepseek_v2": _router(
        *(DeepseekV2TopkRouter, tf.DeepseekV2Config),
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.5,
    ),
    "deepseek_v2, in groups": _router(DeepseekV2TopkRouter, tf.DeepseekV2Config, **_GROUPED),
    "mistral4": _router(Mistral4TopkRouter, tf.Mistral4Config, n_routed_experts=8),
    "mistral_large4": _router(MistralLarge4TextTopkRouter, tf.MistralLarge4TextConfig, num_local_experts=8),
    "lara_mini": _router(LaraMiniTopKRouter, tf.LaraMiniConfig, num_experts=12),
    "kolibri1": _router(Kolibri1TopKRouter, tf.Kolibri1Config, num_experts=12),
    "laguna": _router(LagunaTopKRouter, tf.LagunaConfig, num_experts=12),
    "laguna, with a cap": _router(LagunaTopKRouter, tf.LagunaConfig, num_experts=12, moe_router_logit_softcapping=2.0),
    "minimax_m2": _router(MiniMaxM2TopKRouter, tf.MiniMaxM2Config, num_local_experts=8),
    "hy_v3": _router(HYV3TopKRouter, tf.HYV3Config, num_local_experts=8, router_scaling_factor=2.5),
    "lfm2_moe": _router(Lfm2MoeTopKRouter, tf.Lfm2MoeConfig, **_LFM2),
    "lfm2_moe, without a correction": _router(Lfm2MoeTopKRouter, tf.Lfm2MoeConfig, **_LFM2, use_expert_bias=False),
}
"""Those that have a kernel."""

OTHER_ROUTERS: dict[str, Callable[[], nn.Module]] = {
    "phimoe": _router(PhimoeTopKRouter, tf.PhimoeConfig, num_local_experts=8),
    "mistral4, in groups": _router(Mistral4TopkRouter, tf.Mistral4Config, n_routed_experts=16, n_group=4, topk_group=2),
}
"""Those that have none."""


def arguments_of(family: str, router: nn.Module, hidden: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """The arguments with which a model of the family calls `router`: the hidden states, and maybe a correction bias."""
    names = list(inspect.signature(type(router).forward).parameters)[1:]
    correction = seeded_randn(len(router.weight), seed=5, device=hidden.device, scale=0.3)  # type: ignore[arg-type]
    return dict(zip(names, (hidden, None if family.endswith("without a correction") else correction)))
