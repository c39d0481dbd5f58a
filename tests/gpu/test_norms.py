"""The norms at the sizes models use, on a GPU: accuracy, tensors beyond 2^31 numbers, no syncs, no recompilation."""

import pytest
import torch
import torch.nn.functional as F

from liger_trainer.kernels.norms import layer_norm as _layer_norm_kernels
from liger_trainer.kernels.norms import rms_norm as _rms_norm_kernels
from liger_trainer.kernels.norms.layer_norm import layer_norm, layer_norm_reference
from liger_trainer.kernels.norms.rms_norm import rms_norm, rms_norm_reference
from liger_trainer.kernels.parity.fused_add_rms_norm import fused_add_rms_norm, fused_add_rms_norm_reference
from tests.norm_cases import weight_gradient_errors

pytestmark = pytest.mark.gpu

OPERATORS = {
    "rms_norm": (rms_norm, rms_norm_reference),
    "fused_add_rms_norm": (fused_add_rms_norm, fused_add_rms_norm_reference),
    "layer_norm": (layer_norm, layer_norm_reference),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def inputs(name, rows, hidden_size, device, dtype=torch.bfloat16):
    """Leaves in the order of the function's arguments, and upstream gradients of its outputs."""
    x = torch.randn(rows, hidden_size, device=device, dtype=dtype)
    weight = torch.randn(hidden_size, device=device, dtype=dtype)
    tensors = {
        "rms_norm": (x, weight),
        "fused_add_rms_norm": (x, torch.randn_like(x), weight),
        "layer_norm": (x, weight, torch.randn_like(weight)),
    }[name]
    upstream = [torch.randn_like(x) for _ in range(2 if name == "fused_add_rms_norm" else 1)]
    return [tensor.requires_grad_() for tensor in tensors], upstream


def outputs_and_gradients(function, leaves, upstream):
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("shape", [(16384, 4096), (655360, 128), (16384, 16384), (70001, 2560), (3, 65536)], ids=str)
def test_real_shapes_are_as_accurate_as_eager(device, name, shape):
    function, reference = OPERATORS[name]
    leaves, upstream = inputs(name, shape[0], shape[1], device)
    ours = outputs_and_gradients(function, leaves, upstream)
    eager = outputs_and_gradients(reference, leaves, upstream)
    exact_leaves = [leaf.detach().float().requires_grad_() for leaf in leaves]
    truth = outputs_and_gradients(reference, exact_leaves, [dy.float() for dy in upstream])
    for index, (our, their, exact) in enumerate(zip(ours, eager, truth)):
        our_error, their_error = (torch.linalg.vector_norm(result.float() - exact) for result in (our, their))
        assert our_error <= 1.1 * their_error + 1e-6 * torch.linalg.vector_norm(exact), f"result {index}"


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "hidden_size"), [(16, 256), (32, 4096), (8192, 4096)])
def test_weight_gradient_is_rounded_once_and_eager_is_further_off(device, add, rows, hidden_size, record_property):
    """Liger's test_norm_lora_parity compares with eager, which rounds x_hat and every product."""
    ours, eager = weight_gradient_errors(add, rows, hidden_size, device)
    record_property("bf16 units off", f"ours {ours:.2f}, eager {eager:.2f}")
    print(f"{rows}x{hidden_size} add={add}: bf16 units off float64: ours {ours:.2f}, eager {eager:.2f}")
    assert ours <= 0.5
    assert eager > 1.0


def test_more_than_2_to_the_31_numbers(device):
    rows, hidden_size = 2**19 + 64, 4096
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    x = torch.empty(rows, hidden_size, device=device, dtype=torch.bfloat16).normal_()
    weight = torch.randn(hidden_size, device=device, dtype=torch.bfloat16)
    dy = torch.empty_like(x).normal_()
    for name in ("rms_norm", "layer_norm"):
        function, reference = OPERATORS[name]
        parameters = (weight,) if name == "rms_norm" else (weight, weight)
        leaves = [tensor.detach().requires_grad_() for tensor in (x, *parameters)]
        y, dx, *parameter_gradients = outputs_and_gradients(function, leaves, [dy])
        sums = [torch.zeros(hidden_size, device=device) for _ in parameters]
        for start in range(0, rows, 2**16):
            rows_of = slice(start, start + 2**16)
            part = [tensor.detach().float().requires_grad_() for tensor in (x[rows_of], *parameters)]
            part_y, part_dx, *part_gradients = outputs_and_gradients(reference, part, [dy[rows_of].float()])
            torch.testing.assert_close(y[rows_of].float(), part_y, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(dx[rows_of].float(), part_dx, rtol=2e-2, atol=2e-2)
            for total, gradient in zip(sums, part_gradients):
                total += gradient
        for total, gradient in zip(sums, parameter_gradients):
            assert torch.linalg.vector_norm(gradient.float() - total) <= 4e-3 * torch.linalg.vector_norm(total)
        del y, dx


@pytest.mark.parametrize("name", OPERATORS)
def test_no_host_sync(device, name):
    function, _ = OPERATORS[name]
    leaves, upstream = inputs(name, 300, 1024, device)
    outputs_and_gradients(function, leaves, upstream)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs_and_gradients(function, leaves, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_another_number_of_rows_compiles_nothing(device):
    kernels = (
        _rms_norm_kernels._rms_norm_forward_kernel,
        _rms_norm_kernels._rms_norm_backward_kernel,
        _layer_norm_kernels._layer_norm_forward_kernel,
        _layer_norm_kernels._layer_norm_backward_kernel,
    )
    counts = set()
    for rows in (7, 1, 16, 4096, 100003):
        for name, (function, _) in OPERATORS.items():
            outputs_and_gradients(function, *inputs(name, rows, 192, device))
        counts.add(tuple(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels))
    assert len(counts) == 1, counts


@pytest.mark.parametrize("name", OPERATORS)
def test_inductor_takes_the_operators_into_one_graph(device, name):
    function, _ = OPERATORS[name]
    leaves, upstream = inputs(name, 64, 512, device)

    def after_a_matmul(x, *rest):
        return function(F.silu(x) * 2, *rest)

    compiled = outputs_and_gradients(torch.compile(after_a_matmul, fullgraph=True), leaves, upstream)
    plain = outputs_and_gradients(after_a_matmul, leaves, upstream)
    for ours, theirs in zip(compiled, plain):
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)


def test_cuda_graph_replays(device):
    (x, weight), (dy,) = inputs("rms_norm", 256, 1024, device)
    for _ in range(2):
        outputs_and_gradients(rms_norm, (x, weight), [dy])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outputs_and_gradients(rms_norm, (x, weight), [dy])
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for ours, theirs in zip(captured, outputs_and_gradients(rms_norm, (x, weight), [dy])):
        assert torch.equal(ours, theirs)


@pytest.mark.multigpu
@pytest.mark.parametrize("name", OPERATORS)
def test_a_device_that_is_not_the_current_one(name):
    function, reference = OPERATORS[name]
    leaves, upstream = inputs(name, 33, 128, "cuda:1", torch.float32)
    assert torch.cuda.current_device() == 0
    ours = outputs_and_gradients(function, leaves, upstream)
    torch.testing.assert_close(ours, outputs_and_gradients(reference, leaves, upstream), rtol=1e-4, atol=1e-4)
