"""The fused norm and rotation, and RoPE's other layouts, at the shapes of real models."""

import functools
from unittest import mock

import pytest
import torch

from liger_trainer.functional import qk_norm_rope, rms_norm, rope, rope_complex, rope_multimodal
from liger_trainer.kernels.rope import rope as rope_module
from liger_trainer.kernels.rope.qk_norm_rope import qk_norm_rope_reference
from liger_trainer.kernels.rope.qk_norm_rope_kernels import backward_kernel, forward_kernel
from liger_trainer.kernels.rope.rope import rope_reference

pytestmark = pytest.mark.gpu


def inputs(device, batch=2, seq=2048, q_heads=32, k_heads=8, dim=128, rotary=None, dtype=torch.bfloat16):
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(batch, seq, q_heads, dim), (batch, seq, k_heads, dim), (dim,), (dim,)]
    leaves = [torch.randn(s, device=device, generator=generator).to(dtype).requires_grad_() for s in shapes]
    half = (rotary or dim) // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=device) / half)
    angles = torch.outer(torch.arange(seq, device=device), frequencies).repeat(1, 2)[None]
    return *leaves, angles.cos().to(dtype), angles.sin().to(dtype)


def upstream_of(arguments):
    generator = torch.Generator(arguments[0].device).manual_seed(1)
    return [torch.randn(x.shape, device=x.device, generator=generator).bfloat16().to(x.dtype) for x in arguments[:2]]


def values_and_gradients(function, arguments, leaves=4):
    outputs = function(*arguments)
    gradients = [dy.to(y.dtype) for y, dy in zip(outputs, upstream_of(arguments))]
    return [*outputs, *torch.autograd.grad(outputs, arguments[:leaves], gradients)]


def apart(q, k, q_weight, k_weight, cos, sin):
    return rope(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin, unsqueeze_dim=2)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"q_heads": 8, "k_heads": 4, "dim": 256},
        {"q_heads": 64, "k_heads": 4, "dim": 128},
        {"q_heads": 96, "k_heads": 8, "dim": 128, "rotary": 64},
        {"q_heads": 3, "k_heads": 1, "dim": 80, "seq": 1025},
        {"q_heads": 16, "k_heads": 16, "dim": 64, "seq": 333},
    ],
    ids=str,
)
def test_rounds_no_worse_than_eager(shape, device):
    arguments = inputs(device, **shape)
    exact_leaves = [x.detach().double().requires_grad_() for x in arguments[:4]]
    exact = values_and_gradients(qk_norm_rope_reference, (*exact_leaves, *(x.double() for x in arguments[4:])))
    eager = values_and_gradients(qk_norm_rope_reference, arguments)
    for ours, theirs, right in zip(values_and_gradients(qk_norm_rope, arguments), eager, exact):
        assert (ours - right).norm() <= 1.1 * (theirs - right).norm()


def test_values_are_those_of_the_kernels_apart(device):
    arguments = inputs(device)
    for ours, theirs in zip(qk_norm_rope(*arguments), apart(*arguments)):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-8)


def test_same_bits_without_host_sync(device):
    arguments = inputs(device)
    first = values_and_gradients(qk_norm_rope, arguments)
    upstream = upstream_of(arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = qk_norm_rope(*arguments)
        gradients = torch.autograd.grad(outputs, arguments[:4], upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, first, (*outputs, *gradients)))


def test_cuda_graph(device):
    arguments = inputs(device, seq=128)
    upstream = upstream_of(arguments)

    def step():
        outputs = qk_norm_rope(*arguments)
        return [*outputs, *torch.autograd.grad(outputs, arguments[:4], upstream)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = [x.clone() for x in step()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    graph.replay()
    assert all(map(torch.equal, results, expected))


def test_one_compilation_for_every_batch_and_length(device):
    def compilations():
        kernels = (forward_kernel, backward_kernel)
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    values_and_gradients(qk_norm_rope, inputs(device, batch=2, seq=7))
    before = compilations()
    for batch, seq in ((1, 1), (1, 16), (3, 1), (16, 33), (2, 4096)):
        values_and_gradients(qk_norm_rope, inputs(device, batch=batch, seq=seq))
    assert compilations() == before


def test_more_than_2_to_31_elements(device):
    arguments = [x.detach() for x in inputs(device, batch=1, seq=2**19 + 8, q_heads=33, k_heads=1)]
    assert arguments[0].numel() > 2**31
    last = [x[:, -4:] if x.dim() == 4 else x[:, -4:] if x.dim() == 3 else x for x in arguments]
    for ours, right in zip(qk_norm_rope(*arguments), qk_norm_rope_reference(*last)):
        torch.testing.assert_close(ours[:, -4:], right, rtol=2**-6, atol=2**-5)


def test_memory_is_the_results_and_one_number_a_head(device):
    arguments = inputs(device)
    upstream = upstream_of(arguments)
    values_and_gradients(qk_norm_rope, arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(qk_norm_rope(*arguments), arguments[:4], upstream)
    size = sum(x.numel() * x.element_size() for x in arguments[:2])
    assert torch.cuda.max_memory_allocated() - before <= 2 * size + 4 * size // (2 * 128) + 2**20


LAYOUTS = {
    "half-width tables": (lambda q, k, cos, sin: rope(q, k, cos[..., :64], sin[..., :64], 2, rotary_dim=128), {}),
    "neighbours": (
        functools.partial(rope, unsqueeze_dim=2, interleaved=True, keep_dtype=True),
        {"interleaved": True, "keep_dtype": True},
    ),
    "neighbours to halves": (
        lambda q, k, cos, sin: rope(
            q, k, cos[..., :64], sin[..., :64], 2, rotary_dim=128, interleaved=True, split_output=True
        ),
        {"interleaved": True, "split_output": True, "half": True},
    ),
    "complex": (
        lambda q, k, cos, sin: rope_complex(q, k, torch.complex(cos[..., :64].float(), sin[..., :64].float())),
        {"interleaved": True, "keep_dtype": True, "half": True},
    ),
    "axes": (
        lambda q, k, cos, sin: rope_multimodal(
            q, k, cos.expand(3, 1, -1, -1), sin.expand(3, 1, -1, -1), [16, 24, 24], 2
        ),
        {},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_round_no_worse_than_eager(layout, device):
    ours, options = LAYOUTS[layout]
    options = dict(options)
    half = options.pop("half", False)
    q, k, _, _, cos, sin = inputs(device)

    def reference(q, k, cos, sin):
        tables = (cos[..., :64], sin[..., :64]) if half else (cos, sin)
        return rope_reference(q, k, *tables, 2, rotary_dim=128, **options)

    arguments = (q, k, cos, sin)
    exact_leaves = [x.detach().double().requires_grad_() for x in (q, k)]
    exact = values_and_gradients(reference, (*exact_leaves, cos.double(), sin.double()), 2)
    eager = values_and_gradients(reference, arguments, 2)
    with mock.patch.object(rope_module, "launch", wraps=rope_module.launch) as launch:
        results = values_and_gradients(ours, arguments, 2)
    assert launch.call_count == 2
    for own, theirs, right in zip(results, eager, exact):
        assert own.is_contiguous()
        assert (own - right).norm() <= 1.1 * (theirs - right).norm()
