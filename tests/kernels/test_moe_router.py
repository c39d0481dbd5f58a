"""The routers against transformers' own, float64, what they refuse, and their kernels compiled for every GPU."""

from functools import partial

import pytest
import torch

from liger_trainer.kernels.moe import router as operators
from liger_trainer.kernels.moe.router import grouped_topk_sigmoid_routing, topk_softmax_routing
from tests.accuracy import seeded_randn
from tests.aot import TARGETS, compile_launch, recorded_launches
from tests.moe_routers import HIDDEN, ROUTERS

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
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", OURS)
def test_reference_is_the_models_own(family, dtype):
    """The same experts, and weights that differ by the order of a sum at most."""
    router = ROUTERS[family]().to(dtype)
    hidden = seeded_randn(40, HIDDEN, dtype=dtype)
    logits, weights, index = router(hidden)
    ours = OURS[family]
    if ours.func is grouped_topk_sigmoid_routing:
        bias, scale = router.e_score_correction_bias, router.routed_scaling_factor
        ours = partial(ours, correction_bias=bias, normalise=router.norm_topk_prob, scale=scale)
    if family == "granitemoe":
        ours = partial(ours, dtype=dtype)
    got, chosen = ours(logits, router.top_k)
    assert (got.dtype, chosen.dtype) == (weights.dtype, index.dtype)

    def dense(weights, index):
        return torch.zeros_like(logits, dtype=weights.dtype).scatter(1, index, weights)

    torch.testing.assert_close(dense(got, chosen), dense(weights, index), rtol=1e-6, atol=0.0)
    upstream = seeded_randn(*logits.shape, dtype=got.dtype, seed=1)
    expected = torch.autograd.grad(dense(weights, index), logits, upstream, retain_graph=True)
    gradient = torch.autograd.grad(dense(got, chosen), logits, upstream)
    torch.testing.assert_close(gradient, expected, rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=1e-6)


def test_llama_4():
    router = ROUTERS["llama4"]()
    scores, logits = router(seeded_randn(40, HIDDEN))
    weights, index = grouped_topk_sigmoid_routing(logits, router.top_k, normalise=False)
    assert torch.equal(torch.zeros_like(logits).scatter(1, index, weights), scores)


@pytest.mark.parametrize(
    "function",
    [
        topk_softmax_routing,
        partial(topk_softmax_routing, normalise=False),
        partial(topk_softmax_routing, softmax_after_topk=True),
        grouped_topk_sigmoid_routing,
        partial(grouped_topk_sigmoid_routing, normalise=False, num_groups=3, top_groups=2, scale=2.5),
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
        ({"logits": torch.zeros(2, 12).long()}, "`logits` is of torch.int64; it must be of a floating dtype"),
        ({"k": 0}, "`k` is 0; it must be from 1 to the number of experts, 12"),
        ({"k": 13}, "`k` is 13; it must be from 1 to the number of experts, 12"),
        ({"num_groups": 5}, "`num_groups` is 5; it must divide the 12 experts into groups of at least 2"),
        ({"num_groups": 0}, "`num_groups` is 0"),
        ({"num_groups": 12}, "`num_groups` is 12"),
        ({"num_groups": 4, "top_groups": 5}, "`top_groups` is 5; it must be from 1 to `num_groups`, 4"),
        ({"num_groups": 4, "k": 4}, "`k` is 4, but 1 groups have 3 experts"),
        ({"correction_bias": torch.zeros(4)}, r"`correction_bias` is \(4,\); it must be \(12,\)"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        grouped_topk_sigmoid_routing(**{"logits": torch.zeros(2, 12), "k": 2, **options})
    if options.keys() <= {"logits", "k"}:
        with pytest.raises(ValueError, match=message):
            topk_softmax_routing(**{"logits": torch.zeros(2, 12), "k": 2, **options})


@pytest.mark.parametrize(
    ("experts", "k", "groups", "sigmoid", "normalise", "dtype", "target"),
    [
        *((128, 8, 1, False, True, torch.bfloat16, target) for target in TARGETS),
        *((256, 8, 8, True, True, torch.float32, target) for target in ("sm_90", "gfx942")),
        (60, 4, 1, False, False, torch.float16, "sm_90"),
        (1, 1, 1, True, False, torch.float32, "sm_90"),
    ],
)
def test_compiles_ahead_of_time(experts, k, groups, sigmoid, normalise, dtype, target):
    logits = torch.zeros(100, experts, dtype=dtype)
    bias = torch.zeros(experts) if sigmoid else None
    with recorded_launches() as launches:
        weights, index = operators._route(logits, bias, k, sigmoid, normalise, groups, max(1, groups // 2), 2.5, dtype)
        operators._route_backward(weights, logits, index, sigmoid, normalise, 2.5)
    assert len(launches) == 2
    for launch in launches:
        compiled = compile_launch(launch, target)
        if target == "sm_90":
            assert "st.local" not in compiled.asm["ptx"]
