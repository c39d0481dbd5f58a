"""Every norm at sizes models use, on a GPU: accuracy, memory, no syncs, no recompilation, graphs, 2^31 numbers."""

import pytest
import torch

from liger_trainer.functional import group_norm
from liger_trainer.kernels.norms import layer_norm as _layer_norm_kernels
from liger_trainer.kernels.norms import rms_norm as _rms_norm_kernels
from liger_trainer.kernels.parity import dyt
from liger_trainer.kernels.parity import group_norm_kernels as _group_norm_kernels
from liger_trainer.kernels.parity import modulated_rms_norm as _modulated_rms_norm_kernels
from liger_trainer.kernels.parity import poly_norm as _poly_norm_kernels
from tests.norm_cases import NORMS

pytestmark = pytest.mark.gpu

OF_ROWS = [name for name in NORMS if name != "group_norm"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def inputs(name, shape, device, dtype=torch.bfloat16):
    """Leaves in the order of the function's arguments, and upstream gradients of its outputs."""
    leaves = [leaf.requires_grad_() for leaf in NORMS[name].arguments(shape, device, dtype)]
    # Of one sign for the most part, so that the sums of scalar gradients do not cancel.
    upstream = [torch.randn(shape, device=device).add_(1).to(dtype) for _ in range(2 if "fused" in name else 1)]
    return leaves, upstream


def outputs_and_gradients(function, leaves, upstream):
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


def assert_as_accurate_as_eager(function, reference, leaves, upstream):
    ours = outputs_and_gradients(function, leaves, upstream)
    eager = outputs_and_gradients(reference, leaves, upstream)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = outputs_and_gradients(reference, exact_leaves, [dy.double() for dy in upstream])
    for index, (our, their, exact) in enumerate(zip(ours, eager, truth)):
        our_error, their_error = (torch.linalg.vector_norm(result.double() - exact) for result in (our, their))
        rounding = torch.finfo(our.dtype).eps / 2 if our.numel() < 10 else 1e-6
        assert our_error <= 1.1 * their_error + rounding * torch.linalg.vector_norm(exact), f"result {index}"


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("shape", [(4, 2048, 4096), (64, 4096, 128), (3, 333, 2560), (2, 40, 16384)], ids=str)
def test_real_shapes_are_as_accurate_as_eager(device, name, shape):
    assert_as_accurate_as_eager(NORMS[name].function, NORMS[name].reference, *inputs(name, shape, device))


@pytest.mark.parametrize(
    "shape",
    [(2, 320, 128, 128), (4, 1280, 16, 16), (1, 32, 200, 333), (64, 64, 7, 7), (300, 256), (1, 4, 3000001)],
    ids=str,
)
def test_real_group_norms_are_as_accurate_as_eager(device, shape):
    groups = 32 if shape[1] % 32 == 0 else 2
    reference = torch.nn.functional.group_norm
    leaves, upstream = inputs("group_norm", shape, device)
    functions = [lambda x, w, b, f=f: f(x, groups, w, b) for f in (group_norm, reference)]
    assert_as_accurate_as_eager(*functions, leaves, upstream)


@pytest.mark.parametrize("name", NORMS)
def test_no_host_sync(device, name):
    leaves, upstream = inputs(name, (3, 100, 1024), device)
    outputs_and_gradients(NORMS[name].function, leaves, upstream)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs_and_gradients(NORMS[name].function, leaves, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_another_batch_compiles_nothing(device):
    kernels = (
        _layer_norm_kernels._layer_norm_forward_kernel,
        _layer_norm_kernels._layer_norm_backward_kernel,
        _modulated_rms_norm_kernels._modulated_rms_norm_forward_kernel,
        _modulated_rms_norm_kernels._modulated_rms_norm_backward_kernel,
        _rms_norm_kernels._rms_norm_forward_kernel,
        _rms_norm_kernels._rms_norm_backward_kernel,
        _group_norm_kernels.group_norm_forward_kernel,
        _group_norm_kernels.group_norm_backward_kernel,
        _group_norm_kernels.moments_kernel,
        _group_norm_kernels.channel_sums_kernel,
        _poly_norm_kernels.poly_norm_forward_kernel,
        _poly_norm_kernels.poly_norm_backward_kernel,
        dyt._dyt_forward_kernel,
        dyt._dyt_backward_kernel,
    )
    counts = set()
    for batch in (2, 3, 7, 16, 1001):
        for name in OF_ROWS:
            outputs_and_gradients(NORMS[name].function, *inputs(name, (batch, 3, 192), device))
        for positions in (64, 4096 * 16):
            outputs_and_gradients(NORMS["group_norm"].function, *inputs("group_norm", (batch, 4, positions), device))
        counts.add(tuple(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels))
    assert len(counts) == 1, counts


@pytest.mark.parametrize("name", NORMS)
def test_cuda_graph_replays(device, name):
    (x, *rest), upstream = inputs(name, (4, 64, 1024), device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            outputs_and_gradients(NORMS[name].function, [x, *rest], upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outputs_and_gradients(NORMS[name].function, [x, *rest], upstream)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for ours, theirs in zip(captured, outputs_and_gradients(NORMS[name].function, [x, *rest], upstream)):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", NORMS)
def test_memory_is_that_of_the_results(device, name):
    leaves, upstream = inputs(name, (4, 2048, 4096), device)
    outputs_and_gradients(NORMS[name].function, leaves, upstream)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = outputs_and_gradients(NORMS[name].function, leaves, upstream)
    held = sum({result.data_ptr(): result.nbytes for result in results}.values())
    # Statistics and partial sums: up to three fp32 rows for each of 8 programs a multiprocessor.
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    allowance = 3 * 8 * sms * 4096 * 4 if name != "group_norm" else 2**25
    assert torch.cuda.max_memory_allocated() - before <= held + allowance


@pytest.mark.parametrize("name", ["modulated_rms_norm", "poly_norm", "dyt", "group_norm"])
def test_more_than_2_to_the_31_numbers(device, name):
    shape = (2**10 + 1, 2**9, 4096)
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    x, *rest = NORMS[name].arguments((shape[0], 1 if name != "group_norm" else 512, shape[2]), device, torch.bfloat16)
    del x
    x = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_().requires_grad_()
    rest = [tensor.requires_grad_() for tensor in rest]
    y = NORMS[name].function(x, *rest)
    dx, *_ = torch.autograd.grad(y, (x, *rest), x.detach())
    last = slice(shape[0] - 1, shape[0])
    part_x = x.detach()[last].float().requires_grad_()
    part_rest = [(t.detach()[last] if t.shape[0] == shape[0] else t.detach()).float() for t in rest]
    part_y = NORMS[name].reference(part_x, *part_rest)
    (part_dx,) = torch.autograd.grad(part_y, part_x, part_x.detach())
    for ours, theirs in ((y[last], part_y), (dx[last], part_dx)):
        error = torch.linalg.vector_norm(ours.float() - theirs)
        assert error <= 1e-2 * torch.linalg.vector_norm(theirs)


@pytest.mark.multigpu
@pytest.mark.parametrize("name", NORMS)
def test_a_device_that_is_not_the_current_one(name):
    leaves, upstream = inputs(name, (3, 12, 128), "cuda:1", torch.float32)
    assert torch.cuda.current_device() == 0
    ours = outputs_and_gradients(NORMS[name].function, leaves, upstream)
    torch.testing.assert_close(
        ours, outputs_and_gradients(NORMS[name].reference, leaves, upstream), rtol=1e-4, atol=1e-3
    )
