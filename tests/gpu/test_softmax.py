"""Softmax, sparsemax and multi-token attention on a GPU: real shapes, index width, memory, host syncs, graphs."""

from functools import partial

import pytest
import torch

from liger_trainer.kernels.parity import row_softmax as kernels
from liger_trainer.kernels.parity.multi_token_attention import multi_token_attention, multi_token_attention_reference
from liger_trainer.kernels.parity.softmax import softmax, softmax_reference
from liger_trainer.kernels.parity.sparsemax import sparsemax, sparsemax_reference

pytestmark = pytest.mark.gpu

PAIRS = {"softmax": (softmax, softmax_reference), "sparsemax": (sparsemax, sparsemax_reference)}
functions = pytest.mark.parametrize("name", PAIRS)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def run(function, x, dy):
    x = x.detach().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


@functions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(8192, 4096), (70001, 128), (333, 1000), (2048, 32768), (64, 128256), (5, 1_000_003)]
)
def test_rounds_no_worse_than_eager(name, dtype, shape, device):
    function, reference = PAIRS[name]
    x, dy = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    ours = run(function, x, dy)
    for part in (slice(0, 64), slice(-64, None)):
        eager, exact = run(reference, x[part], dy[part]), run(reference, x[part].double(), dy[part].double())
        for mine, theirs, right in zip(ours, eager, exact):
            assert (mine[part] - right).norm() <= 1.1 * (theirs - right).norm() + 1e-6 * right.norm()


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize("columns", [4096, 100_000])
def test_sparsemax_settles_for_every_spread(scale, columns, device):
    x = scale * torch.randn(256, columns, device=device)
    x[::7] = x[::7].sign()
    x[:, ::3] = float("-inf")
    torch.testing.assert_close(sparsemax(x).double(), sparsemax_reference(x.double()), rtol=1e-5, atol=1e-6)


@functions
def test_more_than_2_to_31_elements(name, device):
    function, reference = PAIRS[name]
    x = torch.empty(2**19 + 64, 4096, device=device, dtype=torch.bfloat16).normal_()
    dy = torch.empty_like(x).normal_()
    y, dx = run(function, x, dy)
    right = run(reference, x[-64:].float(), dy[-64:].float())
    torch.testing.assert_close(y[-64:].float(), right[0], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(dx[-64:].float(), right[1], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("length", [256, 2048])
def test_multi_token_attention(sparse, length, device):
    scores = torch.randn(2, 4, length, length, device=device, dtype=torch.bfloat16)
    weight = torch.randn(4, 4, 3, 5, device=device, dtype=torch.bfloat16) / 8
    dy = torch.randn_like(scores)

    def both(function, *tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[:2]]
        out = function(*leaves, padding=(1, 2), sparse=sparse)
        return [out.detach(), *torch.autograd.grad(out, leaves, tensors[2])]

    ours, eager = (both(f, scores, weight, dy) for f in (multi_token_attention, multi_token_attention_reference))
    exact = both(multi_token_attention_reference, scores.double(), weight.double(), dy.double())
    for mine, theirs, right in zip(ours, eager, exact):
        assert (mine - right).norm() <= 1.1 * (theirs - right).norm()


def test_no_host_sync(device):
    x, dy = (torch.randn(2, 3, 300, 300, device=device) for _ in range(2))
    weight = torch.randn(3, 3, 3, 3, device=device)

    def everything():
        for sparse in (False, True):
            run(partial(multi_token_attention, weight=weight, padding=1, sparse=sparse), x, dy)
        for function in (softmax, sparsemax, partial(sparsemax, dim=1)):
            run(function, x, dy)

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_other_lengths_compile_nothing_within_a_power_of_two(device):
    """A training run with sequences of many lengths does not compile a kernel for each."""
    counts = set()
    for columns in (1040, 1056, 2000, 2032):
        for name in PAIRS:
            x = torch.randn(40, columns, device=device)
            run(PAIRS[name][0], x, x)
        cache = kernels.forward_kernel.device_caches[torch.cuda.current_device()][0]
        counts.add(len(cache))
    assert len(counts) == 1, counts


@functions
def test_peak_memory_is_the_results(name, device):
    x, dy = (torch.randn(8192, 4096, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(PAIRS[name][0](x), x, dy)
    assert torch.cuda.max_memory_allocated() - before <= 2 * x.numel() * 2 + 2**20
