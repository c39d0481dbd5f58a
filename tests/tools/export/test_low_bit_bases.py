"""Adapters on published bases in 8 bits and fewer are merged into the dequantised weights, or the base is refused."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.quantizers import auto
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from liger_trainer import load_packed
from liger_trainer.errors import UserError
from liger_trainer.packed.loading import dequantise
from liger_trainer.tools.export.merging import merge
from liger_trainer.tools.export.saved_run import find_run, load_model
from liger_trainer.trainers.checkpoints.saved_weights import FILE, write_base_quantization
from tests.low_bit import dense, write_fp8, write_mxfp4, write_unscaled
from tests.packed_checkpoints import FORMATS, write_dense, write_nested
from tests.tiny_models import TINY_MODELS
from tests.trainers.tiny import tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = torch.arange(3, 35)[None]


def run_on(folder, base):
    """Random adapters on the base in `folder`, as a run saves them."""
    torch.manual_seed(0)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    save(adapted, folder)
    return adapted.eval()


def save(adapted, folder):
    adapted.save_pretrained(folder / "run")
    file = folder / "run" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(folder / "base")}))
    tokenizer().save_pretrained(folder / "run")


@pytest.mark.parametrize("write", [write_fp8, write_mxfp4])
def test_adapters_are_merged_into_the_dequantised_weights(write, tmp_path):
    expected = write(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")  # a CPU dequantises it
    for name, value in (expected or {}).items():
        torch.testing.assert_close(base.get_parameter(name), value, rtol=2**-7, atol=0)
    adapted = run_on(tmp_path, base)
    merge(find_run(str(tmp_path / "run")), tmp_path / "merged", torch.float32, lambda line: None)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").eval()
    assert not hasattr(found.config, "quantization_config")
    assert {value.dtype for value in found.parameters()} == {torch.float32}
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, adapted.float()(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_adapters_on_a_packed_base_are_merged_into_what_it_decodes_to(name, tmp_path):
    meant = write_dense(tmp_path / "base", name)
    packed = load_packed(str(tmp_path / "base"), dtype=torch.bfloat16)
    torch.manual_seed(0)
    adapted = get_peft_model(packed, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    save(adapted, tmp_path)
    write_base_quantization(adapted, tmp_path / "run")
    proof = merge(find_run(str(tmp_path / "run")), tmp_path / "merged", torch.float32, lambda line: None)
    assert proof.saved <= proof.limit
    assert proof.effect > 0.1
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert not hasattr(found.config, "quantization_config")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    layer = adapted.base_model.model.model.layers[1].mlp.down_proj
    change = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    before = meant["model.layers.1.mlp.down_proj.weight"].to(torch.bfloat16).float()  # what training computed with
    torch.testing.assert_close(found.model.layers[1].mlp.down_proj.weight, before + change, rtol=1e-5, atol=1e-6)


def test_adapters_on_what_transformers_decodes(tmp_path):
    """Of blocks that do not divide the rows it makes other weights than the checkpoint means."""
    meant = write_dense(tmp_path / "base", "fp8 blocks")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)  # a CPU dequantises it
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(base.get_parameter(name), meant[name])
    adapted = run_on(tmp_path, base)
    write_base_quantization(adapted, tmp_path / "run")
    written = json.loads((tmp_path / "run" / FILE).read_text())
    assert (written["decoded"], written["dtype"], written["config"]["quant_method"]) == (True, "float32", "fp8")
    merge(find_run(str(tmp_path / "run")), tmp_path / "merged", say=lambda line: None)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").eval()
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, adapted(IDS).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match=r"what transformers decodes .*gate_proj.weight is \(192, 128\), and blocks of"):
        merge(find_run(str(tmp_path / "run")), tmp_path / "fp8", say=lambda line: None, to="fp8")
    ours = dequantise(load_packed(str(tmp_path / "base")))
    write_base_quantization(get_peft_model(ours, LoraConfig(r=1, target_modules=["q_proj"])), tmp_path / "run")
    assert not (tmp_path / "run" / FILE).exists()  # and so it is merged as we decode it


def test_settings_of_a_text_configuration_that_transformers_decodes(tmp_path):
    model_class = write_nested(tmp_path / "base")
    adapted = run_on(tmp_path, model_class.from_pretrained(tmp_path / "base", dtype=torch.float32))
    write_base_quantization(adapted, tmp_path / "run")
    assert json.loads((tmp_path / "run" / FILE).read_text())["decoded"]
    merge(find_run(str(tmp_path / "run")), tmp_path / "merged", say=lambda line: None)
    found = model_class.from_pretrained(tmp_path / "merged", dtype="auto").eval()
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, adapted(IDS).logits, rtol=1e-4, atol=1e-4)
    assert "quantization_config" not in (tmp_path / "merged" / "config.json").read_text()


class _HalvedConfig(QuantizationConfigMixin):
    """Of a format that dequantises while it loads, and whose quantizer cannot do so afterwards."""

    def __init__(self, dequantize=False, **kwargs):
        self.quant_method, self.dequantize = "halved", dequantize

    def get_loading_attributes(self):
        return {"dequantize": self.dequantize}


class _HalvedQuantizer(HfQuantizer):
    """As that of compressed-tensors: it stays with the model that it has dequantised."""

    def _process_model_after_weight_loading(self, model, **kwargs):
        for module in model.modules():
            if self.quantization_config.dequantize and isinstance(module, nn.Linear):
                module.weight.data *= 2

    def is_serializable(self):
        return False

    is_trainable = True


def test_a_format_that_dequantises_while_it_loads_and_not_afterwards(tmp_path, monkeypatch):
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "halved", _HalvedConfig)
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "halved", _HalvedQuantizer)
    monkeypatch.setattr(auto, "LOADING_ATTRIBUTES_CONFIG_TYPES", (_HalvedConfig,))
    model = TINY_MODELS["llama"]()
    model.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "halved"}}))
    run_on(tmp_path, TINY_MODELS["llama"]())
    found = load_model(find_run(str(tmp_path / "run")), "auto")
    assert getattr(found, "hf_quantizer", None) is None
    assert not hasattr(found.config, "quantization_config")
    layer, before = found.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.up_proj
    assert torch.equal(layer.weight, 2 * before.weight)


def test_codes_without_scales_are_refused(tmp_path):
    write_unscaled(tmp_path / "base", torch.float8_e4m3fn, None)
    run_on(tmp_path, dense())
    with pytest.raises(UserError, match="scales were not loaded"):
        merge(find_run(str(tmp_path / "run")), tmp_path / "merged", torch.float32, lambda line: None)
    assert not (tmp_path / "merged").exists()


def test_the_quantisation_of_an_earlier_run_is_removed(tmp_path):
    """As where `--overwrite_output_dir` trains on a base that is not quantised."""
    (tmp_path / FILE).write_text("{}")
    model = TINY_MODELS["llama"]()
    write_base_quantization(get_peft_model(model, LoraConfig(r=1, target_modules=["q_proj"])), tmp_path)
    assert not [*tmp_path.iterdir()]
