"""Kernels for models whose weights are elsewhere, partitioned, adapted or of another dtype."""

from __future__ import annotations

import pytest
import torch

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from tests.patching import toys
from tests.patching.comparisons import LAYERS, apply_unchanged, loss_and_gradients
from tests.patching.test_apply import only_row
from tests.tiny_models import TINY_MODELS, tiny_batch


def test_meta_model_is_patched_unread_and_remarked():
    from transformers import AutoModelForCausalLM

    plain = TINY_MODELS["gemma2"]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plain.config)
        inside = apply_liger_kernel(model, LAYERS)
    assert inside.rows == apply_liger_kernel(plain, LAYERS).rows
    assert "meta device" in inside.remarks[0]
    assert "meta device" in str(inside)
    assert not apply_liger_kernel(plain, LAYERS).remarks
    model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    for name, buffer in plain.named_buffers():  # rotary frequencies are not in a state dict
        model.get_buffer(name).copy_(buffer)
    batch = tiny_batch("gemma2", plain)
    torch.testing.assert_close(model.eval()(**batch).loss, plain.eval()(**batch).loss)


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_partitioned_weights_are_judged_by_their_full_shape(family):
    """As DeepSpeed ZeRO-3 leaves them: empty, with the shape in an attribute."""
    expected = apply_liger_kernel(TINY_MODELS[family](), LAYERS)
    model = TINY_MODELS[family]()
    for parameter in model.parameters():
        shape = parameter.shape
        parameter.data = torch.empty(0)
        parameter.ds_shape = shape
    assert apply_liger_kernel(model, LAYERS) == expected


def test_empty_shard_is_still_proved():
    norm = toys.NoCasts()
    norm.weight.data = torch.empty(0)
    assert only_row(toys.Toy(it=norm)).kernel == "rms_norm (casting=none)"


def test_lora_on_every_projection():
    from peft import LoraConfig, get_peft_model

    targets = ["gate_proj", "up_proj", "down_proj", "q_proj", "k_proj"]
    model = get_peft_model(TINY_MODELS["llama"](), LoraConfig(target_modules=targets, init_lora_weights=False))
    batch = tiny_batch("llama", model)
    report = apply_unchanged(model, batch, LAYERS)
    assert report.model == "LlamaForCausalLM in PeftModel"
    assert {row.component: row.count for row in report.applied} == {
        "attention": 2,
        "rope": 2,
        "swiglu": 2,
        "rms_norm": 5,
        "lora": 10,
    }
    assert any("gate_proj.lora_A" in name for name in loss_and_gradients(model, batch))
    merged = model.merge_and_unload()
    assert revert_liger_kernel(merged) == 9


def test_trained_norm_of_peft_is_patched():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(TINY_MODELS["llama"](), LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]))
    report = apply_unchanged(model, tiny_batch("llama", model), LAYERS)
    rows = {row.component: row.count for row in report.applied}
    assert rows["rms_norm"] == 10  # five originals (all names end in "norm") and their trained copies
