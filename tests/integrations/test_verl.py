"""The plug-in for verl: imported by its name, then called as `workers/engine/fsdp/transformer_impl.py` does."""

import sys
import types

import pytest

from tests.tiny_models import TINY_MODELS

MODULE = "liger_trainer.integrations.verl"
NAME = "liger_kernel.transformers.monkey_patch"


def apply(verl, model):
    """What verl runs for `external_lib` and `use_liger`."""
    verl.import_external_libs(MODULE)
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, swiglu=True)
    return model


def test_layers_get_kernels_and_verl_keeps_the_rest(verl, capsys):
    model = apply(verl, TINY_MODELS["qwen3_moe"]())
    layer = model.model.layers[0]
    assert all("forward" in vars(each) for each in (model.model.norm, layer.self_attn, layer.mlp.gate))
    assert not any("forward" in vars(each) for each in (model, model.model, model.lm_head))
    assert model.config._attn_implementation == "sdpa"
    assert capsys.readouterr().out.count("liger_trainer kernels in Qwen3MoeForCausalLM") == 1


def test_attention_of_a_model_with_images_is_verls(verl):
    model = apply(verl, TINY_MODELS["qwen2_vl"]())
    layer = model.model.language_model.layers[0]
    assert "forward" not in vars(layer.self_attn)
    assert "forward" in vars(layer.mlp)


def test_only_the_first_process_prints(verl, monkeypatch, capsys):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    apply(verl, TINY_MODELS["llama"]())
    assert capsys.readouterr().out == ""


def test_an_installed_liger_kernel_keeps_everything_else(verl, monkeypatch):
    for name in ("liger_kernel", "liger_kernel.transformers", NAME):
        module = types.ModuleType(name)
        module.__path__, module.__spec__ = [], types.SimpleNamespace(origin="site-packages")
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ImportError, match="Update liger-kernel"):
        verl.import_external_libs(MODULE)
    sys.modules[NAME]._apply_liger_kernel_to_instance = sys.modules[NAME].untouched = object()
    model = apply(verl, TINY_MODELS["llama"]())
    assert "forward" in vars(model.model.norm)
    assert sys.modules["liger_kernel"].__spec__.origin == "site-packages"
