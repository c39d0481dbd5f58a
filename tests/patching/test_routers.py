"""Routers: which are found, that they stay what they were, and what is left alone."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.patching.as_written import is_bound_by_us
from liger_trainer.patching.moe import routers
from tests.accuracy import seeded_randn
from tests.moe_routers import HIDDEN, OTHER_ROUTERS, ROUTERS, arguments_of
from tests.patching import toys
from tests.patching.test_experts import LATENT, ROUTED, SPARSE, made
from tests.patching.test_experts import MODELS as EXPERTS_MODELS

ONLY = {"linear_cross_entropy": False, "cross_entropy": False}
SIGMOID = {"deepseek_v3", "glm4_moe", "llama4", "kolibri1", "laguna", "minimax_m2", "hy_v3", "lfm2_moe"}
ROUNDING = {"lfm2_moe": torch.sigmoid, "mistral4": functools.partial(torch.softmax, dim=-1)}
"""Those that round to half precision on the way, and their scores."""
KEEPING_BATCHES = {"gpt_oss", "granitemoe", "jamba", "llama4", "lfm2_moe"}


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
    def forward(self, states, mask=None, scale=1.0):
        return super().forward(states)


class GatedByName(Router):
    def forward(self, states, *, mask):
        return super().forward(states)


class Scaling(Router):
    """Its second argument is one number for each expert too."""

    def forward(self, states, scales):
        logits, weights, index = super().forward(states)
        return logits, weights * scales[index], index


class Corrected(Router):
    """As DeepSeek-V3's, with a correction that may be left out."""

    routed_scaling_factor = 1.0

    def forward(self, states, correction=None):
        logits = F.linear(states.float(), self.weight.float())
        scores = logits.sigmoid()
        index = (scores if correction is None else scores + correction).topk(self.top_k).indices
        weights = scores.gather(1, index)
        return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20), index


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


def assert_close_by_expert(got, expected):
    torch.testing.assert_close(by_expert(got), by_expert(expected), rtol=1e-6, atol=1e-7)


def assert_rounded_once(family, router, correction, got, expected):
    """Weights of the same logits, which these classes round at each step and ours once; scores as high as theirs.

    Of scores that round to the same number, any may be chosen.
    """
    (logits, weights, index), (_, _, chosen) = got, expected
    torch.testing.assert_close(logits, expected[0], rtol=1e-6, atol=1e-7)
    of = ROUNDING[family.partition(",")[0]]
    ranked = of(expected[0]) + (0.0 if correction is None else correction)
    assert torch.equal(*(ranked.gather(1, each).sort(-1).values for each in (index, chosen)))
    exact = of(expected[0].double()).gather(1, index)
    exact = exact / exact.sum(-1, keepdim=True) * router.routed_scaling_factor
    # One rounding is a quarter of it.
    torch.testing.assert_close(weights.double(), exact, rtol=2**-6, atol=1e-7)


@pytest.fixture
def used(calls_of):
    """How often our operators ran."""
    return calls_of(routers, "topk_softmax_routing", "grouped_topk_sigmoid_routing")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ROUTERS)
def test_transformers_routers(family, dtype, used):
    router = ROUTERS[family]().to(dtype)
    hidden = seeded_randn(30, HIDDEN, dtype=dtype)
    given = arguments_of(family, router, hidden)
    expected = router(**given)
    (row,) = apply_liger_kernel(toys.Toy(router=router), ONLY)
    of_sigmoids = family.partition(",")[0] in SIGMOID
    assert row.kernel == ("grouped_topk_sigmoid_routing" if of_sigmoids else "topk_softmax_routing")
    assert (row.component, row.target) == ("router", type(router).__name__)
    assert is_bound_by_us(router)
    if dtype == torch.bfloat16 and family.partition(",")[0] in ROUNDING:
        compare = functools.partial(assert_rounded_once, family, router, given.get("expert_bias"))
    else:
        compare = assert_close_by_expert
    used.clear()
    got = router(**given)
    assert used == [row.kernel]
    assert [(x.dtype, x.shape) for x in got] == [(x.dtype, x.shape) for x in expected]
    compare(got, expected)
    if family.partition(",")[0] not in KEEPING_BATCHES:
        batch = {**given, next(iter(given)): hidden.view(5, 6, -1)}
        compare(router(**batch), expected)
        assert len(used) == 2
    revert_liger_kernel(toys.Toy(router=router))
    assert all(map(torch.equal, router(**given), expected))


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
    given = arguments_of(family, router, seeded_randn(30, HIDDEN))
    with torch.autocast("cpu", torch.bfloat16):
        expected = router(**given)
        apply_liger_kernel(toys.Toy(router=router), ONLY)
        got = router(**given)
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


@pytest.mark.parametrize("family", ["mistral4", "deepseek_v2", "hy_v3", "qwen3_moe"])
def test_a_scale_counts_where_the_class_reads_it(family):
    """Also where it was 1 when the router was proved."""
    router = ROUTERS[family]()
    given = arguments_of(family, router, seeded_randn(30, HIDDEN))
    for name in ("routed_scaling_factor", "router_scaling_factor"):
        if hasattr(router, name):
            setattr(router, name, 1.0)
    apply_liger_kernel(toys.Toy(router=router), ONLY)
    router.routed_scaling_factor = router.router_scaling_factor = 2.5
    torch.testing.assert_close(by_expert(router(**given)), by_expert(type(router).forward(router, **given)))


class ScaledAsGptOss(Router):
    """The softmax of the largest logits, whose formula knows no scale."""

    def __init__(self):
        super().__init__()
        self.routed_scaling_factor = 1.0

    def forward(self, states):
        logits = F.linear(states, self.weight)
        top, index = logits.topk(self.top_k)
        return logits, top.softmax(-1) * self.routed_scaling_factor, index


def test_what_the_formula_does_not_read_may_not_change(used):
    router, states = ScaledAsGptOss(), seeded_randn(30, 8)
    expected = router(states)
    apply_liger_kernel(toys.Toy(router=router), ONLY)
    used.clear()
    torch.testing.assert_close(router(states), expected)
    assert used
    router.routed_scaling_factor = 2.5
    torch.testing.assert_close(router(states)[1], 2.5 * expected[1])


def test_a_correction_that_may_be_left_out(used):
    router, states = Corrected(), seeded_randn(30, 8)
    corrections = [seeded_randn(6, seed=1, scale=0.3), None, 0.0, torch.zeros(1, 6)]
    expected = [by_expert(router(states, each)) for each in corrections] + [by_expert(router(states))]
    (row,) = apply_liger_kernel(toys.Toy(router=router), ONLY)
    assert row.kernel == "grouped_topk_sigmoid_routing"
    used.clear()
    got = [by_expert(router(states, each)) for each in corrections] + [by_expert(router(states=states))]
    torch.testing.assert_close(got, expected)
    assert len(used) == 3  # the other two are no correction that it was proved with


def test_a_correction_that_is_needed():
    router = ROUTERS["hy_v3"]()
    apply_liger_kernel(toys.Toy(router=router), ONLY)
    with pytest.raises(TypeError, match="e_score_correction_bias"):
        router(seeded_randn(30, HIDDEN))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sigmoids_are_ranked_as_they_are_rounded(dtype):
    """They are about 1/2, which half precision tells apart from 257/512 or from 1025/2048 at least."""
    router = ROUTERS["lfm2_moe"]().to(dtype)
    hidden = seeded_randn(200, HIDDEN, dtype=dtype, scale=2.0**-7)
    correction = seeded_randn(12, scale=2.0**-7)
    expected = router(hidden, correction)
    (row,) = apply_liger_kernel(toys.Toy(router=router), ONLY)
    assert row.applied
    got = router(hidden, correction)
    assert torch.equal(got[2].sort(-1).values, expected[2].sort(-1).values)
    exact = (expected[0].float().sigmoid() + correction).topk(3).indices
    assert not torch.equal(exact.sort(-1).values, expected[2].sort(-1).values)


@pytest.mark.parametrize(
    ("router", "reason"),
    [
        (OTHER_ROUTERS["phimoe"](), "it computes none of the known routers"),
        (OTHER_ROUTERS["mistral4, in groups"](), "it computes none of the known routers"),
        (Scaled(), "it computes none of the known routers"),
        (Detached(), "it computes none of the known routers"),
        (Smallest(), "it computes none of the known routers"),
        (Gated(), "its forward takes other arguments than hidden states and a correction bias"),
        (GatedByName(), "its forward takes other arguments than hidden states and a correction bias"),
        (Scaling(), "it computes none of the known routers"),
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


OF_EXPERTS = {name: build for name, (build, _) in EXPERTS_MODELS.items()}
CORRECTED_MODELS = {
    "minimax_m2": made(tf.MiniMaxM2ForCausalLM, tf.MiniMaxM2Config, num_local_experts=4, num_experts_per_tok=2),
    "hy_v3": made(tf.HYV3ForCausalLM, tf.HYV3Config, **SPARSE, num_shared_experts=1, head_dim=8),
    "lfm2_moe": made(
        tf.Lfm2MoeForCausalLM,
        tf.Lfm2MoeConfig,
        **{**SPARSE, "num_dense_layers": 1, "layer_types": ["full_attention", "conv"]},
    ),
    "deepseek_v2": made(
        tf.DeepseekV2ForCausalLM, tf.DeepseekV2Config, **{**ROUTED, **LATENT, "num_key_value_heads": 4}
    ),
    "laguna": made(tf.LagunaForCausalLM, tf.LagunaConfig, **SPARSE, head_dim=8),
    "kolibri1": made(tf.Kolibri1ForCausalLM, tf.Kolibri1Config, **SPARSE, head_dim=8),
}
GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
MODELS = {"qwen2_moe": {}, "olmoe": {}, "deepseek_v3": GROUPED, "glm4_moe": GROUPED, "llama4": {}}
MODELS |= {name: {} for name in CORRECTED_MODELS}
"""Families that `TINY_MODELS` does not have, and fields of their configurations."""


@pytest.mark.parametrize("family", MODELS)
def test_loss_and_gradients_of_whole_models(family):
    model = {**OF_EXPERTS, **CORRECTED_MODELS}[family](**MODELS[family]).train()
    for name, buffer in model.named_buffers():
        if name.endswith("_bias"):
            buffer.copy_(seeded_randn(*buffer.shape, scale=0.3))
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
