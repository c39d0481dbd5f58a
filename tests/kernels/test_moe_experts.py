"""moe_experts and LigerExperts against plain torch, expert by expert."""

from __future__ import annotations

import functools
import itertools
import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from liger_trainer.functional import moe_experts
from liger_trainer.kernels.moe import down as _moe_down
from liger_trainer.kernels.moe import gate_up as _moe_gate_up
from liger_trainer.kernels.moe import grouped_library as _grouped_library
from liger_trainer.kernels.moe.experts import moe_experts_reference
from liger_trainer.nn import LigerExperts

SIZES = {"tokens": 9, "top_k": 2, "experts": 4, "hidden": 10, "intermediate": 6}
GPT_OSS = {"limit": 0.7, "gate_multiplier": 1.7, "down_multiplier": 1 / 1.7, "up_offset": 1.0}


def bounded(pre):
    """Gate and up bounded each in its own way: no kernel has it."""
    gate, up = pre.chunk(2, -1)
    return 3 * (gate / 3).tanh() * gate.sigmoid() * up.sin()


# Name -> sizes that differ from SIZES, and options.
CASES = {
    "gated": ({}, {}),
    "interleaved": ({}, {"interleaved": True}),
    "transposed": ({}, {"transposed": True}),
    "biases": ({}, {"biases": True}),
    "gpt_oss": ({}, {**GPT_OSS, "interleaved": True, "transposed": True, "biases": True}),
    "gelu": ({}, {"activation": "gelu"}),
    "gelu_tanh": ({}, {"activation": "gelu_tanh"}),
    "relu": ({}, {"activation": "relu"}),
    "relu_squared": ({}, {"activation": "relu_squared"}),
    "no gate": ({}, {"gated": False, "activation": "relu_squared"}),
    "no gate, biases": ({}, {"gated": False, "transposed": True, "biases": True}),
    "a function": ({}, {"activation": bounded, "biases": True}),
    "a function that keeps its result": ({}, {"activation": torch.tanh, "gated": False, "transposed": True}),
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", ["gated", "gpt_oss", "no gate", "wide", "a function"])
def test_half_precision_is_as_near_to_the_truth_as_plain_torch(case, dtype, device):
    arguments, options = made(case, dtype, device)
    exact = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in arguments]
    truth = gradients(moe_experts_reference, exact, options)
    theirs, ours = (gradients(function, arguments, options) for function in (moe_experts_reference, moe_experts))
    for true, plain, got in zip(truth, theirs, ours):
        assert got.dtype == dtype
        allowed = 1.5 * (plain.double() - true).norm() + torch.finfo(dtype).eps * true.norm()
        assert (got.double() - true).norm() <= allowed


def test_an_expert_elsewhere_adds_nothing_and_its_weight_gets_no_gradient(device):
    arguments, options = made("experts elsewhere", device=device)
    _, _, of_weights, *_ = gradients(moe_experts, arguments, options)
    assert torch.equal(of_weights == 0, arguments[1] == 4)
    arguments, options = made("all experts elsewhere", device=device)
    assert not any(result.any() for result in gradients(moe_experts, arguments, options))


@pytest.mark.parametrize("frozen", [(3, 5), (4, 6), (3, 4, 5, 6), (0,), (2,)])
def test_what_is_frozen_costs_no_gradient(frozen, device, monkeypatch):
    made_gradients, native = [], _moe_gate_up.grouped_weight_gradient
    for operators in (_moe_gate_up, _moe_down):
        monkeypatch.setattr(
            operators, "grouped_weight_gradient", lambda *a, **k: made_gradients.append(1) or native(*a, **k)
        )
    arguments, options = made("biases", device=device)
    expected = gradients(moe_experts, arguments, options)[1:]
    assert len(made_gradients) == 3  # the two weights' and the first bias's, which is a product too
    made_gradients.clear()
    for position in frozen:
        arguments[position].requires_grad_(False)
    leaves = [position for position in range(7) if position != 1]
    kept = [gradient for position, gradient in zip(leaves, expected) if position not in frozen]
    torch.testing.assert_close(gradients(moe_experts, arguments, options)[1:], kept)
    assert len(made_gradients) == 3 - len({3, 4, 5} & set(frozen))


@pytest.mark.parametrize("case", ["gated", "gpt_oss", "no gate", "a function that keeps its result"])
def test_a_kept_graph_gives_the_same_gradients_again(case, device):
    arguments, options = made(case, device=device)
    leaves = [x for x in arguments if x.requires_grad]
    out = run(moe_experts, arguments, options).square().sum()
    first = [gradient.clone() for gradient in torch.autograd.grad(out, leaves, retain_graph=True)]
    for keep in (True, False):
        assert all(map(torch.equal, first, torch.autograd.grad(out, leaves, retain_graph=keep)))


def test_a_second_derivative_is_refused(device):
    arguments, options = made("gated", device=device)
    out = run(moe_experts, arguments, options)
    with pytest.raises(RuntimeError, match="moe_experts"):
        torch.autograd.grad(out.sum(), arguments[0], create_graph=True)


def test_what_is_saved_is_the_input_and_the_pre_activation(device):
    arguments, options = made("wide", device=device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(moe_experts, arguments, options)
    floating = {t.data_ptr(): tuple(t.shape) for t in saved if t.is_floating_point()}
    own = {x.data_ptr() for x in arguments}
    assert [shape for pointer, shape in floating.items() if pointer not in own] == [(70 * 4, 2 * 100)]


@pytest.mark.parametrize(
    ("trained", "kept"),
    [((0,), False), ((0, 2, 5, 6), False), ((2, 4), False), ((3,), True), ((0, 2, 3, 4, 5, 6), True)],
    ids=["input", "all but weights", "second weight", "first weight", "all"],
)
@pytest.mark.parametrize("case", ["biases", "gpt_oss"])
def test_the_input_is_saved_for_the_gradient_of_the_first_weight_alone(case, trained, kept, device):
    arguments, options = made(case, device=device)
    leaves = [x for x in arguments if x.requires_grad]
    expected = dict(zip(map(id, leaves), gradients(moe_experts_reference, arguments, options)[1:]))
    for position, argument in enumerate(arguments):
        argument.requires_grad_(position in trained)
    parameters = {x.data_ptr() for x in arguments[2:]}
    storages = {}

    def pack(tensor):
        if tensor.is_floating_point() and tensor.data_ptr() not in parameters:
            storages[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        got = gradients(moe_experts, arguments, options)[1:]
    torch.testing.assert_close(got, [expected[id(arguments[position])] for position in trained])
    tokens, top_k, _, hidden, inner = SIZES.values()
    of_pre = tokens * top_k * 2 * inner * 8
    assert sum(storages.values()) == of_pre + (tokens * hidden * 8 if kept else 0)


def test_a_checkpoint_does_not_repeat_the_down_projection(device, monkeypatch):
    """Its recomputation ends where all is back that was saved."""
    calls = []
    for operators, name in itertools.product((_moe_gate_up, _moe_down), ("grouped_rows", "combine_rows")):
        native = getattr(operators, name)
        monkeypatch.setattr(operators, name, lambda *a, _n=name, _f=native, **k: calls.append(_n) or _f(*a, **k))
    arguments, options = made("gated", device=device)
    leaves = [x for x in arguments if x.requires_grad]

    def layer(*given):
        return given[0] + run(moe_experts, given, options)

    def result(run_layer):
        calls.clear()
        got = torch.autograd.grad(run_layer(layer, *arguments).square().sum(), leaves)
        return got, sorted(calls)

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


@pytest.mark.parametrize("frozen", [(), (3, 4), (0, 3, 4)], ids=["trained", "frozen", "biases alone"])
@pytest.mark.parametrize("case", ["gpt_oss", "no gate"])
def test_operators_keep_torchs_rules(case, frozen, device, monkeypatch):
    calls = []
    from liger_trainer.kernels.moe import experts as module

    for name in ("moe_gate_up", "moe_down_save", "moe_down"):
        native = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _f=native: calls.append((_f, a)) or _f(*a))
    arguments, options = made(case, torch.float32, device)
    for position in frozen:
        arguments[position].requires_grad_(False)
    run(moe_experts, arguments, options)
    assert len(calls) == 3
    rules = ("test_schema", "test_faketensor", "test_autograd_registration")
    for operator, given in calls:
        detached = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in given]
        torch.library.opcheck(operator, detached, test_utils=rules)


@pytest.mark.parametrize("frozen", [(), (3, 4)], ids=["trained", "frozen"])
@pytest.mark.parametrize("case", ["gpt_oss", "gated"])
def test_operators_say_how_gradients_of_operands_of_any_strides_lie(case, frozen, monkeypatch):
    """What torch.compile is told of the backwards, beside what they give."""
    calls = []
    for operators, name in ((_moe_gate_up, "_gate_up_backward"), (_moe_down, "_down_backward")):
        native = getattr(operators, name)
        monkeypatch.setattr(operators, name, lambda *a, _f=native: calls.append((_f, a)) or _f(*a))
    arguments, options = made(case, torch.float32)
    apart = [x.mT.contiguous().mT.detach().requires_grad_(x.requires_grad) for x in arguments]
    for position in frozen:
        apart[position].requires_grad_(False)
    loss = run(moe_experts, apart, options).square().sum()
    torch.autograd.grad(loss, [x for x in apart if x.requires_grad], retain_graph=True)
    assert len(calls) == 2
    for operator, given in calls:
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("columns", [16, 20])
def test_the_grouped_matmul_is_asked_where_its_result_is_contiguous(columns, monkeypatch):
    """It is, on a GPU; the CPU's pads alike."""
    weight = torch.randn(2, columns, 16, dtype=torch.bfloat16)
    x, offsets = torch.randn(8, 16, dtype=torch.bfloat16), torch.tensor([4, 8], dtype=torch.int32)
    result = _grouped_library.grouped_mm(x, weight.transpose(1, 2), offs=offsets)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(_grouped_library, "_on_device", lambda device: True)
    assert _grouped_library.takes(x, weight) == result.is_contiguous() == (columns == 16)


def test_autocast(device):
    arguments, options = made("biases", torch.float32, device)
    with torch.autocast(device if isinstance(device, str) else device.type, torch.bfloat16):
        out = run(moe_experts, arguments, options)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), run(moe_experts, arguments, options), rtol=3e-2, atol=3e-1)


WRONG = {
    "hidden": (lambda a: [a[0][None], *a[1:]], "`hidden` is"),
    "integers": (lambda a: [a[0].long(), *a[1:]], "`hidden` is of torch.int64; it must be of one of torch.float16,"),
    "complex numbers": (lambda a: [a[0].to(torch.complex64), *a[1:]], "`hidden` is of torch.complex64"),
    "index": (lambda a: [a[0], a[1][:3], *a[2:]], "`top_k_index` is"),
    "index of floats": (lambda a: [a[0], a[1].float(), *a[2:]], "must be of an integer dtype"),
    "no choice": (lambda a: [a[0], a[1][:, :0], a[2][:, :0], *a[3:]], "`top_k_index` has no columns"),
    "integer weights": (lambda a: [*a[:2], a[2].long(), *a[3:]], "`top_k_weights` is of torch.int64"),
    "first of another dtype": (lambda a: [*a[:3], a[3].float(), *a[4:]], "`gate_up_weight` is of torch.float32 and"),
    "second of another dtype": (lambda a: [*a[:4], a[4].half(), *a[5:]], "`down_weight` is of torch.float16 and"),
    "weights": (lambda a: [*a[:2], a[2][:, :1], *a[3:]], "`top_k_weights` is"),
    "first": (lambda a: [*a[:3], a[3][:, :, 1:], *a[4:]], "`gate_up_weight` is"),
    "odd": (lambda a: [*a[:3], a[3][:, 1:], *a[4:]], "must be an even number"),
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
    with pytest.raises(ValueError, match=r"`activation` gives .*; it must give \(18, 6\) of the same dtype"):
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
