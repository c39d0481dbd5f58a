"""moe_experts and LigerExperts against plain torch, expert by expert; kernels in fp32; published blocks on a GPU."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from liger_trainer.kernels.activation import NAMES
from liger_trainer.kernels.moe import expert_layers as layers
from liger_trainer.kernels.moe.experts import moe_experts, moe_experts_reference
from liger_trainer.nn import LigerExperts
from tests.calls import recorded_calls, saved_tensors
from tests.device import no_host_sync
from tests.moe_blocks import BLOCKS, measure_block, on_meta

SIZES = {"tokens": 9, "top_k": 2, "experts": 4, "hidden": 10, "intermediate": 6}


GPT_OSS = {"limit": 0.7, "gate_multiplier": 1.7, "down_multiplier": 1 / 1.7, "up_offset": 1.0}


def bounded(pre):
    """An activation that no kernel has."""
    gate, up = pre.chunk(2, -1)
    return 3 * (gate / 3).tanh() * gate.sigmoid() * up.sin()


# Name -> sizes that differ from SIZES, and options.
CASES = {
    "gated": ({}, {}),
    "interleaved": ({}, {"interleaved": True}),
    "transposed": ({}, {"transposed": True}),
    "biases": ({}, {"biases": True}),
    "gpt_oss": ({}, {**GPT_OSS, "interleaved": True, "transposed": True, "biases": True}),
    **{name: ({}, {"activation": name}) for name in NAMES[1:]},
    "no gate": ({}, {"gated": False, "activation": "relu_squared"}),
    "no gate, biases": ({}, {"gated": False, "transposed": True, "biases": True}),
    "a function": ({}, {"activation": bounded, "biases": True}),
    "a function that saves its result": ({}, {"activation": torch.tanh, "gated": False, "transposed": True}),
    "a function, experts elsewhere": ({"elsewhere": 3}, {"activation": bounded}),
    "one choice": ({"top_k": 1}, {}),
    "one expert": ({"top_k": 1, "experts": 1}, {"biases": True}),
    "one token": ({"tokens": 1}, {"biases": True}),
    "no tokens": ({"tokens": 0}, {"biases": True}),
    "experts without tokens": ({"experts": 40}, {"biases": True}),
    "experts elsewhere": ({"elsewhere": 3}, {"biases": True}),
    "all experts elsewhere": ({"elsewhere": 3, "here": 0}, {}),
    "wide": ({"tokens": 70, "top_k": 4, "experts": 5, "hidden": 72, "intermediate": 100}, {}),
}


cases = pytest.mark.parametrize("case", CASES)


def made(case, dtype=torch.float64, device="cpu"):
    """The arguments, leaves all but the second, and the options."""
    sizes, options = CASES[case]
    tokens, top_k, experts, hidden, inner = ({**SIZES, **sizes}[name] for name in SIZES)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(tokens, sizes.get("here", experts) + sizes.get("elsewhere", 0), generator=generator)
    index = chosen.argsort(1)[:, :top_k]
    index = torch.where(index < sizes.get("here", experts), index, experts)
    wide = inner if options.get("gated") is False else 2 * inner
    shapes = [(wide, hidden), (hidden, inner)]
    shapes = [(experts, *(shape[::-1] if options.get("transposed") else shape)) for shape in shapes]
    biases = [(experts, wide), (experts, hidden)] if options.get("biases") else []
    leaves = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for shape in ((tokens, hidden), (tokens, top_k), *shapes, *biases)
    ]
    plain = {name: value for name, value in options.items() if name != "biases"}
    return [leaves[0], index.to(device), *leaves[1:]], plain


def run(function, arguments, options):
    names = ("gate_up_bias", "down_bias")
    return function(*arguments[:5], **dict(zip(names, arguments[5:])), **options)


def gradients(function, arguments, options):
    out = run(function, arguments, options)
    leaves = [x for x in arguments if x.requires_grad]
    upstream = torch.arange(out.numel(), device=out.device).mul(0.7).cos().to(out.dtype).view(out.shape)
    return [out, *torch.autograd.grad(out, leaves, upstream)]


@cases
def test_values_and_gradients_in_float64(case, device):
    arguments, options = made(case, device=device)
    expected = gradients(moe_experts_reference, arguments, options)
    assert "no tokens" in case or expected[0].abs().sum() > 0 or "all" in case
    torch.testing.assert_close(gradients(moe_experts, arguments, options), expected, rtol=1e-10, atol=1e-10)


def spread(x):
    """x with gaps between its elements, and its last two dimensions transposed in memory."""
    wide = x.new_zeros(*x.shape[:-2], x.shape[-1], 2 * x.shape[-2])
    view = wide[..., ::2].mT
    view.copy_(x.detach())
    return view.requires_grad_(x.requires_grad)


@pytest.mark.kernel
@cases
def test_values_and_gradients(case, device):
    arguments, options = made(case, torch.float32, device)
    exact, _ = made(case, device=device)
    for result, true in zip(
        gradients(moe_experts, arguments, options), gradients(moe_experts_reference, exact, options)
    ):
        assert (result.double() - true).norm() <= 2e-6 * true.norm()


@pytest.mark.kernel
@pytest.mark.parametrize("case", ["biases", "gpt_oss"])
def test_operands_of_any_strides(case, device):
    arguments, options = made(case, torch.float32, device)
    apart = [spread(x) for x in arguments]
    assert not any(x.is_contiguous() for x in apart)
    torch.testing.assert_close(gradients(moe_experts, apart, options), gradients(moe_experts, arguments, options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", ["gated", "gpt_oss", "no gate", "wide", "a function"])
def test_half_precision_is_as_near_to_the_truth_as_plain_torch(case, dtype, device):
    arguments, options = made(case, dtype, device)
    if "limit" in options:  # at which gradients jump: rounding carries numbers across it
        options["limit"] = 100.0
    exact = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in arguments]
    truth = gradients(moe_experts_reference, exact, options)
    theirs, ours = (gradients(function, arguments, options) for function in (moe_experts_reference, moe_experts))
    assert {each.dtype for each in ours} == {dtype}

    def mean_error(results):
        return sum((each.double() - true).norm() / true.norm() for each, true in zip(results, truth)) / len(truth)

    assert mean_error(ours) <= 1.5 * mean_error(theirs) + torch.finfo(dtype).eps


def test_an_expert_elsewhere_adds_nothing_and_its_weight_gets_no_gradient(device):
    arguments, options = made("experts elsewhere", device=device)
    _, _, of_weights, *_ = gradients(moe_experts, arguments, options)
    assert torch.equal(of_weights == 0, arguments[1] == 4)
    arguments, options = made("all experts elsewhere", device=device)
    assert not any(result.any() for result in gradients(moe_experts, arguments, options))


@pytest.mark.parametrize("frozen", [(3, 5), (4, 6), (3, 4, 5, 6), (0,), (2,)])
def test_what_is_frozen_costs_no_gradient(frozen, device, monkeypatch):
    made_gradients = recorded_calls(monkeypatch, layers, "grouped_weight_gradient")
    arguments, options = made("biases", device=device)
    expected = gradients(moe_experts, arguments, options)[1:]
    assert len(made_gradients) == 3  # the two weights' and the first bias's, which is a product too
    made_gradients.clear()
    for position in frozen:
        arguments[position].requires_grad_(False)
    leaves = [position for position in range(7) if position != 1]
    needed = [gradient for position, gradient in zip(leaves, expected) if position not in frozen]
    torch.testing.assert_close(gradients(moe_experts, arguments, options)[1:], needed)
    assert len(made_gradients) == 3 - len({3, 4, 5} & set(frozen))


def test_a_retained_graph_gives_the_same_gradients_again(device):
    """With a function, whose result is not overwritten; test_every_operator.py asks it of the activations' kernels."""
    arguments, options = made("a function that saves its result", device=device)
    leaves = [x for x in arguments if x.requires_grad]
    out = run(moe_experts, arguments, options).square().sum()
    first = [gradient.clone() for gradient in torch.autograd.grad(out, leaves, retain_graph=True)]
    for keep in (True, False):
        assert all(map(torch.equal, first, torch.autograd.grad(out, leaves, retain_graph=keep)))


def test_what_is_saved_is_the_input_and_the_pre_activation(device):
    arguments, options = made("wide", device=device)
    with saved_tensors() as saved:
        run(moe_experts, arguments, options)
    floating = {t.data_ptr(): tuple(t.shape) for t in saved if t.is_floating_point()}
    own = {x.data_ptr() for x in arguments}
    assert [shape for pointer, shape in floating.items() if pointer not in own] == [(70 * 4, 2 * 100)]


@pytest.mark.parametrize(
    ("trained", "input_is_saved"),
    [((0,), False), ((0, 2, 5, 6), False), ((2, 4), False), ((3,), True), ((0, 2, 3, 4, 5, 6), True)],
    ids=["input", "all but weights", "second weight", "first weight", "all"],
)
@pytest.mark.parametrize("case", ["biases", "gpt_oss"])
def test_the_input_is_saved_for_the_gradient_of_the_first_weight_alone(case, trained, input_is_saved, device):
    arguments, options = made(case, device=device)
    leaves = [x for x in arguments if x.requires_grad]
    expected = dict(zip(map(id, leaves), gradients(moe_experts_reference, arguments, options)[1:]))
    for position, argument in enumerate(arguments):
        argument.requires_grad_(position in trained)
    parameters = {x.data_ptr() for x in arguments[2:]}
    with saved_tensors() as saved:
        got = gradients(moe_experts, arguments, options)[1:]
    torch.testing.assert_close(got, [expected[id(arguments[position])] for position in trained])
    tokens, top_k, _, hidden, inner = SIZES.values()
    of_pre = tokens * top_k * 2 * inner * 8
    kept = {x.data_ptr(): x.nbytes for x in saved if x.is_floating_point() and x.data_ptr() not in parameters}
    assert sum(kept.values()) == of_pre + (tokens * hidden * 8 if input_is_saved else 0)


def test_a_checkpoint_does_not_repeat_the_down_projection(device, monkeypatch):
    """The recomputation stops at the last saved tensor."""
    calls = recorded_calls(monkeypatch, layers, "grouped_rows", "combine_rows")
    arguments, options = made("gated", device=device)
    leaves = [x for x in arguments if x.requires_grad]

    def layer(*given):
        return given[0] + run(moe_experts, given, options)

    def result(run_layer):
        calls.clear()
        got = torch.autograd.grad(run_layer(layer, *arguments).square().sum(), leaves)
        return got, sorted(name for name, *_ in calls)

    expected, plain = result(lambda layer, *given: layer(*given))
    got, repeated = result(functools.partial(checkpoint, use_reentrant=False))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert repeated == sorted([*plain, "grouped_rows"])  # gate and up alone


@pytest.mark.parametrize("frozen", [(), (3, 4)], ids=["trained", "frozen"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", ["gpt_oss", "experts elsewhere", "a function"])
def test_compiles_to_one_graph(case, dynamic, frozen, device):
    torch.compiler.reset()
    arguments, options = made(case, torch.float32, device)
    for position in frozen:
        arguments[position].requires_grad_(False)
    leaves = [x for x in arguments if x.requires_grad]

    def loss(*given):
        return run(moe_experts, given, options).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")(*arguments)
    expected = loss(*arguments)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(torch.autograd.grad(compiled, leaves), torch.autograd.grad(expected, leaves))


def test_autocast(device):
    arguments, options = made("biases", torch.float32, device)
    with torch.autocast(device if isinstance(device, str) else device.type, torch.bfloat16):
        out = run(moe_experts, arguments, options)
    assert out.dtype == torch.bfloat16
    expected = run(moe_experts, arguments, options)
    assert (out - expected).norm() <= 5e-2 * expected.norm()


WRONG = {
    "hidden": (lambda a: [a[0][None], *a[1:]], "`hidden` is"),
    "integers": (lambda a: [a[0].long(), *a[1:]], "`hidden` is torch.int64; it must be one of torch.float16,"),
    "complex numbers": (lambda a: [a[0].to(torch.complex64), *a[1:]], "`hidden` is torch.complex64"),
    "index": (lambda a: [a[0], a[1][:3], *a[2:]], "`top_k_index` is"),
    "index of floats": (lambda a: [a[0], a[1].float(), *a[2:]], "must be an integer dtype"),
    "no choice": (lambda a: [a[0], a[1][:, :0], a[2][:, :0], *a[3:]], "`top_k_index` has no columns"),
    "integer weights": (lambda a: [*a[:2], a[2].long(), *a[3:]], "`top_k_weights` is torch.int64"),
    "first of another dtype": (lambda a: [*a[:3], a[3].float(), *a[4:]], "`gate_up_weight` is torch.float32 and"),
    "second of another dtype": (lambda a: [*a[:4], a[4].half(), *a[5:]], "`down_weight` is torch.float16 and"),
    "weights": (lambda a: [*a[:2], a[2][:, :1], *a[3:]], "`top_k_weights` is"),
    "first": (lambda a: [*a[:3], a[3][:, :, 1:], *a[4:]], "`gate_up_weight` is"),
    "odd": (lambda a: [*a[:3], a[3][:, 1:], *a[4:]], "it must be an even number"),
    "second": (lambda a: [*a[:4], a[4][1:], *a[5:]], "`down_weight` is"),
    "bias": (lambda a: [*a[:5], a[5][:, 1:], a[6]], "`gate_up_bias` is"),
    "index elsewhere": (lambda a: [a[0], a[1].to("meta"), *a[2:]], "`top_k_index` is on meta and `hidden` on"),
    "weights elsewhere": (lambda a: [*a[:2], a[2].to("meta"), *a[3:]], "`top_k_weights` is on meta"),
    "first elsewhere": (lambda a: [*a[:3], a[3].to("meta"), *a[4:]], "`gate_up_weight` is on meta"),
    "second elsewhere": (lambda a: [*a[:4], a[4].to("meta"), *a[5:]], "`down_weight` is on meta"),
    "bias elsewhere": (lambda a: [*a[:6], a[6].to("meta")], "`down_bias` is on meta"),
    "second bias": (lambda a: [*a[:6], a[6][1:]], "`down_bias` is"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_operands_are_named(what, device):
    change, message = WRONG[what]
    arguments, options = made("biases", device=device)
    with pytest.raises(ValueError, match=message):
        run(moe_experts, change(arguments), options)


@pytest.mark.parametrize("given", ["tanh", None, "identity"])
def test_an_unknown_activation_is_named(given, device):
    arguments, _ = made("gated", device=device)
    with pytest.raises(ValueError, match=f"`activation` is {given!r}; it must be one of silu.* or a function"):
        moe_experts(*arguments, activation=given)


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_a_limit_that_is_none_is_named(limit, device):
    arguments, _ = made("gated", device=device)
    with pytest.raises(ValueError, match=f"`limit` is {limit}; it must be 0 or more, or None"):
        moe_experts(*arguments, limit=limit)


@pytest.mark.parametrize("option", [{"interleaved": True}, {"limit": 0.0}, {"up_offset": 1.0}], ids=str)
def test_an_option_of_gate_and_up_needs_them(option, device):
    arguments, options = made("no gate", device=device)
    (name,) = option
    with pytest.raises(ValueError, match=f"`{name}` is .*, but with `gated=False`"):
        run(moe_experts, arguments, {**options, **option})


@pytest.mark.parametrize(
    "option",
    [{"interleaved": True}, {"limit": 0.5}, {"up_offset": 1.0}, {"gate_multiplier": 2.0}, {"down_multiplier": 2.0}],
    ids=str,
)
def test_a_function_knows_its_options(option, device):
    arguments, options = made("a function", device=device)
    (name,) = option
    with pytest.raises(ValueError, match=f"`{name}` is .*, but `activation` is a function"):
        run(moe_experts, arguments, {**options, **option})


@pytest.mark.parametrize("function", [lambda pre: pre, lambda pre: pre[:, ::2].float()], ids=["width", "dtype"])
def test_what_a_function_gives_is_checked(function, device):
    arguments, _ = made("gated", device=device)
    with pytest.raises(ValueError, match=r"`activation` gave .*; it must return \(18, 6\) of the same dtype"):
        moe_experts(*arguments, activation=function)


def test_a_negative_id_is_an_error():
    arguments, options = made("gated")
    arguments[1][2, 1] = -1
    with pytest.raises(ValueError, match="`top_k_index` holds -1"):
        run(moe_experts, arguments, options)


@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_module_is_mixtrals(act, device):
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_local_experts": 4, "hidden_act": act}
    theirs, ours = MixtralExperts(MixtralConfig(**sizes)), LigerExperts(MixtralConfig(**sizes))
    theirs.config._experts_implementation = "eager"
    theirs.load_state_dict(ours.state_dict())
    theirs, ours = theirs.to(device), ours.to(device)
    index, weights = torch.rand(7, 4).argsort(1)[:, :2].to(device), torch.rand(7, 2).to(device)
    hidden = torch.randn(7, 16).to(device).requires_grad_()

    def results(module):
        out = module(hidden, index, weights)
        return [out, *torch.autograd.grad(out.square().sum(), (hidden, *module.parameters()))]

    torch.testing.assert_close(results(ours), results(theirs))
    assert 0.015 < float(ours.gate_up_proj.detach().std()) < 0.025


def test_module_reads_qwens_config_and_refuses_another_activation():
    config = {"hidden_size": 16, "intermediate_size": 99, "moe_intermediate_size": 12, "num_experts": 3}
    experts = LigerExperts(types.SimpleNamespace(**config, hidden_act="silu"))
    assert experts.gate_up_proj.shape == (3, 24, 16)
    assert experts.down_proj.shape == (3, 16, 12)
    with pytest.raises(ValueError, match="`top_k_index` holds 3, but LigerExperts has 3 experts; ids go from 0 to 2"):
        experts(torch.randn(1, 16), torch.tensor([[0, 3]]), torch.rand(1, 2))
    with pytest.raises(ValueError, match="is 'tanh'; it must be one of silu"):
        LigerExperts(types.SimpleNamespace(**config, hidden_act="tanh"))


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU
# ---------------------------------------------------------------------------------------------------------------------

SHAPES = {
    "aligned": {"tokens": 500, "top_k": 4, "experts": 16, "hidden": 256, "intermediate": 192},
    "one expert": {"tokens": 300, "top_k": 1, "experts": 1, "hidden": 128, "intermediate": 64},
    "odd sizes": {"tokens": 77, "top_k": 2, "experts": 5, "hidden": 100, "intermediate": 37},
    "rows of 16 bytes on one side alone": {"tokens": 77, "top_k": 2, "experts": 5, "hidden": 128, "intermediate": 50},
}


def choices(tokens, top_k, routed, generator):
    logits = torch.randn(tokens, routed, generator=generator).cuda()
    return logits.softmax(-1).topk(top_k)


def run_on_gpu(function, dtype, index, operands, options):
    hidden, *others = (x.detach().to(dtype).requires_grad_() for x in operands)
    return gradients(function, [hidden, index, *others], options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["plain", "empty experts", "skewed", "GPT-OSS", "relu squared", "function"])
def test_no_less_exact_than_eager(kind, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    tokens, top_k, experts, hidden, intermediate = SHAPES[shape].values()
    routed = max(top_k, experts // 3) if kind == "empty experts" else top_k if kind == "skewed" else experts
    weights, index = choices(tokens, top_k, routed, generator)
    gpt_oss, gated = kind == "GPT-OSS", kind != "relu squared"
    width = 2 * intermediate if gated else intermediate
    shapes = [(tokens, hidden), None, (experts, width, hidden), (experts, hidden, intermediate)]
    if gpt_oss:
        shapes[2:] = [(experts, hidden, width), (experts, intermediate, hidden), (experts, width), (experts, hidden)]
    operands = [weights if s is None else torch.randn(s, generator=generator).cuda() for s in shapes]
    operands[2:4] = [x * hidden**-0.5 for x in operands[2:4]]
    operands = [x.to(dtype) for x in operands]
    options = {"gated": gated, "activation": "silu" if gated else "relu_squared"}
    if kind == "function":
        options["activation"] = bounded
    if gpt_oss:
        options |= {"transposed": True, "interleaved": True, "gate_multiplier": 1.702, "limit": 7.0, "up_offset": 1.0}
    exact = run_on_gpu(moe_experts_reference, torch.float64, index, operands, options)
    eager = run_on_gpu(moe_experts_reference, dtype, index, operands, options)
    ours = run_on_gpu(moe_experts, dtype, index, operands, options)
    again = run_on_gpu(moe_experts, dtype, index, operands, options)
    for got, same, beside, right in zip(ours, again, eager, exact, strict=True):
        assert torch.equal(got, same)
        error, allowed = ((x.double() - right).norm() for x in (got, beside))
        assert error <= 1.1 * allowed + 5e-6 * right.norm()  # fp32 sums in another order


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_token(dtype):
    generator = torch.Generator().manual_seed(0)
    weights, index = choices(1, 2, 8, generator)
    operands = [torch.randn(s, generator=generator).cuda() / 8 for s in ((1, 64), (8, 128, 64), (8, 64, 64))]
    operands = [x.to(dtype) for x in (operands[0], weights, *operands[1:])]
    exact = run_on_gpu(moe_experts_reference, torch.float64, index, operands, {})
    for got, right in zip(run_on_gpu(moe_experts, dtype, index, operands, {}), exact, strict=True):
        assert (got.double() - right).norm() <= 4 * torch.finfo(dtype).eps * right.norm()


@pytest.mark.gpu
def test_choices_of_no_expert_add_nothing():
    weights, index = choices(200, 4, 12, torch.Generator().manual_seed(0))
    hidden, gate_up, down = (torch.randn(s).cuda().bfloat16() / 8 for s in ((200, 64), (8, 64, 64), (8, 64, 32)))
    weights = weights.bfloat16().requires_grad_()
    out = moe_experts(hidden, index, weights, gate_up, down)
    (gradient,) = torch.autograd.grad(out.sum(), weights)
    assert out.isfinite().all()
    assert gradient[index >= 8].eq(0).all()
    assert gradient[index < 8].ne(0).any()
    exact = moe_experts_reference(*(hidden.double(), index, weights.double()), gate_up.double(), down.double())
    assert (out.double() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_frozen_experts_keep_no_input(dtype):
    """And the gradients of hidden states and routing weights are those of trained experts."""
    tokens, hidden, intermediate = 4096, 512, 128
    generator = torch.Generator().manual_seed(0)
    weights, index = choices(tokens, 2, 16, generator)
    shapes = (tokens, hidden), (16, 2 * intermediate, hidden), (16, hidden, intermediate)
    x, gate_up, down = (torch.randn(shape, generator=generator).cuda().to(dtype) / 8 for shape in shapes)
    x, weights = x.requires_grad_(), weights.to(dtype).requires_grad_()

    def run(trained):
        first, second = (weight.detach().requires_grad_(trained) for weight in (gate_up, down))
        before = torch.cuda.memory_allocated()
        out = moe_experts(x * 2, index, weights, first, second)
        return torch.cuda.memory_allocated() - before, *torch.autograd.grad(out.float().square().sum(), (x, weights))

    run(False)  # what a first run alone allocates
    frozen, *gradients = run(False)
    trained, *expected = run(True)
    assert trained - frozen == pytest.approx(tokens * hidden * dtype.itemsize, abs=2**20)  # blocks of the allocator
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.gpu
def test_no_host_sync():
    weights, index = choices(1000, 4, 16, torch.Generator().manual_seed(0))
    operands = [torch.randn(s).cuda().bfloat16().requires_grad_() for s in ((1000, 64), (16, 64, 64), (16, 64, 32))]
    hidden, gate_up, down = operands
    moe_experts(hidden, index, weights, gate_up, down).sum().backward()
    with no_host_sync():
        moe_experts(hidden, index, weights, gate_up, down).sum().backward()


@pytest.mark.gpu
def test_an_id_of_no_expert_is_an_assertion_of_the_device():
    """In a process of its own, as it takes the device's context with it."""
    code = (
        "import torch\n"
        "from liger_trainer.patching.apply import apply_liger_kernel\n"
        "from tests.tiny_models import TINY_MODELS\n"
        "model = TINY_MODELS['qwen3_moe']().cuda()\n"
        "apply_liger_kernel(model)\n"
        "experts = model.model.layers[0].mlp.experts\n"
        "hidden = torch.randn(3, experts.hidden_dim, device='cuda')\n"
        "experts(hidden, torch.full((3, 2), 99, device='cuda'), torch.rand(3, 2, device='cuda'))\n"
        "torch.cuda.synchronize()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "holds an id of no expert" in run.stdout + run.stderr


# The loop's backward holds, beside the weights, three times the gradient of a stacked weight: what it has summed, the
# next expert's, as large with zeros, and their sum.
BYTES_A_PARAMETER = 4 * 2


OTHERS = 16 * 2**30


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCKS)
def test_no_less_exact_than_the_blocks_own_loop(name):
    gc.collect()
    torch.cuda.empty_cache()
    needed = BYTES_A_PARAMETER * sum(parameter.numel() for parameter in on_meta(name).parameters()) + OTHERS
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(
            f"needs {needed / 2**30:.0f} GiB of free GPU memory, there are {free / 2**30:.0f}; use a larger GPU"
        )
    measured = measure_block(name, "cuda", torch.bfloat16, 4096, torch.float32)
    print(name, *(f"{key}: {error}" for key, error in measured.errors.items()), sep="\n    ")
    assert measured.components == measured.expected_components
    assert measured.same_choices
    assert measured.less_exact(1.1, 5e-6) == {}
