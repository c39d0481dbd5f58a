"""Adapters on and near the head: fused where a plain linear computes the logits, else run a chunk at a time."""

from __future__ import annotations

import copy
import sys
import types

import peft
import pytest
import torch
from torch import nn

from liger_trainer.head import DeferredLogits, find_lm_heads, lm_head
from liger_trainer.patching.head import patch_head
from tests.tiny_models import TINY_MODELS, tiny_batch


def lora(**options) -> peft.LoraConfig:
    options = {"target_modules": ["q_proj", "v_proj"], "r": 4, "task_type": "CAUSAL_LM", **options}
    return peft.LoraConfig(**options)


CASES = {
    # name: (family, adapter, whether a plain linear computes the logits)
    "lora q v": ("llama", lora(), True),
    "modules_to_save": ("llama", lora(modules_to_save=["lm_head"]), True),
    "modules_to_save with embeddings": ("llama", lora(modules_to_save=["lm_head", "embed_tokens"]), True),
    "lora head": ("llama", lora(target_modules=["q_proj", "lm_head"]), False),
    "dora head": ("llama", lora(target_modules=["lm_head"], use_dora=True), False),
    "token rows": ("llama", lora(trainable_token_indices=[5, 6]), True),
    "token rows tied": ("gemma2", lora(trainable_token_indices=[5, 6]), False),
    "token rows of the head": ("llama", lora(trainable_token_indices={"lm_head": [5, 6]}), False),
}


def adapted(case: str, patch_first: bool, patch_after: bool) -> tuple[nn.Module, object]:
    family, config, _ = CASES[case]
    model = TINY_MODELS[family]().train()
    row = patch_head(model, fused=True, logits_memory=2**20) if patch_first else None
    torch.manual_seed(3)
    model = peft.get_peft_model(model, copy.deepcopy(config))
    with torch.no_grad():  # adapters start as the identity: make them count
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and ("lora_B" in name or "token" in name or "modules_to_save" in name):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    if patch_after:
        row = patch_head(model, fused=True, logits_memory=2**20)
    return model, row


def step(model: nn.Module, family: str):
    inputs = tiny_batch(family, model)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_same(ours, native):
    torch.testing.assert_close(ours[0], native[0], rtol=1e-5, atol=1e-6)
    assert ours[1].keys() == native[1].keys()
    for name, grad in native[1].items():
        assert (ours[1][name] is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(
                ours[1][name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("case", CASES)
def test_adapter_then_patch(case, never_built):
    family, _, plain = CASES[case]
    native = step(adapted(case, False, False)[0], family)
    model, row = adapted(case, False, True)
    assert row.kernel.startswith("linear_cross_entropy" if plain else "cross_entropy on chunks of"), row
    assert_same(step(model, family), native)


@pytest.mark.parametrize("case", CASES)
def test_patch_then_adapter(case):
    """The adapter wraps, or copies, a head that is patched already."""
    family = CASES[case][0]
    native = step(adapted(case, False, False)[0], family)
    model, row = adapted(case, True, False)
    assert row.applied
    assert_same(step(model, family), native)


def test_disabled_adapter_uses_the_original_head(never_built):
    losses = []
    for patch_after in (False, True):
        model, _ = adapted("modules_to_save", False, patch_after)
        inputs = tiny_batch("llama", model)
        with model.disable_adapter():
            losses.append(model(**inputs).loss.detach())
        losses.append(model(**inputs).loss.detach())
    torch.testing.assert_close(losses[:2], losses[2:], rtol=1e-5, atol=1e-6)
    assert losses[0] != losses[1]


def test_find_lm_heads():
    llama = TINY_MODELS["llama"]()
    assert find_lm_heads(llama) == ([llama.lm_head], "")
    saved, _ = adapted("modules_to_save", False, False)
    heads, reason = find_lm_heads(saved)
    wrapper = saved.get_base_model().lm_head
    assert reason == ""
    assert heads == [wrapper.original_module, wrapper.modules_to_save["default"]]
    adapter = adapted("lora head", False, False)[0]
    assert find_lm_heads(adapter) == ([adapter.get_base_model().lm_head], "")
    assert "no output embedding" in find_lm_heads(llama.model)[1]

    llama.lm_head = nn.Sequential(nn.Linear(32, 128))
    assert "Sequential is not known to be linear" in find_lm_heads(llama)[1]
    assert not patch_head(llama, fused=True, logits_memory=2**20).applied
    llama.lm_head = nn.Linear(32, 128, bias=False, dtype=torch.float64)
    assert "float64" in find_lm_heads(llama)[1]


def test_foreign_forwards_are_left_alone():
    from trl.trainer.utils import add_fused_lm_head

    model = TINY_MODELS["llama"]()
    add_fused_lm_head(model)
    row = patch_head(model, fused=True, logits_memory=2**20)
    assert not row.applied
    assert row.reason == "TRL's fused head is already in place"
    assert "forward" not in model.lm_head.__dict__

    model = TINY_MODELS["llama"]()
    model.forward = lambda *args, **kwargs: None
    row = patch_head(model, fused=True, logits_memory=2**20)
    assert not row.applied
    assert "already overridden" in row.reason

    model = TINY_MODELS["llama"]()
    model.lm_head.forward = lambda hidden: hidden
    assert not patch_head(model, fused=True, logits_memory=2**20).applied
    assert "forward" not in model.__dict__


def test_prepared_by_accelerate_is_still_ours():
    """Accelerate wraps the patched forward for mixed precision; patching again must not take it for foreign."""
    from accelerate.utils.operations import convert_outputs_to_fp32

    model = TINY_MODELS["llama"]().train()
    patch_head(model, fused=True, logits_memory=2**20)
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    assert patch_head(model, fused=True, logits_memory=2**20).applied
    outputs = model(**tiny_batch("llama", model))
    assert type(outputs.logits) is DeferredLogits
    assert outputs.logits.dtype == torch.float32


@pytest.mark.parametrize("still_whole", [False, True])
def test_partitioned_parameters_are_gathered_around_the_use(still_whole, monkeypatch):
    """ZeRO-3 as its hooks behave: the weight is empty outside of the head's run, `GatheredParameters` and its backward.

    (tests/distributed/test_head_zero3.py runs the real one, where DeepSpeed is installed.)
    """
    native, model = TINY_MODELS["llama"]().train(), TINY_MODELS["llama"]().train()
    patch_head(model, fused=True, logits_memory=2**20)
    weight = model.lm_head.weight
    weight.ds_id, whole = 0, weight.data
    events = []

    def fetch(event):
        events.append(event)
        weight.data, weight.ds_status = whole, types.SimpleNamespace(name="AVAILABLE")

    def release(event):
        events.append(event)
        weight.data, weight.ds_status = torch.empty(0), types.SimpleNamespace(name="NOT_AVAILABLE")

    class GatheredParameters:
        def __init__(self, parameters, enabled=True):
            self.enabled = enabled
            assert enabled == bool(parameters)

        def __enter__(self):
            if self.enabled:
                fetch("gather")

        def __exit__(self, *_):
            if self.enabled:
                release("free")

    class PreBackwardFunctionForModule(torch.autograd.Function):
        @staticmethod
        def forward(ctx, outputs):
            return outputs.detach()

        @staticmethod
        def backward(ctx, *grads):
            fetch("backward")
            return grads

    deepspeed = types.ModuleType("deepspeed")
    deepspeed.zero = types.SimpleNamespace(GatheredParameters=GatheredParameters)
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.setattr(lm_head, "_check_deepspeed", lambda: None)  # this one has no private names
    model.lm_head.pre_bwd_fn = PreBackwardFunctionForModule
    model.lm_head.register_forward_pre_hook(lambda *_: fetch("run"))
    if not still_whole:
        model.lm_head.register_forward_hook(lambda *_: release("ran"))
    model.lm_head.register_forward_hook(lambda head, _, output: head.pre_bwd_fn.apply(output))
    release("partition")
    inputs = tiny_batch("llama", model)
    monkeypatch.setattr(DeferredLogits, "_compute", lambda self: pytest.fail("the logits were built"))
    losses = [m(**inputs, num_items_in_batch=20).loss for m in (model, native)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    gathers = [] if still_whole else ["ran", "gather", "free"]
    assert events == ["partition", "run", *gathers, "backward"]
    for mine, theirs in zip(model.parameters(), native.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    inputs.pop("labels")
    assert type(model(**inputs).logits) is torch.Tensor, "without a loss inside, the logits are built inside"
