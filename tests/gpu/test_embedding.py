"""The embedding at the shapes of real models: rounding, index width, memory, host syncs, CUDA graphs."""

import pytest
import torch

from liger_trainer.kernels.parity.embedding import embedding, embedding_backward_, tied_embedding

pytestmark = pytest.mark.gpu

VOCAB, HIDDEN, TOKENS = 128256, 4096, 16384


def inputs(device, vocab=VOCAB, hidden=HIDDEN, tokens=TOKENS, dtype=torch.bfloat16):
    """Ids as text has them: a few very frequent ones (a quarter is padding), many rare ones."""
    torch.manual_seed(0)
    ids = (vocab * torch.rand(tokens, device=device) ** 4).long().clamp_(max=vocab - 1)
    ids[: tokens // 4] = 7
    weight = torch.randn(vocab, hidden, device=device, dtype=dtype).requires_grad_()
    return ids[torch.randperm(tokens, device=device)], weight, torch.randn(tokens, hidden, device=device, dtype=dtype)


def gradient(ids, weight, dy):
    return torch.autograd.grad(embedding(ids, weight), weight, dy)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("vocab", "hidden"), [(VOCAB, HIDDEN), (151936, 896), (1000, 100), (262208, 2560)])
def test_rounds_once(vocab, hidden, dtype, device):
    ids, weight, dy = inputs(device, vocab, hidden, dtype=dtype)
    assert torch.equal(embedding(ids, weight), weight[ids])
    ours = gradient(ids, weight, dy)
    assert torch.equal(ours, gradient(ids, weight, dy))
    used = torch.unique(ids)
    exact = torch.zeros(vocab, hidden, device=device, dtype=torch.float64).index_add_(0, ids, dy.double())[used]
    rounding = (exact.to(dtype) - exact).norm()
    assert (ours[used] - exact).norm() <= 1.01 * rounding + 2e-7 * exact.norm()
    ours[used] = 0
    assert not ours.any()


def test_more_than_2_to_31_elements(device):
    ids, weight, _ = inputs(device, 2**19 + 5, 4100, tokens=600_000)
    ids = ids % 5 + 2**19
    assert weight.numel() > 2**31
    dy = torch.ones((), device=device, dtype=torch.bfloat16).expand(600_000, 4100)
    assert torch.equal(embedding(ids, weight)[-1], weight[ids[-1]])
    counts = torch.bincount(ids - 2**19, minlength=5).bfloat16()
    assert torch.equal(gradient(ids, weight, dy)[2**19 :, 4099], counts)


def test_no_host_sync_and_cuda_graph(device):
    ids, weight, dy = inputs(device, 32000, 1024, 4096)
    there = torch.zeros_like(weight)

    def everything():
        embedding_backward_(there.zero_(), dy, ids, 7)
        hidden, head = tied_embedding(ids, weight)
        return gradient(ids, weight, dy), torch.autograd.grad((hidden * dy).sum() + head.sum(), weight)[0]

    expected = [x.clone() for x in (*everything(), there)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        everything()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        results = everything()
    graph.replay()
    assert all(map(torch.equal, (*results, there), expected))


def test_peak_memory(device):
    """The gradient of the weight, and little for the tokens; next to a tied head not even that."""
    ids, weight, dy = inputs(device)
    table = weight.numel() * weight.element_size()

    def peak(run):
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before

    assert peak(lambda: gradient(ids, weight, dy)) <= table + 2 * dy.numel() * dy.element_size() + 2**20

    def tied():
        hidden, head = tied_embedding(ids, weight)
        return torch.autograd.grad((hidden, head), weight, (dy, torch.zeros_like(head)))

    assert peak(tied) <= table + 2 * dy.numel() * dy.element_size() + 2**20
