"""Routers: which are found, that they stay what they were, and what is left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.patching.binding import is_bound_by_us
from tests.accuracy import seeded_randn
from tests.moe_routers import HIDDEN, OTHER_ROUTERS, ROUTERS
from tests.patching import toys
from tests.patching.test_experts import MODELS as EXPERTS_MODELS

ONLY = {"linear_cross_entropy": False, "cross_entropy": False}
SIGMOID = {"deepseek_v3", "glm4_moe", "llama4"}
FLATTENING = {"qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "glm4_moe"}


class Router(nn.Module):
    """As Mixtral's, of no known family."""

    def __init__(self):
        super().__init__()
        self.top_k = 2
        self.weight = nn.Parameter(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, states):
        logits = F.linear(states, self.weight)
        weights, index = logits.float().softmax(-1).topk(self.top_k)
        return logits, weights / weights.sum(-1, keepdim=True), index


class Casting(Router):
    """Takes hidden states of any dtype."""

    def forward(self, states):
        return super().forward(states.to(self.weight.dtype))


class WithoutAutocast(Router):
    """Computes in its own dtype whatever autocast says."""

    def forward(self, states):
        with torch.autocast(states.device.type, enabled=False):
            return super().forward(states)


class Scaled(Router):
    def forward(self, states):
        logits, weights, index = super().forward(states)
        return logits, 1.5 * weights, index


class Detached(Router):
    """The same values, other gradients."""

    def forward(self, states):
        logits, weights, index = super().forward(states)
        return logits, weights.detach() + 0 * logits.sum(), index


class Smallest(Router):
    def forward(self, states):
        logits = F.linear(states, self.weight)
        weights, index = logits.float().softmax(-1).topk(self.top_k, largest=False)
        return logits, weights / weights.sum(-1, keepdim=True), index


class Gated(Router):
    def forward(self, states, mask=None):
        return super().forward(states)


class Tempered(Router):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, states):
        return super().forward(states / self.temperature)


def by_expert(result):
    if len(result) == 2:
        return result
    logits, weights, index = result
    return logits, torch.zeros_like(logits, dtype=weights.dtype).scatter(1, index, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ROUTERS)
def test_transformers_routers(family, dtype):
    router = ROUTERS[family]().to(dtype)
    hidden = seeded_randn(30, HIDDEN, dtype=dtype)
    expected = router(hidden)
    (row,) = apply_liger_kernel(toys.Toy(router=router), ONLY)
    assert row.kernel == ("grouped_topk_sigmoid_routing" if family in SIGMOID else "topk_softmax_routing")
    assert (row.component, row.target) == ("router", type(router).__name__)
    assert is_bound_by_us(router)
    got = router(hidden_states=hidden)
    assert [(x.dtype, x.shape) for x in got] == [(x.dtype, x.shape) for x in expected]
    torch.testing.assert_close(by_expert(got), by_expert(expected), rtol=1e-6, atol=1e-7)
    if family in FLATTENING:
        torch.testing.assert_close(by_expert(router(hidden.view(5, 6, -1))), by_expert(expected), rtol=1e-6, atol=1e-7)
    revert_liger_kernel(toys.Toy(router=router))
    assert all(map(torch.equal, router(hidden), expected))


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe"])
def test_batches_where_the_class_keeps_them_run_its_own_forward(family):
    router = ROUTERS[family]()
    hidden = seeded_randn(2, 6, HIDDEN)
    expected = router(hidden)
    apply_liger_kernel(toys.Toy(router=router), ONLY)
    assert all(map(torch.equal, router(hidden), expected))


@pytest.mark.parametrize("family", ROUTERS)
def test_autocast_gives_the_models_dtypes(family):
    router = ROUTERS[family]()
    hidden = seeded_randn(30, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        expected = router(hidden)
        apply_liger_kernel(toys.Toy(router=router), ONLY)
        got = router(hidden)
    assert [x.dtype for x in got] == [x.dtype for x in expected]


@pytest.mark.parametrize(
    ("kind", "dtype", "autocast"), [(Casting, torch.bfloat16, False), (WithoutAutocast, torch.float32, True)]
)
def test_what_is_not_proved_runs_the_classs_own_forward(kind, dtype, autocast):
    router, states = kind(), seeded_randn(30, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = router(states)
        (row,) = apply_liger_kernel(toys.Toy(router=router), ONLY)
        got = router(states)
    assert row.applied
    assert all(map(torch.equal, got, expected))


def test_settings_are_read_at_every_call():
    router = ROUTERS["qwen3_moe"]()
    hidden = seeded_randn(30, HIDDEN)
    apply_liger_kernel(toys.Toy(router=router), ONLY)
    router.top_k, router.norm_topk_prob = 2, False
    got = router(hidden)
    assert got[2].shape == (30, 2)
    torch.testing.assert_close(got, type(router).forward(router, hidden))


@pytest.mark.parametrize(
    ("router", "reason"),
    [
        (OTHER_ROUTERS["deepseek_v2"](), "it computes none of the known routers"),
        (OTHER_ROUTERS["phimoe"](), "it computes none of the known routers"),
        (OTHER_ROUTERS["minimax_m2"](), "its forward takes more than the hidden states"),
        (Scaled(), "it computes none of the known routers"),
        (Detached(), "it computes none of the known routers"),
        (Smallest(), "it computes none of the known routers"),
        (Gated(), "its forward takes more than the hidden states"),
        (Tempered(), "it has temperature besides a router's weight, bias and correction"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_others_are_left_alone_with_the_reason(router, reason):
    (row,) = apply_liger_kernel(toys.Toy(router=router), ONLY)
    assert not row.applied
    assert row.reason.startswith(reason)
    assert "forward" not in router.__dict__


def test_unknown_family_with_a_known_formula_and_the_switch():
    model = toys.Toy(router=Router())
    (row,) = apply_liger_kernel(model, ONLY)
    assert row.kernel == "topk_softmax_routing"
    (row,) = apply_liger_kernel(model, {**ONLY, "router": False})
    assert row.reason == "switched off in liger_kernel_config"
    model.router.forward = lambda states: None
    (row,) = apply_liger_kernel(model, ONLY)
    assert row.reason.startswith("its forward is already overridden by ")


GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
MODELS = {"qwen2_moe": {}, "olmoe": {}, "deepseek_v3": GROUPED, "glm4_moe": GROUPED, "llama4": {}}
"""Families that `TINY_MODELS` does not have, and fields of their configurations."""


@pytest.mark.parametrize("family", MODELS)
def test_loss_and_gradients_of_whole_models(family):
    model = EXPERTS_MODELS[family][0](**MODELS[family]).train()
    ids = torch.randint(3, 110, (2, 12), generator=torch.Generator().manual_seed(0))

    def loss_and_gradients(model):
        outputs = model(input_ids=ids, labels=ids, output_router_logits=True)
        outputs.loss.backward()
        logits = getattr(outputs, "router_logits", None) or ()
        return outputs.loss, logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected, recorded, gradients = loss_and_gradients(copy.deepcopy(model))
    report = apply_liger_kernel(model, {**dict.fromkeys(("rope", "rms_norm", "swiglu"), False), **ONLY})
    assert [row.applied for row in report if row.component == "router"] == [True]
    loss, ours, own = loss_and_gradients(model)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(ours, recorded)
    assert own.keys() == gradients.keys()
    assert any("gate.weight" in name or "router.weight" in name for name in own)
    for name, gradient in gradients.items():
        assert (own[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name
