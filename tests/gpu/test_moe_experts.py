"""Experts on an accelerator: torch's grouped matmul and our kernels beside float64 and eager bf16."""

import subprocess
import sys

import pytest
import torch

from liger_trainer.kernels.moe import grouped_library as _grouped_library
from liger_trainer.kernels.moe import grouped_rows_kernel as _grouped_rows_kernel
from liger_trainer.kernels.moe.experts import moe_experts, moe_experts_reference
from liger_trainer.kernels.moe.grouped_matmul import grouped_rows, grouped_weight_gradient
from liger_trainer.kernels.moe.routing import sort_by_expert

pytestmark = pytest.mark.gpu

SHAPES = {
    "aligned": {"tokens": 500, "top_k": 4, "experts": 16, "hidden": 256, "intermediate": 192},
    "one expert": {"tokens": 300, "top_k": 1, "experts": 1, "hidden": 128, "intermediate": 64},
    "odd sizes": {"tokens": 77, "top_k": 2, "experts": 5, "hidden": 100, "intermediate": 37},
    "rows of 16 bytes on one side alone": {"tokens": 77, "top_k": 2, "experts": 5, "hidden": 128, "intermediate": 50},
}


def _choices(tokens, top_k, routed, generator):
    logits = torch.randn(tokens, routed, generator=generator).cuda()
    return logits.softmax(-1).topk(top_k)


def _bounded(pre):
    """Gate and up bounded each in its own way: no kernel has it."""
    gate, up = pre.chunk(2, -1)
    return 3 * (gate / 3).tanh() * gate.sigmoid() * up.sin()


def _run(function, dtype, index, operands, options):
    operands = [x.detach().to(dtype).requires_grad_() for x in operands]
    hidden, weights, gate_up, down, *biases = operands
    for name, bias in zip(("gate_up_bias", "down_bias"), biases):
        options = {**options, name: bias}
    out = function(hidden, index, weights, gate_up, down, **options)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=dtype, device="cuda").view_as(out)
    return [out, *torch.autograd.grad(out, operands, upstream)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["plain", "empty experts", "skewed", "GPT-OSS", "relu squared", "function"])
def test_no_less_exact_than_eager(kind, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    tokens, top_k, experts, hidden, intermediate = SHAPES[shape].values()
    routed = max(top_k, experts // 3) if kind == "empty experts" else top_k if kind == "skewed" else experts
    weights, index = _choices(tokens, top_k, routed, generator)
    gpt_oss, gated = kind == "GPT-OSS", kind != "relu squared"
    width = 2 * intermediate if gated else intermediate
    shapes = [(tokens, hidden), None, (experts, width, hidden), (experts, hidden, intermediate)]
    if gpt_oss:
        shapes[2:] = [(experts, hidden, width), (experts, intermediate, hidden), (experts, width), (experts, hidden)]
    operands = [weights if s is None else torch.randn(s, generator=generator).cuda() for s in shapes]
    operands[2:4] = [x * hidden**-0.5 for x in operands[2:4]]
    operands = [x.to(dtype) for x in operands]
    options = {"gated": gated, "activation": "silu" if gated else "relu_squared"}
    if kind == "function":
        options["activation"] = _bounded
    if gpt_oss:
        options |= {"transposed": True, "interleaved": True, "gate_multiplier": 1.702, "limit": 7.0, "up_offset": 1.0}
    exact = _run(moe_experts_reference, torch.float64, index, operands, options)
    eager = _run(moe_experts_reference, dtype, index, operands, options)
    ours = _run(moe_experts, dtype, index, operands, options)
    again = _run(moe_experts, dtype, index, operands, options)
    for got, same, beside, right in zip(ours, again, eager, exact, strict=True):
        assert torch.equal(got, same)
        error, allowed = ((x.double() - right).norm() for x in (got, beside))
        assert error <= 1.1 * allowed + 5e-6 * right.norm()  # fp32 sums in another order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_token(dtype):
    generator = torch.Generator().manual_seed(0)
    weights, index = _choices(1, 2, 8, generator)
    operands = [torch.randn(s, generator=generator).cuda() / 8 for s in ((1, 64), (8, 128, 64), (8, 64, 64))]
    operands = [x.to(dtype) for x in (operands[0], weights, *operands[1:])]
    exact = _run(moe_experts_reference, torch.float64, index, operands, {})
    for got, right in zip(_run(moe_experts, dtype, index, operands, {}), exact, strict=True):
        assert (got.double() - right).norm() <= 4 * torch.finfo(dtype).eps * right.norm()


def test_choices_of_no_expert_add_nothing():
    weights, index = _choices(200, 4, 12, torch.Generator().manual_seed(0))
    hidden, gate_up, down = (torch.randn(s).cuda().bfloat16() / 8 for s in ((200, 64), (8, 64, 64), (8, 64, 32)))
    weights = weights.bfloat16().requires_grad_()
    out = moe_experts(hidden, index, weights, gate_up, down)
    (gradient,) = torch.autograd.grad(out.sum(), weights)
    assert out.isfinite().all()
    assert gradient[index >= 8].eq(0).all()
    assert gradient[index < 8].ne(0).any()
    exact = moe_experts_reference(*(hidden.double(), index, weights.double()), gate_up.double(), down.double())
    assert (out.double() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("routed", [64, 3])
def test_grouped_matmul_and_kernels_agree(routed, monkeypatch):
    _, index = _choices(3000, 2, routed, torch.Generator().manual_seed(0))
    rows = sort_by_expert(index, 64)
    x, left = torch.randn(3000, 256).cuda().bfloat16(), torch.randn(6000, 128).cuda().bfloat16()
    weight, bias = torch.randn(64, 128, 256).cuda().bfloat16() / 16, torch.randn(64, 128).cuda().bfloat16()
    thin = torch.randn(6000, 8).cuda().bfloat16(), torch.randn(64, 128, 8).cuda().bfloat16()
    assert _grouped_library.takes(x, weight) == (torch.cuda.get_device_capability()[0] in (9, 10))

    def products():
        return (
            grouped_rows(x, weight, rows, top_k=2, bias=bias, extra=thin),
            grouped_rows(left, weight, rows, transposed=True),
            grouped_weight_gradient(left, x, rows, right_top_k=2),
        )

    library = products()
    monkeypatch.setattr(_grouped_library, "takes", lambda *operands: False)
    for got, expected in zip(products(), library):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2 * expected.float().std().item())
    assert library[2][routed:].eq(0).all()
    assert _grouped_rows_kernel.tile_for(torch.bfloat16, 200.0, 512).rows == 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_frozen_experts_keep_no_input(dtype):
    """Whose gradient, and that of the routing weights, is that of trained ones."""
    tokens, hidden, intermediate = 4096, 512, 128
    generator = torch.Generator().manual_seed(0)
    weights, index = _choices(tokens, 2, 16, generator)
    shapes = (tokens, hidden), (16, 2 * intermediate, hidden), (16, hidden, intermediate)
    x, gate_up, down = (torch.randn(shape, generator=generator).cuda().to(dtype) / 8 for shape in shapes)
    x, weights = x.requires_grad_(), weights.to(dtype).requires_grad_()

    def run(trained):
        first, second = (weight.detach().requires_grad_(trained) for weight in (gate_up, down))
        before = torch.cuda.memory_allocated()
        out = moe_experts(x * 2, index, weights, first, second)
        return torch.cuda.memory_allocated() - before, *torch.autograd.grad(out.float().square().sum(), (x, weights))

    run(False)  # what a first run alone allocates
    frozen, *gradients = run(False)
    trained, *expected = run(True)
    assert trained - frozen == pytest.approx(tokens * hidden * dtype.itemsize, abs=2**20)  # blocks of the allocator
    assert all(map(torch.equal, gradients, expected))


def test_no_host_sync():
    weights, index = _choices(1000, 4, 16, torch.Generator().manual_seed(0))
    operands = [torch.randn(s).cuda().bfloat16().requires_grad_() for s in ((1000, 64), (16, 64, 64), (16, 64, 32))]
    hidden, gate_up, down = operands
    moe_experts(hidden, index, weights, gate_up, down).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe_experts(hidden, index, weights, gate_up, down).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_id_of_no_expert_is_an_assertion_of_the_device():
    """In a process of its own, as it takes the device's context with it."""
    code = (
        "import torch\n"
        "from liger_trainer.patching.apply import apply_liger_kernel\n"
        "from tests.tiny_models import TINY_MODELS\n"
        "model = TINY_MODELS['qwen3_moe']().cuda()\n"
        "apply_liger_kernel(model)\n"
        "experts = model.model.layers[0].mlp.experts\n"
        "hidden = torch.randn(3, experts.hidden_dim, device='cuda')\n"
        "experts(hidden, torch.full((3, 2), 99, device='cuda'), torch.rand(3, 2, device='cuda'))\n"
        "torch.cuda.synchronize()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "holds an id of no expert" in run.stdout + run.stderr
