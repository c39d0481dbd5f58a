"""The kernels of routers: values and gradients, ties and numbers that are none, any shape, the probe's verdicts."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.moe import router as moe_router
from liger_trainer.kernels.moe.router import (
    grouped_topk_sigmoid_routing,
    grouped_topk_sigmoid_routing_reference,
    topk_softmax_routing,
    topk_softmax_routing_reference,
)
from liger_trainer.patching.moe.routers import find_router
from liger_trainer.patching.probe import Probe
from tests.accuracy import seeded_randn
from tests.moe_routers import ROUTERS

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
REFERENCES = {
    topk_softmax_routing: topk_softmax_routing_reference,
    grouped_topk_sigmoid_routing: grouped_topk_sigmoid_routing_reference,
}


def outcome(function, logits, k, **options):
    """Weights, experts and the gradient of the logits."""
    logits = logits.detach().requires_grad_()
    weights, index = function(logits, k, **options)
    upstream = seeded_randn(*weights.shape, seed=3, device=logits.device, dtype=torch.bfloat16).to(weights.dtype)
    return weights, index, torch.autograd.grad(weights, logits, upstream)[0]


@given(
    function=st.sampled_from(list(REFERENCES)),
    tokens=st.integers(0, 40),
    members=st.integers(2, 40),
    groups=st.integers(1, 6),
    data=st.data(),
    normalise=st.booleans(),
    biased=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    transposed=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_any_shape(function, tokens, members, groups, data, normalise, biased, dtype, transposed):
    """The experts that float64 chooses of the same numbers, and weights and gradients rounded once."""
    experts = groups * members
    options = {"normalise": normalise}
    top_groups = 1
    if function is grouped_topk_sigmoid_routing:
        top_groups = data.draw(st.integers(1, groups), "top_groups")
        options |= {"num_groups": groups, "top_groups": top_groups, "scale": 2.5}
        options["correction_bias"] = seeded_randn(experts, seed=1, device=DEVICE) * 0.3 if biased else None
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


def test_equal_numbers_go_to_the_lower_expert():
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, 1.0, 0.0]], device=DEVICE)
    for function in REFERENCES:
        assert function(logits, 6)[1].tolist() == [[1, 3, 4, 0, 2, 5]]
    index = grouped_topk_sigmoid_routing(logits[:, [4, 4, 4, 4]], 2, num_groups=2, top_groups=1)[1]
    assert index.tolist() == [[0, 1]]


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


def test_scores_that_vanish_do_not_divide_by_zero():
    weights, _, gradient = outcome(grouped_topk_sigmoid_routing, torch.full((1, 4), -200.0, device=DEVICE), 2)
    assert not weights.any()
    assert not gradient.any()


def test_opcheck():
    logits = seeded_randn(4, 6, device=DEVICE).requires_grad_()
    bias = seeded_randn(6, device=DEVICE)
    for options in ((None, 2, False, True, 1, 1, 1.0), (bias, 3, True, True, 3, 2, 2.5)):
        torch.library.opcheck(moe_router._route, (logits, *options, torch.float32))
    index = torch.tensor([[0, 2]] * 4, device=DEVICE)
    torch.library.opcheck(
        moe_router._route_backward, (seeded_randn(4, 2, device=DEVICE), logits.detach(), index, True, True, 2.5)
    )


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "deepseek_v3", "llama4"])
def test_probe_finds_the_kernel_equal(family):
    router = ROUTERS[family]().to(DEVICE)
    probe = Probe(DEVICE)
    with probe.isolated():
        finding = find_router(router, lambda component: True, probe)
    assert finding.kernel, finding.reason
    hidden = seeded_randn(10, router.weight.shape[1], device=DEVICE)
    expected = router(hidden)
    got = finding.forward(router, hidden)
    compare = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    if family == "llama4":
        compare(got, expected)
        return
    for one, other in zip(got, expected):
        compare(one.sort(dim=1).values, other.sort(dim=1).values)
