"""The `tiled_mlp` switch: gated MLPs of whole models in tiles, with adapters, checkpoints and offloading hooks."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.autograd.graph import saved_tensors_hooks

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.configs.kernel_config import KERNEL_KEYS
from liger_trainer.patching import mlps
from liger_trainer.tiling.tiled_mlp import tiled_mlp
from tests.patching import toys
from tests.patching.comparisons import loss_and_gradients
from tests.patching.test_mlps import assert_same
from tests.tiny_models import TINY_MODELS, tiny_batch

MLPS = {**dict.fromkeys(KERNEL_KEYS, False), "swiglu": True, "geglu": True}
TILED = {**MLPS, "tiled_mlp": True}
TILES = 3


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    """Tiny models fit into one tile; these get three."""
    monkeypatch.setattr(mlps, "tiled_mlp", lambda forward, module, x, _: tiled_mlp(forward, module, x, TILES))
    torch.manual_seed(0)


def with_adapters(model, **options):
    everywhere = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(target_modules=everywhere, init_lora_weights=False, **options))


@pytest.mark.parametrize("family", ["llama", "gemma", "gemma3", "phi3", "glm4"])
def test_loss_and_gradients_are_the_models(family):
    model = TINY_MODELS[family]()
    batch = tiny_batch(family, model)
    expected = loss_and_gradients(model, batch)
    (row,) = apply_liger_kernel(model, TILED).applied
    assert row.kernel.endswith(", in tiles")
    assert row.probe_error < 1e-5
    assert_same(loss_and_gradients(model, batch), expected)
    assert revert_liger_kernel(model) == row.count
    assert_same(loss_and_gradients(model, batch), expected)


def test_it_is_off_by_default_and_follows_the_component():
    model = TINY_MODELS["llama"]()
    assert [row.kernel for row in apply_liger_kernel(model, MLPS).applied] == ["swiglu"]
    assert not apply_liger_kernel(model, {**TILED, "swiglu": False}).applied
    (row,) = apply_liger_kernel(model, {**TILED, "recompute_mlp": False}).applied
    assert row.kernel == "swiglu, product saved, in tiles"


def test_what_is_no_gated_mlp_is_left_alone():
    (row,) = apply_liger_kernel(toys.Toy(mlp=toys.ClampedGate()), TILED)
    assert not row.applied


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("patched_first", [True, False])
def test_adapters_take_part_and_are_trained(dropout, patched_first, fused):
    kernels = {**TILED, "lora": fused}
    model = TINY_MODELS["llama"]()
    if patched_first:
        apply_liger_kernel(model, kernels)
    model = with_adapters(model, lora_dropout=dropout).train()
    if not patched_first:
        apply_liger_kernel(model, kernels)
    batch = tiny_batch("llama", model)
    ours = loss_and_gradients(model, batch)
    assert any("mlp.down_proj.lora_B" in name for name in ours)
    if dropout:  # other random numbers than without tiles, but the backward's are the forward's
        assert_same(loss_and_gradients(model, batch), ours)
        return
    revert_liger_kernel(model)
    assert_same(ours, loss_and_gradients(model, batch))
    apply_liger_kernel(model, kernels)
    with model.disable_adapter(), torch.no_grad():  # the reference of DPO and GRPO
        without = model(**batch).loss
    torch.testing.assert_close(without, TINY_MODELS["llama"]()(**batch).loss)


@pytest.mark.parametrize("fused", [False, True])
def test_a_tile_drops_in_its_backward_what_it_dropped_in_its_forward(fused):
    model = with_adapters(toys.Toy(mlp=toys.MLP()), lora_dropout=0.3).double().train()
    apply_liger_kernel(model, {**TILED, "lora": fused})
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def seeded(*_):
        torch.manual_seed(1)
        return model.base_model.model.mlp(x)

    assert len(adapters) == 6
    assert not torch.equal(seeded(), model.base_model.model.mlp(x))
    assert torch.autograd.gradcheck(seeded, (x, *adapters), fast_mode=True)


def test_hooks_of_a_backward_alone_change_no_gradient():
    """With them adapters and their layers are called, which in the forward were one operator."""
    model = get_peft_model(TINY_MODELS["llama"](), LoraConfig(target_modules=["gate_proj", "up_proj"]))
    model.requires_grad_(True)
    batch = tiny_batch("llama", model)
    expected = loss_and_gradients(model, batch)
    apply_liger_kernel(model, {**TILED, "lora": True})
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
        loss.backward()
    assert_same({"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}, expected)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_in_a_tile_are_one_operator(monkeypatch, checkpointed):
    """As without tiles: PEFT's own forward casts every tile to fp32 and back."""
    calls = []
    operator = mlps.lora_mlp
    monkeypatch.setattr(mlps, "lora_mlp", lambda *a, **k: calls.append(a[0].shape) or operator(*a, **k))
    model = with_adapters(TINY_MODELS["llama"]()).train()
    batch = tiny_batch("llama", model)
    expected = loss_and_gradients(model, batch)
    apply_liger_kernel(model, {**TILED, "lora": True})
    if checkpointed:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    assert_same(loss_and_gradients(model, batch), expected)
    assert len(calls) == 2 * model.config.num_hidden_layers * TILES  # in the forward and in the backward
    assert sum(shape[:-1].numel() for shape in calls) == 2 * 2 * batch["input_ids"].numel()


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(("family", "runs"), [("llama", 2), ("gemma3", 3)])
def test_in_checkpointed_layers(family, runs, adapters):
    """Two forwards of an MLP that ends its layer, as in any checkpointed layer; three where a norm follows it."""
    model = TINY_MODELS[family]()
    model = (with_adapters(model) if adapters else model).train()
    batch = tiny_batch(family, model)
    expected = loss_and_gradients(model, batch)
    apply_liger_kernel(model, TILED)
    model.gradient_checkpointing_enable()
    if adapters:
        model.enable_input_require_grads()
    layers = model.config.get_text_config().num_hidden_layers
    rows = []
    for name, module in model.named_modules():
        if name.endswith("layers.0.mlp.gate_proj") and "vision" not in name:
            module.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[:-1].numel()))
    assert_same(loss_and_gradients(model, batch), expected)
    assert layers == 2
    assert len(rows) == runs * TILES
    assert sum(rows) == runs * batch["input_ids"].numel()


def test_hooks_that_offload_do_not_see_what_a_tile_saves():
    """They stay on around the backward too, as in TRL's trainers."""
    model = TINY_MODELS["llama"]()
    batch = tiny_batch("llama", model)
    expected = loss_and_gradients(model, batch)
    apply_liger_kernel(model, TILED)
    inner, seen = model.config.intermediate_size, []
    kept = {}

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            seen.append(tensor.shape[-1] if tensor.dim() else 0)
        kept[len(kept)] = tensor.clone()
        return len(kept) - 1

    with saved_tensors_hooks(pack, lambda key: kept[key]):
        ours = loss_and_gradients(model, batch)
    assert_same(ours, expected)
    assert seen
    assert inner not in seen


def test_generation_and_copies():
    model = TINY_MODELS["llama"]().eval()
    prompt = torch.randint(3, 120, (2, 5))
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    apply_liger_kernel(model, TILED)
    for one in (model, copy.deepcopy(model)):
        assert torch.equal(one.generate(prompt, max_new_tokens=6, do_sample=False), expected)
