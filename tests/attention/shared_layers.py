"""Small models whose layers have the keys of earlier ones, or keys that are their values: Gemma 4 and Gemma 3n."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from liger_trainer.recipe.families import FAMILIES
from tests.attention.families import BATCHES

_SIZES: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 0},
    **{"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 6, "sliding_window": 4},
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
_GEMMA4 = {**_SIZES, "global_head_dim": 32, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # as E2B and E4B: shared keys, gates of per-layer inputs, MLPs twice as wide where keys are shared
    "E2B": ("gemma4_text", {**_GEMMA4, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}),
    # as 31B: global layers whose keys are their values, with fewer key heads
    "31B": (
        "gemma4_text",
        {**_GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    # windows of heads of the published size
    "wide heads": (
        "gemma4_text",
        {**_GEMMA4, "head_dim": 256, "global_head_dim": 256, "num_kv_shared_layers": 2, "num_hidden_layers": 4,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "images": (
        "gemma4",
        {**FAMILIES["gemma4"],
         "text_config": {**_GEMMA4, "hidden_size": 32, "num_kv_shared_layers": 3},
         **{f"{kind}_token_id": 120 for kind in ("image", "video", "audio", "boi", "boa", "eoi")}},
    ),
    "unified": ("gemma4_unified_text", {**_SIZES, "global_head_dim": 32, "num_kv_shared_layers": 3}),
    "3n": (
        "gemma3n_text",
        {**_SIZES, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
         "laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]},
    ),
}  # fmt: skip


def build(name: str, **overrides: Any) -> Any:
    """A model of `MODELS`, with these fields in its config; the weights are the same at every call."""
    kind, fields = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        of_images = "vision_config" in fields
        auto = AutoModelForImageTextToText if of_images else AutoModelForCausalLM
        model = auto.from_config(AutoConfig.for_model(kind, **{**fields, **overrides})).float().train()
        with torch.no_grad():
            for key, parameter in model.named_parameters():  # fresh norms are all ones
                parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.05))
                if "q_norm" in key:  # the scale is 1, with which a softmax of drawn scores chooses a single key
                    parameter.mul_(len(parameter) ** -0.5)
    return model


def batch_of(kind: str) -> dict[str, Any]:
    """Two rows of a kind of `BATCHES`."""
    batch = {key: value[:2] if torch.is_tensor(value) else value for key, value in BATCHES[kind]().items()}
    # The padding token has an embedding of zeros, at which the norms of Gemma 3n have no gradient.
    batch["input_ids"] = batch["input_ids"].clamp_min(1)
    return batch
