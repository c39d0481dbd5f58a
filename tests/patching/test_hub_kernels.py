"""Models with `use_kernels`: our forwards stay when the `kernels` library brings its own, and are brought by it.

Each test runs with a stand-in for the library and, where it is installed in a version that transformers takes, with it.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import pickle
import types

import pytest
import torch
import transformers.modeling_utils
from torch import nn
from transformers.integrations import hub_kernels as of_transformers
from transformers.models.llama import modeling_llama
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from transformers.utils import is_kernels_available
from transformers.utils import kernel_config as config_of_transformers

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.head import warn_once
from liger_trainer.integrations.hub_kernels import folder, layers
from liger_trainer.patching import mlps, rotations
from liger_trainer.patching import norm_forwards as norms
from liger_trainer.patching.as_written import is_bound_by_us
from tests.tiny_models import TINY_MODELS, tiny_batch

NORMS = {"LlamaRMSNorm"}


class StandIn:
    """What `kernels` 0.17 and transformers 5.23 do to the instances of a model on the CPU."""

    def __init__(self, monkeypatch):
        self.layers = {}  # by the name that a class has for the library
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "kernel_layer_name", "RMSNorm", raising=False)
        monkeypatch.setattr(transformers.modeling_utils, "is_kernels_available", lambda: True)
        monkeypatch.setattr(transformers.modeling_utils, "kernelize", self.kernelize)
        monkeypatch.setattr(of_transformers, "register_kernel_mapping_transformers", lambda: None)

    def kernelize(self, model, mode=None):
        for module in model.modules():
            if hasattr(type(module), "kernel_layer_name"):
                layer = self.layers.get(type(module).kernel_layer_name, type(module))
                module.forward = types.MethodType(layer.forward, module)
        model._use_kernels = True


@pytest.fixture(params=["stand-in", "kernels"])
def library(request, monkeypatch):
    """The stand-in; None for the library itself."""
    warn_once._said.clear()
    if request.param == "stand-in":
        if is_kernels_available():
            pytest.skip("the `kernels` library is installed; the tests with it run")
        return StandIn(monkeypatch)
    if not is_kernels_available():
        pytest.skip("no `kernels` library that transformers takes is installed; the tests with its stand-in ran")
    return None


def bound(model):
    return {name for name, module in model.named_modules() if is_bound_by_us(module)}


def loss_and_gradients(model):
    model.zero_grad()
    loss = model(**tiny_batch("llama", model)).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


SWITCHES = {
    "train and eval": lambda model: (model.set_use_kernels(True), model.eval(), model.train()),
    "use_kernels": lambda model: setattr(model, "use_kernels", True),
    "the model inside": lambda model: model.model.set_use_kernels(True),
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
    (said,) = [record.message for record in caplog.records if "liger_trainer's kernels" in record.message]
    assert "LlamaRMSNorm of Llama" in said


def test_a_model_that_uses_kernels_already(library):
    model = TINY_MODELS["llama"]()
    model.set_use_kernels(True)
    report = apply_liger_kernel(model)
    assert not report.left_alone
    before = bound(model)
    model.eval().train()
    assert bound(model) == before


def test_copies_and_pickles(library):
    model = TINY_MODELS["llama"]()
    apply_liger_kernel(model)
    copied = copy.deepcopy(model)
    copied.set_use_kernels(True)
    assert bound(copied) == bound(model)
    assert not model.use_kernels
    if library is not None:  # the library itself puts a class without a name into the model
        loaded = pickle.loads(pickle.dumps(model))
        loaded.set_use_kernels(True)
        assert loaded.use_kernels


def test_reverted(library):
    model = TINY_MODELS["llama"]()
    apply_liger_kernel(model)
    assert "set_use_kernels" in model.__dict__
    revert_liger_kernel(model)
    model.set_use_kernels(True)
    assert not bound(model)
    assert all("set_use_kernels" not in module.__dict__ for module in model.modules())


def test_an_error_of_the_library_takes_nothing_away(library, monkeypatch):
    def failing(model, mode=None):
        model.model.norm.forward = types.MethodType(modeling_llama.LlamaRMSNorm.forward, model.model.norm)
        raise OSError("no kernel")

    model = TINY_MODELS["llama"]()
    apply_liger_kernel(model)
    before = bound(model)
    monkeypatch.setattr(transformers.modeling_utils, "kernelize", failing)
    with pytest.raises(OSError, match="no kernel"):
        model.set_use_kernels(True)
    assert bound(model) == before


def test_nothing_is_changed_where_no_class_has_a_hub_kernel(monkeypatch):
    monkeypatch.delattr(modeling_llama.LlamaRMSNorm, "kernel_layer_name", raising=False)
    model = TINY_MODELS["llama"]()
    apply_liger_kernel(model)
    assert "set_use_kernels" not in model.__dict__


# ---------------------------------------------------------------------------------------------------------------------
# Our layers
# ---------------------------------------------------------------------------------------------------------------------

LAYERS = {"RMSNorm": layers.RMSNorm, "MLP": layers.GatedMLP, "rotary_pos_emb": layers.RotaryPosEmb}


def as_module(function):
    """A function as the library makes it a module, which transformers' own are where it is installed."""
    if isinstance(function, nn.Module):
        return function

    class Func(nn.Module):
        kernel_layer_name = "rotary_pos_emb"

        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    signature = inspect.signature(function)
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    Func.forward.__signature__ = signature.replace(parameters=[self, *signature.parameters.values()])
    return Func()


def ask_for_ours(model, library, monkeypatch):
    """Gives `model` our layers as a user does: by a `KernelConfig`, or the stand-in for it."""
    monkeypatch.setattr(modeling_llama.LlamaMLP, "kernel_layer_name", "MLP", raising=False)
    if library is None:
        devices = [*config_of_transformers.KERNELS_SUPPORTED_DEVICE_TYPES, "cpu"]
        monkeypatch.setattr(config_of_transformers, "KERNELS_SUPPORTED_DEVICE_TYPES", devices)
        mapping = {name: f"{folder()}:{layer.__name__}" for name, layer in LAYERS.items()}
        config = config_of_transformers.KernelConfig(mapping, use_local_kernel=True)
        monkeypatch.setitem(modeling_llama.apply_rotary_pos_emb.__dict__, "forward", None)  # shared by all models
        del modeling_llama.apply_rotary_pos_emb.__dict__["forward"]
        model.set_use_kernels(True, config)
    else:
        library.layers |= LAYERS
        rotary = as_module(modeling_llama.apply_rotary_pos_emb)
        rotary.forward = types.MethodType(layers.RotaryPosEmb.forward, rotary)
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotary)
        model.set_use_kernels(True)


def test_a_model_trains_with_our_layers(library, monkeypatch, calls_of):
    model = TINY_MODELS["llama"]()
    expected = loss_and_gradients(model)
    ask_for_ours(model, library, monkeypatch)
    mlps.gated_mlp_forward.cache_clear()  # its results hold the functions that are counted
    calls = [calls_of(norms, "rms_norm"), calls_of(mlps, "glu_down"), calls_of(rotations, "rope")]
    loss_and_gradients(model)  # after the proofs
    for _ in range(2):
        for each in calls:
            each.clear()
        torch.testing.assert_close(loss_and_gradients(model), expected, rtol=1e-5, atol=1e-6)
        assert [len(each) for each in calls] == [5, 2, 2]
        model.eval().train()
    mlps.gated_mlp_forward.cache_clear()


def test_the_proof_is_no_part_of_a_checkpoint(library, monkeypatch):
    model = TINY_MODELS["llama"]()
    expected = loss_and_gradients(model)
    ask_for_ours(model, library, monkeypatch)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(loss_and_gradients(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_what_the_library_demands_of_a_layer(name):
    layer = LAYERS[name]
    assert layer.__init__ is nn.Module.__init__
    members = {each for each, _ in inspect.getmembers(layer)} - {each for each, _ in inspect.getmembers(nn.Module)}
    assert members == {"has_backward", "can_torch_compile"}
    assert layer.has_backward
    replaced = {
        "RMSNorm": modeling_llama.LlamaRMSNorm.forward,
        "MLP": modeling_llama.LlamaMLP.forward,
        "rotary_pos_emb": as_module(modeling_llama.apply_rotary_pos_emb).forward.__func__,
    }[name]
    kinds = [[each.kind for each in inspect.signature(f).parameters.values()] for f in (layer.forward, replaced)]
    assert kinds[0] == kinds[1]


def test_the_folder_is_imported_as_the_library_imports_it():
    described = json.loads(
        (importlib.resources.files("liger_trainer.integrations.hub_kernels") / "metadata.json").read_text()
    )
    assert described.keys() == {"id", "name", "version", "license", "python-depends", "backend"}
    spec = importlib.util.spec_from_file_location(described["id"], f"{folder()}/__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert all(getattr(module.layers, layer.__name__) is layer for layer in LAYERS.values())


def with_layer(module, layer):
    module.forward = types.MethodType(layer.forward, module)
    return module


@pytest.mark.parametrize("cls", [Olmo2RMSNorm, Qwen3_5RMSNorm])
def test_a_norm_gets_its_own_formula(cls, calls_of):
    """The norms that the library calls by one name round in different places."""
    norm = cls(64).to(torch.bfloat16)
    norm.weight.data += torch.linspace(-1, 1, 64).bfloat16()
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    expected = norm(x)
    with_layer(norm, layers.RMSNorm)(x)
    calls = calls_of(norms, "rms_norm")
    assert torch.equal(norm(x), expected)
    assert len(calls) == 1


class OtherNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states):
        return self.weight * hidden_states / hidden_states.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    ("build", "layer", "reason"),
    [
        (lambda: OtherNorm(8), layers.RMSNorm, "none of the RMSNorm formulas"),
        (lambda: nn.Linear(8, 8), layers.RMSNorm, "it is no normalisation of rows"),
        (lambda: nn.Linear(8, 8), layers.GatedMLP, "it is no gated MLP"),
    ],
)
def test_what_is_not_proved_runs_as_it_did_and_is_said_once(build, layer, reason, caplog):
    warn_once._said.clear()
    x = torch.randn(3, 8)
    for _ in range(2):
        module = build()
        expected = module(x)
        assert torch.equal(with_layer(module, layer)(x), expected)
    (said,) = caplog.messages
    assert type(module).__qualname__ in said
    assert reason in said


def test_another_rotation_runs_as_it_did(caplog):
    warn_once._said.clear()

    def backwards(q, k, cos, sin, unsqueeze_dim=1):
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, -sin, unsqueeze_dim)

    operands = [torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 3, 4), torch.randn(1, 3, 4)]
    ours = with_layer(as_module(backwards), layers.RotaryPosEmb)
    torch.testing.assert_close(ours(*operands), backwards(*operands), rtol=0, atol=0)
    assert "rotary_pos_emb" in caplog.text
    assert "another rotation" in caplog.text


def test_compiled_code_runs_the_classes_own_forward(calls_of):
    norm = with_layer(modeling_llama.LlamaRMSNorm(8), layers.RMSNorm)
    calls = calls_of(norms, "rms_norm")
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(x), modeling_llama.LlamaRMSNorm.forward(norm, x))
    assert not calls
