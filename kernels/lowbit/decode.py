"""Packed weights in 16 or 32 bits.

With s the scale of the block, group or row in which (n, k) lies::

    BlockFp8Weight    W[n, k] = e4m3(code) s
    Fp4Weight         W[n, k] = e2m1(code) s                       MXFP4, s = 2^(b - 127)
                      W[n, k] = e2m1(code) (s / t) or (s * t)      NVFP4, t the global scale
    Int4Weight        W[n, k] = (code - zero) s

Everything is computed in fp32, each operation rounded by itself, and rounded once more at the store: bit for bit what
transformers and compressed-tensors decode on a CPU. With scales that are powers of two nothing is rounded in bf16.
Codes are decoded by integer arithmetic, which every GPU has, and so that no subnormal number is lost where a product
flushes them.

Bytes moved: 0.5 or 1 read per element, and the scales; the result is written.

Shapes: (N, K), or (E, N, K) for a stack of experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from liger_trainer.kernels.lowbit.buffers import filled
from liger_trainer.kernels.lowbit.formats import (
    BlockFp8Weight,
    Fp4Weight,
    Int4Weight,
    PackedWeight,
    check_packed,
    packed_of,
)
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import cdiv, has_elements, on_device, tl, triton, use_triton

_ROWS, _COLUMNS = 16, 256  # of a tile
_GROUPS = 128  # of 4-bit codes in a program
_WHOLE = 0  # in place of the size of a block that is the whole dimension, so that no kernel is compiled for a size
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight neighbours, in units of 4 bits
# What GPTQ's first version takes from a word of zeros, modulo 2^32: a zero of 0 borrows from the next.
_ONES = 0x11111111


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def _e8m0(codes):
    """The powers of two of bytes, given as int32; 2^-127 is subnormal and 255 is NaN."""
    bits = tl.where(codes == 0, 0x00400000, codes << 23)
    return tl.where(codes == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(codes):
    """The numbers of bytes of e4m3, given as int32: 4 bits of exponent with a bias of 7, 3 of mantissa, no infinity."""
    magnitude = codes & 0x7F
    normal = (magnitude << 20) + (120 << 23)
    subnormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # 2^-9
    bits = tl.where(magnitude < 8, subnormal, normal)
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
    return (bits | ((codes & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(codes):
    """The numbers of 4 bits, given as int32: a sign, 2 bits of exponent with a bias of 1, 1 of mantissa."""
    magnitude = codes & 7
    normal = (magnitude << 22) + (126 << 23)
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, normal)
    return (bits | ((codes & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _fp8_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    num_rows,  # of all experts
    rows_an_expert,
    columns,
    scale_rows,
    scale_columns,
    HEIGHT: tl.constexpr,  # of a block; 0 for all rows of an expert
    WIDTH: tl.constexpr,  # 0 for all columns
    E8M0: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < columns)[None, :]
    expert = row // rows_an_expert
    scale_row = expert * scale_rows
    if HEIGHT:
        scale_row += (row - expert * rows_an_expert) // HEIGHT
    scale_ptrs = scales_ptr + scale_row[:, None] * scale_columns
    if WIDTH:
        scale_ptrs = scale_ptrs + (column // WIDTH)[None, :]
        scale = tl.load(scale_ptrs, mask=inside, other=0)
    else:
        scale = tl.load(scale_ptrs, mask=(row < num_rows)[:, None], other=0)
    scale = _e8m0(scale.to(tl.int32)) if E8M0 else scale.to(tl.float32)
    offsets = row[:, None] * columns + column[None, :]
    codes = tl.load(codes_ptr + offsets, mask=inside, other=0).to(tl.int32)
    tl.store(out_ptr + offsets, (_e4m3(codes) * scale).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _fp4_kernel(
    codes_ptr,
    scales_ptr,
    global_ptr,
    out_ptr,
    num_groups,  # of all rows of all experts
    groups_a_part,  # with one global scale
    GROUP: tl.constexpr,
    GLOBAL: tl.constexpr,  # whether there are global scales, with scales in e4m3; else scales are in e8m0
    DIVIDES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    # A row of the tile is one group: rows of the weight hold whole groups.
    HALF: tl.constexpr = GROUP // 2
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = group < num_groups
    scale_codes = tl.load(scales_ptr + group, mask=inside, other=0).to(tl.int32)
    if GLOBAL:
        above = tl.load(global_ptr + group // groups_a_part, mask=inside, other=1.0)
        scale = _e4m3(scale_codes)
        scale = tl.div_rn(scale, above) if DIVIDES else scale * above
    else:
        scale = _e8m0(scale_codes)
    offsets = group[:, None] * HALF + tl.arange(0, HALF)[None, :]
    codes = tl.load(codes_ptr + offsets, mask=inside[:, None], other=0).to(tl.int32)
    values = tl.interleave(_e2m1(codes & 15) * scale[:, None], _e2m1(codes >> 4) * scale[:, None])
    offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(out_ptr + offsets, values.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _int4_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    group_of_ptr,
    out_ptr,
    num_rows,  # of all experts
    rows_an_expert,
    columns,
    codes_an_expert,
    code_row_stride,
    code_column_stride,
    scales_an_expert,
    scale_row_stride,
    scale_group_stride,
    zeros_an_expert,
    zero_row_stride,
    zero_group_stride,
    GROUP: tl.constexpr,  # 0 for all columns
    ZEROS: tl.constexpr,
    PLUS: tl.constexpr,  # added to a word of zeros
    GROUP_OF: tl.constexpr,
    AWQ: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < columns
    inside = (row < num_rows)[:, None] & in_columns[None, :]
    expert = (row // rows_an_expert)[:, None]
    out_ptrs = out_ptr + row[:, None] * columns + column[None, :]
    row = row[:, None] - expert * rows_an_expert
    if GROUP_OF:
        group = tl.load(group_of_ptr + expert * columns + column[None, :], mask=inside, other=0).to(tl.int64)
    elif GROUP:
        group = (column // GROUP).to(tl.int64)[None, :]
    else:
        group = tl.zeros_like(column).to(tl.int64)[None, :]
    # Zeros are packed along the rows, codes along the columns but in AWQ, which has an order of its own.
    row_place = (row % 8 // 2 + row % 2 * 4 if AWQ else row % 8).to(tl.int32)
    wide_column = column.to(tl.int64)[None, :]
    codes_ptrs = codes_ptr + expert * codes_an_expert
    if AWQ:
        codes_ptrs = codes_ptrs + row // 8 * code_row_stride + wide_column * code_column_stride
        shift = row_place * 4
    else:
        codes_ptrs = codes_ptrs + row * code_row_stride + wide_column // 8 * code_column_stride
        shift = (column % 8 * 4)[None, :]
    codes = (tl.load(codes_ptrs, mask=inside, other=0) >> shift) & 15
    scales_ptrs = scales_ptr + expert * scales_an_expert + row * scale_row_stride + group * scale_group_stride
    scale = tl.load(scales_ptrs, mask=inside, other=0.0).to(tl.float32)
    if ZEROS:
        zeros_ptrs = zeros_ptr + expert * zeros_an_expert + row // 8 * zero_row_stride + group * zero_group_stride
        zero = ((tl.load(zeros_ptrs, mask=inside, other=0) + PLUS) >> (row_place * 4)) & 15
    else:
        zero = 8
    values = (codes - zero).to(tl.float32) * scale
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------------------------------------------------------------
# Launch
# ---------------------------------------------------------------------------------------------------------------------


@operator("liger_trainer::lowbit_decode_", mutates=("out",))
def _decode_(out: torch.Tensor, codes: torch.Tensor, statistics: Sequence[torch.Tensor], layout: Sequence[int]) -> None:
    """Writes the weight into the contiguous `out`, which has its shape."""
    weight = packed_of(codes, statistics, layout)
    if not use_triton(out):
        out.copy_(decode_reference(weight, out.dtype))
    elif has_elements(out):
        with on_device(out):
            if isinstance(weight, BlockFp8Weight):
                _launch_fp8(out, weight)
            elif isinstance(weight, Fp4Weight):
                _launch_fp4(out, weight)
            else:
                _launch_int4(out, weight)


def _launch_fp8(out: torch.Tensor, weight: BlockFp8Weight) -> None:
    (rows, columns), (height, width) = weight.shape[-2:], weight.block
    num_rows = out.numel() // columns
    _fp8_kernel[(cdiv(num_rows, _ROWS), cdiv(columns, _COLUMNS))](
        *(weight.codes, weight.scales, out, num_rows, rows, columns, *weight.scales.shape[-2:]),
        HEIGHT=_WHOLE if height >= rows else height,
        WIDTH=_WHOLE if width >= columns else width,
        E8M0=weight.scales.dtype == torch.uint8,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )


def _launch_fp4(out: torch.Tensor, weight: Fp4Weight) -> None:
    above, num_groups = weight.global_scale, weight.scales.numel()
    _fp4_kernel[(cdiv(num_groups, _GROUPS),)](
        *(weight.codes, weight.scales, weight.scales if above is None else above, out, num_groups),
        num_groups if above is None else num_groups // above.numel(),
        GROUP=weight.group,
        GLOBAL=above is not None,
        DIVIDES=weight.divides,
        GROUPS=_GROUPS,
        num_warps=4,
    )


def _launch_int4(out: torch.Tensor, weight: Int4Weight) -> None:
    rows, columns = weight.shape[-2:]
    codes, scales, zeros, group_of = weight.codes, weight.scales, weight.zeros, weight.group_of
    by_rows = weight.order == "compressed"  # else the tensors are those of the transpose
    num_rows = out.numel() // columns

    def strides(tensor: torch.Tensor) -> tuple[int, int, int]:
        """Elements an expert, from row to row, and from column or group to the next."""
        size, width = tensor.shape[-2] * tensor.shape[-1], tensor.shape[-1]
        return (size, width, 1) if by_rows else (size, 1, width)

    _int4_kernel[(cdiv(num_rows, _ROWS), cdiv(columns, _COLUMNS))](
        *(codes, scales, codes if zeros is None else zeros, codes if group_of is None else group_of, out),
        *(num_rows, rows, columns, *strides(codes), *strides(scales), *strides(scales if zeros is None else zeros)),
        GROUP=_WHOLE if weight.group >= columns else weight.group,
        ZEROS=zeros is not None,
        PLUS=_ONES if weight.order == "gptq" else 0,
        GROUP_OF=group_of is not None,
        AWQ=weight.order == "awq",
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Functions
# ---------------------------------------------------------------------------------------------------------------------


def decode_(out: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Writes a packed weight into memory that is there.

    Args:
        out: Contiguous and floating, of the weight's shape and on its device.
        weight: (N, K), or (E, N, K); `weight.experts(first, last)` are a part of a stack.

    Returns:
        `out`.

    Raises:
        ValueError: If the parts of `weight` do not fit each other, or `out` does not fit.
    """
    check_packed("weight", weight)
    fits = out.shape == weight.shape and out.device == weight.device
    if not fits or not out.is_contiguous() or not out.is_floating_point():
        raise ValueError(
            f"`out` is {tuple(out.shape)} of {out.dtype} on {out.device}; it must be contiguous and floating, "
            f"{tuple(weight.shape)}, on {weight.device}."
        )
    return _write(weight, out)


def decode(weight: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A packed weight in a floating dtype, without a gradient.

    Args:
        weight: (N, K) or (E, N, K).
        dtype: Dtype of the result.

    Returns:
        (N, K) or (E, N, K), rounded as the file says.

    Raises:
        ValueError: If the parts of `weight` do not fit each other.
    """
    return decode_(torch.empty(weight.shape, dtype=dtype, device=weight.device), weight)


def _write(weight: PackedWeight, out: torch.Tensor) -> torch.Tensor:
    _decode_(out, weight[0], weight.statistics, weight.layout)
    return out


@contextlib.contextmanager
def decoded(weight: PackedWeight, dtype: torch.dtype, slot: int = 0) -> Iterator[torch.Tensor]:
    """The weight in `dtype`, in the buffer of `buffers.py`, for products that are queued inside the context."""
    tensors = [weight[0], *weight.statistics]
    with filled(weight.shape, dtype, weight.device, lambda out: _write(weight, out), tensors, slot) as dense:
        yield dense


def decode_reference(weight: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`decode` in plain torch."""
    if isinstance(weight, BlockFp8Weight):
        return _fp8_reference(weight).to(dtype)
    if isinstance(weight, Fp4Weight):
        return _fp4_reference(weight).to(dtype)
    return _int4_reference(weight).to(dtype)


def _fp8_reference(weight: BlockFp8Weight) -> torch.Tensor:
    (rows, columns), (height, width) = weight.shape[-2:], weight.block
    scales = weight.typed_scales.float()
    scales = scales.repeat_interleave(min(height, rows), -2)[..., :rows, :]
    scales = scales.repeat_interleave(min(width, columns), -1)[..., :columns]
    return weight.codes.view(torch.float8_e4m3fn).float() * scales


def _fp4_reference(weight: Fp4Weight) -> torch.Tensor:
    if weight.global_scale is None:
        scales = weight.scales.view(torch.float8_e8m0fnu).float()
    else:
        scales = weight.scales.view(torch.float8_e4m3fn).float()
        parts = weight.global_scale.shape[-1]
        above = weight.global_scale.repeat_interleave(weight.shape[-2] // parts, -1)[..., None]
        scales = scales / above if weight.divides else scales * above
    table = torch.tensor(_E2M1, device=weight.device)
    values = torch.stack([table[(weight.codes & 15).int()], table[(weight.codes >> 4).int()]], -1)
    return (values.view(*scales.shape, weight.group) * scales[..., None]).view(weight.shape)


def _int4_reference(weight: Int4Weight) -> torch.Tensor:
    rows, columns = weight.shape[-2:]
    if weight.group_of is None:
        group_of = torch.arange(columns, device=weight.device) // weight.group
        group_of = group_of.expand(*weight.shape[:-2], columns)
    else:
        group_of = weight.group_of.long()
    index = group_of[..., None, :].expand(weight.shape)
    places = _AWQ_PLACES if weight.order == "awq" else tuple(range(8))

    def unpacked(words: torch.Tensor, size: int) -> torch.Tensor:
        """The numbers in the words of the last dimension, the first `size` of them."""
        shifts = 4 * torch.tensor(places, dtype=torch.int32, device=words.device)
        return ((words[..., None] >> shifts) & 15).flatten(-2)[..., :size]

    scales, zeros = weight.scales, weight.zeros
    if weight.order == "compressed":
        codes = unpacked(weight.codes, columns)
        zeros = None if zeros is None else unpacked(zeros.mT, rows).mT
    else:
        codes = unpacked(weight.codes, rows).mT if weight.order == "awq" else unpacked(weight.codes.mT, columns)
        plus = _ONES if weight.order == "gptq" else 0
        zeros = None if zeros is None else unpacked(zeros + plus, rows).mT
        scales = scales.mT
    zero = 8 if zeros is None else zeros.gather(-1, index)
    return (codes - zero).float() * scales.float().gather(-1, index)
