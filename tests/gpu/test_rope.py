"""RoPE at the shapes of real models: rounding, index width, memory, host syncs, recompilation."""

import pytest
import torch

from liger_trainer.kernels.rope.rope import rope, rope_reference
from liger_trainer.kernels.rope.rope_kernel import rope_kernel

pytestmark = pytest.mark.gpu

BATCH, SEQ, Q_HEADS, K_HEADS, DIM = 4, 4096, 32, 8, 128


def inputs(device, batch=BATCH, seq=SEQ, q_heads=Q_HEADS, k_heads=K_HEADS, dim=DIM, rotary=None, dtype=torch.bfloat16):
    q = torch.randn(batch, seq, q_heads, dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
    k = torch.randn(batch, seq, k_heads, dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
    half = (rotary or dim) // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=device) / half)
    angles = torch.outer(torch.arange(seq, device=device), frequencies).repeat(1, 2)[None]
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def values_and_gradients(function, q, k, cos, sin):
    torch.manual_seed(1)
    outputs = function(q, k, cos, sin)
    # Not randn_like, which fills in memory order, and the reference's results may lie otherwise.
    gradients = [torch.randn(y.shape, device=y.device, dtype=torch.bfloat16).to(y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, (q, k), gradients)]


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"q_heads": 40, "k_heads": 8},
        {"q_heads": 8, "k_heads": 4, "dim": 256},
        {"q_heads": 24, "k_heads": 1, "dim": 96, "rotary": 64},
        {"q_heads": 128, "k_heads": 128, "dim": 192, "seq": 333},
        {"q_heads": 3, "k_heads": 3, "dim": 80, "seq": 1025},
    ],
    ids=str,
)
def test_rounds_no_worse_than_eager(shape, device):
    arguments = inputs(device, **{"batch": 2, **shape})
    q, k, cos, sin = (x.detach().double() for x in arguments)
    exact = values_and_gradients(rope_reference, q.requires_grad_(), k.requires_grad_(), cos, sin)
    eager = values_and_gradients(rope_reference, *arguments)
    for ours, theirs, right in zip(values_and_gradients(rope, *arguments), eager, exact):
        assert (ours - right).norm() <= (theirs - right).norm()
        assert (ours - right).abs().max() <= 2**-8 * right.abs().max()


def test_no_host_sync(device):
    arguments = inputs(device)
    values_and_gradients(rope, *arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        values_and_gradients(rope, *arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_compilation_for_every_batch_and_length(device):
    def compilations():
        return sum(len(caches[0]) for caches in rope_kernel.device_caches.values())

    values_and_gradients(rope, *inputs(device, batch=2, seq=7))
    before = compilations()
    for batch, seq in ((1, 1), (1, 16), (3, 1), (16, 33), (2, 4096), (1, 100_000)):
        values_and_gradients(rope, *inputs(device, batch=batch, seq=seq))
    assert compilations() == before


def test_many_sequences(device):
    arguments = inputs(device, batch=70_000, seq=2, q_heads=2, k_heads=1, dim=16, dtype=torch.float32)
    for ours, right in zip(values_and_gradients(rope, *arguments), values_and_gradients(rope_reference, *arguments)):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads_first", [False, True])
def test_more_than_2_to_31_elements(heads_first, device):
    q, k, cos, sin = (x.detach() for x in inputs(device, batch=1, seq=2**19 + 8, q_heads=33, k_heads=1))
    assert q.numel() > 2**31
    last = slice(-4, None)
    expected = rope_reference(q[:, :, last], k[:, :, last], cos[:, last], sin[:, last])
    if heads_first:  # strides between heads, rather than tokens, then go beyond 31 bits
        q = q.contiguous()
    q_out, k_out = rope(q, k, cos, sin)
    for ours, right in zip((q_out, k_out), expected):
        torch.testing.assert_close(ours[:, :, last], right, rtol=2**-7, atol=2**-6)


def test_peak_memory_is_the_results(device):
    q, k, cos, sin = inputs(device)
    gradients = [torch.randn_like(q), torch.randn_like(k)]
    values_and_gradients(rope, q, k, cos, sin)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = torch.autograd.grad(rope(q, k, cos, sin), (q, k), gradients)
    size = sum(x.numel() * x.element_size() for x in (q, k))
    assert torch.cuda.max_memory_allocated() - before <= 2 * size + 2**20
    assert [x.transpose(1, 2).is_contiguous() for x in results] == [True, True]
