"""Attention of the last tokens of documents to all of their keys: the rows of these tokens in attention of all."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch

from liger_trainer.kernels.attention.attention import attention, attention_reference
from liger_trainer.kernels.attention.plan import AttentionPlan, SharedKeys, dense
from tests.accuracy import seeded_randn
from tests.kernels.attention.test_attention import check, check_operator, distances, in_double, operands, results


class Lengths(NamedTuple):
    """The tokens of each document, and how many of its last ones are queries."""

    tokens: tuple[int, ...]
    queries: tuple[int, ...]


CASES = {
    "one": Lengths((40,), (9,)),
    "several": Lengths((5, 1, 70, 20, 14), (3, 1, 1, 20, 5)),
    "all": Lengths((6, 30), (6, 30)),
}
WINDOWS = [0, 1, 7, 33, 1000]
REAL = Lengths((1024, 1, 700, 300), (512, 1, 64, 300))


def offsets(lengths, device="cpu"):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def plan_of(case, window, device="cpu"):
    keys = SharedKeys(None, offsets(case.tokens, device), max(case.tokens) + 2)
    return AttentionPlan(window, offsets(case.queries, device), max(case.queries) + 3, keys=keys)


def whole_plan(case, window, device="cpu"):
    return AttentionPlan(window, offsets(case.tokens, device), max(case.tokens))


def kept(case):
    """The places of the queries among all tokens."""
    ends = itertools.accumulate(case.tokens)
    return torch.cat([torch.arange(end - count, end) for end, count in zip(ends, case.queries)])


def tensors_of(case, device, dtype=torch.float32, heads=(2, 1), head_dim=16):
    q, _, _ = operands(device, dtype, heads, head_dim, length=sum(case.queries), batch=1)
    _, k, v = operands(device, dtype, heads, head_dim, length=sum(case.tokens), batch=1)
    return [q, k, v]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_plan_is_the_mask(case, window):
    tokens, cpu = sum(case.tokens), torch.device("cpu")
    found = dense(plan_of(case, window), 1, sum(case.queries), cpu, tokens=tokens)
    assert torch.equal(found, dense(whole_plan(case, window), 1, tokens, cpu)[:, :, kept(case)])


@pytest.mark.kernel
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients(case, window, device):
    # The weight of one key is 1, whatever its score; beside a sink it has gradients.
    sinks = seeded_randn(2, seed=5, device=device) if window == 1 else None
    check(tensors_of(case, device), sinks, plan_of(case, window, device))


@pytest.mark.kernel
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 16), ((2, 1), 256), ((2, 1), 512)], ids=str)
def test_heads_and_soft_caps(heads, head_dim, device):
    case = CASES["several"]
    for dtype in (torch.float32, torch.bfloat16):
        check(tensors_of(case, device, dtype, heads, head_dim), None, plan_of(case, 7, device), softcap=2.0)


@pytest.mark.kernel
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_rows_and_gradients_are_those_of_all_tokens(case, window, device):
    """With no gradient at the other rows."""
    q, k, v = tensors_of(case, device)
    places = kept(case).to(device)
    whole = seeded_randn(1, sum(case.tokens), *q.shape[2:], seed=6, device=device).index_copy(1, places, q)

    def of_all(q, k, v, plan, **options):
        return attention_reference(q, k, v, plan=plan, **options)[:, places]

    expected = results(of_all, in_double(whole, k, v), None, whole_plan(case, window, device))
    expected[1] = expected[1][:, places]
    found = results(attention, (q, k, v), None, plan_of(case, window, device))
    assert max(distances(found, expected)) < 1e-6


@pytest.mark.kernel
def test_opcheck(device):
    case = CASES["several"]
    check_operator(tensors_of(case, device), True, plan_of(case, 7, device), 2.0)


@pytest.mark.kernel
def test_traced_in_one_graph(device):
    case = CASES["several"]
    tensors, plan = tensors_of(case, device), plan_of(case, 7, device)
    torch.compiler.reset()
    traced = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for one, other in zip(*(results(run, tensors, None, plan) for run in (traced, attention)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("window", [0, 1, 256])
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((4, 4), 128), ((4, 2), 256), ((4, 1), 512)], ids=str)
def test_real_sizes(heads, head_dim, window, softcap, device):
    """On torch's flash operator; with a soft-cap, and wide heads, on our kernels."""
    for dtype in (torch.bfloat16, torch.float16):
        sinks = seeded_randn(heads[0], seed=5, dtype=dtype, device=device) if window == 1 else None
        check(tensors_of(REAL, device, dtype, heads, head_dim), sinks, plan_of(REAL, window, device), softcap=softcap)


@pytest.mark.gpu
def test_opcheck_on_flash(device):
    case = CASES["several"]
    check_operator(tensors_of(case, device, torch.bfloat16), True, plan_of(case, 7, device), 0.0)
