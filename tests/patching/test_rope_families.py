"""Families whose rotary embedding is not Llama's: applied, equal in loss and gradients, undone without a trace."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers as tf

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.patching import rotations
from tests.patching.comparisons import (
    LAYERS,
    assert_as_near_to_the_truth,
    assert_same,
    image_batch,
    loss_and_gradients,
)
from tests.patching.test_experts import MODELS
from tests.tiny_models import COMMON, _build, tiny_batch

_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
_TOKENS = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}


def _cohere2():
    return _build(tf.Cohere2ForCausalLM, tf.Cohere2Config(**COMMON, logit_scale=0.0625, sliding_window=8))


def _qwen2_5_vl():
    vision = {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]}
    config = tf.Qwen2_5_VLConfig(text_config={**COMMON, "rope_parameters": _MROPE}, vision_config=vision, **_TOKENS)
    return _build(tf.Qwen2_5_VLForConditionalGeneration, config)


def _qwen3_vl():
    vision = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    text = {**COMMON, "head_dim": 8, "rope_parameters": _MROPE}
    config = tf.Qwen3VLConfig(text_config=text, vision_config=vision, **_TOKENS)
    return _build(tf.Qwen3VLForConditionalGeneration, config)


def _text_of(family):
    return partial(tiny_batch, family)


# Family: (builder, its batch, the kernels of its rotary functions)
FAMILIES = {
    "cohere2": (_cohere2, _text_of("cohere2"), {"rope (neighbours)"}),
    "deepseek_v3": (MODELS["deepseek_v3"][0], _text_of("deepseek_v3"), {"rope", "rope (neighbours to halves)"}),
    "llama4": (MODELS["llama4"][0], _text_of("llama4"), {"rope (complex)"}),
    "qwen2_5_vl": (_qwen2_5_vl, image_batch, {"rope"}),
    "qwen3_vl": (_qwen3_vl, image_batch, {"rope", "rope with the norms of q and k"}),
}
families = pytest.mark.parametrize("family", FAMILIES)


@families
def test_loss_and_every_gradient(family, calls_of):
    build, batch_of, kernels = FAMILIES[family]
    calls = calls_of(rotations, "rope", "rope_complex", "qk_norm_rope")
    model = build()
    batch = batch_of(model)
    expected = loss_and_gradients(model, batch)
    rows = [row for row in apply_liger_kernel(model, LAYERS) if row.component == "rope"]
    assert {row.kernel for row in rows} == kernels
    assert all(row.probe_error <= 1e-5 for row in rows)
    calls.clear()
    got = loss_and_gradients(model, batch)
    # Every layer: Cohere2 and Llama 4 have layers without positions, vision towers have two of their own, and latent
    # attention rotates queries and keys apart.
    assert len(calls) == {"qwen2_5_vl": 4, "qwen3_vl": 4, "deepseek_v3": 4}.get(family, 2)
    assert_same(got, expected, floor=1e-6)
    revert_liger_kernel(model)
    again = loss_and_gradients(model, batch)
    assert all(torch.equal(value, again[name]) for name, value in expected.items())


@families
def test_bf16_is_as_near_to_the_truth_as_the_model_itself(family):
    build, batch_of, _ = FAMILIES[family]
    layers = {**LAYERS, "rms_norm": False, "layer_norm": False, "swiglu": False, "geglu": False}
    assert_as_near_to_the_truth(build().to(torch.bfloat16), layers, batch_of)


def test_llama4_vision_tower():
    config = tf.Llama4VisionConfig(
        hidden_size=32,
        intermediate_size=128,
        num_attention_heads=4,
        num_hidden_layers=2,
        image_size=16,
        patch_size=4,
        vision_output_dim=32,
        projector_input_dim=32,
        projector_output_dim=32,
    )
    model = _build(tf.Llama4VisionModel, config)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def run():
        model.zero_grad(set_to_none=True)
        loss = model(pixels).last_hidden_state.square().mean()
        loss.backward()
        return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}

    expected = run()
    rows = {row.component: row.kernel for row in apply_liger_kernel(model, LAYERS)}
    assert rows["rope"] == "rope (complex)"
    assert_same(run(), expected, floor=1e-6)
