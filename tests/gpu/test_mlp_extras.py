"""Clamped SwiGLU, squared ReLU and rebuilt products at the shapes of real models."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from liger_trainer.kernels.mlp.gated_down import swiglu_down, swiglu_down_reference
from liger_trainer.kernels.mlp.relu_squared import relu_squared, relu_squared_reference
from liger_trainer.kernels.mlp.swiglu import swiglu, swiglu_reference
from liger_trainer.kernels.parity.clamped_swiglu import clamped_swiglu, clamped_swiglu_reference

pytestmark = pytest.mark.gpu

SCALED = {"gate_multiplier": 0.75, "down_multiplier": 1.5}
ELEMENTWISE = {
    "clamped_swiglu": (clamped_swiglu, clamped_swiglu_reference, 2),
    "relu_squared": (relu_squared, relu_squared_reference, 1),
}


def randn(*shape, device="cuda", dtype=torch.bfloat16, scale=2.0):
    return scale * torch.randn(shape, device=device, dtype=dtype)


def run(function, dy, *inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def peak(run):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(8192, 2880), (70_001, 33)])
def test_elementwise_rounds_no_worse(name, dtype, shape, device):
    function, reference, width = ELEMENTWISE[name]
    torch.manual_seed(0)
    x, dy = randn(shape[0], width * shape[1], dtype=dtype, scale=4.0), randn(*shape, dtype=dtype)
    eager, exact = run(reference, dy, x), run(reference, dy.double(), x.double())
    slack = 1.1 if dtype != torch.float32 else 6  # fast exp and division
    for ours, theirs, right in zip(run(function, dy, x), eager, exact):
        assert (ours - right).norm() <= slack * (theirs - right).norm()


@pytest.mark.parametrize("options", [SCALED, {"limit": 2.0}])
def test_options_of_swiglu_round_no_worse(options, device):
    torch.manual_seed(0)
    dy, gate, up = (randn(4096, 3072) for _ in range(3))
    eager = run(partial(swiglu_reference, **options), dy, gate, up)
    exact = run(partial(swiglu_reference, **options), dy.double(), gate.double(), up.double())
    for ours, theirs, right in zip(run(partial(swiglu, **options), dy, gate, up), eager, exact):
        assert (ours - right).norm() <= 1.1 * (theirs - right).norm()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_beyond_2_to_31_elements(name, device):
    function, reference, width = ELEMENTWISE[name]
    x, dy = randn(2**16 + 1, width * (2**15 + 8)), randn(2**16 + 1, 2**15 + 8)
    ours = run(function, dy, x)
    eager, exact = run(reference, dy[-64:], x[-64:]), run(reference, dy[-64:].double(), x[-64:].double())
    for mine, theirs, right in zip(ours, eager, exact):
        assert (mine[-64:] - right).norm() <= 1.1 * (theirs - right).norm()


ROWS, HIDDEN, INTERMEDIATE = 8192, 4096, 14336


def down_inputs():
    torch.manual_seed(0)
    weight = randn(HIDDEN, INTERMEDIATE, scale=0.02)
    return randn(ROWS, INTERMEDIATE), randn(ROWS, INTERMEDIATE), weight, randn(ROWS, HIDDEN)


def test_rebuilt_product_is_the_kept_one(device):
    gate, up, weight, dy = down_inputs()
    ours = run(swiglu_down, dy, gate, up, weight)
    kept = run(lambda gate, up, weight: F.linear(swiglu(gate, up), weight), dy, gate, up, weight)
    assert all(map(torch.equal, ours, kept))
    part = slice(0, 256)
    eager = run(swiglu_down_reference, dy[part], gate[part], up[part], weight)
    exact = run(swiglu_down_reference, *(x.double() for x in (dy[part], gate[part], up[part], weight)))
    for mine, theirs, right in zip(run(swiglu_down, dy[part], gate[part], up[part], weight), eager, exact):
        assert (mine - right).norm() <= 1.1 * (theirs - right).norm()


def test_memory_of_a_rebuilt_product(device):
    gate, up, weight, dy = down_inputs()
    leaves = [x.requires_grad_() for x in (gate, up, weight)]
    product, y, dweight = (n * 2 for n in (ROWS * INTERMEDIATE, ROWS * HIDDEN, HIDDEN * INTERMEDIATE))
    torch.autograd.grad(swiglu_down(*leaves), leaves, dy)  # cuBLAS takes its workspace
    held = []
    assert peak(lambda: held.append(swiglu_down(*leaves, inplace_backward=True))) <= product + y + 2**20
    assert torch.cuda.memory_allocated() > 0
    (output,) = held
    backward = peak(lambda: torch.autograd.grad(output, leaves, dy))
    assert backward <= product + dweight + 2**20  # dh, which becomes h, and the weight's gradient


def test_no_host_sync_and_cuda_graph(device):
    gate, up, weight, dy = (randn(*shape) for shape in ((512, 1024), (512, 1024), (256, 1024), (512, 256)))
    gate_up, dh = randn(512, 2048), randn(512, 1024)

    def everything():
        return [
            *run(swiglu_down, dy, gate, up, weight),
            *run(clamped_swiglu, dh, gate_up),
            *run(partial(clamped_swiglu, inplace_backward=True), dh, gate_up.clone()),
            *run(relu_squared, dh, gate),
        ]

    expected = everything()
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
