"""Published weights in fp8 as they are: casts of groups, products against float64, other scales, and on a Hopper."""

import pytest
import torch

from liger_trainer.kernels.fp8 import blocks, stored
from liger_trainer.kernels.fp8.blocks import (
    BLOCK,
    block_product,
    block_product_reference,
    cast_groups,
    cast_groups_reference,
    obstacle_to_blocks,
)
from liger_trainer.kernels.fp8.row_cast import E4M3_MAX
from liger_trainer.kernels.fp8.stored import Fp8Weight, dequantize, fp8_stored_linear
from liger_trainer.kernels.lora.lora import LoRA, LoRALayer, lora_linear, lora_linears, lora_linears_reference
from liger_trainer.kernels.lowbit.decode import decode_reference
from liger_trainer.kernels.lowbit.formats import fp8_weight
from tests.accuracy import errors, result_and_gradients, run
from tests.accuracy import seeded_randn as randn
from tests.aot import compile_launch, recorded_launches
from tests.calls import recorded_calls, saved_tensors

BF16 = {"dtype": torch.bfloat16}
SHAPES = [(37, 256), (1, 128), (16, 384), (3, 1280)]
IN_FP8 = 0.029, 0.016  # of a product, what rounding normal numbers to e4m3 explains at most, and at least


def weight_of(device, outputs=256, features=384, seed=1, dtype=torch.float32):
    """Blocks whose magnitudes differ by 2^8."""
    codes = (randn(outputs, features, seed=seed) * 100).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    scales = torch.exp2(8 * torch.rand(outputs // BLOCK, features // BLOCK) - 14)
    return Fp8Weight(codes.view(torch.uint8).to(device), scales.to(dtype).to(device))


def magnitudes(rows, columns, dtype, device):
    """Groups of columns, and rows, whose magnitudes differ by 2^20 each."""
    rows_by = torch.logspace(-20, 0, rows, 2.0)[:, None]
    columns_by = torch.logspace(0, 20, columns // BLOCK, 2.0).repeat_interleave(BLOCK)
    return (randn(rows, columns) * rows_by * columns_by).to(device, dtype)


def rounded(x):
    """What the cast of x stands for, in float64."""
    codes, scales = cast_groups_reference(x)
    return (codes.double() * scales.double().repeat_interleave(BLOCK, 1))[: len(x)]


def assert_same_cast(actual, expected):
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_groups_have_the_bits_of_the_reference(shape, dtype, device):
    x = magnitudes(*shape, dtype, device)
    x[-1] = 0
    assert_same_cast(cast_groups(x), cast_groups_reference(x))
    wider = torch.cat([x, x], dim=1)[:, : shape[1]]  # rows further apart
    assert_same_cast(cast_groups(wider), cast_groups_reference(x))


@pytest.mark.kernel
@pytest.mark.parametrize("shape", SHAPES)
def test_a_cast_lies_as_the_product_reads_it_and_is_near(shape, device):
    x = magnitudes(*shape, torch.float32, device)
    codes, scales = cast_groups(x)
    filled = -(-shape[0] // 16) * 16
    assert (codes.shape, codes.stride()) == ((filled, shape[1]), (shape[1], 1))
    assert (scales.shape, scales.stride()) == ((filled, shape[1] // BLOCK), (1, filled))
    assert not codes[shape[0] :].float().any()
    meant, scales = codes.double() * scales.double().repeat_interleave(BLOCK, 1), scales[: shape[0]]
    step = x.abs().clamp(min=scales.repeat_interleave(BLOCK, 1) * 2.0**-6) * 2.0**-4
    assert ((meant[: shape[0]] - x).abs() <= step * 1.0001).all()
    largest = codes[: shape[0]].float().view(shape[0], -1, BLOCK).abs().amax(2)
    torch.testing.assert_close(largest, torch.full_like(largest, E4M3_MAX))


@pytest.mark.kernel
@pytest.mark.parametrize("rows", [(2, 37), (1,), (16,)])
def test_products_are_those_of_the_rounded_operands(rows, device):
    weight, bias = weight_of(device), randn(256, seed=3, device=device, **BF16)
    x = magnitudes(torch.Size(rows).numel(), 384, torch.bfloat16, device).view(*rows, 384)
    (y, dx, dbias), (dy,) = run(lambda x, bias: fp8_stored_linear(x, weight, bias), (x, bias))
    exact, flat, upstream = dequantize(weight, torch.float64), x.reshape(-1, 384), dy.reshape(-1, 256)
    truth = rounded(flat) @ exact.t() + bias.double(), rounded(upstream) @ exact, upstream.double().sum(0)
    for error in errors([y.reshape(-1, 256), dx.reshape(-1, 384), dbias], truth):
        assert error < 2**-7  # of the result's rounding to bf16, before and after the bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_a_product_is_as_near_as_its_input(dtype, device):
    """The weight is not rounded again: it is what its format says, whatever the dtype of its scales."""
    weight, x = weight_of(device, dtype=dtype), randn(64, 384, device=device, **BF16)
    exact = decode_reference(fp8_weight(*weight, (BLOCK, BLOCK)), torch.float32)
    assert torch.equal(dequantize(weight, torch.float32), exact)
    y, dx = result_and_gradients(lambda x: fp8_stored_linear(x, weight), dy := randn(64, 256, seed=2, device=device), x)
    for error in errors([y, dx], [x.double() @ exact.double().t(), dy.double() @ exact.double()]):
        assert IN_FP8[1] < error < IN_FP8[0]


@pytest.mark.parametrize("of", ["rows", "all"])
def test_published_scales_of_rows(of, device):
    """bf16, and one for all rows, which products take as those of rows."""
    codes = weight_of(device).codes
    scales = (torch.rand(256 if of == "rows" else 1, 1, device=device) + 0.5).bfloat16()
    weight, wide = Fp8Weight(codes, scales), Fp8Weight(codes, scales.float().expand(256, 1).contiguous())
    assert not weight.in_blocks
    x, dy = randn(9, 384, device=device, **BF16), randn(9, 256, seed=2, device=device, **BF16)
    ours, expected = (result_and_gradients(lambda x, w=w: fp8_stored_linear(x, w), dy, x) for w in (weight, wide))
    assert all(torch.equal(*pair) for pair in zip(ours, expected))


@pytest.mark.parametrize(("shape", "in_blocks"), [((128, 128), False), ((128, 256), True), ((256, 128), True)])
def test_weights_of_few_blocks(shape, in_blocks, device):
    """One block is one scale of all."""
    weight, x = weight_of(device, *shape), randn(20, shape[1], device=device, **BF16)
    assert weight.in_blocks == in_blocks
    y, dx = result_and_gradients(lambda x: fp8_stored_linear(x, weight), dy := randn(20, shape[0], device=device), x)
    exact = dequantize(weight, torch.float64)
    assert all(error < 0.04 for error in errors([y, dx], [x.double() @ exact.t(), dy.double() @ exact]))


@pytest.mark.kernel
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_row(value, device):
    x, dy = randn(4, 384, device=device, **BF16), randn(4, 256, device=device, **BF16)
    dy[1, 130] = x[2, 5] = value
    assert cast_groups(x)[1][:4].isfinite().tolist() == [[row != 2, True, True] for row in range(4)]
    y, dx = result_and_gradients(lambda x: fp8_stored_linear(x, weight_of(device)), dy, x)
    assert y.isfinite().all(1).tolist() == [True, True, False, True]
    assert dx.isfinite().all(1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_no_rows(shape, device):
    x = torch.zeros(*shape, 384, device=device, requires_grad=True)
    y = fp8_stored_linear(x, weight_of(device))
    assert y.shape == (*shape, 256)
    y.sum().backward()
    assert x.grad.shape == x.shape


def adapters(device, rank=4):
    return [randn(rank, 384, seed=5, device=device, scale=0.2), randn(256, rank, seed=6, device=device, scale=0.2)]


@pytest.mark.kernel
def test_adapters_on_weights_of_every_kind(device):
    """In blocks, in rows and in 16 bits; their products are in bf16."""
    a, b = adapters(device)
    rows = Fp8Weight(weight_of(device, seed=2).codes, torch.rand(256, 1, device=device) * 1e-3)
    others = weight_of(device), rows, randn(256, 384, seed=7, device=device, scale=0.1, **BF16)

    def layers(a, b):
        weights = [
            each if isinstance(each, Fp8Weight) else each.to(torch.promote_types(a.dtype, each.dtype))
            for each in others
        ]
        return [LoRALayer(weight, None, (LoRA(a, b, 1.5),) * (index == 0)) for index, weight in enumerate(weights)]

    x = randn(21, 384, device=device, **BF16)
    ours, upstream = run(lambda x, a, b: lora_linears(x, layers(a, b)), (x, a, b))
    wide = [tensor.double() for tensor in (x, a, b)]
    truth, _ = run(lambda x, a, b: lora_linears_reference(x, layers(a, b)), wide, upstream)
    *products, da, db = errors(ours, truth)
    assert all(error < 0.04 for error in products)
    assert da < 2**-7
    assert db < 2**-7


def test_nothing_of_the_weight_is_saved_and_one_cast_is_made(device, monkeypatch):
    x, (a, b) = randn(21, 384, device=device, **BF16).requires_grad_(), adapters(device)
    calls = recorded_calls(monkeypatch, stored, "cast_groups")
    layers = [
        LoRALayer(weight_of(device, seed=seed), None, (LoRA(a.requires_grad_(), b.requires_grad_()),))
        for seed in (1, 2)
    ]
    with saved_tensors() as saved:
        lora_linears(x, layers)
    assert len(calls) == 1
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    assert sum(memory.values()) == x.nbytes + 21 * 8 * 2 + a.nbytes + b.nbytes
    with saved_tensors() as saved:
        fp8_stored_linear(x, weight_of(device))
    assert saved == []


def test_a_product_is_tried_before_it_is_trusted(monkeypatch):
    cpu = torch.device("cpu")
    assert obstacle_to_blocks(cpu) == ""
    assert blocks._trial(cpu) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert obstacle_to_blocks(torch.device("cuda", 7)) == "products with scales of blocks are Hopper's alone"
    native = block_product
    monkeypatch.setattr(blocks, "block_product", lambda left, right: native(left, (right[0], right[1].flip(0))))
    assert blocks._trial(cpu) == "this torch has other results of products with scales of blocks"
    monkeypatch.setattr(blocks, "block_product", lambda left, right: torch.mm(left[1], right[1]))
    assert blocks._trial(cpu).startswith("torch refuses products with scales of blocks (mat1 and mat2 shapes")


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_compiles_ahead_of_time(target, monkeypatch):
    monkeypatch.setattr(blocks, "use_triton", lambda tensor: True)
    with recorded_launches() as launches:
        cast_groups(torch.zeros(70, 4096, **BF16))
    (launch,) = launches
    assert "cvt.rn.satfinite.e4m3x2" in compile_launch(launch, target).asm["ptx"]


REAL = [(4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (768, 2048), (2048, 1408)]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 1003, 4096])
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_products_of_a_hopper_are_those_of_the_reference(shape, tokens, device):
    if torch.version.cuda is None or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs NVIDIA's Hopper")
    assert obstacle_to_blocks(torch.device(device, 0)) == ""
    outputs, features = shape
    weight = weight_of(device, *shape)
    x, dy = randn(tokens, features, device=device, **BF16), randn(tokens, outputs, seed=2, device=device, **BF16)
    y, dx = result_and_gradients(lambda x: fp8_stored_linear(x, weight), dy, x)
    codes, scales = weight.codes.view(torch.float8_e4m3fn), weight.scales
    assert_same_cast(cast_groups(x), cast_groups_reference(x))
    expected = [
        block_product_reference(cast_groups(x), (codes, scales))[:tokens],
        block_product_reference(cast_groups(dy), (codes.t(), scales.t()))[:tokens],
    ]
    for error in errors([y, dx], expected):
        assert error < 2**-8
    exact = dequantize(weight, torch.float32).double()
    for error in errors([y, dx], [x.double() @ exact.t(), dy.double() @ exact]):
        assert error < 0.035


@pytest.mark.gpu
def test_a_hopper_keeps_nothing_of_the_weight(device):
    """From forward to backward are kept the input and z; the backward takes a transpose, casts and cuBLAS's memory."""
    if torch.version.cuda is None or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs NVIDIA's Hopper")
    weight, x = weight_of(device, 4096, 4096), randn(512, 4096, device=device, **BF16).requires_grad_()
    a, b = (torch.randn(*shape, device=device).requires_grad_() for shape in ((16, 4096), (4096, 16)))
    lora_linear(x, weight, None, a, b).sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = lora_linear(x, weight, None, a, b)
    assert torch.cuda.memory_allocated() - before <= y.nbytes + 512 * 16 * 2 + 2**16
    y.backward(torch.ones_like(y))
    assert torch.cuda.max_memory_allocated() - before <= weight.codes.nbytes + 8 * y.nbytes + 2**26
