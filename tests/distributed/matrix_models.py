"""The matrix's models: which parameters train, and in which precision."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from tests.patching.mixing_models import built
from tests.tiny_models import TINY_MODELS

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LAYERS = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
ADDED_TOKENS = [3, 7, 63]


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Which parameters train.

    Args:
        lora: Options of PEFT's `LoraConfig`; None trains the model itself.
        tied: Whether the head is the input embedding.
        frozen: Names of parameters of the model that do not train.
        fused: Whether the loss is fused with the head, or runs on logits built for it.
        hybrid: The family of a model whose layers mix tokens without attention; None for a Llama.
    """

    lora: dict[str, Any] | None = None
    tied: bool = False
    frozen: tuple[str, ...] = ()
    fused: bool = True
    hybrid: str | None = None


PARAMETERS: dict[str, Parameters] = {
    "full": Parameters(),
    "full, head not fused": Parameters(fused=False),
    "tied head": Parameters(tied=True),
    "frozen head": Parameters(frozen=("lm_head.weight",)),
    "lora": Parameters({"target_modules": LAYERS}),
    "lora with head": Parameters({"target_modules": [*LAYERS, "lm_head"]}),
    "dora": Parameters({"target_modules": LAYERS, "use_dora": True}),
    "dora with head": Parameters({"target_modules": [*ATTENTION, "lm_head"], "use_dora": True}),
    "modules to save": Parameters({"target_modules": ATTENTION, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "token rows": Parameters({"target_modules": ATTENTION, "trainable_token_indices": {"lm_head": ADDED_TOKENS}}),
    "tied token rows": Parameters({"target_modules": ATTENTION, "trainable_token_indices": ADDED_TOKENS}, tied=True),
}


HYBRIDS: dict[str, Parameters] = {
    **{name: Parameters(hybrid=name) for name in ("qwen3_5_text", "nemotron_h", "lfm2")},
    "qwen3_5_text, lora": Parameters({"target_modules": "all-linear"}, hybrid="qwen3_5_text"),
    "lfm2, lora": Parameters({"target_modules": "all-linear"}, hybrid="lfm2"),
}
"""Further ones, which not every wrapping trains."""


def build_model(name: str, **sizes: int) -> nn.Module:
    """The model with `PARAMETERS[name]` or `HYBRIDS[name]`, in fp32.

    Its weights are the same at every call, and adapters do something.
    """
    parameters = {**PARAMETERS, **HYBRIDS}[name]
    tied = parameters.tied
    if parameters.hybrid is None:
        model: Any = TINY_MODELS["llama"](**{**SIZES, **sizes}, tie_word_embeddings=tied).train()
    else:
        fields = {"vocab_size": SIZES["vocab_size"], "tie_word_embeddings": tied, "use_cache": False, **sizes}
        model = built(parameters.hybrid, **fields).train()
    for frozen in parameters.frozen:
        model.get_parameter(frozen).requires_grad_(False)
    if parameters.lora is None:
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM", **parameters.lora)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(2)
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
        for path, parameter in model.named_parameters():
            if parameter.requires_grad and ("lora_" in path or "delta" in path):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def inner_model(model: nn.Module) -> Any:
    """The causal LM inside PEFT's wrapper, or `model` itself."""
    base = getattr(model, "get_base_model", None)
    return model if base is None else base()
