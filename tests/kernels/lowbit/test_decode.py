"""Packed weights: the libraries' own bits, formulas by hand, the kernels' bits, errors, compilation for every card."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from liger_trainer.kernels.lowbit import decode as decoding
from liger_trainer.kernels.lowbit.decode import decode, decode_, decode_reference
from liger_trainer.kernels.lowbit.formats import (
    Int4Weight,
    fp8_weight,
    int4_weight,
    mxfp4_weight,
    nvfp4_weight,
    packed_of,
)
from tests import aot
from tests.packed_weights import FORMATS, int4, on, packed

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def assert_same_bits(ours, expected):
    """Equal, with the sign of zeros, and NaN where NaN is."""
    assert ours.dtype == expected.dtype
    assert torch.equal(ours.isnan(), expected.isnan())
    numbers = ~ours.isnan()
    assert torch.equal(ours[numbers], expected[numbers])
    assert torch.equal(ours[numbers].signbit(), expected[numbers].signbit())


def every_pair_of(codes, scales):
    """A row with every code for each scale, (scales, codes)."""
    return codes.expand(len(scales), -1).contiguous(), scales[:, None].contiguous()


ALL_BYTES = torch.arange(256).byte()

# ---------------------------------------------------------------------------------------------------------------------
# The libraries
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["fp8, blocks", "mxfp8", "fp8, rows", "fp8, one scale"])
def test_fp8_is_what_transformers_decodes(name, dtype):
    weight = packed(name, 3, 256, 384, any_code=True)
    codes, scales = weight.codes.view(torch.float8_e4m3fn), weight.scales
    scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    library = Fp8Dequantize(None)
    expected = torch.stack([library._dequantize_one(*each, output_dtype=dtype) for each in zip(codes, scales)])
    assert_same_bits(decode(weight, dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_and_every_power_of_two_is_what_transformers_decodes(dtype):
    codes, scales = every_pair_of(ALL_BYTES, ALL_BYTES)
    expected = Fp8Dequantize(None)._dequantize_one(
        codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu), output_dtype=dtype
    )
    assert_same_bits(decode(fp8_weight(codes, scales), dtype), expected)
    assert expected[255].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp4_is_what_transformers_decodes(dtype):
    """Every byte with every scale but NaN, for which transformers has 2^128."""
    scales = ALL_BYTES[:255].view(3, 85, 1).repeat_interleave(16, 2)
    blocks = ALL_BYTES.view(16, 16).expand(3, 85, 16, 16).contiguous()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).mT
    assert_same_bits(decode(mxfp4_weight(blocks, scales), dtype), expected)
    assert_same_bits(decode(mxfp4_weight(blocks.flatten(-2).view(torch.int8), scales), dtype), expected)


def test_a_scale_that_is_nan():
    weight = mxfp4_weight(torch.zeros(1, 2, 16).byte(), torch.tensor([[255, 127]]).byte())
    assert decode(weight).isnan().tolist() == [[True] * 32 + [False] * 32]


def compressed_tensors():
    return pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")


def scheme(**weights):
    quantization = compressed_tensors().quantization
    return quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**weights))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("columns", [64, 128])
def test_int4_is_what_compressed_tensors_decodes(columns, symmetric):
    library = compressed_tensors().compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    args = scheme(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=32)
    weight = int4(24, columns, zeros=not symmetric, group=32)
    state = {"weight_packed": weight.codes, "weight_scale": weight.scales}
    state |= {"weight_shape": torch.tensor([24, columns])}
    state |= {} if symmetric else {"weight_zero_point": weight.zeros}
    assert_same_bits(decode(weight, torch.bfloat16), library.decompress(state, args)["weight"])


def test_nvfp4_is_what_compressed_tensors_decodes():
    library = compressed_tensors().compressors.BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    args = scheme(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)
    weight = packed("nvfp4, compressed-tensors", 48, 128, any_code=True)
    state = {"weight_packed": weight.codes, "weight_scale": weight.scales.view(torch.float8_e4m3fn)}
    state |= {"weight_global_scale": weight.global_scale}
    assert_same_bits(decode(weight, torch.bfloat16), library.decompress(state, args)["weight"])


# ---------------------------------------------------------------------------------------------------------------------
# By hand
# ---------------------------------------------------------------------------------------------------------------------


def e2m1(code):
    return (-1.0) ** (code >> 3) * [0, 0.5, 1, 1.5, 2, 3, 4, 6][code & 7]


def e4m3(code):
    sign, exponent, mantissa = (-1.0) ** (code >> 7), code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_the_numbers_of_every_byte():
    expected = torch.tensor([[e4m3(code) for code in range(256)]])
    assert_same_bits(decode(fp8_weight(ALL_BYTES[None], torch.ones(1, 1)), torch.float32), expected)


def test_the_halves_of_a_byte():
    """The first column is in the low half."""
    weight = mxfp4_weight(torch.tensor([[0x2F] + 15 * [0]]).byte(), torch.tensor([[128]]).byte())
    assert decode(weight)[0, :2].tolist() == [-12.0, 2.0]


@pytest.mark.parametrize("divides", [False, True])
def test_nvfp4_by_hand(divides):
    """Gate and up, the halves of the rows, have global scales of their own."""
    codes, scales, above = torch.randint(0, 256, (4, 16)).byte(), torch.randint(1, 120, (4, 2)).byte(), (2.0, 0.25)
    weight = nvfp4_weight(codes, scales, torch.tensor(above), divides)
    for row in range(4):
        for column in range(32):
            code = int(codes[row, column // 2]) >> 4 * (column % 2) & 15
            scale = e4m3(int(scales[row, column // 16])) * above[row // 2] ** (-1 if divides else 1)
            assert decode(weight, torch.float32)[row, column] == e2m1(code) * scale


def test_ragged_blocks_of_fp8_by_hand():
    codes = torch.full((130, 300), 0x38, dtype=torch.uint8)  # 1
    weight = fp8_weight(codes, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), (128, 128))
    expected = torch.tensor([[1.0 + i // 128 * 3 + j // 128 for j in range(300)] for i in range(130)])
    assert torch.equal(decode(weight, torch.float32), expected)


def unpacked(word, order=range(8)):
    """The eight numbers of an int32, and the place that each is in."""
    numbers = [None] * 8
    for place, index in enumerate(order):
        numbers[index] = (word & 0xFFFFFFFF) >> 4 * place & 15
    return numbers


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith(("int4", "gptq", "awq"))])
def test_int4_by_hand(name):
    rows, columns, group = 16, 48, 16
    weight = packed(name, rows, columns)
    dense = decode(weight, torch.float32)
    awq = (0, 2, 4, 6, 1, 3, 5, 7)
    for row in range(rows):
        for column in range(columns):
            place = column // group if weight.group_of is None else int(weight.group_of[column])
            if weight.order == "compressed":
                code = unpacked(int(weight.codes[row, column // 8]))[column % 8]
                zero = 8 if weight.zeros is None else unpacked(int(weight.zeros[row // 8, place]))[row % 8]
                scale = weight.scales[row, place]
            else:
                order = awq if weight.order == "awq" else range(8)
                word = int(weight.zeros[place, row // 8]) + (0x11111111 if weight.order == "gptq" else 0)
                zero = unpacked(word, order)[row % 8]
                scale = weight.scales[place, row]
                if weight.order == "awq":
                    code = unpacked(int(weight.codes[column, row // 8]), awq)[row % 8]
                else:
                    code = unpacked(int(weight.codes[column // 8, row]))[column % 8]
            assert dense[row, column] == (code - zero) * scale.float()


def test_gptq_and_awq_by_their_published_formulas():
    """The unpacking of GPTQModel's and AutoAWQ's plain torch modules; the first adds to whole words when it loads."""
    weight = packed("gptq", 16, 32)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    zeros = (weight.zeros[:, :, None] + 0x11111111 >> shifts & 15).flatten(1)
    codes = (weight.codes[:, None, :] >> shifts[:, None] & 15).flatten(0, 1)
    of = weight.group_of.long()
    assert torch.equal(decode(weight, torch.float16), (weight.scales[of] * (codes - zeros[of])).half().T)
    weight = packed("awq", 16, 32)
    reverse = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    codes, zeros = (
        (each[:, :, None] >> shifts & 15)[:, :, reverse].flatten(1) for each in (weight.codes, weight.zeros)
    )
    scales, zeros = weight.scales.repeat_interleave(16, 0), zeros.repeat_interleave(16, 0)
    assert torch.equal(decode(weight, torch.float16), ((codes - zeros) * scales).half().T)


def test_zeros_of_gptq_borrow_from_their_neighbours():
    """A zero of 0, stored as 15, takes 1 from the next."""
    zeros = torch.tensor([0, 5, 15, 0, 0, 1, 15, 0])
    word = (int((zeros << torch.arange(0, 32, 4)).sum()) - 0x11111111) % 2**32
    stored = torch.tensor([[word - 2**32 if word >= 2**31 else word]], dtype=torch.int32)
    weight = int4_weight(torch.zeros(1, 8).int(), torch.ones(1, 8).half(), stored, order="gptq")
    assert decode(weight, torch.float32)[:, 0].neg().tolist() == zeros.tolist()


def test_columns_past_the_weight():
    """compressed-tensors fills the last word; rows and columns of neither 8 nor a group."""
    weight = int4(13, 45, group=16)
    wide = weight._replace(shape=torch.Size((13, 48)))
    assert torch.equal(decode(weight), decode(wide)[:, :45])


@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_those_of_the_stack(name):
    weight = packed(name, 4, 24, 64, any_code=True)
    whole = decode(weight)
    assert_same_bits(decode(weight.experts(1, 3)), whole[1:3])
    assert weight.experts(1, 3).shape == (2, 24, 64)
    assert weight.experts(1, 3).codes.data_ptr() == weight.codes[1].data_ptr()


@pytest.mark.parametrize("name", FORMATS)
def test_an_operator_s_arguments_hold_the_weight(name):
    weight = packed(name, 24, 64)
    again = packed_of(weight.codes, weight.statistics, weight.layout)
    assert type(again) is type(weight)
    assert again.shape == weight.shape
    assert torch.equal(decode(again), decode(weight))


def test_scales_of_rows_and_matrices_in_every_shape():
    codes = torch.randint(0, 120, (2, 8, 16)).byte()
    for scales in (torch.rand(2), torch.rand(2, 1), torch.rand(2, 1, 1)):
        expected = codes.view(torch.float8_e4m3fn).float() * scales.view(2, 1, 1)
        assert torch.equal(decode(fp8_weight(codes, scales), torch.float32), expected)
    for scales in (torch.rand(2, 8), torch.rand(2, 8, 1)):
        expected = codes.view(torch.float8_e4m3fn).float() * scales.view(2, 8, 1)
        assert torch.equal(decode(fp8_weight(codes, scales), torch.float32), expected)
    assert decode(fp8_weight(codes[0], torch.tensor(2.0))).shape == (8, 16)


def test_a_checkpoint_s_memory_is_not_copied():
    codes, scales = torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.ones(1, 1)
    weight = fp8_weight(codes, scales, (128, 128))
    assert (weight.codes.data_ptr(), weight.scales.data_ptr()) == (codes.data_ptr(), scales.data_ptr())


# ---------------------------------------------------------------------------------------------------------------------
# The kernels
# ---------------------------------------------------------------------------------------------------------------------

SHAPES = [(6, 64), (2, 130, 288), (150, 544)]


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_the_bits_of_the_reference(name, shape, dtype, device):
    weight = on(packed(name, *shape, any_code=True), device)
    memory = torch.full((weight.shape.numel() + 8,), 7.0, dtype=dtype, device=device)
    out = memory[:-8].view(shape)
    assert decode_(out, weight) is out
    assert_same_bits(out, decode_reference(weight, dtype))
    assert (memory[-8:] == 7).all()  # nothing is written past the end


@pytest.mark.kernel
@pytest.mark.parametrize("name", [name for name in FORMATS if "fp4" not in name])
def test_columns_that_are_no_multiple_of_anything(name, device):
    weight = on(packed(name, 3, 14, 77, any_code=True), device)
    assert_same_bits(decode(weight), decode_reference(weight))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_and_every_scale(dtype, device):
    codes, scales = every_pair_of(ALL_BYTES, ALL_BYTES)
    weight = on(fp8_weight(codes, scales), device)
    assert_same_bits(decode(weight, dtype), decode_reference(weight, dtype))
    groups = ALL_BYTES.view(16, 16).expand(256, 16, 16)
    weight = on(mxfp4_weight(groups, scales.expand(-1, 16)), device)
    assert_same_bits(decode(weight, dtype), decode_reference(weight, dtype))
    for divides in (False, True):
        weight = on(nvfp4_weight(codes.flip(1)[:, :128], scales.expand(-1, 16), torch.tensor(3.7), divides), device)
        assert_same_bits(decode(weight, dtype), decode_reference(weight, dtype))


@pytest.mark.kernel
@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_without_elements(name, device):
    assert decode(on(packed(name, 2, 16, 64), device).experts(1, 1)).shape == (0, 16, 64)


CARDS = [card for card in aot.CARDS if card != "sm_75"]


@pytest.mark.parametrize(
    ("card", "name", "dtype"),
    [(card, name, torch.bfloat16) for card in CARDS for name in FORMATS]
    + [("sm_90", name, dtype) for name in FORMATS for dtype in (torch.float16, torch.float32)],
    ids=str,
)
def test_compiles_ahead_of_time(card, name, dtype):
    """Also for cards without instructions for fp8, and with no code of them anywhere."""
    weight = packed(name, 2, 256, 512)
    with aot.launches_on(card) as launches:
        decoding._decode_(torch.empty(weight.shape, dtype=dtype), weight[0], weight.statistics, weight.layout)
    (launch,) = launches
    compiled = aot.compile_launch(launch, card)
    assert compiled.metadata.shared <= aot.CARDS[card][1] * 1024
    assert "e4m3" not in compiled.asm["ptx"]
    assert ".ftz" not in compiled.asm["ptx"]  # subnormal numbers stay
    assert "fma.rn.f32" not in compiled.asm["ptx"]


# ---------------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------------

FP8 = torch.zeros(256, 128, dtype=torch.uint8)
SCALED = fp8_weight(FP8, torch.ones(1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp8_weight(FP8.float(), torch.ones(2, 1)), r"`codes` is \(256, 128\) of torch.float32"),
        (lambda: fp8_weight(FP8, torch.ones(2, 1)), r"`scales` is \(2, 1\); without `block` .* one a row, 256"),
        (lambda: fp8_weight(FP8, torch.ones(2, 2), (128, 128)), r"scales` is \(2, 2\).* must be \(2, 1\)"),
        (lambda: fp8_weight(FP8, torch.ones(2, 1), (0, 128)), r"`weight.block` is \(0, 128\); .* positive"),
        (lambda: fp8_weight(FP8, torch.ones(256, 1).double()), r"scales` is .*float64.* must be"),
        (lambda: mxfp4_weight(torch.zeros(4, 24).byte(), torch.zeros(4, 2).byte()), "48 columns; in MXFP4 .* of 32"),
        (lambda: mxfp4_weight(torch.zeros(4, 32).byte(), torch.zeros(4, 1).byte()), r"scales` is \(4, 1\).*\(4, 2\)"),
        (
            lambda: nvfp4_weight(torch.zeros(4, 32).byte(), torch.zeros(4, 4).byte(), torch.ones(3), True),
            "global_scale` has 3 numbers, which must divide the 4 rows",
        ),
        (lambda: int4_weight(FP8.int(), torch.ones(256, 8), order="awk"), "`order` is 'awk'; it must be one of"),
        (lambda: int4_weight(FP8.int(), torch.ones(8)), r"`scales` \(8,\); both must have 2"),
        (lambda: int4_weight(FP8.int(), torch.ones(256, 9), group=128), r"scales` is \(256, 9\).*\(256, 8\)"),
        (lambda: int4_weight(FP8.int(), torch.ones(1, 128), order="gptq"), "zeros` is None; 'gptq' needs"),
        (lambda: int4_weight(FP8.int(), torch.ones(256, 8), group=0), "group` is 0; it must be positive"),
        (
            lambda: decode_(torch.empty(128, 256), fp8_weight(FP8, torch.ones(1))),
            r"`out` is \(128, 256\).*\(256, 128\)",
        ),
        (lambda: decode_(torch.empty(256, 128).int(), fp8_weight(FP8, torch.ones(1))), "`out` is .*int32"),
    ],
)
def test_bad_arguments_get_an_error_that_names_them(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_int4_with_a_shape_that_is_not_the_codes():
    weight = int4(16, 32)
    with pytest.raises(ValueError, match=r"codes` is \(16, 4\).*\(16, 5\)"):
        decode(Int4Weight(*weight[:4], torch.Size((16, 33)), 17))
