"""Routers: references against transformers' own, kernels against float64 (ties, NaN, any shape), real sizes."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.moe import router as operators
from liger_trainer.kernels.moe.router import (
    grouped_topk_sigmoid_routing,
    grouped_topk_sigmoid_routing_reference,
    topk_softmax_routing,
    topk_softmax_routing_reference,
)
from liger_trainer.patching.moe.routers import find_router
from liger_trainer.patching.probe import Probe
from tests.accuracy import seeded_randn
from tests.aot import TARGETS, compile_launch, recorded_launches
from tests.moe_routers import HIDDEN, ROUTERS, arguments_of

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


REFERENCES = {
    topk_softmax_routing: topk_softmax_routing_reference,
    grouped_topk_sigmoid_routing: grouped_topk_sigmoid_routing_reference,
}
OURS = {
    "qwen2_moe": partial(topk_softmax_routing, normalise=False),
    "qwen3_moe": partial(topk_softmax_routing),
    "olmoe": partial(topk_softmax_routing, normalise=False),
    "mixtral": partial(topk_softmax_routing, dtype=torch.float32),
    "gpt_oss": partial(topk_softmax_routing, softmax_after_topk=True),
    "granitemoe": partial(topk_softmax_routing, softmax_after_topk=True),
    "jamba": partial(topk_softmax_routing, normalise=False),
    "glm4_moe": partial(grouped_topk_sigmoid_routing),
    "deepseek_v3": partial(grouped_topk_sigmoid_routing, num_groups=4, top_groups=2),
    "deepseek_v2": partial(topk_softmax_routing, normalise=False, scale=2.5),
    "deepseek_v2, in groups": partial(topk_softmax_routing, num_groups=4, top_groups=2, normalise=False),
    "mistral_large4": partial(topk_softmax_routing),
    "kolibri1": partial(grouped_topk_sigmoid_routing, sigmoid_after_topk=True, eps=0.0),
    "laguna": partial(grouped_topk_sigmoid_routing, eps=0.0),
    "minimax_m2": partial(grouped_topk_sigmoid_routing, dtype=torch.float32, eps=0.0),
    "hy_v3": partial(grouped_topk_sigmoid_routing, scale=2.5),
    "lfm2_moe": partial(grouped_topk_sigmoid_routing, round_scores=True, eps=1e-6),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", OURS)
def test_reference_is_the_models_own(family, dtype):
    """The same experts, and weights that differ by the order of a sum at most."""
    router = ROUTERS[family]().to(dtype)
    hidden = seeded_randn(40, HIDDEN, dtype=dtype)
    given = arguments_of(family, router, hidden)
    logits, weights, index = router(**given)
    ours = OURS[family]
    if ours.func is grouped_topk_sigmoid_routing:
        bias = [*given.values()][1] if len(given) > 1 else router.e_score_correction_bias
        scale = getattr(router, "routed_scaling_factor", 1.0)
        normalise = getattr(router, "norm_topk_prob", True)
        ours = partial(ours, **{"correction_bias": bias, "normalise": normalise, "scale": scale, **ours.keywords})
    if family in ("granitemoe", "laguna"):
        ours = partial(ours, dtype=dtype)
    got, chosen = ours(logits, router.top_k)
    assert (got.dtype, chosen.dtype) == (weights.dtype, index.dtype)

    def distance(one, other):
        return (one - other).double().norm() / other.double().norm()

    def dense(weights, index):
        return torch.zeros_like(logits, dtype=weights.dtype).scatter(1, index, weights)

    rounded = dtype == torch.bfloat16 and family == "lfm2_moe"  # three times on the way
    assert distance(dense(got, chosen), dense(weights, index)) <= (2**-6 if rounded else 1e-6)
    upstream = seeded_randn(*logits.shape, dtype=got.dtype, seed=1)
    expected = torch.autograd.grad(dense(weights, index), logits, upstream, retain_graph=True)
    gradient = torch.autograd.grad(dense(got, chosen), logits, upstream)
    assert distance(*gradient, *expected) <= (1e-5 if dtype == torch.float32 else 4e-2 if rounded else 2**-8)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_sigmoids_are_torchs(dtype):
    """Of two neighbours among the numbers of the dtype, the larger sigmoid wins, and a correction where they are equal.

    Two ways to compute exp may round differently where a sigmoid is half way between two numbers.
    """
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    numbers = numbers[numbers.abs() < 30.0].sort().values.unique_consecutive()
    pairs = torch.stack((numbers[:-1], numbers[1:]), 1)[:: 1 if DEVICE.type == "cuda" else 11].to(DEVICE)
    first, second = pairs.sigmoid().float().unbind(1)
    least = 2.0**-30
    correction = torch.tensor([least, 0.0], device=DEVICE)
    index = grouped_topk_sigmoid_routing(pairs, 1, round_scores=True, correction_bias=correction)[1].squeeze(1)
    expected = (second > first + least).long()
    assert 0 < expected.sum() < len(expected) / 2
    assert (index == expected).float().mean() > 0.999


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_llama_4(size):
    """Also where the sigmoids of several experts round to 1."""
    router = ROUTERS["llama4"]()
    scores, logits = router(size * seeded_randn(40, HIDDEN))
    weights, index = grouped_topk_sigmoid_routing(logits, router.top_k, sigmoid_after_topk=True, normalise=False)
    assert torch.equal(torch.zeros_like(logits).scatter(1, index, weights), scores)


@pytest.mark.parametrize(
    "function",
    [
        topk_softmax_routing,
        partial(topk_softmax_routing, normalise=False),
        partial(topk_softmax_routing, softmax_after_topk=True),
        grouped_topk_sigmoid_routing,
        partial(grouped_topk_sigmoid_routing, normalise=False, num_groups=3, top_groups=2, scale=2.5),
        partial(grouped_topk_sigmoid_routing, eps=0.5),
        partial(topk_softmax_routing, num_groups=3, top_groups=2, scale=2.5, normalise=False),
    ],
)
def test_float64_runs_as_reference(function, device):
    logits = seeded_randn(4, 12, dtype=torch.float64, device=device).requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: function(logits, 3)[0], logits)


def test_weights_may_have_another_dtype():
    logits = seeded_randn(4, 12, dtype=torch.bfloat16)
    for function in (topk_softmax_routing, grouped_topk_sigmoid_routing):
        wide, index = function(logits, 3, dtype=torch.float32)
        narrow, same = function(logits, 3)
        assert torch.equal(index, same)
        assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(wide.bfloat16(), narrow)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logits": torch.zeros(3)}, r"`logits` is \(3,\); it must be \(tokens, experts\)"),
        ({"logits": torch.zeros(2, 12).long()}, "`logits` is torch.int64; it must be a floating dtype"),
        ({"k": 0}, "`k` is 0; it must be from 1 to the number of experts, 12"),
        ({"k": 13}, "`k` is 13; it must be from 1 to the number of experts, 12"),
        ({"num_groups": 5}, "`num_groups` is 5; it must divide the 12 experts into groups of at least 2"),
        ({"num_groups": 0}, "`num_groups` is 0"),
        ({"num_groups": 12}, "`num_groups` is 12"),
        ({"num_groups": 4, "top_groups": 5}, "`top_groups` is 5; it must be from 1 to `num_groups`, 4"),
        ({"num_groups": 4, "k": 4}, "`k` is 4, but 1 groups hold 3 experts"),
        ({"correction_bias": torch.zeros(4)}, r"`correction_bias` is \(4,\); it must be \(12,\)"),
        ({"eps": -1e-20}, "`eps` is -1e-20; it must be 0 or more"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        grouped_topk_sigmoid_routing(**{"logits": torch.zeros(2, 12), "k": 2, **options})
    if not options.keys() & {"correction_bias", "eps"}:
        with pytest.raises(ValueError, match=message):
            topk_softmax_routing(**{"logits": torch.zeros(2, 12), "k": 2, **options})


@pytest.mark.parametrize(
    ("experts", "k", "groups", "sigmoid", "normalise", "dtype", "target"),
    [
        *((128, 8, 1, False, True, torch.bfloat16, target) for target in TARGETS),
        *((256, 8, 8, True, True, torch.float32, target) for target in ("sm_90", "gfx942")),
        (160, 6, 8, False, False, torch.float32, "sm_90"),
        (64, 4, 1, True, True, torch.bfloat16, "sm_90"),
        (60, 4, 1, False, False, torch.float16, "sm_90"),
        (1, 1, 1, True, False, torch.float32, "sm_90"),
    ],
)
def test_compiles_ahead_of_time(experts, k, groups, sigmoid, normalise, dtype, target):
    logits = torch.zeros(100, experts, dtype=dtype)
    bias = torch.zeros(experts) if sigmoid else None
    with recorded_launches() as launches:
        weights, index = operators._route(
            *(logits, bias, k, sigmoid, not sigmoid, sigmoid, normalise),
            *(groups, max(1, groups // 2), 2.5, 1e-20, dtype),
        )
        operators._route_backward(weights, logits, index, sigmoid, normalise, 2.5, 1e-20)
    assert len(launches) == 2
    for launch in launches:
        compiled = compile_launch(launch, target)
        if target == "sm_90":
            assert "st.local" not in compiled.asm["ptx"]


def outcome(function, logits, k, **options):
    """Weights, experts and the gradient of the logits."""
    logits = logits.detach().requires_grad_()
    weights, index = function(logits, k, **options)
    upstream = seeded_randn(*weights.shape, seed=3, device=logits.device, dtype=torch.bfloat16).to(weights.dtype)
    return weights, index, torch.autograd.grad(weights, logits, upstream)[0]


@pytest.mark.kernel
@given(
    function=st.sampled_from(list(REFERENCES)),
    tokens=st.integers(0, 40),
    members=st.integers(2, 40),
    groups=st.integers(1, 6),
    data=st.data(),
    normalise=st.booleans(),
    biased=st.booleans(),
    after=st.booleans(),
    eps=st.sampled_from([1e-20, 0.0, 1e-6, 0.5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    transposed=st.booleans(),
)
@settings(max_examples=15)
def test_any_shape(function, tokens, members, groups, data, normalise, biased, after, eps, dtype, transposed):
    """The experts are those of float64 on the same numbers; weights and gradients are rounded once."""
    experts = groups * members
    top_groups = data.draw(st.integers(1, groups), "top_groups")
    options = {"normalise": normalise, "num_groups": groups, "top_groups": top_groups, "scale": 2.5}
    if function is grouped_topk_sigmoid_routing:
        options["eps"] = eps
        options["correction_bias"] = seeded_randn(experts, seed=1, device=DEVICE) * 0.3 if biased else None
        options["sigmoid_after_topk"] = after
    k = data.draw(st.integers(1, min(8, top_groups * members)), "k")
    # All different, also in bfloat16, and of one sign: s(x) + s(-x) would be the same sum for many groups.
    order = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens)).argsort(dim=1)
    logits = (order / 64).to(DEVICE, dtype)
    logits = logits.mT.contiguous().mT if transposed else logits
    weights, index, gradient = outcome(function, logits, k, **options)
    right, chosen, exact = outcome(REFERENCES[function], logits.double(), k, **options)
    assert (weights.dtype, gradient.dtype, index.dtype) == (dtype, dtype, torch.int64)
    assert torch.equal(index, chosen)
    rounding = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(weights.double(), right, rtol=rounding, atol=1e-7)
    torch.testing.assert_close(gradient.double(), exact, rtol=rounding, atol=1e-6)


@pytest.mark.kernel
def test_equal_numbers_go_to_the_lower_expert():
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, 1.0, 0.0]], device=DEVICE)
    for function in REFERENCES:
        assert function(logits, 6)[1].tolist() == [[1, 3, 4, 0, 2, 5]]
    for function in REFERENCES:
        index = function(logits[:, [4, 4, 4, 4]], 2, num_groups=2, top_groups=1)[1]
        assert index.tolist() == [[0, 1]]


@pytest.mark.kernel
def test_a_group_is_as_good_as_its_best_expert_or_its_best_two():
    logits = torch.tensor([[3.0, -3.0, 2.0, 2.0]], device=DEVICE)
    assert topk_softmax_routing(logits, 1, num_groups=2)[1].tolist() == [[0]]
    assert grouped_topk_sigmoid_routing(logits, 1, num_groups=2)[1].tolist() == [[2]]


@pytest.mark.kernel
@pytest.mark.parametrize("shift", [0.0, -150.0])
def test_logits_are_ranked_where_their_sigmoids_are_equal(shift):
    """In fp32 they are all 1, or all 0."""
    logits = torch.tensor([[20.0, 25.0, 18.0, 17.0]], device=DEVICE) + shift
    weights, index, gradient = outcome(
        grouped_topk_sigmoid_routing, logits, 3, sigmoid_after_topk=True, normalise=False
    )
    assert index.tolist() == [[1, 0, 2]]
    exact, chosen, slope = outcome(
        grouped_topk_sigmoid_routing_reference, logits.double(), 3, sigmoid_after_topk=True, normalise=False
    )
    assert torch.equal(index, chosen)
    torch.testing.assert_close(weights.double(), exact, rtol=1e-6, atol=1e-40)
    torch.testing.assert_close(gradient.double(), slope, rtol=1e-5, atol=1e-40)


@pytest.mark.kernel
def test_infinite_and_not_a_number():
    """Every row still has k different experts that exist."""
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan, 1.0, inf], [-inf, -inf, 0.0], [nan, nan, nan], [-inf, -inf, -inf]], device=DEVICE)
    for function, reference in REFERENCES.items():
        weights, index = function(logits, 3)
        assert index.tolist() == [[0, 2, 1], [2, 0, 1], [0, 1, 2], [0, 1, 2]]
        exact = reference(logits, 3)[0]
        torch.testing.assert_close(weights[1:], exact[1:], equal_nan=True)
        assert weights[0].isnan().all()


@pytest.mark.kernel
def test_scores_that_vanish_do_not_divide_by_zero():
    weights, _, gradient = outcome(grouped_topk_sigmoid_routing, torch.full((1, 4), -200.0, device=DEVICE), 2)
    assert not weights.any()
    assert not gradient.any()
    weights = grouped_topk_sigmoid_routing(torch.full((1, 4), -200.0, device=DEVICE), 2, eps=0.0)[0]
    assert weights.isnan().all()


@pytest.mark.kernel
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_the_epsilon_of_the_sum(eps):
    logits = seeded_randn(20, 12, device=DEVICE, scale=4.0) - 12.0
    weights, index, gradient = outcome(grouped_topk_sigmoid_routing, logits, 3, eps=eps)
    right, chosen, exact = outcome(grouped_topk_sigmoid_routing_reference, logits.double(), 3, eps=eps)
    assert torch.equal(index, chosen)
    torch.testing.assert_close(weights.double(), right, rtol=2e-6, atol=0.0)
    torch.testing.assert_close(gradient.double(), exact, rtol=0, atol=2e-6 * exact.abs().max().item())


@pytest.mark.kernel
@pytest.mark.parametrize(
    "family",
    ["qwen2_moe", "mixtral", "deepseek_v3", "llama4", "deepseek_v2, in groups", "minimax_m2", "hy_v3", "lfm2_moe"],
)
def test_probe_finds_the_kernel_equal(family):
    router = ROUTERS[family]().to(DEVICE)
    probe = Probe(DEVICE)
    with probe.isolated():
        finding = find_router(router, lambda component: True, probe)
    assert finding.kernel, finding.reason
    hidden = seeded_randn(10, router.weight.shape[1], device=DEVICE)
    given = arguments_of(family, router, hidden)
    expected = router(**given)
    got = finding.forward(router, **given)
    compare = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    if family == "llama4":
        compare(got, expected)
        return
    for one, other in zip(got, expected):
        compare(one.sort(dim=1).values, other.sort(dim=1).values)


REAL = {
    "Qwen3-MoE": (topk_softmax_routing, topk_softmax_routing_reference, 128, 8, {}),
    "OLMoE": (topk_softmax_routing, topk_softmax_routing_reference, 64, 8, {"normalise": False}),
    "Qwen3-Next": (topk_softmax_routing, topk_softmax_routing_reference, 512, 10, {}),
    "DeepSeek-V3": (
        grouped_topk_sigmoid_routing,
        grouped_topk_sigmoid_routing_reference,
        256,
        8,
        {"num_groups": 8, "top_groups": 4, "scale": 2.5},
    ),
    "DeepSeek-V2": (
        topk_softmax_routing,
        topk_softmax_routing_reference,
        160,
        6,
        {"num_groups": 8, "top_groups": 3, "scale": 16.0, "normalise": False},
    ),
    "MiniMax-M2": (grouped_topk_sigmoid_routing, grouped_topk_sigmoid_routing_reference, 256, 8, {"eps": 0.0}),
    "Kimi-K2": (grouped_topk_sigmoid_routing, grouped_topk_sigmoid_routing_reference, 384, 8, {"scale": 2.8}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", REAL)
def test_sizes_of_real_models(model, dtype, device):
    function, reference, experts, k, options = REAL[model]
    if dtype == torch.bfloat16 and experts > 256:
        pytest.skip("bfloat16 has fewer different numbers there")
    torch.manual_seed(0)
    # Different numbers in every row, in bfloat16 too; of one sign, so that no two groups' sums are the same.
    order = torch.rand(8192, experts, device=device).argsort(dim=1)
    logits = (2.0 ** (-order.double() * (6 / experts))).to(torch.bfloat16 if experts <= 256 else torch.float32)
    logits = logits.to(dtype).requires_grad_()
    weights, index = function(logits, k, **options)
    right, chosen = reference(logits.double(), k, **options)
    if function is topk_softmax_routing:
        assert torch.equal(index, chosen)
    # Sums of groups, and sigmoids, may be closer to each other than fp32 can tell; either choice is right then.
    assert (index.sort().values == chosen.sort().values).all(-1).float().mean() > 0.999
    same = (index == chosen).all(-1)
    rounding = 3e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(weights[same].double(), right[same], rtol=rounding, atol=1e-7)
    upstream = torch.randn_like(weights)
    (gradient,) = torch.autograd.grad(weights, logits, upstream, retain_graph=True)
    (exact,) = torch.autograd.grad(right, logits, upstream.double())
    torch.testing.assert_close(gradient[same].double(), exact[same].double(), rtol=2 * rounding, atol=1e-6)
    assert torch.equal(gradient, torch.autograd.grad(weights, logits, upstream)[0])
