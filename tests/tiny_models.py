"""The families of ``--smoke`` as tiny random models; their weights are the same at every call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from liger_trainer.recipe.families import FAMILIES
from liger_trainer.recipe.model import model_class

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
# Trained by smoke runs alone: Gemma 4 and latent attention do not take the sizes of `COMMON`, the others have no row in
# the tables.
_SMOKE_ALONE = ("gemma4", "glm4_moe_lite", "qwen3_5", "qwen3_vl")
_MORE: dict[str, dict[str, Any]] = {  # added to FAMILIES: auxiliary losses, and image ids that `tiny_batch` never draws
    "qwen3_moe": {"output_router_logits": True},
    "mixtral": {"output_router_logits": True},
    "gemma3": {"boi_token_index": 120, "eoi_token_index": 121, "image_token_index": 122},
    "qwen2_vl": {
        "image_token_id": 120,
        "video_token_id": 121,
        "vision_start_token_id": 122,
        "vision_end_token_id": 123,
    },
    "mllama": {"image_token_index": 120},
}


def _build(architecture: Callable[[Any], PreTrainedModel], config: Any) -> PreTrainedModel:
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


def _tiny_model(family: str, **overrides: Any) -> PreTrainedModel:
    sizes, more = FAMILIES[family], _MORE.get(family, {})
    if "text_config" in sizes:
        text = {**sizes["text_config"], **COMMON, **overrides}
        config = AutoConfig.for_model(family, **{**sizes, "text_config": text, **more})
    else:
        config = AutoConfig.for_model(family, **{**sizes, **COMMON, **more, **overrides})
    # The class itself: `from_config` would split the parameters where ZeRO-3 is configured.
    return _build(model_class(config)._model_mapping[type(config)], config)


TINY_MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    family: functools.partial(_tiny_model, family) for family in FAMILIES if family not in _SMOKE_ALONE
}
"""Family name → builder. Keyword arguments override fields of the (text) config."""


def tiny_batch(
    name: str, model: PreTrainedModel, batch: int = 2, length: int = 12, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Inputs for one training forward of `model`, a `TINY_MODELS[name]()`: text only, some labels ignored.

    The first row starts with three ignored labels (a prompt) and the last row ends in two padding tokens.
    """
    generator = torch.Generator().manual_seed(seed)
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
