"""Matrices in 4 bits and their products: bitsandbytes' bits, one buffer, gradients, errors, compilation."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from liger_trainer.functional import LoRA, LoRALayer, NestedAbsmax, NF4Weight, lora_linear, lora_linears, nf4_dequantize
from liger_trainer.kernels.lora import nf4
from liger_trainer.kernels.lora.lora import lora_linears_reference
from liger_trainer.kernels.lora.lora_mlp import lora_mlp, lora_mlp_reference
from liger_trainer.kernels.lora.nf4 import nf4_dequantize_reference
from liger_trainer.kernels.lowbit import buffers
from tests import aot
from tests.calls import saved_tensors
from tests.quantised import library, matrix, moved, random_weight


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    buffers.free_buffers()


def by_hand(weight):
    """The formula, one element at a time."""
    flat, values = weight.packed.flatten().tolist(), []
    for index in range(weight.shape[0] * weight.shape[1]):
        byte, block = flat[index // 2], index // weight.blocksize
        if weight.nested is None:
            scale = weight.absmax[block]
        else:
            code, absmax, offset, blocksize = weight.nested
            scale = code[int(weight.absmax[block])] * absmax[block // blocksize] + offset
        values.append(weight.code[byte & 15 if index % 2 else byte >> 4] * scale)
    return torch.stack(values).view(weight.shape)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(3, 64), (5, 33), (1, 1)], ids=str)
def test_the_formula(shape, nested):
    weight = random_weight(*shape, nested, blocksize=32, quantised_scales=2)
    assert torch.equal(nf4_dequantize(weight, torch.float32), by_hand(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("blocksize", [64, 128, 1024])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_bit_for_bit_what_bitsandbytes_makes(quant_type, nested, blocksize, dtype):
    # Rows of whole blocks: for others, the CPU code of bitsandbytes reads wrong scales.
    weight, expected = matrix(torch.randn(300, blocksize).to(dtype), quant_type, nested, blocksize)
    out = torch.empty(weight.shape, dtype=dtype)
    assert torch.equal(nf4_dequantize(weight, dtype), expected)
    assert nf4_dequantize(weight, out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("shape", "blocksize"), [((3, 64), 64), ((40, 96), 64), ((7, 33), 32), ((1, 1), 64), ((9, 1000), 4096)], ids=str
)
def test_the_bits_of_the_reference(shape, blocksize, nested, dtype, device):
    torch.manual_seed(0)
    weight = moved(random_weight(*shape, nested, blocksize, quantised_scales=4), device)
    memory = torch.full((shape[0] * shape[1] + 8,), 7.0, dtype=dtype, device=device)
    out = memory[:-8].view(shape)
    assert nf4_dequantize(weight, out=out) is out
    assert torch.equal(out, nf4_dequantize_reference(weight, dtype))
    assert (memory[-8:] == 7).all()  # nothing is written past the end


@pytest.mark.kernel
def test_a_matrix_without_elements(device):
    assert nf4_dequantize(moved(random_weight(0, 64), device)).shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize(
    ("shape", "blocksize"),
    [((4096, 14336), 64), ((128, 64), 64), ((70, 33), 64), ((300, 200), 128), ((96, 4096), 4096)],
    ids=str,
)
def test_bit_for_bit_what_bitsandbytes_makes_on_a_gpu(shape, blocksize, quant_type, nested, dtype, device):
    library()
    values = torch.randn(shape, device=device).to(dtype)
    weight, expected = matrix(values, quant_type, nested, blocksize)
    assert torch.equal(nf4_dequantize(weight, dtype), expected)
    assert torch.equal(nf4_dequantize_reference(weight, dtype), expected)


def test_the_values_of_nf4():
    weight, _ = matrix(torch.randn(2, 64))
    assert torch.equal(weight.code, torch.tensor(nf4.NF4_CODE))


# ---------------------------------------------------------------------------------------------------------------------
# LoRA on matrices in 4 bits
# ---------------------------------------------------------------------------------------------------------------------


def adapters(outputs, inputs, rank=3, dtype=torch.float64):
    a = torch.randn(rank, inputs, dtype=dtype).requires_grad_()
    return a, torch.randn(outputs, rank, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("nested", [False, True])
def test_layers_are_the_reference(nested):
    """One layer with an adapter and a bias, a plain one, and one in 4 bits without an adapter."""
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(12, dtype=torch.float64, requires_grad=True)
    plain = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    first, second = adapters(12, 16), adapters(8, 16)
    layers = [
        LoRALayer(random_weight(12, 16, nested), bias, (LoRA(*first, 0.5, torch.rand(2, 5, 16) < 0.7),)),
        LoRALayer(plain, None, (LoRA(*second),)),
        LoRALayer(random_weight(6, 16, nested)),
    ]
    leaves = [x, bias, plain, *first, *second]
    ours, expected = lora_linears(x, layers), lora_linears_reference(x, layers)
    torch.testing.assert_close(ours, expected)
    gradients = [torch.autograd.grad(sum(y.square().sum() for y in ys), leaves) for ys in (ours, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_an_mlp_is_the_reference(activation):
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    shapes = ((24, 16), (24, 16), (16, 24))
    parts = [adapters(*shape) for shape in shapes]
    layers = [LoRALayer(random_weight(*s, True), None, (LoRA(*p, 0.5),)) for s, p in zip(shapes, parts)]
    leaves = [x, *(each for pair in parts for each in pair)]
    ours, expected = (each(x, *layers, activation) for each in (lora_mlp, lora_mlp_reference))
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), leaves) for y in (ours, expected)))


def test_nothing_of_the_floating_matrix_is_saved():
    weight, (a, b) = random_weight(24, 16, True), adapters(24, 16, dtype=torch.float32)
    x = torch.randn(40, 16, requires_grad=True)
    with saved_tensors() as saved:
        lora_linear(x, weight, None, a, b).sum()
    floating = [tensor for tensor in saved if tensor.is_floating_point() and tensor.numel()]
    assert sorted(tensor.numel() for tensor in floating) == sorted([x.numel(), a.numel(), b.numel(), 40 * 3])
    assert not [tensor for tensor in saved if tensor.dtype == torch.uint8]  # which would be offloaded


def test_one_buffer_of_the_largest_matrix():
    x, (a, b) = torch.randn(4, 16), adapters(24, 16, dtype=torch.float32)
    small, (c, d) = random_weight(8, 16), adapters(8, 16, dtype=torch.float32)
    first = lora_linear(x, random_weight(24, 16), None, a, b)
    (buffer,) = buffers._buffers.values()
    memory = buffer.memory.data_ptr()
    before = first.detach().clone()
    lora_linear(x, small, None, c, d).sum().backward()
    first.sum().backward()
    (buffer,) = buffers._buffers.values()
    assert (buffer.memory.numel(), buffer.memory.data_ptr()) == (24 * 16, memory)
    assert torch.equal(first, before)  # a result does not share the buffer
    lora_linear(x.bfloat16(), small, None, c, d)
    assert {key[1] for key in buffers._buffers} == {torch.float32, torch.bfloat16}
    buffers.free_buffers()
    assert not buffers._buffers


def test_a_stream_without_a_buffer(monkeypatch):
    """A product there leaves no memory allocated and does not use the buffer of another stream."""
    x, (a, b) = torch.randn(4, 16), adapters(24, 16, dtype=torch.float32)
    weight = random_weight(24, 16)
    expected = lora_linear(x, weight, None, a, b)
    gradients = torch.autograd.grad(expected.sum(), (a, b))
    (buffer,) = buffers._buffers.values()
    buffer.memory.fill_(7.0)
    monkeypatch.setattr(buffers, "_has_buffer", lambda device: False)
    y = lora_linear(x, weight, None, a, b)
    torch.testing.assert_close((y, *torch.autograd.grad(y.sum(), (a, b))), (expected, *gradients), rtol=0, atol=0)
    assert list(buffers._buffers.values()) == [buffer]
    assert (buffer.memory == 7).all()


def test_streams_that_have_a_buffer(monkeypatch):
    """Only the default one: on others CUDA graphs are captured, and torch.compile warms up for them."""
    default, other = object(), object()
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    for stream in (default, other):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        assert buffers._has_buffer(torch.device("cuda", 0)) == (stream is default)
    assert buffers._has_buffer(torch.device("cpu"))


def test_threads_do_not_write_over_each_other_s_matrices():
    x, layers = torch.randn(4, 64), []
    for _ in range(4):
        a, b = (each.detach() for each in adapters(64, 64, dtype=torch.float32))
        layers.append(LoRALayer(random_weight(64, 64), None, (LoRA(a, b),)))
    expected = [lora_linears(x, [layer])[0] for layer in layers]
    wrong = []

    def work(layer, right):
        for _ in range(50):
            if not torch.equal(lora_linears(x, [layer])[0], right):
                wrong.append(1)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(layers, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_after_inference_mode():
    x, (a, b) = torch.randn(4, 16), adapters(24, 16, dtype=torch.float32)
    weight = random_weight(24, 16)
    with torch.inference_mode():
        expected = lora_linear(x, weight, None, a, b).clone()
    y = lora_linear(x, weight, None, a, b)
    y.sum().backward()
    assert torch.equal(y, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Errors, schemas and compilation
# ---------------------------------------------------------------------------------------------------------------------

WEIGHT = NF4Weight(torch.zeros(8, 1, dtype=torch.uint8), torch.ones(1), torch.zeros(16), (1, 16))
NESTED = WEIGHT._replace(
    absmax=torch.zeros(1, dtype=torch.uint8), nested=NestedAbsmax(torch.zeros(256), torch.ones(1), torch.tensor(0.0))
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nf4_dequantize(WEIGHT._replace(packed=torch.zeros(7, dtype=torch.uint8))), r"packed` has 7 .* 8 of"),
        (lambda: nf4_dequantize(WEIGHT._replace(absmax=torch.ones(2))), r"`weight.absmax` has 2 elements.* have 1 of"),
        (lambda: nf4_dequantize(WEIGHT._replace(absmax=torch.zeros(1).byte())), r"absmax` .*uint8.* of torch.float32"),
        (lambda: nf4_dequantize(NESTED._replace(absmax=torch.zeros(1))), r"absmax` .*float32.* of torch.uint8"),
        (lambda: nf4_dequantize(WEIGHT._replace(code=torch.zeros(15))), r"`weight.code` has 15"),
        (lambda: nf4_dequantize(WEIGHT._replace(blocksize=48)), r"blocksize 48; .* a power of two, 32 or more"),
        (lambda: nf4_dequantize(WEIGHT._replace(blocksize=16)), r"blocksize 16"),
        (
            lambda: nf4_dequantize(NESTED._replace(nested=NESTED.nested._replace(blocksize=0))),
            r"`weight.nested.blocksize` is 0; it must be positive",
        ),
        (lambda: nf4_dequantize(WEIGHT, out=torch.zeros(16)), r"`out` is \(16,\).* contiguous, \(1, 16\)"),
        (
            lambda: lora_linear(torch.zeros(2, 8), WEIGHT, None, torch.zeros(2, 8), torch.zeros(1, 2)),
            r"`weight` is \(1, 16\) in 4 bits on cpu; for an `x` of \(2, 8\) .* \(any, 8\)",
        ),
    ],
)
def test_bad_arguments_get_an_error_that_names_them(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("target", "blocksize", "nested", "dtype"),
    aot.on_targets(*itertools.product((64, 4096), (True, False), (torch.bfloat16, torch.float32))),
    ids=str,
)
def test_compiles_ahead_of_time(target, blocksize, nested, dtype):
    weight = random_weight(64, 128, nested, blocksize)
    with aot.recorded_launches() as launches:
        nf4.dequantize_(torch.empty(64, 128, dtype=dtype), weight.packed, weight.statistics, weight.layout)
    (launch,) = launches
    assert launch.options["enable_fp_fusion"] is False
    compiled = aot.compile_launch(launch, target)
    assert compiled.metadata.shared <= 64 * 1024
    if "ptx" in compiled.asm:  # scales are multiplied and added in two roundings
        assert "fma.rn.f32" not in compiled.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_training_steps_under_torch_compile(mode, device):
    """With CUDA graphs no buffer may stay allocated between calls."""
    hidden, intermediate, rank = 256, 512, 8
    layers, leaves = [], []
    for rows, columns in ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate)):
        a, b = (torch.randn(shape, device=device) / 16 for shape in ((rank, columns), (rows, rank)))
        leaves += [a.requires_grad_(), b.requires_grad_()]
        layers.append(LoRALayer(moved(random_weight(rows, columns), device), None, (LoRA(a, b, 0.5),)))

    def loss(x):
        return lora_mlp(x, *layers).float().square().mean()

    torch.compiler.reset()
    compiled = torch.compile(loss, mode=mode, fullgraph=True)
    for _ in range(4):  # warm-up, recording, replays
        x = torch.randn(64, hidden, device=device).bfloat16()
        torch.compiler.cudagraph_mark_step_begin()
        got = [each.clone() for each in torch.autograd.grad(compiled(x), leaves)]
        for one, other in zip(got, torch.autograd.grad(loss(x), leaves)):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2 * float(other.abs().max()))
