"""PEFT's LoRA layers patched: values and gradients are PEFT's own, in every state PEFT can bring a layer into."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.helpers import disable_input_dtype_casting
from torch import nn

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.configs.kernel_config import KERNEL_KEYS
from liger_trainer.head import warn_once
from liger_trainer.patching.lora.operands import adapted_layer
from tests.calls import saved_tensors
from tests.patching import comparisons
from tests.patching.comparisons import loss_and_gradients
from tests.tiny_models import TINY_MODELS, tiny_batch

NONE = dict.fromkeys(KERNEL_KEYS, False)
LORA = {**NONE, "lora": True}
MLPS = {**LORA, "swiglu": True, "geglu": True}
assert_same = functools.partial(comparisons.assert_same, tolerance=2e-5, floor=1e-8)
apply_unchanged = functools.partial(comparisons.apply_unchanged, tolerance=2e-5, floor=1e-8)


class Projection(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.proj = nn.Linear(16, 24, bias=bias)

    def forward(self, x):
        return self.proj(x)


def layer(with_bias=False, dtype=torch.float64, **options):
    torch.manual_seed(0)
    config = LoraConfig(**{"target_modules": ["proj"], "init_lora_weights": False, "r": 4, "lora_alpha": 6, **options})
    return get_peft_model(Projection(with_bias).to(dtype), config, autocast_adapter_dtype=dtype == torch.bfloat16)


def results(model, x):
    """Values and all gradients, from one state of the random generator."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    y = model(x)
    y.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    (dx,) = torch.autograd.grad(model(x).sum(), x)
    return {"y": y.detach(), "dx": dx, **gradients}


def assert_patched_is_native(model, fused, calls=2, x=None):
    x = torch.randn(2, 5, 16, dtype=torch.float64).requires_grad_() if x is None else x
    revert_liger_kernel(model)
    expected = results(model, x)
    (row,) = apply_liger_kernel(model, LORA)
    assert row.applied, row.reason
    fused.clear()
    got = results(model, x)
    assert len(fused) == calls
    assert got.keys() == expected.keys()
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("options", [{}, {"r": 1}, {"use_rslora": True}, {"lora_alpha": 3}], ids=str)
@pytest.mark.parametrize("bias", ["none", "all", None])
def test_a_layer(fused, options, bias):
    model = layer(bias is not None, **options, bias=bias or "none")
    assert_patched_is_native(model, fused)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == (3 if bias == "all" else 2)


def test_a_trained_base(fused):
    model = layer(True)
    model.requires_grad_(True)
    assert_patched_is_native(model, fused)


@pytest.mark.parametrize("dropout", [0.0, 0.3, 0.9])
def test_dropout_draws_the_masks_that_peft_draws(fused, dropout):
    model = layer(lora_dropout=dropout)
    model.train()
    assert_patched_is_native(model, fused)
    model.eval()
    assert_patched_is_native(model, fused)


def test_several_adapters(fused):
    model = layer(lora_dropout=0.2)
    model.add_adapter("second", LoraConfig(target_modules=["proj"], init_lora_weights=False, r=3))
    for active in (["default"], ["second"], ["default", "second"]):
        model.base_model.set_adapter(active)
        assert_patched_is_native(model, fused)


def test_disabling_and_merging_in_the_middle(fused):
    model = layer()
    apply_liger_kernel(model, LORA)
    x = torch.randn(3, 16, dtype=torch.float64)
    adapted, base = model(x), model.base_model.model.proj.base_layer(x)
    assert fused == [1]
    with model.disable_adapter():
        torch.testing.assert_close(model(x), base)
    model.merge_adapter()
    torch.testing.assert_close(model(x), adapted)
    with model.disable_adapter():  # unmerges
        torch.testing.assert_close(model(x), base)
    assert fused == [1]
    torch.testing.assert_close(model(x), adapted)
    assert fused == [1, 1]


@pytest.mark.parametrize("part", ["base_layer", "lora_A", "lora_B", "lora_dropout"])
def test_hooks_on_a_part_are_called(fused, part):
    model = layer()
    apply_liger_kernel(model, LORA)
    module = model.base_model.model.proj.get_submodule(part)
    module, seen = module if part == "base_layer" else module["default"], []
    handle = module.register_forward_hook(lambda *_: seen.append(1))
    model(torch.randn(3, 16, dtype=torch.float64))
    assert (seen, fused) == ([1], [])
    handle.remove()
    model(torch.randn(3, 16, dtype=torch.float64))
    assert (seen, fused) == ([1], [1])


def test_mixed_batches_are_peft_s(fused):
    model = layer().eval()
    model.add_adapter("second", LoraConfig(target_modules=["proj"], init_lora_weights=False, r=3))
    x = torch.randn(2, 16, dtype=torch.float64)
    names = {"adapter_names": ["second", "__base__"]}
    expected = model(x, **names)
    apply_liger_kernel(model, LORA)
    torch.testing.assert_close(model(x, **names), expected)
    assert fused == []


@pytest.mark.parametrize(
    ("options", "says"), [({"use_dora": True}, "another kind"), ({"target_modules": ["conv"]}, None)], ids=str
)
def test_what_is_left_alone(fused, options, says):
    model = Projection(False).double()
    model.conv = nn.Conv1d(16, 16, 1)
    model = get_peft_model(model, LoraConfig(**{"target_modules": ["proj"], **options}))
    report = apply_liger_kernel(model, LORA)
    assert not report.applied
    assert [row.reason for row in report] == [] if says is None else says in report.rows[0].reason


def test_a_bias_of_b_is_peft_s(fused):
    model = layer(True, lora_bias=True)
    assert_patched_is_native(model, fused, calls=0)
    model.add_adapter("second", LoraConfig(target_modules=["proj"], init_lora_weights=False, r=3))
    model.base_model.set_adapter(["second", "default"])
    assert_patched_is_native(model, fused, calls=0)


def test_a_scaling_that_is_trained_is_peft_s(fused):
    model, x = layer(), torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    apply_liger_kernel(model, LORA)
    scaling = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    gradients = []
    for patched in (True, False):
        fused.clear()
        if not patched:
            revert_liger_kernel(model)
        model.proj.scaling["default"], scaling.grad = scaling, None
        model(x).square().sum().backward()
        gradients.append(scaling.grad)
        assert not fused
    assert torch.equal(*gradients)


def test_a_layer_without_an_active_adapter_is_peft_s():
    model = layer()
    apply_liger_kernel(model, LORA)
    proj, x = model.base_model.model.proj, torch.randn(3, 16, dtype=torch.float64)
    proj.set_adapter([])
    assert adapted_layer(proj, x) is None
    torch.testing.assert_close(model(x), proj.base_layer(x))


def test_an_input_of_another_dtype_is_cast_by_autocast_alone(fused):
    model, x = layer(dtype=torch.bfloat16), torch.randn(3, 16)
    apply_liger_kernel(model, LORA)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        with disable_input_dtype_casting(model):
            model(x)
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)
    assert fused == [1]


def test_off_and_reverted():
    model = layer()
    (row,) = apply_liger_kernel(model, NONE)
    assert (row.component, row.reason) == ("lora", "switched off in liger_kernel_config")
    keys = list(model.state_dict())
    (row,) = apply_liger_kernel(model, LORA)
    assert (row.target, row.kernel, row.count) == ("lora.Linear", "lora_linear", 1)
    assert row.probe_error < 1e-5
    assert list(model.state_dict()) == keys
    x = torch.randn(3, 16, dtype=torch.float64)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    torch.testing.assert_close(twin(x), model(x))
    assert revert_liger_kernel(model) == revert_liger_kernel(twin) == 1
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), model(x))


# ---------------------------------------------------------------------------------------------------------------------
# Precision and memory
# ---------------------------------------------------------------------------------------------------------------------


def mean_error(results, truth):
    """Relative, over all results: that of one with few numbers is mostly chance."""
    return sum(float((results[name] - true).norm() / true.norm()) for name, true in truth.items()) / len(truth)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_half_precision_is_as_exact_as_under_autocast(fused, autocast, dtype):
    """The Trainer's setting. Without it PEFT multiplies fp32 adapters with an fp32 copy of x, and ours does not."""
    model = layer(True, dtype)
    with torch.no_grad():  # an adapter as training makes it: a correction
        model.base_model.model.proj.lora_B["default"].weight.mul_(0.05)
    x = torch.randn(64, 16).to(dtype).requires_grad_()
    truth = results(copy.deepcopy(model).double(), x.detach().double().requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(model, x)
    apply_liger_kernel(model, LORA)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = results(model, x)
    assert len(fused) == 2
    for name in truth:
        assert got[name].dtype == (expected[name].dtype if autocast or name != "y" else dtype), name
    assert mean_error(got, truth) <= 1.25 * mean_error(expected, truth)


def saved_by(model, x):
    """The tensors saved for the backward that are no parameter's, one for each memory."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with saved_tensors() as saved:
        model(x).sum()
    kept = {each.untyped_storage().data_ptr(): each for each in saved}
    return [kept[each] for each in kept.keys() - parameters]


def test_no_copy_of_an_activation_is_saved():
    model = layer(dtype=torch.bfloat16)
    assert model.base_model.model.proj.lora_A["default"].weight.dtype == torch.float32
    x = torch.randn(40, 16, dtype=torch.bfloat16, requires_grad=True)
    assert max(tensor.element_size() for tensor in saved_by(model, x)) == 4
    apply_liger_kernel(model, LORA)
    assert sum(tensor.nbytes for tensor in saved_by(model, x)) == x.nbytes + 40 * 4 * 2  # and z, of rank 4


# ---------------------------------------------------------------------------------------------------------------------
# Whole models
# ---------------------------------------------------------------------------------------------------------------------


def adapted(family, **options):
    torch.manual_seed(0)
    model = TINY_MODELS[family]()
    config = LoraConfig(**{"target_modules": "all-linear", "init_lora_weights": False, **options})
    return get_peft_model(model, config).train(), tiny_batch(family, model)


@pytest.mark.parametrize("config", [LORA, MLPS, {}], ids=["layers", "MLPs", "all"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "phi3"])
def test_all_linear(fused, family, config):
    model, batch = adapted(family, lora_dropout=0.1)
    expected = loss_and_gradients(model, batch)
    assert any(row.component == "lora" for row in apply_liger_kernel(model, config).applied)
    assert_same(loss_and_gradients(model, batch), expected)
    assert (2 in fused) == (config != LORA and family != "phi3")  # gate and up
    assert (3 in fused) == (family != "phi3")  # queries, keys and values
    revert_liger_kernel(model)
    fused.clear()
    assert_same(loss_and_gradients(model, batch), expected)
    assert fused == []


def test_a_hook_on_one_of_q_k_and_v_and_adapters_on_two(fused):
    model, batch = adapted("llama", target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    expected, seen = loss_and_gradients(model, batch), []
    apply_liger_kernel(model, LORA)
    assert_same(loss_and_gradients(model, batch), expected)
    assert fused == [2, 2]
    model.base_model.model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda *_: seen.append(1))
    assert_same(loss_and_gradients(model, batch), expected)
    assert (fused[2:], seen) == ([1, 1, 2], [1])


def test_an_attention_that_gives_its_projections_other_tensors(fused):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, hidden_states, position_embeddings=None, attention_mask=None):
            return self.q_proj(hidden_states) + self.k_proj(hidden_states * 1) + self.v_proj(hidden_states)

    model = get_peft_model(Attention(), LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"]))
    apply_liger_kernel(model, LORA)
    model(torch.randn(2, 16))
    assert fused == [1, 1, 1]


@pytest.mark.parametrize("targets", [["gate_proj"], ["up_proj", "q_proj"], ["down_proj"], ["gate_proj", "down_proj"]])
def test_adapters_on_a_part_of_the_mlp(targets):
    model, batch = adapted("llama", target_modules=targets, lora_dropout=0.1)
    apply_unchanged(model, batch, MLPS)


def test_adapters_that_are_added_after_patching(fused):
    model = TINY_MODELS["llama"]()
    apply_liger_kernel(model, MLPS)
    model = get_peft_model(model, LoraConfig(target_modules=["gate_proj", "up_proj"], init_lora_weights=False))
    batch = tiny_batch("llama", model)
    fused.clear()
    got = loss_and_gradients(model, batch)
    assert set(fused) == {2}
    revert_liger_kernel(model)
    assert_same(got, loss_and_gradients(model, batch))


@pytest.mark.parametrize("change", ["lora_variant", "scaling", "subclass"])
def test_a_changed_layer_in_a_gated_mlp_is_left_alone_with_one_warning(change, fused, caplog, monkeypatch):
    """As after an update of PEFT. A subclass is called as any module is, and needs no warning."""
    monkeypatch.setattr(warn_once, "_said", set())
    model, batch = adapted("llama")
    gates = [module for name, module in model.named_modules() if name.endswith("gate_proj")]
    expected = loss_and_gradients(model, batch)
    for gate in gates:
        kind = type(gate)
        gate.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__})
        if change == "subclass":
            gate.__class__.__module__ = __name__
        else:
            values = getattr(gate, change)
            delattr(gate, change)
            gate.__class__.forward = functools.partialmethod(_forward_of_another_peft, change, values)
    apply_liger_kernel(model, MLPS)
    fused.clear()
    assert_same(loss_and_gradients(model, batch), expected)
    warnings = [record.message for record in caplog.records if "of PEFT has no" in record.message]
    assert len(warnings) == (change != "subclass")
    assert fused == [3, 1, 1, 1] * len(gates)  # queries, keys and values as one; then the output, up and down


def _forward_of_another_peft(layer, name, values, x):
    """PEFT's forward, with the attribute that the layer has lost."""
    restored = copy.copy(layer)
    restored.__class__ = type(layer).__mro__[1]
    restored.__dict__ = {**layer.__dict__, name: values}
    return restored(x)


def test_hooks_on_gate_and_up_are_called(fused):
    model, batch = adapted("llama")
    expected, seen = loss_and_gradients(model, batch), []
    apply_liger_kernel(model, MLPS)
    for name, module in model.named_modules():
        if name.endswith(("up_proj", "down_proj")):
            module.register_forward_hook(lambda *_: seen.append(1))
    assert_same(loss_and_gradients(model, batch), expected)
    assert len(seen) == 4
    assert set(fused) == {1, 3}  # but not 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_and_autocast(autocast, reentrant):
    model, batch = adapted("llama", lora_dropout=0.1)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss_and_gradients(model, batch)

    expected, exact = run(), loss_and_gradients(model, batch)
    apply_liger_kernel(model, MLPS)
    got = run()
    if not autocast:
        assert_same(got, expected)
        return
    assert mean_error(got, exact) <= 2.5 * mean_error(expected, exact)


def test_merged_and_disabled_in_a_model():
    model, batch = adapted("qwen3")
    model.eval()
    apply_liger_kernel(model, MLPS)
    before = model(**batch).logits
    model.merge_adapter()
    torch.testing.assert_close(model(**batch).logits, before, rtol=1e-3, atol=1e-3)
    model.unmerge_adapter()
    with model.disable_adapter():
        assert not torch.allclose(model(**batch).logits, before, atol=1e-2)
    torch.testing.assert_close(model(**batch).logits, before, rtol=1e-3, atol=1e-3)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(**batch).logits, before, rtol=1e-3, atol=1e-3)


def test_an_adapter_on_the_head_is_the_head_s():
    model, batch = adapted("llama", target_modules=["q_proj", "lm_head"])
    expected = loss_and_gradients(model, batch)
    report = apply_liger_kernel(model)
    assert [row.count for row in report.applied if row.component == "lora"] == [2]
    assert_same(loss_and_gradients(model, batch), expected)
