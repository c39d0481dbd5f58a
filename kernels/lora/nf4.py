"""Matrices in 4 bits (NF4 of QLoRA, arXiv 2305.14314, and FP4) as bitsandbytes stores them.

::

    W[i] = code[nibble i] * scale[i // blocksize]       row by row; the first of a byte's two in its high half
    scale[j] = absmax[j]                                or, quantised once more ("double quantisation"),
    scale[j] = code2[absmax[j]] * absmax2[j // blocksize2] + offset

Everything is computed in fp32, with multiplication and addition rounded separately, and rounded once more at the store:
bit for bit the results of bitsandbytes. NF4 and FP4 differ in `code` alone.

Bytes moved: 0.5 read per element and 4 (doubly quantised: 1) per block; the result is written.

Products dequantize the matrix into the buffer that all packed weights share (`kernels/lowbit/buffers.py`).

Shapes: rows and columns of the weight; a block is blocksize neighbouring weights of a row, or of the flat weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from liger_trainer.kernels.lowbit.buffers import filled
from liger_trainer.kernels.lowbit.buffers import free_buffers as free_buffers
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import cdiv, on_device, tl, triton, use_triton

_BYTES_A_THREAD = 4  # of the packed matrix: 8 results, 16 bytes in half precision
_NUM_WARPS = 4


class NestedAbsmax(NamedTuple):
    """The scales of a doubly quantised matrix.

    Args:
        code: The values of the 256 codes, fp32.
        absmax: A scale for every `blocksize` codes, fp32.
        offset: The number that was subtracted from the scales before they were quantised, fp32.
        blocksize: Codes per scale; 256 in bitsandbytes.
    """

    code: torch.Tensor
    absmax: torch.Tensor
    offset: torch.Tensor
    blocksize: int = 256


class NF4Weight(NamedTuple):
    """A matrix in 4 bits.

    Args:
        packed: Two numbers per byte, uint8, in any shape.
        absmax: The scale of each block: fp32, or with `nested` a uint8 code.
        code: The values of the 16 codes, fp32; those of NF4 are `NF4_CODE`.
        shape: (rows, columns).
        blocksize: Numbers per block, a power of two of at least 32; blocks run on from row to row.
        nested: The scales of the scales, where they are quantised as well.
    """

    packed: torch.Tensor
    absmax: torch.Tensor
    code: torch.Tensor
    shape: tuple[int, int]
    blocksize: int = 64
    nested: NestedAbsmax | None = None

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.packed.device

    @property
    def statistics(self) -> list[torch.Tensor]:
        """All tensors but `packed`, for an operator."""
        return [self.absmax, self.code, *(self.nested[:3] if self.nested else ())]

    @property
    def layout(self) -> list[int]:
        """All numbers, `LAYOUT_LENGTH` of them, for an operator."""
        return [*self.shape, self.blocksize, self.nested.blocksize if self.nested else 0]

    @classmethod
    def of(cls, packed: torch.Tensor, statistics: Sequence[torch.Tensor], layout: Sequence[int]) -> NF4Weight:
        """The matrix of an operator's arguments `packed`, `statistics` and `layout`."""
        (absmax, code, *rest), (rows, columns, blocksize, nested_blocksize) = statistics, layout
        nested = NestedAbsmax(rest[0], rest[1], rest[2], nested_blocksize) if nested_blocksize else None
        return cls(packed, absmax, code, (rows, columns), blocksize, nested)


LAYOUT_LENGTH = 4

NF4_CODE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 values of NF4 (arXiv 2305.14314, appendix E)."""


@triton.jit
def _dequantize_kernel(
    packed_ptr,
    absmax_ptr,
    code_ptr,
    nested_code_ptr,
    nested_absmax_ptr,
    offset_ptr,
    out_ptr,
    numel,
    BLOCKSIZE: tl.constexpr,
    NESTED_BLOCKSIZE: tl.constexpr,  # 0 where scales are not quantised
    BLOCKS: tl.constexpr,
):
    # A row of the tile is one block, so that its scale is computed once per thread and not once per byte.
    HALF: tl.constexpr = BLOCKSIZE // 2
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = blocks * BLOCKSIZE < numel
    if NESTED_BLOCKSIZE:
        codes = tl.load(absmax_ptr + blocks, mask=inside, other=0).to(tl.int32)
        wide = tl.load(nested_absmax_ptr + blocks // NESTED_BLOCKSIZE, mask=inside, other=0.0)
        scale = tl.load(nested_code_ptr + codes) * wide + tl.load(offset_ptr)
    else:
        scale = tl.load(absmax_ptr + blocks, mask=inside, other=0.0)
    offsets = blocks[:, None] * HALF + tl.arange(0, HALF)[None, :]
    packed = tl.load(packed_ptr + offsets, mask=offsets * 2 < numel, other=0).to(tl.int32)
    first = tl.load(code_ptr + (packed >> 4)) * scale[:, None]
    second = tl.load(code_ptr + (packed & 15)) * scale[:, None]
    offsets = blocks[:, None] * BLOCKSIZE + tl.arange(0, BLOCKSIZE)[None, :]
    tl.store(out_ptr + offsets, tl.interleave(first, second).to(out_ptr.dtype.element_ty), mask=offsets < numel)


@operator("liger_trainer::nf4_dequantize_", mutates=("out",))
def dequantize_(
    out: torch.Tensor, packed: torch.Tensor, statistics: Sequence[torch.Tensor], layout: Sequence[int]
) -> None:
    """Writes the matrix into the contiguous `out`, which has its shape."""
    weight, numel = NF4Weight.of(packed, statistics, layout), out.numel()
    nested = weight.nested or NestedAbsmax(weight.code, weight.absmax, weight.absmax, 0)
    blocks = max(1, _BYTES_A_THREAD * 32 * _NUM_WARPS // (weight.blocksize // 2))
    if not numel:
        return
    with on_device(out):
        _dequantize_kernel[(cdiv(numel, blocks * weight.blocksize),)](
            *(weight.packed, weight.absmax, weight.code, nested.code, nested.absmax, nested.offset, out, numel),
            BLOCKSIZE=weight.blocksize,
            NESTED_BLOCKSIZE=nested.blocksize,
            BLOCKS=blocks,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,  # a fused multiply-add of the scales would differ from bitsandbytes
        )


def nf4_dequantize(
    weight: NF4Weight, dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The matrix in a floating dtype, without a gradient.

    Args:
        weight: The matrix in 4 bits.
        dtype: Dtype of the result; not used with `out`.
        out: Memory for the result: contiguous, with the shape of the matrix, on its device.

    Returns:
        (rows, columns); `out` where it is given.

    Raises:
        ValueError: If the parts of `weight` do not fit each other, or `out` does not fit.
    """
    check_weight("weight", weight)
    if out is None:
        out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    elif out.shape != weight.shape or out.device != weight.device or not out.is_contiguous():
        raise ValueError(
            f"`out` is {tuple(out.shape)} on {out.device}; it must be contiguous, {tuple(weight.shape)}, on "
            f"{weight.device}."
        )
    return _write(weight, out)


def _write(weight: NF4Weight, out: torch.Tensor) -> torch.Tensor:
    if use_triton(out):
        dequantize_(out, weight.packed, weight.statistics, weight.layout)
        return out
    return out.copy_(nf4_dequantize_reference(weight, out.dtype))


def nf4_dequantize_reference(weight: NF4Weight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`nf4_dequantize` in plain torch."""
    scale, numel = weight.absmax, weight.shape[0] * weight.shape[1]
    if weight.nested is not None:
        code, absmax, offset, blocksize = weight.nested
        scale = code[scale.long()] * absmax.repeat_interleave(blocksize)[: scale.numel()] + offset
    pairs = torch.stack([weight.code.repeat_interleave(16), weight.code.repeat(16)], dim=1)  # of every byte
    values = pairs[weight.packed.flatten().long()].flatten()[:numel]
    return (values * scale.repeat_interleave(weight.blocksize)[:numel]).to(dtype).view(weight.shape)


def check_weight(name: str, weight: NF4Weight) -> None:
    """Raises ValueError if the parts of a matrix in 4 bits do not fit each other."""
    packed, absmax, code, shape, blocksize, nested = weight
    if len(shape) != 2 or blocksize < 32 or blocksize & (blocksize - 1):
        raise ValueError(
            f"`{name}` has shape {tuple(shape)} and blocksize {blocksize}; it must be a matrix, and the blocksize a "
            "power of two, 32 or more."
        )
    blocks = cdiv(shape[0] * shape[1], blocksize)
    _check_part(f"{name}.packed", packed, packed, torch.uint8, cdiv(shape[0] * shape[1], 2))
    _check_part(f"{name}.code", code, packed, torch.float32, 16)
    _check_part(f"{name}.absmax", absmax, packed, torch.float32 if nested is None else torch.uint8, blocks)
    if nested is not None:
        if nested.blocksize < 1:
            raise ValueError(f"`{name}.nested.blocksize` is {nested.blocksize}; it must be positive.")
        _check_part(f"{name}.nested.code", nested.code, packed, torch.float32, 256)
        _check_part(f"{name}.nested.absmax", nested.absmax, packed, torch.float32, cdiv(blocks, nested.blocksize))
        _check_part(f"{name}.nested.offset", nested.offset, packed, torch.float32, 1)


def _check_part(name: str, tensor: torch.Tensor, packed: torch.Tensor, dtype: torch.dtype, numel: int) -> None:
    fits = tensor.dtype == dtype and tensor.numel() == numel and tensor.device == packed.device
    if not fits or not tensor.is_contiguous():
        raise ValueError(
            f"`{name}` has {tensor.numel()} elements of {tensor.dtype} on {tensor.device}; it must have {numel} of "
            f"{dtype} on {packed.device}, contiguous."
        )


@contextlib.contextmanager
def dequantized(weight: NF4Weight, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The matrix in `dtype`, in the buffer of all packed weights, for products that are queued inside the context."""
    tensors = [weight.packed, *weight.statistics]
    with filled(weight.shape, dtype, weight.device, lambda out: _write(weight, out), tensors) as dense:
        yield dense
