"""What is changed after patching: the model computes what its classes compute with the change, or it says no."""

from __future__ import annotations

import copy
import functools
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, parametrize, prune
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from liger_trainer import apply_liger_kernel
from liger_trainer.head import warn_once
from liger_trainer.patching import norm_forwards as norms
from liger_trainer.patching.as_written import is_bound_by_us
from liger_trainer.patching.moe import experts_formula
from tests.patching import toys
from tests.patching.comparisons import LAYERS, assert_same, loss_and_gradients, relative
from tests.tiny_models import TINY_MODELS, tiny_batch

# Of the norm of each tensor, in fp32; each change moves some tensor by 10 times as much.
TOLERANCE = 5e-5


@functools.cache
def both(family):
    """A tiny model without and with the kernels; tests change copies."""
    stock, patched = (TINY_MODELS[family.removesuffix(" with adapters")]().train() for _ in range(2))
    if family.endswith("with adapters"):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        for model in (stock, patched):
            torch.manual_seed(0)
            peft.get_peft_model(model, config)
    apply_liger_kernel(patched)
    return stock, patched


class Scaled(nn.Linear):
    def forward(self, x):
        return 1.5 * super().forward(x)


class ScaledNorm(LlamaRMSNorm):
    def forward(self, x):
        return 1.5 * super().forward(x)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def doubled(module, args, output):
    return 2 * output


def layer(model):
    return model.model.layers[0]


def experts(model):
    return layer(model).mlp.experts


def down(model):
    return layer(model).mlp.down_proj


def new(module, name):
    setattr(module, name, nn.Parameter(2 * getattr(module, name).detach()))


def with_method(patch, cls, name, method):
    patch.setattr(cls, name, method)


def with_global(patch, model, name, function):
    patch.setattr(sys.modules[type(model).__module__], name, function)


CHANGES = {
    # What our forward does not read at each call: the class's own forward runs.
    "another activation": ("llama", lambda m, p: setattr(layer(m).mlp, "act_fn", nn.Tanh())),
    "another class of the activation": ("llama", lambda m, p: setattr(layer(m).mlp.act_fn, "__class__", nn.Tanh)),
    "another forward of the activation": ("llama", lambda m, p: setattr(layer(m).mlp.act_fn, "forward", torch.tanh)),
    "another class of a norm": ("llama", lambda m, p: setattr(layer(m).input_layernorm, "__class__", ScaledNorm)),
    "a class's forward, of norms": (
        "llama",
        lambda m, p: with_method(p, type(layer(m).input_layernorm), "forward", lambda self, x: x * self.weight),
    ),
    "a class's forward, of MLPs": (
        "llama",
        lambda m, p: with_method(p, type(layer(m).mlp), "forward", lambda self, x: self.down_proj(self.up_proj(x))),
    ),
    "a class's forward, of linear layers": (
        "llama",
        lambda m, p: with_method(p, nn.Linear, "forward", lambda self, x: 1.5 * F.linear(x, self.weight)),
    ),
    "a method of the class": (
        "gemma2",
        lambda m, p: with_method(p, type(layer(m).input_layernorm), "_norm", lambda self, x: 0.5 * x),
    ),
    "a method of the instance": ("gemma2", lambda m, p: setattr(layer(m).input_layernorm, "_norm", lambda x: 0.5 * x)),
    "the rotary function": (
        "llama",
        lambda m, p: with_global(p, m, "apply_rotary_pos_emb", lambda q, k, cos, sin, unsqueeze_dim=1: (2 * q, k)),
    ),
    "a function that the rotary function calls": ("llama", lambda m, p: with_global(p, m, "rotate_half", torch.neg)),
    "the loss of the router": (
        "qwen3_moe",
        lambda m, p: with_global(p, m, "load_balancing_loss_func", lambda logits, *a: 1e3 * logits[0].square().mean()),
    ),
    "an attribute of experts": ("gpt_oss", lambda m, p: setattr(experts(m), "limit", 0.01)),
    "the activation of experts": ("qwen3_moe", lambda m, p: setattr(experts(m), "act_fn", nn.Tanh())),
    "the normalisation of a router": ("qwen3_moe", lambda m, p: setattr(layer(m).mlp.gate, "norm_topk_prob", False)),
    "a class's forward, of experts": (
        "qwen3_moe",
        lambda m, p: with_method(p, type(experts(m)), "forward", lambda self, x, *choices: 2 * x),
    ),
    "a class's forward, of the model": (
        "llama",
        lambda m, p: with_method(p, type(m), "forward", with_thrice_the_loss(type(m).forward)),
    ),
    "another class of the head": ("llama", lambda m, p: setattr(m.lm_head, "__class__", Scaled)),
    # What it reads at each call.
    "epsilon": ("llama", lambda m, p: setattr(layer(m).input_layernorm, "variance_epsilon", 1.0)),
    "the number of chosen experts": ("qwen3_moe", lambda m, p: setattr(layer(m).mlp.gate, "top_k", 1)),
    "the scale of the scores": ("llama", lambda m, p: setattr(layer(m).self_attn, "scaling", 0.9)),
    "another class of a projection": ("llama", lambda m, p: setattr(down(m), "__class__", Scaled)),
    "another projection": ("llama", lambda m, p: setattr(layer(m).mlp, "down_proj", nn.Sequential(down(m), Doubled()))),
    "another norm": ("llama", lambda m, p: setattr(layer(m), "input_layernorm", nn.LayerNorm(32))),
    "another head": ("llama", lambda m, p: setattr(m, "lm_head", nn.Sequential(m.lm_head, nn.Tanh()))),
    "another weight": ("llama", lambda m, p: new(layer(m).input_layernorm, "weight")),
    "another weight of experts": ("qwen3_moe", lambda m, p: new(experts(m), "down_proj")),
    "another weight of the head": ("llama", lambda m, p: new(m.lm_head, "weight")),
    "a tied head": ("llama", lambda m, p: setattr(m.lm_head, "weight", m.model.embed_tokens.weight)),
    "one MLP for two layers": ("llama", lambda m, p: setattr(m.model.layers[1], "mlp", layer(m).mlp)),
    "another dtype of a norm": ("llama", lambda m, p: layer(m).input_layernorm.bfloat16()),
    "weight norm": ("llama", lambda m, p: with_weight_norm(down(m))),
    "a parametrised norm": (
        "llama",
        lambda m, p: parametrize.register_parametrization(layer(m).input_layernorm, "weight", Doubled()),
    ),
    "a parametrised head": ("llama", lambda m, p: parametrize.register_parametrization(m.lm_head, "weight", Doubled())),
    "parametrised experts": (
        "qwen3_moe",
        lambda m, p: parametrize.register_parametrization(experts(m), "down_proj", Doubled()),
    ),
    "a pruned projection": ("llama", lambda m, p: prune.l1_unstructured(down(m), "weight", 0.5)),
    "a pruned norm": ("llama", lambda m, p: prune.l1_unstructured(layer(m).input_layernorm, "weight", 0.5)),
    # Hooks.
    "a hook on the activation": ("llama", lambda m, p: layer(m).mlp.act_fn.register_forward_hook(doubled)),
    "a hook before the activation": (
        "llama",
        lambda m, p: layer(m).mlp.act_fn.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    ),
    "a backward hook on the activation": (
        "llama",
        lambda m, p: layer(m).mlp.act_fn.register_full_backward_hook(lambda module, got, given: (2 * got[0],)),
    ),
    "a hook on the activation of experts": ("qwen3_moe", lambda m, p: experts(m).act_fn.register_forward_hook(doubled)),
    "a hook on the norm of the queries": (
        "qwen3",
        lambda m, p: layer(m).self_attn.q_norm.register_forward_hook(doubled),
    ),
    "a hook on the head": ("llama", lambda m, p: m.lm_head.register_forward_hook(doubled)),
    "a hook on all modules": (
        "llama",
        lambda m, p: on_all("forward_hook", p, lambda module, args, y: doubled_leaf(module, y)),
    ),
    "a hook before all modules": (
        "qwen3_moe",
        lambda m, p: on_all(
            "forward_pre_hook", p, lambda module, args: tuple(doubled_leaf(module, each) for each in args)
        ),
    ),
    "a backward hook on all modules": (
        "llama",
        lambda m, p: on_all(
            "full_backward_hook", p, lambda module, got, given: tuple(doubled_leaf(module, each) for each in got)
        ),
    ),
    # Adapters.
    "another class of a base layer": (
        "llama with adapters",
        lambda m, p: setattr(down(m).base_layer, "__class__", Scaled),
    ),
    "another class of an adapter": (
        "llama with adapters",
        lambda m, p: setattr(down(m).lora_A["default"], "__class__", Scaled),
    ),
    "a hook on an adapter": (
        "llama with adapters",
        lambda m, p: layer(m).self_attn.q_proj.lora_B["default"].register_forward_hook(doubled),
    ),
    "the scale of an adapter": (
        "llama with adapters",
        lambda m, p: down(m).scaling.update(default=7.0),
    ),
    "a class's forward, of layers with adapters": (
        "llama with adapters",
        lambda m, p: with_method(
            p, type(down(m)), "forward", lambda self, x: 2 * self.lora_B["default"](self.lora_A["default"](x))
        ),
    ),
    "a class's forward, of the parts of adapters": (
        "llama with adapters",
        lambda m, p: with_method(p, nn.Linear, "forward", lambda self, x: 1.5 * F.linear(x, self.weight)),
    ),
    "an activation between adapters": ("llama with adapters", lambda m, p: setattr(layer(m).mlp, "act_fn", nn.Tanh())),
}


def with_weight_norm(projection):
    parametrizations.weight_norm(projection)
    with torch.no_grad():
        projection.parametrizations.weight.original0.mul_(2)


def with_thrice_the_loss(native):
    def forward(self, *args, **kwargs):
        outputs = native(self, *args, **kwargs)
        outputs.loss = 3 * outputs.loss
        return outputs

    return forward


def on_all(kind, patch, hook):
    handle = getattr(torch_module, f"register_module_{kind}")(hook)
    patch.callback(handle.remove)


def doubled_leaf(module, tensor):
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        return tensor
    return 2 * tensor if isinstance(module, nn.Linear | nn.SiLU) or "SiLU" in type(module).__name__ else tensor


class Patch(pytest.MonkeyPatch):
    """Also undoes what is no attribute."""

    def __init__(self):
        super().__init__()
        self.callbacks = []

    def callback(self, function):
        self.callbacks.append(function)

    def undo(self):
        super().undo()
        for function in self.callbacks:
            function()


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:.*ackward hook")
def test_a_change_counts(name):
    family, change = CHANGES[name]
    results = []
    for model in both(family):
        batch, model, patch = tiny_batch(family.split()[0], model), copy.deepcopy(model), Patch()
        before = loss_and_gradients(model, batch)
        torch.manual_seed(0)
        try:
            change(model, patch)
            results.append(loss_and_gradients(model, batch))
        finally:
            patch.undo()
    expected, got = results
    for key, value in expected.items():
        if value.dtype == torch.bfloat16:  # fp32 sums that differ in their last place may round to neighbours
            neighbours = (got[key] - value).abs() <= torch.finfo(value.dtype).eps * value.abs()
            got[key] = torch.where(neighbours, value, got[key])
    moved = (relative(value, before[key]) for key, value in expected.items() if key in before)
    assert max(moved) > 10 * TOLERANCE, "the change changes something"
    assert_same(got, expected, TOLERANCE, floor=1e-7)


@pytest.fixture
def said(caplog, monkeypatch):
    """What has been logged, as if nothing had been said before."""
    monkeypatch.setattr(warn_once, "_said", set())
    return lambda: [record.getMessage() for record in caplog.records if "since liger_trainer patched" in record.message]


def appended_to(values):
    """A generator that keeps what it gets: a list that a forward can reach would be compared too."""
    while True:
        values.append((yield))


def test_it_is_said_once_and_what_is_put_back_runs_our_kernel_again(said):
    calls = []  # of the activations, which our kernel does not call
    counter = appended_to(calls)
    next(counter)

    class Counted(nn.SiLU):
        def forward(self, input):
            if input.dim() == 2:  # the inputs of a proof have more, which would see that this keeps something
                counter.send(self)
            return super().forward(input)

    model = toys.Toy(a=toys.MLP(act=Counted()), b=toys.MLP(act=Counted()))
    assert all(row.applied for row in apply_liger_kernel(model, LAYERS))
    x, activation = torch.ones(2, 8), model.a.act_fn
    calls.clear()
    model(x)
    assert calls == []
    model.a.act_fn = Counted()
    for _ in range(2):
        model(x)
    assert calls == [model.a.act_fn] * 2, "b still runs ours"
    model.b.act_fn = Counted()
    model(x)
    (message,) = said()
    assert message.startswith("`act_fn` has been changed since liger_trainer patched this MLP")
    assert "apply_liger_kernel(model)" in message
    model.a.act_fn = activation
    calls.clear()
    model(x)
    assert calls == [model.b.act_fn], "a runs ours again"
    apply_liger_kernel(model, LAYERS)
    calls.clear()
    model(x)
    assert calls == []


def test_values_that_are_read_at_each_call_keep_the_kernel(said, calls_of):
    model = TINY_MODELS["qwen3_moe"](num_hidden_layers=1)
    apply_liger_kernel(model)
    batch, calls = tiny_batch("qwen3_moe", model), calls_of(norms, "rms_norm")
    of_experts = calls_of(experts_formula, "moe_experts")
    model(**batch)
    before = list(calls)
    block = model.model.layers[0]
    block.input_layernorm.variance_epsilon, block.mlp.gate.top_k = 1.0, 1
    new(experts(model), "down_proj")
    calls.clear()
    model(**batch)
    assert calls == before
    assert len(of_experts) == 2
    assert said() == []


@pytest.mark.parametrize("attribute", ["bias", "e_score_correction_bias", "routed_scaling_factor"])
def test_what_the_class_does_not_read_changes_nothing(attribute):
    """Our forward of routers reads these where other families have them."""
    router = layer(copy.deepcopy(both("qwen3_moe")[1])).mlp.gate
    assert is_bound_by_us(router)
    hidden = torch.linspace(-1, 1, 3 * router.weight.shape[1]).view(3, -1)
    expected = router(hidden)
    value = torch.full((len(router.weight),), 5.0).cumsum(0)
    setattr(router, attribute, 3.0 if attribute == "routed_scaling_factor" else nn.Parameter(value))
    assert all(map(torch.equal, router(hidden), expected))


def test_a_norm_gets_a_weight():
    norm = nn.RMSNorm(8, eps=1e-5, elementwise_affine=False)
    apply_liger_kernel(toys.Toy(it=norm), LAYERS)
    assert is_bound_by_us(norm)
    norm.weight = nn.Parameter(torch.full((8,), 3.0))
    x = torch.linspace(-1, 2, 16).view(2, 8)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), norm.weight, 1e-5))


@pytest.mark.parametrize("name", ["act_fn", "variance_epsilon", "weight"])
def test_what_is_missing_is_the_error_that_it_was(name):
    errors = []
    for model in both("llama"):
        module = layer(copy.deepcopy(model))
        module = module.mlp if name == "act_fn" else module.input_layernorm
        setattr(module, name, None) if name == "weight" else delattr(module, name)
        with pytest.raises((AttributeError, TypeError)) as error:
            module(torch.ones(2, 32))
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_compiled_code_sees_a_change(said):
    class Norm(toys.Norm):
        def normed(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

        def forward(self, states):
            return self.weight * self.normed(states.float()).to(states.dtype)

    torch.compiler.reset()
    stock = toys.Toy(a=toys.MLP(act=nn.SiLU()), b=toys.MLP(act=nn.SiLU()), norm=Norm())
    model = copy.deepcopy(stock)
    assert all(row.applied for row in apply_liger_kernel(model, LAYERS))
    compiled, x = torch.compile(model, backend="eager", fullgraph=True), torch.linspace(-1, 2, 16).view(2, 8)
    changes = (
        lambda model: setattr(model.a, "act_fn", nn.Tanh()),
        lambda model: setattr(model.b.act_fn, "__class__", nn.Tanh),
        lambda model: setattr(model.norm, "eps", 3.0),
        lambda model: setattr(model.norm, "normed", torch.tanh),
    )
    torch.testing.assert_close(compiled(x), stock(x))
    for change in changes:
        before = stock(x)
        change(stock), change(model)
        assert not torch.equal(stock(x), before)
        torch.testing.assert_close(compiled(x), stock(x))
    assert len(said()) == 3
