"""The keys that an indexer selects: the largest scores in float64, the first of equal ones, and where documents end."""

from __future__ import annotations

import pytest
import torch

from liger_trainer.kernels.attention import selection
from liger_trainer.kernels.attention.plan import AttentionPlan, dense
from liger_trainer.kernels.attention.selection import select, select_reference
from tests.accuracy import seeded_randn
from tests.kernels.attention.shared_prompts import Group, tokens_of
from tests.kernels.attention.shared_prompts import plan_of as plan_of_shared
from tests.kernels.attention.test_selected_keys import PLANS, documents, on

SCALE = 0.3
_GROUPS = (Group(5, (1, 3)), Group(0, (2,)))
SHORT = {  # an interpreter takes its time for each query
    "rows": (AttentionPlan(0, None, 11), 2, 11),
    "documents": (documents(1, 10, 0, 2, 9), 2, 11),
    "shared prompts": (plan_of_shared(_GROUPS, 0), 1, tokens_of(_GROUPS)),
}


def draw(device, batch, length, heads=3, width=20, dtype=torch.float32):
    q = seeded_randn(batch, length, heads, width, dtype=dtype, device=device)
    k = seeded_randn(batch, length, width, seed=1, dtype=dtype, device=device)
    return q, k, seeded_randn(batch, length, heads, seed=2, device=device)


def seen_of(plan, bits, batch, length, device):
    return dense(plan._replace(bits=bits), batch, length, device)[:, 0]


def check(plan, batch, length, count, device, dtype=torch.float32, tolerance=1e-5):
    """As many keys as there are to select, none of which has a lower score than one that is not."""
    q, k, weights = draw(device, batch, length, dtype=dtype)
    bits = select(on(device, plan), q, k, weights, SCALE, count)
    assert bits.dtype == torch.int32
    products = torch.einsum("bshd,btd->bsht", q.double(), k.double()) * SCALE
    scores = torch.einsum("bsh,bsht->bst", weights.double(), products.relu())
    visible = dense(on(device, plan), batch, length, torch.device(device))[:, 0]
    chosen = seen_of(on(device, plan), bits, batch, length, torch.device(device))
    assert not (chosen & ~visible).any()
    assert torch.equal(chosen.sum(-1), visible.sum(-1).clamp(max=count).expand(batch, -1))
    least = scores.masked_fill(~chosen, torch.inf).amin(-1)
    best_left = scores.masked_fill(chosen | ~visible, -torch.inf).amax(-1)
    assert (best_left <= least + tolerance * scores.abs().max()).all()


@pytest.mark.parametrize("count", [1, 9, 70])
@pytest.mark.parametrize("name", PLANS)
def test_the_reference_selects_the_largest_scores(name, count):
    check(*PLANS[name], count, "cpu")


@pytest.mark.kernel
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", SHORT)
def test_the_largest_scores_are_selected(name, count, device):
    check(*SHORT[name], count, device)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision(dtype, device):
    """Products of two such numbers are exact in fp32."""
    check(*SHORT["documents"], 4, device, dtype)


@pytest.mark.kernel
def test_rows_longer_than_a_block_and_a_chunk(device, monkeypatch):
    monkeypatch.setattr(selection, "BLOCK", 17)
    monkeypatch.setattr(selection, "_CHUNK", 32)
    check(documents(40, 3), 1, 43, 9, device)


@pytest.mark.kernel
def test_of_equal_scores_the_first_ones(device):
    q, k, weights = draw(device, 1, 20)
    bits = select(AttentionPlan(0, None, 20), q, k, weights * 0.0, SCALE, 7)
    chosen = seen_of(AttentionPlan(0, None, 20), bits, 1, 20, torch.device(device))[0]
    assert torch.equal(
        chosen, torch.ones(20, 20, dtype=torch.bool, device=device).tril() & (torch.arange(20) < 7).to(device)
    )


@pytest.mark.kernel
def test_a_nan_is_selected_and_no_key_is_lost(device):
    q, k, weights = draw(device, 1, 20)
    k[0, 8] = float("nan")
    bits = select(AttentionPlan(0, None, 20), q, k, weights, SCALE, 7)
    chosen = seen_of(AttentionPlan(0, None, 20), bits, 1, 20, torch.device(device))[0]
    assert chosen[8:, 8].all()
    assert chosen.sum(-1).tolist() == [*range(1, 8), *[7] * 13]


@pytest.mark.kernel
def test_strides(device):
    q, k, weights = draw(device, 2, 20)
    plan = AttentionPlan(0, None, 20)
    expected = select(plan, q, k, weights, SCALE, 7)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2), k.mT.contiguous().mT, weights.mT.contiguous().mT
    assert torch.equal(select(plan, *turned, SCALE, 7), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [4096, 5000])
def test_published_sizes(length, device):
    """32 heads of 128, in bf16: the kernel's scores in fp32 are those of the reference, give or take rounding."""
    q, k, weights = draw(device, 1, length, heads=32, width=128, dtype=torch.bfloat16)
    plan = AttentionPlan(0, None, length)
    bits = select(plan, q, k, weights, 128**-0.5, 2048)
    chosen = seen_of(plan, bits, 1, length, torch.device(device))
    reference = select_reference(plan, q, k, weights, 128**-0.5, 2048)
    expected = seen_of(plan, reference, 1, length, torch.device(device))
    assert torch.equal(chosen.sum(-1), expected.sum(-1))
    assert (chosen != expected).sum() <= 1e-4 * expected.sum()
