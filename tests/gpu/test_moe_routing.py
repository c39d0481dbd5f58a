"""Routing at the sizes of real models: skewed choices, many tokens, host syncs, CUDA graphs, the device's assertion."""

import subprocess
import sys

import pytest
import torch

from liger_trainer.kernels.moe.router import (
    grouped_topk_sigmoid_routing,
    grouped_topk_sigmoid_routing_reference,
    topk_softmax_routing,
    topk_softmax_routing_reference,
)
from liger_trainer.kernels.moe.routing import (
    sort_by_expert,
    sort_by_expert_reference,
    tile_table,
    tile_table_reference,
)

pytestmark = pytest.mark.gpu

CHOICES = {
    "even": lambda size, experts: torch.randint(0, experts, size),
    "all to one": lambda size, experts: torch.full(size, experts - 1),
    "few and sentinels": lambda size, experts: torch.randint(experts - 3, experts + 5, size),
    "zipf": lambda size, experts: (experts * torch.rand(size) ** 4).long(),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(8192, 8, 128), (32771, 10, 512), (5000, 1, 16), (1, 8, 256)])
def test_sort_and_tiles(choice, tokens, top_k, experts, device):
    torch.manual_seed(0)
    index = CHOICES[choice]((tokens, top_k), experts).to(device)
    for given in (index, index.int(), index.mT.contiguous().mT):
        rows = sort_by_expert(given, experts)
        assert all(map(torch.equal, rows, sort_by_expert_reference(given, experts)))
    for block_rows in (64, 128):
        table = tile_table(rows.offsets, block_rows, index.numel())
        assert torch.equal(table, tile_table_reference(rows.offsets, block_rows, index.numel()))


def test_sixty_million_rows(device):
    torch.manual_seed(0)
    index = torch.randint(0, 128, (2**23, 8), device=device, dtype=torch.int32)
    order, slots, offsets = sort_by_expert(index, 128)
    by_expert = index.view(-1)[order]
    assert (by_expert.diff() >= 0).all()
    assert (order.diff()[by_expert.diff() == 0] > 0).all()  # stable
    assert torch.equal(order[slots], torch.arange(index.numel(), device=device, dtype=torch.int32))
    assert torch.equal(offsets.diff().long(), torch.bincount(index.view(-1), minlength=128))


FUNCTIONS = {
    "Qwen3-MoE": (topk_softmax_routing, topk_softmax_routing_reference, 128, 8, {}),
    "OLMoE": (topk_softmax_routing, topk_softmax_routing_reference, 64, 8, {"normalise": False}),
    "Qwen3-Next": (topk_softmax_routing, topk_softmax_routing_reference, 512, 10, {}),
    "DeepSeek-V3": (
        grouped_topk_sigmoid_routing,
        grouped_topk_sigmoid_routing_reference,
        256,
        8,
        {"num_groups": 8, "top_groups": 4, "scale": 2.5},
    ),
    "Kimi-K2": (grouped_topk_sigmoid_routing, grouped_topk_sigmoid_routing_reference, 384, 8, {"scale": 2.8}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", FUNCTIONS)
def test_routers(model, dtype, device):
    function, reference, experts, k, options = FUNCTIONS[model]
    if dtype == torch.bfloat16 and experts > 256:
        pytest.skip("bfloat16 has fewer different numbers there")
    torch.manual_seed(0)
    # Different numbers in every row, in bfloat16 too; of one sign, so that no two groups' sums are the same.
    order = torch.rand(8192, experts, device=device).argsort(dim=1)
    logits = (2.0 ** (-order.double() * (6 / experts))).to(torch.bfloat16 if experts <= 256 else torch.float32)
    logits = logits.to(dtype).requires_grad_()
    weights, index = function(logits, k, **options)
    right, chosen = reference(logits.double(), k, **options)
    if function is topk_softmax_routing:
        assert torch.equal(index, chosen)
    # Sums of groups, and sigmoids, may be nearer to each other than fp32 tells: as good a choice then.
    assert (index.sort().values == chosen.sort().values).all(-1).float().mean() > 0.999
    same = (index == chosen).all(-1)
    rounding = 3e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(weights[same].double(), right[same], rtol=rounding, atol=1e-7)
    upstream = torch.randn_like(weights)
    (gradient,) = torch.autograd.grad(weights, logits, upstream, retain_graph=True)
    (exact,) = torch.autograd.grad(right, logits, upstream.double())
    torch.testing.assert_close(gradient[same].double(), exact[same].double(), rtol=2 * rounding, atol=1e-6)
    assert torch.equal(gradient, torch.autograd.grad(weights, logits, upstream)[0])


def test_no_host_sync_and_cuda_graph(device):
    torch.manual_seed(0)
    logits = torch.randn(4096, 128, device=device, dtype=torch.bfloat16).requires_grad_()

    def everything():
        weights, index = topk_softmax_routing(logits, 8)
        (gradient,) = torch.autograd.grad(weights.float().square().sum(), logits)
        rows = sort_by_expert(index, 128)
        return weights.detach(), index, gradient, *rows, tile_table(rows.offsets, 128, index.numel())

    expected = [x.clone() for x in everything()]
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
    assert all(map(torch.equal, results, expected))


def test_a_negative_id_is_an_assertion_of_the_device():
    """In a process of its own, as it takes the device's context with it."""
    code = (
        "import torch\n"
        "from liger_trainer.kernels.moe.routing import sort_by_expert\n"
        "sort_by_expert(torch.tensor([[0, -1]], device=torch.accelerator.current_accelerator()), 4)\n"
        "torch.accelerator.synchronize()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "`top_k_index` has a negative id" in run.stdout + run.stderr
