"""Which layers of a model multiply in fp8, and what the report says of the others."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from liger_trainer import LigerTrainingArguments, apply_liger_kernel, revert_liger_kernel
from liger_trainer.kernels.fp8 import linear
from liger_trainer.patching import fp8

MODE = {"fp8": "rowwise_gw_hp"}
IDS = torch.arange(64).remainder(90)[None]


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 1024, "intermediate_size": 1040, "num_attention_heads": 8, "num_key_value_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, vocab_size=96)).bfloat16()


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(fp8, "LEAST_ROWS", 64)


@pytest.fixture(autouse=True)
def unpatched(model):
    yield
    revert_liger_kernel(model)


def rows(report):
    return {(row.kernel, row.reason): row.count for row in report if row.component == "fp8"}


def in_fp8(model):
    return [name for name, module in model.named_modules() if fp8.mode_of(module)]


def test_the_inner_layers_multiply_in_fp8(model):
    expected = model(input_ids=IDS, labels=IDS).loss
    report = apply_liger_kernel(model, MODE)
    ends = "the first and the last layer stay in bf16, unless `fp8_all_layers` is set"
    small = "fewer than 1024 features, for which fp8 does not pay"  # k and v
    assert rows(report) == {("fp8_linear (rowwise_gw_hp)", ""): 5, (None, ends): 14, (None, small): 2}
    names = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert in_fp8(model) == [f"model.layers.1.{name}" for name in names]
    loss = model(input_ids=IDS, labels=IDS).loss
    assert 0 < abs(loss - expected) < 0.01 * expected
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    model.zero_grad()
    revert_liger_kernel(model)
    assert in_fp8(model) == []


@pytest.mark.parametrize("mode", ["rowwise", "tensorwise"])
def test_the_mode_reaches_every_layer(model, mode, monkeypatch):
    used = []
    product = linear.product
    monkeypatch.setattr(linear, "product", lambda *operands: used.append(operands[3]) or product(*operands))
    apply_liger_kernel(model, {"fp8": mode})
    model(input_ids=IDS, labels=IDS)
    assert used == [mode] * 5  # the last one in the reference of `swiglu_down`
    layer = model.model.layers[1]
    assert fp8.mode_of(copy.deepcopy(layer.mlp.up_proj)) == mode
    assert fp8.mode_of(pickle.loads(pickle.dumps(layer.mlp.up_proj))) is None  # it has its class's forward


def test_all_layers_where_asked(model):
    report = apply_liger_kernel(model, {**MODE, "fp8_all_layers": True})
    small = "fewer than 1024 features, for which fp8 does not pay"
    assert rows(report) == {("fp8_linear (rowwise_gw_hp)", ""): 15, (None, small): 6}
    with pytest.raises(ValueError, match=r"'fp8_all_layers'\]` is True, but `fp8` is null"):
        apply_liger_kernel(model, {"fp8_all_layers": True})
    with pytest.raises(ValueError, match=r"'fp8_all_layers'.* it must be true or false"):
        apply_liger_kernel(model, {**MODE, "fp8_all_layers": "yes"})


def test_few_rows_stay_in_bf16(model, monkeypatch):
    apply_liger_kernel(model, MODE)
    layer = model.model.layers[1]
    x = torch.randn(64, 1024, dtype=torch.bfloat16)
    ours = layer.mlp(x), layer.self_attn.q_proj(x)
    monkeypatch.setattr(fp8, "LEAST_ROWS", 65)
    short = layer.mlp(x), layer.self_attn.q_proj(x)
    revert_liger_kernel(model)
    torch.testing.assert_close(short, (layer.mlp(x), layer.self_attn.q_proj(x)))
    for one, other in zip(ours, short):
        assert (one - other).norm() > 0.005 * other.norm()


def test_nothing_happens_unless_asked(model):
    assert rows(apply_liger_kernel(model)) == {}


def test_a_model_in_fp32_is_said(model, monkeypatch, caplog):
    monkeypatch.setattr("liger_trainer.head.warn_once._said", set())
    apply_liger_kernel(model, MODE)
    layer, x = model.model.layers[1].self_attn.q_proj, torch.randn(64, 1024)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert not caplog.messages
    wide = copy.deepcopy(layer).float()
    torch.testing.assert_close(wide(x), x @ wide.weight.t())
    assert "a layer multiplies torch.float32 by torch.float32, as without it" in caplog.text


def test_strict_asks_for_some_layer_in_fp8(model, monkeypatch):
    apply_liger_kernel(model, MODE, strict=True)
    monkeypatch.setattr(fp8, "LEAST_FEATURES", 4096)
    with pytest.raises(ValueError, match=r"fp8: 7 x Linear left alone, fewer than 4096 features"):
        apply_liger_kernel(model, MODE, strict=True)


def test_layers_with_adapters_stay(model):
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    report = apply_liger_kernel(adapted, MODE)
    assert rows(report)[None, "it has adapters; their bases are multiplied in bf16"] == 1
    adapted.unload()


def test_a_device_without_fp8_is_said(model, monkeypatch):
    monkeypatch.setattr(fp8, "has_fp8", lambda device: False)
    reasons = [reason for _, reason in rows(apply_liger_kernel(model, MODE))]
    assert any(reason.startswith("cpu has no fp8 matmuls") for reason in reasons)


def test_another_recipe_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="`fp8` is 'e5m2'; it must be 'rowwise', 'rowwise_gw_hp', 'tensorwise' or null"
    ):
        LigerTrainingArguments(output_dir=str(tmp_path), fp8="e5m2", use_cpu=True)
    with pytest.raises(ValueError, match="MLPs in tiles multiply in the model's dtype"):
        apply_liger_kernel(torch.nn.Linear(1, 1), {**MODE, "tiled_mlp": True})
    switches = {"fp8_all_layers": True}
    args = LigerTrainingArguments(output_dir=str(tmp_path), fp8="rowwise", liger_kernel_config=switches, use_cpu=True)
    assert args.kernel_config().fp8 == "rowwise"
    assert args.kernel_config().fp8_all_layers
