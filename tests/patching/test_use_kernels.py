"""Models with `use_kernels`: our kernels without a configuration, those of the `kernels` library with one.

The library is replaced by a stand-in, or where it is installed in a version that transformers takes, by itself.
"""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import types

import pytest
import torch
import transformers.modeling_utils
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, KernelConfig
from transformers.integrations import hub_kernels
from transformers.models.llama import modeling_llama
from transformers.utils import is_kernels_available

from liger_trainer import apply_liger_kernel, revert_liger_kernel, stock_trainer
from liger_trainer.attention.interface import NAME
from liger_trainer.head import warn_once
from liger_trainer.patching.as_written import is_bound_by_us
from liger_trainer.stock_trainer import stock_trainer_report
from tests.tiny_models import TINY_MODELS, tiny_batch


@pytest.fixture(autouse=True)
def _nothing_said():
    warn_once._said.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    TINY_MODELS["llama"]().save_pretrained(path)
    return path


@pytest.fixture
def offline(monkeypatch):
    """No `kernels` library: whoever asks for it fails."""
    monkeypatch.setattr(transformers.modeling_utils, "is_kernels_available", lambda: False)
    monkeypatch.setattr(transformers.modeling_utils, "kernelize", lambda *_, **__: pytest.fail("the library was asked"))


def bound(model):
    return {name for name, module in model.named_modules() if is_bound_by_us(module)}


def loss_and_gradients(model):
    model.zero_grad()
    loss = model(**tiny_batch("llama", model)).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)]


def test_a_model_is_loaded_with_all_our_kernels(folder, offline, caplog):
    stock, applied = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    expected = apply_liger_kernel(applied)
    with caplog.at_level(logging.INFO, logger="liger_trainer"):
        model = AutoModelForCausalLM.from_pretrained(folder, use_kernels=True)
    assert model.use_kernels
    assert bound(model) == bound(applied)
    assert model.config._attn_implementation == NAME
    assert [row.kernel for row in stock_trainer_report(model).rows] == [row.kernel for row in expected.rows]
    assert "use_kernels: the kernels of liger_trainer run: 2x rope" in caplog.text
    torch.testing.assert_close(loss_and_gradients(model.train()), loss_and_gradients(stock.train()))


TURNED_ON = {
    "set_use_kernels": lambda model: model.set_use_kernels(True),
    "use_kernels": lambda model: setattr(model, "use_kernels", True),
}


@pytest.mark.parametrize("turn_on", TURNED_ON)
def test_on_and_off(turn_on, offline):
    model = TINY_MODELS["llama"]()
    attention = model.config._attn_implementation
    TURNED_ON[turn_on](model)
    assert model.use_kernels
    assert bound(model)
    model.set_use_kernels(False)
    assert not model.use_kernels
    assert not bound(model)
    assert model.config._attn_implementation == attention
    model.eval().train()
    assert not bound(model)


def test_a_model_is_patched_once(offline, monkeypatch):
    model = TINY_MODELS["llama"]()
    model.set_use_kernels(True)
    forward = model.model.norm.forward
    monkeypatch.setattr("liger_trainer.patching.apply.Probe", lambda *_: pytest.fail("proved again"))
    model.set_use_kernels(True)
    copied = copy.deepcopy(model.eval().train())
    copied.eval().train()
    assert model.model.norm.forward == forward
    assert bound(copied) == bound(model)


def test_what_was_applied_explicitly_stays(offline):
    model = TINY_MODELS["llama"]()
    apply_liger_kernel(model, {"rope": False})
    before = bound(model)
    model.set_use_kernels(True)
    assert bound(model.eval().train()) == before
    model.set_use_kernels(False)
    assert not bound(model)
    model.set_use_kernels(True)
    apply_liger_kernel(model, {"rope": False})
    assert bound(model.eval().train()) == before


def test_turning_off_takes_out_only_what_it_has_put_in(offline):
    model = TINY_MODELS["llama"]()
    apply_liger_kernel(model)
    model.set_use_kernels(False)
    assert bound(model)


def test_reverted_kernels_do_not_come_back(offline):
    model = TINY_MODELS["llama"]()
    model.set_use_kernels(True)
    revert_liger_kernel(model)
    assert not model.use_kernels
    assert not bound(model.eval().train())


def test_adapters_get_their_kernels_when_training_begins(folder, offline, caplog):
    model = AutoModelForCausalLM.from_pretrained(folder, use_kernels=True)
    expected = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    adapted = get_peft_model(model, config).train()
    torch.manual_seed(0)
    reference = get_peft_model(expected, config).train()
    assert "lora_linear" in {row.kernel for row in stock_trainer_report(adapted).applied}
    torch.testing.assert_close(loss_and_gradients(adapted), loss_and_gradients(reference), rtol=1e-5, atol=1e-6)
    whole = adapted.merge_and_unload().eval()
    assert is_bound_by_us(whole.model.layers[0].mlp)
    assert "has been changed" not in caplog.text


@pytest.mark.skipif(is_kernels_available(), reason="with the `kernels` library, no model of transformers has a pickle")
def test_a_pickle_is_patched_anew(offline):
    model = TINY_MODELS["llama"]()
    model.set_use_kernels(True)
    loaded = pickle.loads(pickle.dumps(model))
    assert bound(loaded.eval().train()) == bound(model)


def test_a_model_without_a_part_that_is_ours(offline, caplog):
    model = transformers.BertModel(transformers.BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=0))
    model.embeddings.LayerNorm = torch.nn.Identity()
    model.set_use_kernels(True)
    assert model.use_kernels
    assert "use_kernels: no kernel of liger_trainer fits this model" in caplog.text


def test_without_ours_it_is_the_librarys(offline):
    stock_trainer.uninstall()
    try:
        with pytest.raises(ValueError, match="Kernels are not available"):
            TINY_MODELS["llama"]().set_use_kernels(True)
    finally:
        stock_trainer.install()


# ---------------------------------------------------------------------------------------------------------------------
# With the library
# ---------------------------------------------------------------------------------------------------------------------


class StandIn:
    """What `kernels` 0.17 and transformers 5.24 do to the instances of a model on the CPU."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "kernel_layer_name", "RMSNorm", raising=False)
        monkeypatch.setattr(transformers.modeling_utils, "is_kernels_available", lambda: True)
        monkeypatch.setattr(transformers.utils, "is_kernels_available", lambda: True)
        monkeypatch.setattr(transformers.modeling_utils, "kernelize", self.kernelize)
        monkeypatch.setattr(KernelConfig, "create_compatible_mapping", lambda self, model: None)  # it has no layers
        monkeypatch.setattr(hub_kernels, "register_kernel_mapping_transformers", lambda: None)

    def kernelize(self, model, mode=None):
        for module in model.modules():
            if hasattr(type(module), "kernel_layer_name"):
                module.forward = types.MethodType(type(module).forward, module)
        model._use_kernels = True


@pytest.fixture(params=["stand-in", "kernels"])
def library(request, monkeypatch):
    if request.param == "stand-in":
        if is_kernels_available():
            pytest.skip("the `kernels` library is installed; the tests with it run")
        StandIn(monkeypatch)
    elif not is_kernels_available():
        pytest.skip("no `kernels` library that transformers takes is installed; the tests with its stand-in ran")


def test_the_library_is_asked_with_a_configuration_alone(library, caplog):
    model = TINY_MODELS["llama"]()
    for _ in range(2):
        model.set_use_kernels(True)
        assert "forward" in model.model.norm.__dict__
        assert bound(model)
        model.set_use_kernels(False)
    assert caplog.text.count("not those of the `kernels` library") == 1
    model.set_use_kernels(True, KernelConfig())
    assert not bound(model)
    assert "forward" in model.model.norm.__dict__
    assert not bound(model.eval().train())  # which asks again, without a configuration


SWITCHES = {
    "train and eval": lambda model: (model.set_use_kernels(True, KernelConfig()), model.eval(), model.train()),
    "the model inside": lambda model: model.model.set_use_kernels(True, KernelConfig()),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_our_forwards_stay(switch, library, caplog):
    model = TINY_MODELS["llama"]()
    apply_liger_kernel(model)
    before, expected = bound(model), loss_and_gradients(model)
    SWITCHES[switch](model)
    SWITCHES[switch](model)
    assert bound(model) == before
    assert all(map(torch.equal, loss_and_gradients(model), expected))
    (said,) = [record.message for record in caplog.records if "keep liger_trainer's kernels" in record.message]
    assert "LlamaRMSNorm of Llama" in said


def test_a_model_that_has_the_librarys_already(library):
    model = TINY_MODELS["llama"]()
    model.set_use_kernels(True, KernelConfig())
    assert not apply_liger_kernel(model).left_alone
    before = bound(model)
    model.eval().train()
    assert bound(model) == before


def test_a_function_in_a_module_of_the_library_is_followed(library, monkeypatch):
    """It wraps the rotary function in a module without parameters; what that function calls still counts."""
    rotary = modeling_llama.apply_rotary_pos_emb
    if isinstance(rotary, types.FunctionType):  # with the stand-in

        class Func(torch.nn.Module):
            def forward(self, *args, **kwargs):
                return rotary(*args, **kwargs)

        given = inspect.signature(rotary).parameters.values()
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        Func.__module__, Func.forward.__signature__ = "kernels.layer", inspect.Signature([own, *given])
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", Func())
    stock, model = TINY_MODELS["llama"](), TINY_MODELS["llama"]()
    assert "rope" in {row.component for row in apply_liger_kernel(model).applied}
    monkeypatch.setattr(modeling_llama, "rotate_half", torch.neg)
    for ours, theirs in zip(loss_and_gradients(model), loss_and_gradients(stock)):
        torch.testing.assert_close(ours, theirs)


def test_an_error_of_the_library_takes_nothing_away(library, monkeypatch):
    def failing(model, mode=None):
        model.model.norm.forward = types.MethodType(modeling_llama.LlamaRMSNorm.forward, model.model.norm)
        raise OSError("no kernel")

    model = TINY_MODELS["llama"]()
    apply_liger_kernel(model)
    before = bound(model)
    monkeypatch.setattr(transformers.modeling_utils, "kernelize", failing)
    with pytest.raises(OSError, match="no kernel"):
        model.set_use_kernels(True, KernelConfig())
    assert bound(model) == before
