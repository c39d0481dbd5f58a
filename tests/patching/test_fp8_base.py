"""Bases of LoRA layers that are stored in fp8: which layers, what they compute, and what is refused afterwards."""

import copy
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from liger_trainer import apply_liger_kernel
from liger_trainer.kernels.fp8.row_cast import cast_rows_reference
from liger_trainer.kernels.fp8.stored import dequantize
from liger_trainer.kernels.lora import lora as operators
from liger_trainer.patching.lora import fp8_base, low_bit
from liger_trainer.patching.lora.fp8_base import store_base_in_fp8
from liger_trainer.patching.lora.low_bit import Fp8Linear
from tests.patching.comparisons import loss_and_gradients
from tests.tiny_models import TINY_MODELS, tiny_batch

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
STORED = "fp8 (e4m3), a scale for each row"
CPU = torch.device("cpu")


def adapted(family="llama", dtype=torch.bfloat16, **lora):
    model = TINY_MODELS[family](**SIZES).to(dtype)
    torch.manual_seed(0)
    config = {"target_modules": "all-linear", "init_lora_weights": False, "r": 4, **lora}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config)).train()


def layers_of(model):
    return model.get_base_model().model.layers


def counts(rows):
    assert {row.component for row in rows} == {"fp8_base"}
    return {row.kernel or row.reason: row.count for row in rows}


class OfRoundedRows(torch.autograd.Function):
    """What a layer with a weight in fp8 computes: inputs and gradients are rounded to fp8 row by row."""

    @staticmethod
    def forward(ctx, x, stored, bias):
        ctx.stored = stored
        result = rounded(x) @ dequantize(stored, torch.float32).T
        return (result if bias is None else result + bias.bfloat16()).bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        codes, scales = ctx.stored
        dx = rounded(dy * scales.T) @ codes.view(torch.float8_e4m3fn).float()
        return dx.bfloat16().to(dy.dtype), None, None


def rounded(x):
    codes, scales = cast_rows_reference(x.reshape(-1, x.shape[-1]))
    return (codes.float() * scales).view(x.shape)


class RoundedLinear(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.weight, self.stored, self.bias = layer.codes, layer.stored, layer.bias  # PEFT looks at a `weight`

    def forward(self, x):
        return OfRoundedRows.apply(x, self.stored, self.bias)


def on_rounded_rows(model):
    """A copy of `model` that computes in fp32 what the layers in fp8 are to compute."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Fp8Linear):
                setattr(module, name, RoundedLinear(child))
    return model


def assert_near(got, expected):
    assert got.keys() == expected.keys()
    ours, theirs = (
        torch.cat([value.flatten().float() for name, value in sorted(values.items()) if name != "loss"])
        for values in (got, expected)
    )
    assert float(got["loss"]) == pytest.approx(float(expected["loss"]), rel=5e-3)
    assert (ours - theirs).norm() < 0.23 * theirs.norm()  # four times the worst of 200 seeds


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "phi3"])
def test_every_linear_layer_of_the_decoder(family, monkeypatch):
    model, calls = adapted(family, torch.float32), []
    batch, linears = tiny_batch(family, model), 4 if family == "phi3" else 7
    rows = store_base_in_fp8(model, CPU)
    assert counts(rows) == {STORED: linears * len(layers_of(model))}
    rounded = on_rounded_rows(model)
    expected = loss_and_gradients(rounded, batch)
    assert_near(loss_and_gradients(model, batch), expected)  # PEFT's own forward
    native = operators._lora_linears
    monkeypatch.setattr(operators, "_lora_linears", lambda *args: calls.append(len(args[1])) or native(*args))
    report = apply_liger_kernel(model)
    assert [row.kernel for row in report if row.target == "lora.Linear"] == ["lora_linear (fp8)"]
    assert_near(loss_and_gradients(model, batch), expected)
    assert set(calls) == ({1} if family == "phi3" else {1, 2, 3})  # with gate and up, and queries, keys and values


def test_a_weight_is_freed_before_the_next_is_cast(monkeypatch):
    model = adapted()
    weights = [weakref.ref(m.base_layer.weight) for m in model.modules() if hasattr(m, "base_layer")]
    alive, native = [], low_bit.store
    monkeypatch.setattr(
        low_bit, "store", lambda weight: alive.append(sum(w() is not None for w in weights)) or native(weight)
    )
    bytes_before = sum(p.numel() * p.element_size() for p in layers_of(model).parameters() if not p.requires_grad)
    store_base_in_fp8(model, CPU)
    assert alive == list(range(len(weights), 0, -1))
    bytes_after = sum(p.numel() * p.element_size() for p in layers_of(model).parameters() if not p.requires_grad)
    stored = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    assert bytes_before - bytes_after == sum(m.codes.numel() - 4 * m.scales.numel() for m in stored)


def test_a_second_time_nothing_changes():
    model = adapted()
    rows = store_base_in_fp8(model, CPU)
    stored = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    assert store_base_in_fp8(model, CPU) == rows
    assert [module for module in model.modules() if isinstance(module, Fp8Linear)] == stored


def test_casts_of_the_model_change_neither_codes_nor_scales():
    model = adapted()
    store_base_in_fp8(model, CPU)
    base = layers_of(model)[0].mlp.up_proj.base_layer
    codes, scales = base.codes.clone(), base.scales.clone()
    for cast in (copy.deepcopy(model).half(), model.type(torch.float64), model.float()):
        again = layers_of(cast)[0].mlp.up_proj.base_layer
        assert torch.equal(again.codes, codes)
        assert torch.equal(again.scales, scales)
        assert (again.codes.dtype, again.scales.dtype) == (torch.uint8, torch.float32)


def test_further_adapters_go_where_the_base_is():
    model = adapted(target_modules=["q_proj"])
    store_base_in_fp8(model, CPU)
    layer = layers_of(model.to("meta"))[0].self_attn.q_proj
    device, dtype = layer._get_base_layer_device_and_dtype(layer.base_layer)  # as PEFT asks for further adapters
    assert (device.type, dtype) == ("meta", torch.float32)


def test_the_model_without_its_adapters_and_in_a_generation():
    model = adapted(dtype=torch.float32)
    store_base_in_fp8(model, CPU)
    rounded = on_rounded_rows(model)
    apply_liger_kernel(model)
    ids = torch.arange(3, 12)[None]
    with model.disable_adapter(), rounded.disable_adapter(), torch.no_grad():
        got, expected = model(input_ids=ids).logits, rounded(input_ids=ids).logits
    assert (got - expected).norm() < 0.12 * expected.norm()
    generated = model.eval().generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 12)


def test_frozen_layers_without_adapters_are_stored_if_they_are_large(monkeypatch):
    model = adapted(dtype=torch.float32, target_modules=["q_proj", "v_proj"])
    few = f"no adapters and fewer than {fp8_base.LEAST_FEATURES} features"
    count = len(layers_of(model))
    assert counts(store_base_in_fp8(model, CPU)) == {STORED: 2 * count, few: 5 * count}
    monkeypatch.setattr(fp8_base, "LEAST_FEATURES", 64)
    assert counts(store_base_in_fp8(model, CPU))[STORED] > 5 * count
    batch, rounded = tiny_batch("llama", model), on_rounded_rows(model)
    apply_liger_kernel(model)
    assert_near(loss_and_gradients(model, batch), loss_and_gradients(rounded, batch))


def test_what_is_left_alone():
    model = adapted(modules_to_save=["k_proj"], target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "gate_proj"])
    model.add_adapter("dora", LoraConfig(target_modules=["o_proj"], use_dora=True))
    first, *_ = layers_of(model)
    first.mlp.up_proj.base_layer.weight.requires_grad_()
    first.mlp.gate_proj.base_layer.weight = nn.Parameter(torch.zeros(40, 64), requires_grad=False)
    first.self_attn.q_proj.base_layer.register_forward_hook(lambda *args: None)
    first.self_attn.v_proj.base_layer.weight = layers_of(model)[1].self_attn.v_proj.base_layer.weight
    found = counts(store_base_in_fp8(model, CPU))
    for reason in (
        "it is trained",
        "its weight is (40, 64); the sizes must be multiples of 16",
        "its forward is overridden by a hook",
    ):
        assert found[reason] == 1
    assert found["its weight is another module's too"] == 2
    layers = len(layers_of(model))
    assert found["its adapters (DoraLinearVariant) read the weight"] == layers
    assert found["it is part of PEFT's ModulesToSaveWrapper"] == layers


def test_stacked_experts_are_named():
    model = adapted("qwen3_moe", target_modules=["q_proj"])
    found = counts(store_base_in_fp8(model, CPU))
    assert found["stacked weights of experts stay as they are"] == 2 * len(layers_of(model))


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match=r"no linear layer of \w+ can be stored in fp8: its adapters \(DoraLinear"):
        store_base_in_fp8(adapted(use_dora=True), CPU)


def test_what_reads_the_weights_is_refused(tmp_path):
    model = adapted()
    store_base_in_fp8(model, CPU)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(RuntimeError, match="merge with `liger-trainer merge`"):
            merge()
    assert layers_of(model)[0].mlp.up_proj.weight.dtype == torch.float32  # in which a model's code may cast x
    with pytest.raises(RuntimeError, match="The values of `weight` are asked for, but this layer holds its weight as"):
        layers_of(model)[0].mlp.up_proj.merge()
    with pytest.raises(RuntimeError, match="The values of `weight` are asked for, but this layer holds its weight as"):
        model.add_adapter("dora", LoraConfig(target_modules=["o_proj"], use_dora=True))
    with pytest.raises(RuntimeError, match="Save the adapters"):
        model.get_base_model().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="Save the adapters"):
        model.unload().save_pretrained(tmp_path)
