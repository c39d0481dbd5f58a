"""`attention` against its reference in float64: on torch's flash operator, on our kernels, and in plain torch."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.attention import attention as module
from liger_trainer.kernels.attention.attention import attention, attention_reference
from liger_trainer.kernels.attention.plan import AttentionPlan, dense
from liger_trainer.kernels.runtime import INTERPRETED
from tests.accuracy import seeded_randn
from tests.device import peak_memory

BATCH, LENGTH = 2, 20
OFFSETS = (0, 1, 9, 9, 20, 31, 40)  # with an empty document and one of a single token
PLANS = {
    "rows": (0, None),
    "window": (7, None),
    "documents": (0, OFFSETS),
    "documents and a window": (7, OFFSETS),
}
EXTRAS = {"plain": {}, "soft-cap": {"softcap": 2.0}, "sinks": {"sinks": True}, "both": {"softcap": 2.0, "sinks": True}}


def plan_of(name, device, times=1):
    """For rows of `LENGTH` tokens, or of so many times as many."""
    window, offsets = PLANS[name]
    if offsets is None:
        return AttentionPlan(times * window, None, times * LENGTH)
    return AttentionPlan(times * window, times * torch.tensor(offsets, dtype=torch.int32, device=device), times * 11)


def operands(device, dtype, heads=(2, 1), head_dim=16, value_dim=None, length=LENGTH, batch=BATCH):
    queries, keys = heads
    sizes = (queries, head_dim), (keys, head_dim), (keys, value_dim or head_dim)
    return [
        seeded_randn(batch, length, *size, seed=seed, dtype=dtype, device=device) for seed, size in enumerate(sizes)
    ]


def results(function, tensors, sinks, plan, **options):
    """Output and gradients of everything, with a gradient of the output that is the same in all dtypes."""
    leaves = [tensor.detach().requires_grad_() for tensor in (*tensors, *([] if sinks is None else [sinks]))]
    out = function(*leaves[:3], plan=plan, sinks=None if sinks is None else leaves[3], **options)
    gradient = seeded_randn(*out.shape, seed=9, dtype=torch.bfloat16, device=out.device).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def distances(got, truth):
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, truth, strict=True)]


def in_double(*tensors):
    return [None if tensor is None else tensor.double() for tensor in tensors]


SLACK = 1.5 if INTERPRETED else 1.1  # Triton's interpreter rounds to bfloat16 in its own way


def check(tensors, sinks, plan, **options):
    truth = results(attention_reference, in_double(*tensors), *in_double(sinks), plan, **options)
    ours = distances(results(attention, tensors, sinks, plan, **options), truth)
    eager = distances(results(attention_reference, tensors, sinks, plan, **options), truth)
    half = tensors[0].dtype != torch.float32
    # With sinks, the kernel's output, which is rounded, is scaled and rounded once more, and the gradients are computed
    # from it. Such errors are spread over half a unit in the last place, of at most eps: eps / sqrt(12) in the norm.
    again = torch.finfo(tensors[0].dtype).eps / 12**0.5 if half and sinks is not None else 0.0
    # The last is the sinks': sums of products of the output, which is rounded to half precision and cancels.
    floors = [2.0**-8 if half else 1e-6] * 4 + [2.0**-7 if half else 1e-6]
    for error, allowed, floor in zip(ours, eager, floors):
        assert error <= max(SLACK * allowed + again, floor)


@pytest.mark.kernel
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_values_and_gradients(name, extra, dtype, device):
    tensors = operands(device, dtype)
    options = dict(EXTRAS[extra])
    sinks = seeded_randn(2, seed=5, dtype=dtype, device=device) if options.pop("sinks", False) else None
    check(tensors, sinks, plan_of(name, device), **options)


@pytest.mark.parametrize("name", PLANS)
def test_the_reference_is_softmax_under_the_dense_mask(name):
    tensors = operands("cpu", torch.float64)
    q, k, v = (x.transpose(1, 2) for x in tensors)
    mask = dense(plan_of(name, "cpu"), BATCH, LENGTH, torch.device("cpu"))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    got = attention_reference(*tensors, plan=plan_of(name, "cpu"))
    torch.testing.assert_close(got.transpose(1, 2), expected)


@pytest.mark.parametrize(("name", "window"), [*itertools.product(PLANS, [6, 8])])
def test_another_window_is_another_result(name, window):
    plan = plan_of(name, "cpu")
    tensors = operands("cpu", torch.float64)
    assert not torch.allclose(
        attention(*tensors, plan=plan), attention(*tensors, plan=plan._replace(window=window)), atol=1e-3
    )


@pytest.mark.kernel
def test_values_of_fewer_dimensions(device):
    check(operands(device, torch.float32, value_dim=8), None, plan_of("documents", device))


@pytest.mark.parametrize(("head_dim", "key_heads", "grouped"), [(256, 2, True), (264, 4, False)])
def test_torch_gets_no_groups_of_wide_heads(head_dim, key_heads, grouped, device, monkeypatch):
    """Not all of its operators take them."""
    calls, native = [], module.F.scaled_dot_product_attention

    def spy(q, k, v, **options):
        calls.append((k.shape[1], v.shape[1], options["enable_gqa"]))
        return native(q, k, v, **options)

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", spy)
    tensors, plan = operands(device, torch.float32, (4, 2), head_dim), plan_of("rows", device)
    check(tensors, None, plan)
    assert calls == [(key_heads, key_heads, grouped)]


@pytest.mark.kernel
@pytest.mark.parametrize(("head_dim", "ours"), [(256, False), (264, True), (512, True), (520, False)])
def test_whole_rows_of_wide_heads(head_dim, ours, device, monkeypatch):
    """In half precision; torch has no fast kernel for them."""
    launched, native = [], module.attention_launch.forward
    monkeypatch.setattr(module.attention_launch, "forward", lambda *x: launched.append(x) or native(*x))
    tensors = operands(device, torch.bfloat16, (2, 1), head_dim, length=9)
    if ours:
        check(tensors, None, AttentionPlan(0, None, 9))
    else:
        attention(*tensors, plan=AttentionPlan(0, None, 9))
    assert bool(launched) == ours


@pytest.mark.kernel
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_wide_heads(extra, dtype, device):
    tensors, options = operands(device, dtype, head_dim=320), dict(EXTRAS[extra])
    sinks = seeded_randn(2, seed=5, dtype=dtype, device=device) if options.pop("sinks", False) else None
    check(tensors, sinks, plan_of("documents and a window", device), **options)


def check_operator(tensors, sinks, plan, softcap, heads_first=False):
    """opcheck, of operands that lie in memory as (batch, seq, heads, head_dim) or as (batch, heads, seq, head_dim)."""
    if heads_first:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    leaves = [x.requires_grad_() for x in tensors]
    b = seeded_randn(2, seed=5, device=leaves[0].device, dtype=leaves[0].dtype).requires_grad_() if sinks else None
    copies, offsets, longest = (None, None, plan.longest) if plan.keys is None else plan.keys[:3]
    spans = module.Spans(plan.offsets, plan.longest, plan.window, 0.25, softcap, offsets, longest, plan.bits)
    torch.library.opcheck(module._attention.custom, (*leaves, b, *(copies or (None, None, None)), *spans))


@pytest.mark.kernel
@pytest.mark.parametrize(("name", "sinks", "softcap"), [("rows", True, 2.0), ("documents and a window", False, 0.0)])
def test_opcheck(name, sinks, softcap, device):
    check_operator(operands(device, torch.float32), sinks, plan_of(name, device), softcap)


@pytest.mark.gpu
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_opcheck_on_flash(name, sinks, heads_first, device):
    """Of operands of any strides, which flash attention gives to its results."""
    check_operator(operands(device, torch.bfloat16), sinks, plan_of(name, device), 0.0, heads_first)


@pytest.mark.parametrize(("hip", "capability", "runs"), [(None, 9, True), (None, 7, False), ("6.4", 9, False)])
def test_flash_is_for_recent_nvidia_gpus(hip, capability, runs, monkeypatch):
    q = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 4, 2, 64))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    spans = module.Spans(None, 4, 0, 1.0, 0.0)
    assert module._flash_runs(q, spans) == module._flash_runs(q, spans._replace(offsets=torch.empty(65536))) == runs
    assert not module._flash_runs(q, spans._replace(softcap=30.0))
    assert not module._flash_runs(q, spans._replace(offsets=torch.empty(65537)))
    assert not module._flash_runs(q, spans._replace(bits=torch.empty(1, 4)))


@pytest.mark.kernel
def test_a_second_derivative_is_refused(device):
    q, k, v = (x.requires_grad_() for x in operands(device, torch.float32))
    (dq,) = torch.autograd.grad(attention(q, k, v, plan=plan_of("window", device)).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of attention cannot itself be differentiated"):
        dq.sum().backward()


@pytest.mark.kernel
@pytest.mark.parametrize("extra", EXTRAS)
def test_traced_in_one_graph(extra, device):
    head_dim = 320 if extra == "both" else 16
    tensors, plan = operands(device, torch.float32, head_dim=head_dim), plan_of("documents and a window", device)
    options = dict(EXTRAS[extra])
    sinks = seeded_randn(2, seed=5, device=device) if options.pop("sinks", False) else None
    torch.compiler.reset()
    traced = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for one, other in zip(*(results(run, tensors, sinks, plan, **options) for run in (traced, attention)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.kernel
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant, device):
    tensors, plan = operands(device, torch.float32), plan_of("documents and a window", device)

    def checkpointed(q, k, v, **options):
        return checkpoint(lambda *x: attention(*x, **options), q, k, v, use_reentrant=reentrant)

    leaves = [x.requires_grad_() for x in tensors]
    outs = [function(*leaves, plan=plan) for function in (attention, checkpointed)]
    gradients = []
    for out in outs:
        out.square().sum().backward()
        gradients.append([x.grad for x in leaves])
        for x in leaves:
            x.grad = None
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)), "a number of heads that is a multiple"),
        (((1, 4, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8)), "batch and length of `q`"),
        (((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 16)), "must not exceed that of `q`, 8"),
    ],
)
def test_shapes_that_do_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        attention(*(torch.zeros(shape) for shape in shapes), plan=AttentionPlan(0, None, 4))


def test_sinks_of_another_number_of_heads():
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"`sinks` is \(3,\); it must be \(2,\)"):
        attention(x, x, x, plan=AttentionPlan(0, None, 4), sinks=torch.zeros(3))


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU: torch's flash operator
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_flash(name, heads, head_dim, device):
    for dtype in (torch.bfloat16, torch.float16):
        sinks = seeded_randn(heads[0], seed=5, dtype=dtype, device=device)
        check(operands(device, dtype, heads, head_dim, length=10 * LENGTH), sinks, plan_of(name, device, times=10))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 192, 704, 1088])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_are_finite_where_masked_cudnn_gives_nan(length, head_dim, device):
    leaves = [(8 * x).requires_grad_() for x in operands(device, torch.bfloat16, (8, 4), head_dim, length=length)]
    offsets = torch.tensor([0, 5, length, length + length // 2, 2 * length], dtype=torch.int32, device=device)
    for window, documents in ((17, None), (0, offsets), (17, offsets)):
        plan = AttentionPlan(window, documents, length)
        for gradient in torch.autograd.grad(attention(*leaves, plan=plan).float().square().sum(), leaves):
            assert gradient.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLANS)
def test_compiled_in_one_graph(name, device):
    plan, tensors = plan_of(name, device), operands(device, torch.bfloat16, head_dim=64)
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True)
    for one, other in zip(results(compiled, tensors, None, plan), results(attention, tensors, None, plan)):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_flash_is_deterministic_where_torch_is(device):
    tensors = operands(device, torch.bfloat16, (8, 2), 128, length=2048)
    plan = AttentionPlan(0, torch.arange(0, 4097, 1024, dtype=torch.int32, device=device), 1024)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (results(attention, tensors, None, plan) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.gpu
def test_memory_grows_with_the_length_of_a_row(device):
    """Not with its square, as that of a mask or of scores would: twice the tokens would take four times as much."""

    def peak(length):
        leaves = [x.requires_grad_() for x in operands(device, torch.bfloat16, (8, 4), 256, length=length, batch=1)]
        plan = AttentionPlan(1024, None, length)
        return peak_memory(lambda: torch.autograd.grad(attention(*leaves, plan=plan).sum(), leaves))

    assert peak(16384) <= 2.2 * peak(8192)
