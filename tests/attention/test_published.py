"""Families whose attention has tables, positions or keys of its own: small models with heads of the published sizes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

from liger_trainer.attention import interface
from liger_trainer.packing.proof import small_config
from tests.attention.families import BATCHES
from tests.attention.test_families import NOISE, count_calls_of_the_function, documents_alone, eager, patched
from tests.patching.comparisons import assert_same, loss_and_gradients

FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},  # latent keys, complex tables
    "deepseek_v3": {},  # tables of the rotated columns, whose neighbours turn together
    "glm4_moe_lite": {},
    "longcat_flash": {},  # two attentions a layer, scaled latents
    "minicpm3": {},  # halves turn together
    "mistral4": {"experts_implementation": "eager"},  # queries scaled by position
    "ministral3": {},
    "youtu": {},
    "axk1": {},
    "stablelm": {},  # a part of each head is rotated
    "gemma3n_text": {},  # the last layers have the keys of earlier ones
    "beam": {"experts_implementation": "eager"},  # layers without positions, which are given scales
    "glm4": {},  # 16 heads have one key
}

MAGNIFY_ROUNDING = ("ministral3", "gemma3n_text", "glm4", "beam", "mistral4", "stablelm")
"""Compared in float64. Eager in fp32 is as far from float64 as ours is."""
TOLERANCE = {"gemma3n_text": 5e-3}
"""Other than 1e-5: it magnifies rounding. Weights that differ by one unit change gradients by up to 6e-4."""


@functools.cache
def config_of(name: str) -> Any:
    config = small_config(AutoConfig.for_model(name, **FIELDS[name]))
    config.vocab_size = 128
    if hasattr(config, "vocab_size_per_layer_input"):
        config.vocab_size_per_layer_input = 128
    return config


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = config_of(name)
    mapping = (
        MODEL_FOR_CAUSAL_LM_MAPPING
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    )
    return mapping[type(config)](config).to(dtype).train()


@functools.cache
def pair(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    model = build(name, dtype)
    return eager(model), patched(model)


def batch_of(kind: str) -> dict[str, Any]:
    """Two rows: with padding before one, or of several documents."""
    batch = {key: value[:2] if torch.is_tensor(value) else value for key, value in BATCHES[kind]().items()}
    # The padding token has an embedding of zeros, at which the norms of Gemma 3n have no gradient.
    batch["input_ids"] = batch["input_ids"].clamp_min(1)
    return batch


def not_zero(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the gradients of experts that only padding, which no label is of, was given to."""
    return {name: value for name, value in values.items() if value.any()}


def softmax(x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, native=F.softmax, **kwargs) -> torch.Tensor:
    """That of eager attention, which rounds to float32 whatever the model's dtype, without it in float64."""
    return native(x, *args, dtype=None if x.dtype == torch.float64 else dtype, **kwargs)


@pytest.mark.parametrize("kind", ["left-padded", "packed"])
@pytest.mark.parametrize("name", FIELDS)
def test_loss_and_gradients_equal_those_of_eager(name, kind, monkeypatch):
    wide = kind == "packed" and name in MAGNIFY_ROUNDING  # eager's masks of padding overflow in float64
    theirs, ours = pair(name, torch.float64 if wide else torch.float32)
    monkeypatch.setattr(interface, "use_triton", lambda query: True)
    monkeypatch.setattr(F, "softmax", softmax)
    calls = count_calls_of_the_function(monkeypatch)
    batch = batch_of(kind)
    got = loss_and_gradients(ours, batch)
    assert len(calls) == ours.config.get_text_config().num_hidden_layers
    expected = documents_alone(theirs, batch) if kind == "packed" else loss_and_gradients(theirs, batch)
    assert_same(not_zero(got), not_zero(expected), TOLERANCE.get(name, 1e-5), NOISE)
