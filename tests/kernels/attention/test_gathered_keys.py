"""The kernels with the keys of several processes, which are more than the queries; no process is asked for them here.

`tests/distributed/test_sequence_parts_gloo.py` gathers them.
"""

from __future__ import annotations

import pytest
import torch

from liger_trainer.kernels.attention import attention as module
from liger_trainer.kernels.attention.attention import attention, attention_reference
from liger_trainer.kernels.attention.plan import Ranks
from liger_trainer.parallel.sequence_parts import SequenceParts
from tests.accuracy import seeded_randn

LENGTH = 96
BEGINS = [[0, 5, 40, 41, 77], [0, 30]]


@pytest.mark.kernel
@pytest.mark.parametrize("window", [0, 7, 19])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_values_and_gradients(dtype, rank, window, device, monkeypatch):
    parts = SequenceParts(Ranks(rank, 2, "none"), BEGINS, LENGTH, torch.device(device))
    plan = parts.plan(window, 0)
    q = seeded_randn(2, LENGTH // 2, 4, 16, seed=1, dtype=dtype, device=device)
    k, v = (seeded_randn(1, 2 * LENGTH, 2, 16, seed=seed, dtype=dtype, device=device) for seed in (2, 3))
    d_out = seeded_randn(2, LENGTH // 2, 4, 16, seed=4, dtype=dtype, device=device)

    def results(wide, function):
        leaves = [x.to(wide).requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, d_out.to(wide).view_as(out))]

    def ours(queries, keys, values):
        monkeypatch.setattr(module, "gathered_keys", lambda *mine: (keys, values))
        own = queries.detach()[:, :, :2]  # what a process would give away; only the shape is looked at
        return attention(queries, own, own, plan=plan)

    def reference(queries, keys, values):
        return attention_reference(queries.flatten(0, 1)[None], keys, values, plan=plan)

    found, truth, eager = results(dtype, ours), results(torch.float64, reference), results(dtype, reference)
    assert found[0].shape == q.shape
    for one, exact, other in zip(found, truth, eager, strict=True):
        error, allowed = ((x.double().flatten() - exact.flatten()).norm() / exact.norm() for x in (one, other))
        assert error <= max(1.25 * allowed, 1e-6 if dtype == torch.float32 else 2.0**-8)
