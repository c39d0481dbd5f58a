"""The attention kernels against dense attention in float64: values, log-sum-exp and gradients."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch

from liger_trainer.kernels.attention.attention_kernel import backward, forward
from tests.accuracy import seeded_randn


class Case(NamedTuple):
    """Documents, and how they attend to themselves."""

    lengths: tuple[int, ...]
    heads: tuple[int, int] = (1, 1)
    head_dim: int = 16
    window: int = 0
    causal: bool = True
    softcap: float = 0.0

    def offsets(self, device):
        return torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=device)

    def arguments(self, device):
        """What follows q, k and v (or lse) in the arguments of `forward` and `backward`."""
        # A bound on the longest document may be loose.
        return self.offsets(device), max(self.lengths) + 3, self.window, self.causal, self.scale, self.softcap

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
        seen = document[:, None] == document[None, :]
        if self.causal:
            seen &= distance >= 0
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
        out, lse = forward(q, k, v, *arguments)
        return [out, lse, *backward(d_out, q, k, v, out, lse, *arguments)]


def errors(results, exact):
    """Relative to the norm of the exact result, or of 0.1 an element where it is next to nothing."""
    for result, right in zip(results, exact):
        yield ((result - right).norm() / max(right.norm().item(), 0.1 * right.numel() ** 0.5)).item()


NAMES = ("out", "lse", "dq", "dk", "dv")


def assert_accurate(case, dtype, device):
    """fp32 within its rounding; half precision no further from float64 than eager is."""
    inputs = case.inputs(dtype, device)
    exact, ours = case.exact(*inputs), case.ours(*inputs)
    assert [x.dtype for x in ours] == [dtype, torch.float32, dtype, dtype, dtype]
    assert [x.shape for x in ours] == [x.shape for x in exact]
    assert all(x.is_contiguous() for x in ours)
    if dtype == torch.float32:
        allowed = [2e-6] * 5
    else:
        allowed = [max(1.1 * error, torch.finfo(dtype).eps / 2) for error in errors(case.dense(*inputs), exact)]
    for name, error, limit in zip(NAMES, errors(ours, exact), allowed):
        assert error <= limit, f"{name}: error {error:.2e}, allowed {limit:.2e}"


MASKS = {
    "causal": Case((70,)),
    "window 1": Case((40,), window=1),
    "window 21": Case((75,), window=21),
    "window of a block": Case((75,), window=32),
    "window as long": Case((40,), window=40),
    "all keys": Case((45,), causal=False),
    "documents": Case((0, 33, 1, 0, 18, 0)),
    "documents with a window": Case((33, 1, 40), window=5),
    "documents, all keys": Case((17, 1, 34), causal=False),
}
CAPPED = {
    "capped": Case((40,), softcap=1.0),
    "capped, with a window": Case((50,), softcap=3.0, window=9),
    "capped, all keys": Case((20,), softcap=0.5, causal=False),
}
HEADS = {
    "grouped": Case((35,), heads=(4, 2)),
    "one key head": Case((20,), heads=(3, 1), softcap=2.0),
    "three to one": Case((20, 18), heads=(6, 2), window=11),
    "64": Case((33,), head_dim=64),
    "80": Case((33,), head_dim=80, heads=(2, 1)),
    "96": Case((20,), head_dim=96, causal=False),
    "128": Case((33,), head_dim=128, softcap=2.0),
    "192": Case((17,), head_dim=192, window=3),
    "256": Case((17,), head_dim=256, softcap=2.0),
}
ALL = MASKS | CAPPED | HEADS


@pytest.mark.kernel
@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_fp32(case, device):
    assert_accurate(case, torch.float32, device)
