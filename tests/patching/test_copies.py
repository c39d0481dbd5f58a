"""Copies of patched modules, transforms of torch.func over them, and results that a model changes in place."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from liger_trainer import apply_liger_kernel
from liger_trainer import functional as ops
from liger_trainer.patching import norm_forwards as norms
from liger_trainer.patching.as_written import is_bound_by_us
from tests.patching import toys
from tests.patching.comparisons import LAYERS, assert_same, relative
from tests.patching.test_changed_afterwards import Doubled, both, layer
from tests.tiny_models import tiny_batch

# ---------------------------------------------------------------------------------------------------------------------
# Copies
# ---------------------------------------------------------------------------------------------------------------------


def pickled(module):
    memory = io.BytesIO()
    torch.save(module, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


def by_its_state(module):
    other = object.__new__(type(module))
    other.__setstate__(module.__getstate__())
    return other


COPIES = {
    "shallow": copy.copy,
    "deep": copy.deepcopy,
    "pickled": pickled,
    "by its state": by_its_state,
    "replica": lambda module: module._replicate_for_data_parallel(),
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("part", ["norm", "mlp", "experts", "router", "head", "attention"])
def test_a_copy_computes_with_its_own_weights(kind, part):
    model = copy.deepcopy(both("llama" if part == "mlp" else "qwen3_moe")[1])
    block = layer(model)
    module = {
        "norm": lambda: block.input_layernorm,
        "mlp": lambda: block.mlp,
        "experts": lambda: block.mlp.experts,
        "router": lambda: block.mlp.gate,
        "head": lambda: model.lm_head,
        "attention": lambda: block.self_attn,
    }[part]()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 3, 32, generator=generator)]
    if part == "experts":
        inputs = [inputs[0][0], torch.tensor([[0, 1], [1, 2], [2, 0]]), torch.rand(3, 2, generator=generator)]
    if part == "attention":
        tables = torch.randn(1, 3, 8, generator=generator)
        inputs += [(tables, tables), None]
    plain = copy.deepcopy(both("llama" if part == "mlp" else "qwen3_moe")[0].get_submodule(_path(model, module)))
    copied = COPIES[kind](module)
    _give_other_weights(plain, plain)
    _give_other_weights(copied, module)
    before = _first(module(*inputs))
    torch.testing.assert_close(_first(copied(*inputs)), _first(plain(*inputs)))
    assert torch.equal(_first(module(*inputs)), before)
    assert (copied.__dict__.keys() == module.__dict__.keys()) == (kind == "deep"), "only a deep copy has the kernels"


def _path(model, module):
    return next(path for path, each in model.named_modules() if each is module)


def _first(result):
    return result[0] if isinstance(result, tuple) else result


def _give_other_weights(module, original):
    """Other parameters than those of `original`, in dictionaries of its own, as where a copy is filled by hand."""
    module._parameters = {
        name: None if each is None else nn.Parameter(1.5 * each.detach()) for name, each in original._parameters.items()
    }
    children = {name: each for name, each in original._modules.items() if each is not None}
    module._modules = {name: copy.copy(each) for name, each in children.items()}
    for name, child in children.items():
        _give_other_weights(module._modules[name], child)


def test_attributes_of_a_shallow_copy_are_its_own():
    norm = layer(copy.deepcopy(both("llama")[1])).input_layernorm
    other = copy.copy(norm)
    other.variance_epsilon = 10.0
    x = torch.linspace(-1, 2, 64).view(2, 32)
    assert relative(norm(x), other(x)) > 0.1
    assert is_bound_by_us(norm)
    assert not is_bound_by_us(other)


def test_a_copy_of_a_parametrised_module_is_refused_as_it_was():
    norm = layer(copy.deepcopy(both("llama")[1])).input_layernorm
    parametrize.register_parametrization(norm, "weight", Doubled())
    with pytest.raises(RuntimeError, match="state_dict"):
        copy.copy(norm)


# ---------------------------------------------------------------------------------------------------------------------
# torch.func
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss", "llama with adapters"])
def test_a_transform_of_torch_func_runs_the_classes_own_code(family):
    gradients = []
    for model in both(family):
        batch = dict(tiny_batch(family.split()[0], model))
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(parameters, model=model, batch=batch):
            return torch.func.functional_call(model, parameters, kwargs=batch).loss

        gradients.append(torch.func.grad(loss)(parameters))
    assert_same(gradients[1], gradients[0])


def test_vmap_and_jvp_over_patched_modules():
    stock = toys.Toy(norm=toys.Norm(), mlp=toys.MLP())
    model = copy.deepcopy(stock)
    assert all(row.applied for row in apply_liger_kernel(model, LAYERS))
    x = torch.linspace(-1, 2, 24).view(3, 1, 8)
    torch.testing.assert_close(torch.func.vmap(model)(x), torch.func.vmap(stock)(x))
    torch.testing.assert_close(torch.func.jvp(model, (x,), (x,)), torch.func.jvp(stock, (x,), (x,)))


def test_functional_call_keeps_the_kernels(calls_of):
    calls = calls_of(norms, "rms_norm")
    stock, model = both("llama")
    batch = dict(tiny_batch("llama", stock))
    parameters = {name: 1.1 * parameter.detach() for name, parameter in model.named_parameters()}
    expected, got = (torch.func.functional_call(each, parameters, kwargs=batch).loss for each in (stock, model))
    torch.testing.assert_close(got, expected)
    assert calls


def test_an_operator_inside_a_transform_says_what_to_do():
    x, weight = torch.ones(2, 8), torch.ones(8, 8)
    factors = torch.ones(2, 8), torch.ones(8, 2)
    with pytest.raises(RuntimeError, match=r"lora_linears.*revert_liger_kernel\(model\)"):
        torch.func.grad(lambda x: ops.lora_linear(x, weight, None, *factors).sum())(x)


# ---------------------------------------------------------------------------------------------------------------------
# Results that a model changes in place
# ---------------------------------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    """Scales the results of its parts where they are, as Longformer scales its queries."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
        self.norm, self.mlp = toys.Norm(), toys.MLP()

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None):
        parts = (self.q_proj, self.k_proj, self.v_proj, self.mlp, self.norm)
        results = [part(hidden_states) for part in parts]
        for result in results:
            result *= 0.5
            result += 1.0
        return sum(results)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_model_may_change_results_in_place(adapters):
    torch.manual_seed(0)
    stock = nn.Sequential(InPlace())
    if adapters:
        peft = pytest.importorskip("peft")
        stock = peft.get_peft_model(stock, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    model = copy.deepcopy(stock)
    report = apply_liger_kernel(model, LAYERS)
    assert {row.component for row in report.applied} == {"rms_norm", "swiglu", *(["lora"] if adapters else [])}
    x = torch.linspace(-1, 2, 16).view(2, 8)
    results = []
    for each in (stock, model):
        (out := each(x)).square().sum().backward()
        results.append([out.detach(), *(p.grad for p in each.parameters() if p.grad is not None)])
    torch.testing.assert_close(results[1], results[0])
