"""Norms of q and k that wait for the rotary function: one pass where nothing else sees them, tensors elsewhere."""

from __future__ import annotations

import copy
import functools
import inspect
import io

import peft
import pytest
import torch
from torch import nn
from transformers.utils import is_kernels_available

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.kernels.norms.rms_norm import rms_norm
from liger_trainer.patching import rotations
from liger_trainer.patching.norm_forwards import PendingNorm
from tests.attention.shared_layers import batch_of
from tests.attention.shared_layers import build as shared_keys
from tests.patching.comparisons import LAYERS, apply_unchanged, assert_same, loss_and_gradients, relative
from tests.patching.test_rope import apply_rotary_pos_emb
from tests.patching.toys import Norm
from tests.tiny_models import TINY_MODELS, tiny_batch

FUSED = "rope with the norms of q and k"


@pytest.fixture
def fused_calls(calls_of):
    return calls_of(rotations, "qk_norm_rope")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3_text"])
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_every_layer_is_fused(family, checkpointing, fused_calls):
    model = TINY_MODELS[family]().train()
    batch = tiny_batch(family, model)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    apply_unchanged(model, batch, LAYERS)
    assert len(fused_calls) == (2 if checkpointing is None else 4)


@pytest.mark.parametrize(("name", "calls"), [("E2B", 9), ("31B", 12), ("unified", 9), ("3n", 10)])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_norms_of_one_tensor_each_are_fused(name, calls, checkpointed, fused_calls):
    """Two calls a layer; one where the keys are those of an earlier one."""
    model, batch = shared_keys(name), batch_of("left-padded")
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    report = apply_unchanged(model, batch, {**LAYERS, "attention": False}, floor=1e-6)
    assert [row.kernel for row in report if row.component == "rope"] == [FUSED]
    assert len(fused_calls) == calls * (1 + checkpointed)


def test_a_frozen_norm_of_one_tensor(fused_calls):
    model, batch = shared_keys("E2B"), batch_of("full")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_norm" not in name and "layers.2.self_attn.q_proj" not in name)
    apply_unchanged(model, batch, {**LAYERS, "attention": False}, floor=1e-6)
    assert len(fused_calls) == 9


def test_autocast(fused_calls):
    model = TINY_MODELS["qwen3"]()
    batch = tiny_batch("qwen3", model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss_and_gradients(model, batch)
        apply_liger_kernel(model, LAYERS)
        got = loss_and_gradients(model, batch)
    assert len(fused_calls) == 2
    assert all(relative(value, got[name]) <= 0.02 for name, value in expected.items())


def test_compiled_as_one_graph(fused_calls):
    torch.compiler.reset()
    model = TINY_MODELS["gemma3_text"]()
    batch = tiny_batch("gemma3_text", model)
    batch.pop("labels")

    def run(forward):
        model.zero_grad()
        logits = forward(**batch, use_cache=False).logits
        logits.square().mean().backward()
        return {"logits": logits.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}

    expected = run(model)
    apply_liger_kernel(model, LAYERS)
    got = run(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert len(fused_calls) == 2
    assert all(relative(value, got[name]) <= 1e-4 for name, value in expected.items())


def test_hooks_see_the_normalised_tensor(fused_calls):
    model = TINY_MODELS["qwen3"]()
    batch = tiny_batch("qwen3", model)
    seen = []
    norm = model.model.layers[0].self_attn.q_norm
    norm.register_forward_hook(lambda module, args, output: seen.append(output))
    expected = loss_and_gradients(model, batch)
    apply_liger_kernel(model, LAYERS)
    assert_same(loss_and_gradients(model, batch), expected)
    assert len(fused_calls) == 1  # the other layer's
    assert type(seen[1]) is torch.Tensor
    torch.testing.assert_close(seen[1], seen[0])
    with nn.modules.module.register_module_forward_hook(lambda module, args, output: None):
        assert_same(loss_and_gradients(model, batch), expected)
    assert len(fused_calls) == 1


def test_lora_and_trained_norms(fused_calls):
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj"], modules_to_save=["k_norm"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(TINY_MODELS["qwen3"](), config)
    batch = tiny_batch("qwen3", model)
    expected = loss_and_gradients(model, batch)
    apply_liger_kernel(model, LAYERS)
    assert any("k_norm" in name for name in expected)
    assert_same(loss_and_gradients(model, batch), expected)
    revert_liger_kernel(model)
    plain = TINY_MODELS["qwen3"]()
    apply_liger_kernel(plain, LAYERS)
    torch.manual_seed(0)
    fused_calls.clear()
    assert_same(loss_and_gradients(peft.get_peft_model(plain, config), batch), expected)


def test_copies_use_their_own_weights(fused_calls):
    model = TINY_MODELS["qwen3"]()
    batch = tiny_batch("qwen3", model)
    apply_liger_kernel(model, LAYERS)
    first = model(**batch).loss
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_norm.weight.mul_(2)
    assert not torch.equal(other(**batch).loss, first)
    assert torch.equal(model(**batch).loss, first)
    assert len(fused_calls) == 6


@pytest.mark.skipif(is_kernels_available(), reason="with the `kernels` library, no model of transformers has a pickle")
def test_a_stored_model_computes_the_same():
    model = TINY_MODELS["qwen3"]()
    batch = tiny_batch("qwen3", model)
    apply_liger_kernel(model, LAYERS)
    first = model(**batch).loss
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    torch.testing.assert_close(torch.load(stored, weights_only=False)(**batch).loss, first)


@pytest.mark.parametrize("switched_off", ["rms_norm", "rope"])
def test_nothing_is_fused_without_either(switched_off, fused_calls):
    model = TINY_MODELS["qwen3"]()
    batch = tiny_batch("qwen3", model)
    expected = loss_and_gradients(model, batch)
    report = apply_liger_kernel(model, {**LAYERS, switched_off: False})
    assert FUSED not in {row.kernel for row in report}
    assert_same(loss_and_gradients(model, batch), expected)
    assert not fused_calls


def test_other_callers_of_the_norm_get_a_tensor():
    model = TINY_MODELS["qwen3"]()
    norm = model.model.layers[0].self_attn.q_norm
    x = torch.randn(2, 3, 8)
    expected = norm(x)
    apply_liger_kernel(model, LAYERS)
    with pytest.raises(ValueError):  # noqa: PT011 (the model's own error, from the middle of an attention)
        model.model.layers[0].self_attn(torch.randn(1, 3, 32), position_embeddings=(), attention_mask=None)
    assert type(norm(x)) is torch.Tensor
    torch.testing.assert_close(norm(x), expected)
    attention = model.model.layers[0].self_attn
    assert inspect.signature(attention.forward) == inspect.signature(functools.partial(type(attention).forward, None))


def test_frozen_norms():
    model = TINY_MODELS["qwen3"]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_norm" not in name)
    batch = tiny_batch("qwen3", model)
    apply_unchanged(model, batch, LAYERS)
    assert not any("q_norm" in name for name in loss_and_gradients(model, batch))


class Attention(nn.Module):
    """Shaped as Hugging Face's; `between` is what happens to the queries after their norm."""

    def __init__(self, between="nothing"):
        super().__init__()
        self.between = between
        self.head_dim = 8
        self.q_proj, self.k_proj = nn.Linear(12, 32), nn.Linear(12, 16)
        self.q_norm, self.k_norm = Norm(), Norm()

    def forward(self, hidden_states, position_embeddings, attention_mask=None):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        if self.between == "scale":
            q = q * 0.5
        if self.between == "scale long sequences" and hidden_states.shape[1] > 4:
            q = q.mul_(0.5)
        if self.between == "no positions of long sequences" and hidden_states.shape[1] > 4:
            return torch.cat((q, k), dim=1)
        if self.between == "norm after":
            q, k = apply_rotary_pos_emb(q, q + k.mean(), *position_embeddings)
        else:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return torch.cat((q, k), dim=1)


def run(module):
    generator = torch.Generator().manual_seed(0)
    hidden, cos, sin = (torch.randn(2, 5, size, generator=generator) for size in (12, 8, 8))
    module.zero_grad()
    y = module(hidden, (cos, sin))
    y.square().sum().backward()
    return {"y": y.detach(), **{name: p.grad.clone() for name, p in module.named_parameters()}}


@pytest.mark.parametrize(
    ("between", "kernel", "fused"),
    [
        ("nothing", FUSED, 1),
        ("scale", "rope", 0),
        ("norm after", "rope", 0),
        ("scale long sequences", FUSED, 0),
        ("no positions of long sequences", FUSED, 0),
    ],
)
def test_attention_of_another_shape(between, kernel, fused, fused_calls):
    module = Attention(between)
    expected = run(module)
    report = apply_liger_kernel(module, LAYERS)
    assert {row.kernel for row in report if row.component == "rope"} == {kernel}
    assert_same(run(module), expected)
    assert len(fused_calls) == fused
    revert_liger_kernel(module)
    assert_same(run(module), expected)


def test_pending_norm_is_the_tensor():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 4, 8, requires_grad=True), torch.rand(8, requires_grad=True)
    expected = rms_norm(x, weight, 1e-5)

    def pending():
        return PendingNorm(x, weight, (1e-5, 0.0, "llama"))

    y = pending().transpose(1, 2)
    assert isinstance(y, PendingNorm)
    assert y.is_pending
    same = expected.transpose(1, 2)
    for got, right in [
        (pending() * 2, expected * 2),
        (2 - pending(), 2 - expected),
        (pending()[0, ..., :4], expected[0, ..., :4]),
        (pending() @ weight.detach(), expected @ weight.detach()),
        (torch.cat([pending(), expected]), torch.cat([expected, expected])),
        (torch.nn.functional.silu(input=pending()), torch.nn.functional.silu(expected)),
        (pending().transpose(2, -1), expected.transpose(2, -1)),
        (y.contiguous(), same),
        (expected.transpose(1, 2) + y, same + same),
    ]:
        torch.testing.assert_close(got, right)
    assert (y.shape, y.dtype, y.dim(), len(y)) == (same.shape, same.dtype, 4, 2)
    assert not y.is_pending
    assert y.build() is y.build()
    gradients = torch.autograd.grad(pending().square().sum(), (x, weight))
    for got, right in zip(gradients, torch.autograd.grad(expected.square().sum(), (x, weight))):
        torch.testing.assert_close(got, right)


def test_a_change_in_place_is_seen_by_the_views():
    base = PendingNorm(torch.randn(2, 3, 4, 8), torch.rand(8), (1e-5, 0.0, "llama"))
    view = base.transpose(1, 2)
    base.build().zero_()
    assert not view.build().any()
