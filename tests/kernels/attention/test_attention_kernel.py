"""The attention kernels against dense attention in float64: values, log-sum-exp and gradients."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch

from liger_trainer.kernels.attention import attention_launch
from liger_trainer.kernels.attention.attention_launch import Spans, Tile, backward, forward, row_dots
from liger_trainer.kernels.rows import DeviceLimits
from tests.accuracy import seeded_randn
from tests.aot import compile_launch, recorded_launches


class Case(NamedTuple):
    """Documents, and how they attend to themselves."""

    lengths: tuple[int, ...]
    heads: tuple[int, int] = (1, 1)
    head_dim: int = 16
    window: int = 0
    softcap: float = 0.0

    def offsets(self, device):
        return torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=device)

    def arguments(self, device):
        """The fields of `Spans`."""
        # A bound on the longest document may be loose.
        return self.offsets(device), max(self.lengths) + 3, self.window, self.scale, self.softcap

    @property
    def scale(self):
        return 1.5 * self.head_dim**-0.5

    def inputs(self, dtype, device):
        """Slices of one projection, (T, q_heads + 2 * k_heads, D), and d_out of another layout."""
        query_heads, key_heads = self.heads
        tokens = sum(self.lengths)
        qkv = seeded_randn(tokens, query_heads + 2 * key_heads, self.head_dim, dtype=dtype, device=device)
        d_out = seeded_randn(query_heads, tokens, self.head_dim, seed=1, dtype=dtype, device=device).transpose(0, 1)
        return (*qkv.split([query_heads, key_heads, key_heads], dim=1), d_out)

    def mask(self, device):
        """(T, T), True where a query sees a key."""
        tokens = sum(self.lengths)
        position = torch.arange(tokens, device=device)
        document = torch.repeat_interleave(torch.tensor(self.lengths)).to(device)
        distance = position[:, None] - position[None, :]
        seen = (document[:, None] == document[None, :]) & (distance >= 0)
        if self.window:
            seen &= distance < self.window
        return seen

    def dense(self, q, k, v, d_out, sinks=None):
        """out, lse, dq, dk and dv (and those of the sinks) of eager attention in the dtype of `q`."""
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
        q, k, v = leaves[:3]
        group = self.heads[0] // self.heads[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~self.mask(q.device), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, leaves[3][:, None, None].expand(-1, scores.shape[1], 1)], dim=2)
        wide = torch.promote_types(q.dtype, torch.float32)
        p = scores.to(wide).softmax(-1).to(q.dtype)[..., : v.shape[0]]
        out = torch.einsum("hqk,khd->qhd", p, v)
        return [out.detach(), scores.detach().to(wide).logsumexp(-1), *torch.autograd.grad(out, leaves, d_out)]

    def exact(self, *tensors):
        return self.dense(*(x.double() for x in tensors))

    def ours(self, q, k, v, d_out):
        """As `dense`, by the kernels."""
        arguments = self.arguments(q.device)
        out, lse = forward(q, k, v, Spans(*arguments))
        return [out, lse, *backward(d_out, q, k, v, out, lse, Spans(*arguments))]


def errors(results, exact):
    """Relative to the norm of the exact result, or of 0.1 an element where it is next to nothing."""
    for result, right in zip(results, exact):
        yield ((result - right).norm() / max(right.norm().item(), 0.1 * right.numel() ** 0.5)).item()


NAMES = ("out", "lse", "dq", "dk", "dv")


def assert_accurate(case, dtype, device):
    """No further from float64 than eager is, or than a few roundings of fp32 and one of half precision are."""
    inputs = case.inputs(dtype, device)
    exact, ours = case.exact(*inputs), case.ours(*inputs)
    assert [x.dtype for x in ours] == [dtype, torch.float32, dtype, dtype, dtype]
    assert [x.shape for x in ours] == [x.shape for x in exact]
    assert all(x.is_contiguous() for x in ours)
    rounding = 5e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    allowed = [max(1.1 * error, rounding) for error in errors(case.dense(*inputs), exact)]
    for name, error, limit in zip(NAMES, errors(ours, exact), allowed):
        assert error <= limit, f"{name}: error {error:.2e}, allowed {limit:.2e}"


CASES = {
    "causal": Case((70,)),
    "window 1": Case((40,), window=1),
    "window 21": Case((75,), window=21),
    "window of a block": Case((75,), window=32),
    "window as long": Case((40,), window=40),
    "documents": Case((0, 33, 1, 0, 18, 0)),
    "documents with a window": Case((33, 1, 40), window=5),
    "lengths around a block": Case((1, 63, 64, 127, 192), window=70),
    "capped": Case((40,), softcap=1.0),
    "capped, with a window": Case((50,), softcap=3.0, window=9),
    "capped, far from the cap": Case((40,), softcap=500.0),
    "grouped": Case((35,), heads=(4, 2)),
    "one key head": Case((20,), heads=(3, 1), softcap=2.0),
    "three to one": Case((20, 18), heads=(6, 2), window=11),
    "64": Case((33,), head_dim=64),
    "80": Case((33,), head_dim=80, heads=(2, 1)),
    "96": Case((20,), head_dim=96),
    "128": Case((33,), head_dim=128, softcap=2.0),
    "192": Case((17,), head_dim=192, window=3),
    "256": Case((17,), head_dim=256, softcap=2.0),
    "320": Case((20, 13), heads=(2, 1), head_dim=320, window=9),
    "512": Case((33, 1, 0, 14), heads=(2, 1), head_dim=512),
    "512, capped": Case((35,), head_dim=512, window=17, softcap=2.0),
    "512, eight to one": Case((18,), heads=(8, 1), head_dim=512),
}


@pytest.mark.kernel
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_fp32(case, device):
    assert_accurate(case, torch.float32, device)


WIDE = ("320", "512", "512, capped", "512, eight to one")
HALF = ("window 21", "documents", "capped, with a window", "three to one", "80", "256", *WIDE)


@pytest.mark.kernel
@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_eager(name, dtype, device):
    assert_accurate(CASES[name], dtype, device)


@pytest.mark.kernel
@pytest.mark.parametrize("tile", [(16, 16), (16, 64), (64, 16)])
@pytest.mark.parametrize(
    "case",
    [Case((100, 5), window=33), Case((37, 80)), Case((70,), window=2)],
    ids=["window", "documents", "window 2"],
)
def test_any_tile(case, tile, device, monkeypatch):
    """The bounds of the parts with and without a mask follow from both sides of a tile."""
    monkeypatch.setattr(attention_launch, "tile_for", lambda *kernel: Tile(*tile, 4, 1))
    assert_accurate(case, torch.float32, device)


@pytest.mark.kernel
@pytest.mark.parametrize("columns", [64, 256, 512])
@pytest.mark.parametrize(("window", "step"), [(0, 0), (9, 0), (9, -1), (9, 1)])
def test_wide_heads_in_any_number_of_parts(window, step, columns, device, monkeypatch):
    """Whether a program sums all columns of a head, or one of two or six parts, of which one is not whole."""
    monkeypatch.setattr(attention_launch, "tile_for", lambda *kernel: Tile(16, 16, 4, 1, columns))
    case = Case((20, 13), heads=(2, 1), head_dim=328, window=window + step, softcap=3.0)
    if step == 0:
        assert_accurate(case, torch.float32, device)
    else:
        inputs = case.inputs(torch.float32, device)
        assert min(errors(case.ours(*inputs), case._replace(window=window).exact(*inputs))) > 1e-3


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "multiprocessors", "splits"), [(8, 1000, 4), (4, 4, 2), (6, 1000, 2), (2, 2, 1)])
def test_a_group_of_heads_is_split_where_programs_are_few(group, multiprocessors, splits, dtype, device, monkeypatch):
    monkeypatch.setattr(attention_launch, "num_sms", lambda device: multiprocessors)
    monkeypatch.setattr(attention_launch, "tile_for", lambda *kernel: Tile(16, 16, 4, 1))
    case = Case((9, 4), heads=(group, 1), window=5)
    assert attention_launch._splits(2, group, torch.device(device)) == splits
    assert_accurate(case, dtype, device)
    inputs = case.inputs(dtype, device)
    assert all(map(torch.equal, case.ours(*inputs), case.ours(*inputs)))


@pytest.mark.kernel
@pytest.mark.parametrize("window", [2, 21, 32])
@pytest.mark.parametrize("step", [-1, 1])
def test_a_window_off_by_one_is_seen(window, step, device):
    """What the cases above compare tells one window from the next."""
    case = Case((75,), window=window)
    inputs = case.inputs(torch.float32, device)
    off = case._replace(window=window + step).ours(*inputs)
    assert min(errors(off, case.exact(*inputs))) > 1e-3


@pytest.mark.kernel
def test_equal_documents_without_offsets(device):
    case = Case((35, 35))
    q, k, v, d_out = case.inputs(torch.float32, device)
    expected = case.ours(q, k, v, d_out)
    arguments = (None, 35, 0, case.scale, 0.0)
    out, lse = forward(q, k, v, Spans(*arguments))
    results = [out, lse, *backward(d_out, q, k, v, out, lse, Spans(*arguments))]
    assert all(torch.equal(ours, right) for ours, right in zip(results, expected))


@pytest.mark.kernel
def test_documents_do_not_see_each_other(device):
    case, alone = Case((17, 20, 3)), Case((20,))
    inputs = case.inputs(torch.float32, device)
    for x in inputs:
        x[:17], x[37:] = float("nan"), float("inf")
    expected = alone.ours(*(x[17:37] for x in inputs))
    for ours, right in zip(case.ours(*inputs), expected):
        ours = ours[:, 17:37] if ours.dim() == 2 else ours[17:37]
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_whose_exponentials_underflow(dtype, device):
    """exp(-88.7) is next to the smallest number of fp32."""
    case = Case((64, 21), window=30)
    q, k, v, d_out = case.inputs(dtype, device)
    q, k = 5.0 + 0.1 * q, -6.0 + 0.1 * k
    exact, ours = case.exact(q, k, v, d_out), case.ours(q, k, v, d_out)
    assert exact[1].max() < -100
    assert all(x.isfinite().all() for x in ours)
    # Besides the errors of the products q . k, which eager has too, p has that of a score of -180: half a unit in the
    # last place. In the backward the compiler makes one operation of a score's product and difference, so it is another
    # one than in the forward, and the terms of dq, in which the common part of the keys cancels, no longer add up to 0.
    rounding = 2.0**-24 * exact[1].abs().max().item() if dtype == torch.float32 else 0.0
    cancelled = (k.norm() / (k - k.mean(0)).norm()).item()
    eager = errors(case.dense(q, k, v, d_out), exact)
    for name, error, theirs in zip(NAMES, errors(ours, exact), eager):
        limit = 1.1 * theirs + rounding * (cancelled if name == "dq" else 1.0)
        assert error <= limit, f"{name}: error {error:.2e}, allowed {limit:.2e}"


@pytest.mark.kernel
def test_merged_with_sinks(device):
    """The backward of a merged result is that of the merged softmax; the gradient of the sinks is from `row_dots`."""
    case = Case((30, 12), heads=(4, 2), window=9, softcap=4.0)
    q, k, v, d_out = case.inputs(torch.float32, device)
    sinks = seeded_randn(4, seed=3, device=device)
    exact = case.dense(*(x.double() for x in (q, k, v, d_out, sinks)))
    out, lse = forward(q, k, v, Spans(*case.arguments(device)))
    merged = torch.logaddexp(lse, sinks[:, None])
    out = out * (lse - merged).exp().T[:, :, None]
    gradients = backward(d_out, q, k, v, out, merged, Spans(*case.arguments(device)))
    d_sinks = -((sinks[:, None] - merged).exp() * row_dots(d_out, out)).sum(1)
    assert max(errors([out, merged, *gradients, d_sinks], exact)) < 5e-6


@pytest.mark.kernel
def test_other_strides(device):
    """Columns that are not contiguous, and the gradient of a sum, which has no strides at all."""
    case = Case((20,), heads=(2, 1))
    q, k, v, _ = case.inputs(torch.float32, device)
    apart = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (q, k, v)]
    ones = torch.ones((), device=device).expand(q.shape)
    results, expected = case.ours(*apart, ones), case.ours(q, k, v, torch.ones_like(q))
    assert all(torch.equal(ours, right) for ours, right in zip(results, expected))


@pytest.mark.kernel
def test_nothing_beyond_a_head_is_read(device):
    case = Case((70,), head_dim=24)
    inputs = case.inputs(torch.float32, device)
    padded = [torch.nn.functional.pad(x, (0, 8), value=float("nan"))[..., :24] for x in inputs]
    results, expected = case.ours(*padded), case.ours(*inputs)
    assert all(torch.equal(ours, right) for ours, right in zip(results, expected))


@pytest.mark.kernel
def test_every_element_is_written(device):
    """New memory holds NaN: `tests/uninitialised.py`."""
    case = Case((0, 5, 40, 1), heads=(2, 1), window=7, head_dim=80)
    assert all(x.isfinite().all() for x in case.ours(*case.inputs(torch.float32, device)))


def test_no_tokens():
    q, offsets = torch.zeros(0, 2, 16), torch.zeros(1, dtype=torch.int32)
    out, lse = forward(q, q, q, Spans(offsets, 1, 0, 1.0, 0.0))
    assert out.shape == (0, 2, 16)
    assert lse.shape == (2, 0)
    assert [x.shape for x in backward(q, q, q, q, out, lse, Spans(offsets, 1, 0, 1.0, 0.0))] == [(0, 2, 16)] * 3


def test_errors():
    q = torch.zeros(8, 2, 16)
    with pytest.raises(ValueError, match="`longest` is 5; without `offsets` it must divide the 8 tokens"):
        forward(q, q, q, Spans(None, 5, 0, 1.0, 0.0))


@pytest.mark.parametrize(("target", "shared"), [("sm_90", 227), ("sm_80", 99), ("gfx942", 64)])
def test_kernels_compile(target, shared, monkeypatch):
    """The longest heads, with a window and a soft-cap, in the shared memory (KiB) of the target and its like."""
    limits = DeviceLimits(max_warps=16, shared_memory=shared * 1024)
    monkeypatch.setattr(attention_launch, "device_limits", lambda device: limits)
    case = Case((4096,), heads=(4, 2), head_dim=256, window=1024, softcap=50.0)
    q, kv = (torch.zeros(4096, heads, 256, dtype=torch.bfloat16) for heads in case.heads)
    with recorded_launches() as launches:
        case.ours(q, kv, kv, q)
    assert len(launches) == 5
    for launch in launches:
        assert compile_launch(launch, target).metadata.shared <= shared * 1024


def test_wide_heads_compile_in_fp32(monkeypatch):
    """On the smallest card that takes them."""
    monkeypatch.setattr(attention_launch, "INTERPRETED", False)
    limits = DeviceLimits(max_warps=32, shared_memory=163 * 1024)
    monkeypatch.setattr(attention_launch, "device_limits", lambda device: limits)
    case = Case((64, 64), heads=(2, 1), head_dim=512, window=50, softcap=50.0)
    with recorded_launches() as launches:
        case.ours(*case.inputs(torch.float32, "cpu"))
    assert [launch.kernel.__name__ for launch in launches].count("key_gradients_kernel") == 2
    for launch in launches:
        assert compile_launch(launch, "sm_80").metadata.shared <= 163 * 1024


@pytest.mark.parametrize(("shared", "half", "fp32"), [(64, 256, 256), (99, 512, 256), (163, 512, 512), (227, 512, 512)])
def test_the_widest_heads_follow_the_shared_memory(shared, half, fp32, monkeypatch):
    monkeypatch.setattr(attention_launch, "INTERPRETED", False)
    limits = DeviceLimits(32, shared * 1024, before_ampere=shared == 64)
    monkeypatch.setattr(attention_launch, "device_limits", lambda device: limits)
    for dtype, columns in ((torch.bfloat16, half), (torch.float16, half), (torch.float32, fp32)):
        assert attention_launch.largest_head_dim(torch.device("cuda"), dtype) == columns
        for kernel in ("forward", "dk", "dv", "dq"):
            assert attention_launch.tile_for(kernel, torch.empty(1, 1, columns, dtype=dtype))


REAL = {
    "Gemma2": Case((4096,), heads=(2, 1), head_dim=256, softcap=50.0),
    "Gemma2, window": Case((3000, 1096), heads=(2, 1), head_dim=256, softcap=50.0, window=1000),
    "128": Case((1000, 1, 0, 1500), heads=(4, 1), head_dim=128, softcap=30.0),
    "64": Case((2048,), heads=(3, 1), head_dim=64, window=128),
    "80": Case((1000, 1111), heads=(2, 2), head_dim=80),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL.values(), ids=REAL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_real_sizes(case, dtype, device):
    assert_accurate(case, dtype, device)


@pytest.mark.gpu
def test_every_run_gives_the_same_bits(device):
    case = Case((4096, 2000), heads=(8, 2), head_dim=128, softcap=50.0, window=3000)
    inputs = case.inputs(torch.bfloat16, device)
    first, second = case.ours(*inputs), case.ours(*inputs)
    assert all(torch.equal(one, other) for one, other in zip(first, second))


@pytest.mark.gpu
def test_more_than_2_to_31_elements(device):
    """1,024 documents of 1,025 tokens; the last one is compared."""
    last, documents = Case((1025,), heads=(8, 1), head_dim=256, softcap=20.0), 1024
    q, k, v, d_out = (
        torch.randn(1025 * documents, heads, 256, dtype=torch.bfloat16, device=device) for heads in (8, 1, 1, 8)
    )
    assert q.numel() > 2**31
    arguments = (None, 1025, 0, last.scale, last.softcap)
    out, lse = forward(q, k, v, Spans(*arguments))
    gradients = backward(d_out, q, k, v, out, lse, Spans(*arguments))
    ours = [out[-1025:], lse[:, -1025:], *(x[-1025:] for x in gradients)]
    tail = [x[-1025:] for x in (q, k, v, d_out)]
    exact = last.exact(*tail)
    for error, eager in zip(errors(ours, exact), errors(last.dense(*tail), exact)):
        assert error <= 1.1 * eager
