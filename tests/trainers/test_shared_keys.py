"""Layers that share keys: trainers refuse the checkpoints with which stock training loses gradients."""

import copy
import re

import pytest
import torch

from tests.attention.shared_layers import batch_of, build
from tests.patching.comparisons import loss_and_gradients, relative
from tests.trainers.builders import causal, dpo
from tests.trainers.tiny import llama

LOST = {
    "E2B": "layers of gemma4_text share keys, whose gradients use_reentrant=True loses. Set it to False.",
    "3n": "layers of gemma3n_text share keys, whose gradients use_reentrant=True loses. Set it to False.",
}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


@pytest.mark.parametrize("name", LOST)
def test_stock_training_loses_them_in_silence(name):
    """Once transformers mends it, nothing has to be refused."""
    model, batch = build(name), batch_of("full")
    kept, lost = (copy.deepcopy(model) for _ in range(2))
    kept.gradient_checkpointing_enable({"use_reentrant": False})
    lost.gradient_checkpointing_enable({"use_reentrant": True})
    expected, found = loss_and_gradients(kept, batch), loss_and_gradients(lost, batch)
    torch.testing.assert_close(found["loss"], expected["loss"])
    storing = [layer for layer in model.model.layers if layer.self_attn.store_full_length_kv]
    assert len(storing) == 2
    for layer in storing:
        key = f"model.layers.{layer.self_attn.layer_idx}.self_attn.v_proj.weight"
        assert relative(expected[key], found[key]) > 0.05


@pytest.mark.parametrize("name", LOST)
def test_reentrant_checkpoints_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=re.escape(LOST[name])):
        causal(tmp_path, model=build(name), **REENTRANT)
    with pytest.raises(ValueError, match=re.escape(LOST[name])):
        causal(tmp_path, model=build(name), use_liger_kernel=False, **REENTRANT)


def test_what_the_caller_has_switched_on_is_refused(tmp_path):
    model = build("E2B")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match=re.escape(LOST["E2B"])):
        causal(tmp_path, model=model)


def test_trainers_of_trl_refuse_them(tmp_path):
    with pytest.raises(ValueError, match=re.escape(LOST["E2B"])):
        dpo(tmp_path, model=build("E2B"), **REENTRANT)


def test_others_are_not_refused(tmp_path):
    causal(tmp_path, model=build("E2B"), **{**REENTRANT, "gradient_checkpointing_kwargs": {"use_reentrant": False}})
    causal(tmp_path, model=build("31B"), **REENTRANT)
    causal(tmp_path, model=llama(), **REENTRANT)
