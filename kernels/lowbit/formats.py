"""Weights of 4 and 8 bits as published checkpoints hold them.

Every one is codes and scales; `decode.py` has the formulas.

::

    BlockFp8Weight    e4m3 codes, a scale for each block of rows and columns: DeepSeek's and Qwen's FP8 (128 x 128), one
                      scale a row or a matrix (compressed-tensors, ModelOpt), MXFP8 (1 x 32)
    Fp4Weight         e2m1 codes, two a byte: MXFP4 (a power of two for 32 columns: gpt-oss, DeepSeek V4), NVFP4 (an
                      e4m3 scale for 16 columns and an fp32 one above it: compressed-tensors, ModelOpt)
    Int4Weight        integers, eight in an int32: compressed-tensors' "pack-quantized", GPTQ, AWQ

Their tensors are views of the checkpoint's, without a copy. Codes, and scales in 8 bits, are bytes (uint8), which no
cast of a model changes and every process group can send; a byte b of e8m0 is 2^(b - 127), and 255 is NaN (OCP
Microscaling Formats 1.0).

Shapes: N output features, K input features: a weight is (N, K), or (E, N, K) for a stack of E experts. Shapes below
begin with the E of a stack. ``⌈a / b⌉`` rounds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from liger_trainer.kernels.runtime import cdiv

FP8_LAYOUT, FP4_LAYOUT, INT4_LAYOUT = -2, -3, -4
"""The first number of a layout, which says which class it is of."""

ORDERS = ("compressed", "gptq", "gptq_v2", "awq")
"""How an `Int4Weight` is packed."""

_MXFP4_GROUP, _NVFP4_GROUP = 32, 16
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)
_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_PAIRS = (torch.int8, torch.float4_e2m1fn_x2)  # dtypes of two e2m1 codes beside uint8


class BlockFp8Weight(NamedTuple):
    """A weight in fp8 with a scale for each block; `fp8_weight` makes it.

    Args:
        codes: (N, K), contiguous, the bytes of float8_e4m3fn as uint8.
        scales: (⌈N / rows⌉, ⌈K / columns⌉), contiguous, fp32, bf16 or fp16; or uint8, which is e8m0.
        block: (rows, columns) of a block. The last of a row or column may reach past the weight.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        """(N, K) or (E, N, K)."""
        return self.codes.shape

    @property
    def typed_scales(self) -> torch.Tensor:
        """The scales in the dtype that they are of: bytes as e8m0, a view."""
        return self.scales.view(_E8M0) if self.scales.dtype == torch.uint8 else self.scales

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.codes.device

    @property
    def statistics(self) -> list[torch.Tensor]:
        """All tensors but the codes, for an operator."""
        return [self.scales]

    @property
    def layout(self) -> list[int]:
        """All numbers, `LAYOUT_LENGTH` of them, for an operator."""
        return [FP8_LAYOUT, *self.block, 0]

    def experts(self, first: int, last: int) -> BlockFp8Weight:
        """Experts first ... last - 1 of a stack, without a copy."""
        return self._replace(codes=self.codes[first:last], scales=self.scales[first:last])


class Fp4Weight(NamedTuple):
    """A weight in e2m1 with a scale for each group of columns; `mxfp4_weight` and `nvfp4_weight` make it.

    Args:
        codes: (N, K / 2), contiguous uint8, two columns a byte; the first in its low half.
        scales: (N, K / group), contiguous uint8: e8m0 for MXFP4, the bytes of float8_e4m3fn for NVFP4.
        global_scale: None for MXFP4. (parts,), contiguous fp32, for NVFP4: a scale of the scales for each of `parts`
            equal parts of the rows; two where gate and up were published apart.
        divides: Whether the global scale divides the scales (compressed-tensors) or multiplies them (ModelOpt).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None = None
    divides: bool = False

    @property
    def shape(self) -> torch.Size:
        """(N, K) or (E, N, K)."""
        return torch.Size((*self.codes.shape[:-1], 2 * self.codes.shape[-1]))

    @property
    def group(self) -> int:
        """Columns with one scale."""
        return _MXFP4_GROUP if self.global_scale is None else _NVFP4_GROUP

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.codes.device

    @property
    def statistics(self) -> list[torch.Tensor]:
        """All tensors but the codes, for an operator."""
        return [self.scales, _or_empty(self.global_scale, self.codes)]

    @property
    def layout(self) -> list[int]:
        """All numbers, `LAYOUT_LENGTH` of them, for an operator."""
        return [FP4_LAYOUT, int(self.divides), 0, 0]

    def experts(self, first: int, last: int) -> Fp4Weight:
        """Experts first ... last - 1 of a stack, without a copy."""
        above = None if self.global_scale is None else self.global_scale[first:last]
        return self._replace(codes=self.codes[first:last], scales=self.scales[first:last], global_scale=above)


class Int4Weight(NamedTuple):
    """A weight in integers of 4 bits with a scale for each group of columns.

    With group_k = group_of[k], or k // group without it; `order` says how the tensors are packed:

    ========== ==================== ============== ======================= =============
    order      codes                scales         zeros                   without zeros
    ========== ==================== ============== ======================= =============
    compressed (N, ⌈K / 8⌉)         (N, groups)    (⌈N / 8⌉, groups)       8
    gptq       (⌈K / 8⌉, N)         (groups, N)    (groups, ⌈N / 8⌉)       not allowed
    gptq_v2    (⌈K / 8⌉, N)         (groups, N)    (groups, ⌈N / 8⌉)       not allowed
    awq        (K, ⌈N / 8⌉)         (groups, N)    (groups, ⌈N / 8⌉)       not allowed
    ========== ==================== ============== ======================= =============

    An int32 holds eight numbers, the first in its lowest bits; in AWQ's, the numbers 0 2 4 6 1 3 5 7. The zeros
    of gptq are those of gptq_v2 with 0x11111111 taken from each int32, modulo 2^32.

    Args:
        codes: int32, contiguous.
        scales: fp32, bf16 or fp16, contiguous.
        zeros: The code that stands for 0 in each group, int32, contiguous; None where it is 8 everywhere.
        group_of: (K,), int32: the group of each column (`g_idx`); None where groups are consecutive columns.
        shape: (N, K) or (E, N, K).
        group: Columns a group.
        order: One of `ORDERS`.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_of: torch.Tensor | None
    shape: torch.Size
    group: int
    order: str = "compressed"

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.codes.device

    @property
    def statistics(self) -> list[torch.Tensor]:
        """All tensors but the codes, for an operator."""
        return [self.scales, _or_empty(self.zeros, self.codes), _or_empty(self.group_of, self.codes)]

    @property
    def layout(self) -> list[int]:
        """All numbers, `LAYOUT_LENGTH` of them, for an operator."""
        # The rows, unless packed, are a dimension of the scales, and the columns a number; that is the shape.
        return [INT4_LAYOUT, self.shape[-1], self.group, ORDERS.index(self.order)]

    def experts(self, first: int, last: int) -> Int4Weight:
        """Experts first ... last - 1 of a stack, without a copy."""
        part = slice(first, last)
        return self._replace(
            codes=self.codes[part],
            scales=self.scales[part],
            zeros=None if self.zeros is None else self.zeros[part],
            group_of=None if self.group_of is None else self.group_of[part],
            shape=torch.Size((last - first, *self.shape[1:])),
        )


PackedWeight: TypeAlias = BlockFp8Weight | Fp4Weight | Int4Weight
"""A weight of a published checkpoint in 4 or 8 bits."""

PACKED = (BlockFp8Weight, Fp4Weight, Int4Weight)
"""The classes of `PackedWeight`."""

LAYOUT_LENGTH = 4

NUM_STATISTICS = {FP8_LAYOUT: 1, FP4_LAYOUT: 2, INT4_LAYOUT: 3}
"""Tensors of a weight beside its codes, by the first number of its layout."""


def packed_of(codes: torch.Tensor, statistics: Sequence[torch.Tensor], layout: Sequence[int]) -> PackedWeight:
    """The weight of an operator's arguments: its codes, its `statistics` and its `layout`."""
    kind, first, second, third = layout
    if kind == FP8_LAYOUT:
        return BlockFp8Weight(codes, statistics[0], (first, second))
    if kind == FP4_LAYOUT:
        return Fp4Weight(codes, statistics[0], _or_none(statistics[1]), bool(first))
    scales, zeros, group_of = statistics
    rows = scales.shape[-2 if ORDERS[third] == "compressed" else -1]
    shape = torch.Size((*codes.shape[:-2], rows, first))
    return Int4Weight(codes, scales, _or_none(zeros), _or_none(group_of), shape, second, ORDERS[third])


def _or_empty(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The tensor, or one without elements for None, as an operator's list takes it."""
    return like.new_empty(0) if tensor is None else tensor


def _or_none(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if tensor.numel() else None


# ---------------------------------------------------------------------------------------------------------------------
# From the tensors of a checkpoint
# ---------------------------------------------------------------------------------------------------------------------


def fp8_weight(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None = None) -> BlockFp8Weight:
    """A weight in fp8 as checkpoints hold it.

    Args:
        codes: (N, K) or (E, N, K), float8_e4m3fn, or its bytes as uint8.
        scales: Factors of the codes, though some checkpoints call them `weight_scale_inv`: fp32, bf16 or fp16;
            float8_e8m0fnu or its bytes as uint8. (⌈N / rows⌉, ⌈K / columns⌉) with `block`. Without it, a scale a row,
            (N, 1) or (N,), or one of the whole matrix: (), (1,) or (1, 1). For a stack with an E before it.
        block: (rows, columns) of a block; None for one scale a row or a matrix.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit.
    """
    if codes.dim() not in (2, 3) or codes.dtype not in (_E4M3, torch.uint8):
        raise ValueError(
            f"`codes` is {tuple(codes.shape)} of {codes.dtype}; it must be (N, K) or (E, N, K) of float8_e4m3fn or "
            "its bytes as uint8."
        )
    leading, (rows, columns) = codes.shape[:-2], codes.shape[-2:]
    if block is None:
        one = scales.numel() == leading.numel()
        if not one and scales.numel() != leading.numel() * rows:
            raise ValueError(
                f"`scales` is {tuple(scales.shape)}; without `block` there must be one a row, {rows} of them, or one a "
                f"matrix, for codes of {tuple(codes.shape)}."
            )
        block = (max(rows, 1), max(columns, 1)) if one else (1, max(columns, 1))
        scales = scales.reshape(*leading, 1 if one else rows, 1)
    weight = BlockFp8Weight(_bytes_of(codes, _E4M3).contiguous(), _bytes_of(scales, _E8M0).contiguous(), block)
    check_packed("weight", weight)
    return weight


def mxfp4_weight(blocks: torch.Tensor, scales: torch.Tensor) -> Fp4Weight:
    """A weight in MXFP4 as checkpoints hold it.

    Args:
        blocks: (N, K / 32, 16) or (N, K / 2), uint8, int8 or float4_e2m1fn_x2, two columns a byte, the first in its low
            half; for a stack with an E before it. It is of the first form where it has a dimension more than `scales`.
        scales: (N, K / 32), float8_e8m0fnu or its bytes as uint8; for a stack with an E before it.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit.
    """
    codes = blocks.flatten(-2) if blocks.dim() == scales.dim() + 1 else blocks
    weight = Fp4Weight(_bytes_of(codes, *_PAIRS).contiguous(), _bytes_of(scales, _E8M0).contiguous())
    check_packed("weight", weight)
    return weight


def nvfp4_weight(codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, divides: bool) -> Fp4Weight:
    """A weight in NVFP4 as checkpoints hold it.

    Args:
        codes: (N, K / 2), uint8, two columns a byte, the first in its low half; for a stack with an E before it.
        scales: (N, K / 16), float8_e4m3fn or its bytes as uint8; for a stack with an E before it.
        global_scale: fp32, one number; or several, one for each of as many equal parts of the rows. For a stack with an
            E before it.
        divides: True for compressed-tensors, whose `weight_global_scale` divides the scales; False for ModelOpt, whose
            `weight_scale_2` multiplies them.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit.
    """
    above = global_scale.reshape(*codes.shape[:-2], -1).contiguous()
    weight = Fp4Weight(_bytes_of(codes, *_PAIRS).contiguous(), _bytes_of(scales, _E4M3).contiguous(), above, divides)
    check_packed("weight", weight)
    return weight


def int4_weight(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    group_of: torch.Tensor | None = None,
    *,
    group: int = -1,
    columns: int | None = None,
    order: str = "compressed",
) -> Int4Weight:
    """A weight in integers of 4 bits as checkpoints hold it; `Int4Weight` has the shapes.

    Args:
        codes: `weight_packed` of compressed-tensors, `qweight` of GPTQ and AWQ.
        scales: `weight_scale`, or `scales`.
        zeros: `weight_zero_point`, or `qzeros`.
        group_of: `weight_g_idx`, or `g_idx`.
        group: Columns a group; -1 for one group in all.
        columns: K, the last number of `weight_shape`; None where the codes hold nothing past it.
        order: "compressed", "gptq", "gptq_v2" or "awq".

    Raises:
        ValueError: If shapes, dtypes or devices do not fit.
    """
    if order not in ORDERS:
        raise ValueError(f"`order` is {order!r}; it must be one of {', '.join(ORDERS)}.")
    if codes.dim() not in (2, 3) or scales.dim() != codes.dim():
        raise ValueError(
            f"`codes` is {tuple(codes.shape)} and `scales` {tuple(scales.shape)}; both must have 2 dimensions, or 3 "
            "for a stack."
        )
    held = {"compressed": 8 * codes.shape[-1], "awq": codes.shape[-2]}.get(order, 8 * codes.shape[-2])
    columns = held if columns is None else columns
    shape = torch.Size((*codes.shape[:-2], scales.shape[-2 if order == "compressed" else -1], columns))
    zeros = None if zeros is None else zeros.contiguous()
    group_of = None if group_of is None else group_of.to(torch.int32).contiguous()
    group = max(columns, 1) if group == -1 else group
    weight = Int4Weight(codes.contiguous(), scales.contiguous(), zeros, group_of, shape, group, order)
    check_packed("weight", weight)
    return weight


def _bytes_of(tensor: torch.Tensor, *dtypes: torch.dtype) -> torch.Tensor:
    """A tensor of one of these dtypes as its bytes, others unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype in dtypes else tensor


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------


def check_packed(name: str, weight: PackedWeight) -> None:
    """Raises ValueError if the parts of a packed weight do not fit each other."""
    if len(weight.shape) not in (2, 3):
        raise ValueError(f"`{name}` is {tuple(weight.shape)}; it must be (N, K), or (E, N, K) for a stack of experts.")
    leading, (rows, columns) = weight.shape[:-2], weight.shape[-2:]
    if isinstance(weight, BlockFp8Weight):
        height, width = weight.block
        if height < 1 or width < 1:
            raise ValueError(f"`{name}.block` is {weight.block}; it must be two positive numbers.")
        _check_part(f"{name}.codes", weight.codes, weight, (torch.uint8,), (*leading, rows, columns))
        grid = (*leading, cdiv(rows, height), cdiv(columns, width))
        _check_part(f"{name}.scales", weight.scales, weight, (*_FLOATING, torch.uint8), grid)
    elif isinstance(weight, Fp4Weight):
        if columns % weight.group:
            raise ValueError(
                f"`{name}` has {columns} columns; in {'MXFP4' if weight.global_scale is None else 'NVFP4'} they must "
                f"be a multiple of {weight.group}."
            )
        _check_part(f"{name}.codes", weight.codes, weight, (torch.uint8,), (*leading, rows, columns // 2))
        _check_part(f"{name}.scales", weight.scales, weight, (torch.uint8,), (*leading, rows, columns // weight.group))
        if weight.global_scale is not None:
            parts = weight.global_scale.shape[-1] if weight.global_scale.dim() else 0
            if parts < 1 or rows % parts:
                raise ValueError(f"`{name}.global_scale` has {parts} numbers, which must divide the {rows} rows.")
            _check_part(f"{name}.global_scale", weight.global_scale, weight, (torch.float32,), (*leading, parts))
    else:
        _check_int4(name, weight)


def _check_int4(name: str, weight: Int4Weight) -> None:
    leading, (rows, columns) = weight.shape[:-2], weight.shape[-2:]
    if weight.group < 1:
        raise ValueError(f"`{name}.group` is {weight.group}; it must be positive.")
    if weight.order != "compressed" and weight.zeros is None:
        raise ValueError(f"`{name}.zeros` is None; {weight.order!r} needs the zeros of its groups.")
    groups, words = cdiv(columns, weight.group), cdiv(rows, 8)
    of_codes = {"compressed": (rows, cdiv(columns, 8)), "awq": (columns, words)}.get(
        weight.order, (cdiv(columns, 8), rows)
    )
    first = weight.order == "compressed"
    _check_part(f"{name}.codes", weight.codes, weight, (torch.int32,), (*leading, *of_codes))
    _check_part(
        f"{name}.scales", weight.scales, weight, _FLOATING, (*leading, *((rows, groups) if first else (groups, rows)))
    )
    if weight.zeros is not None:
        of_zeros = (words, groups) if first else (groups, words)
        _check_part(f"{name}.zeros", weight.zeros, weight, (torch.int32,), (*leading, *of_zeros))
    if weight.group_of is not None:
        _check_part(f"{name}.group_of", weight.group_of, weight, (torch.int32,), (*leading, columns))


def _check_part(
    name: str, tensor: torch.Tensor, weight: PackedWeight, dtypes: Sequence[torch.dtype], shape: Sequence[int]
) -> None:
    fits = tensor.dtype in dtypes and tensor.shape == torch.Size(shape) and tensor.device == weight.device
    if not fits or not tensor.is_contiguous():
        raise ValueError(
            f"`{name}` is {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}; for a weight of "
            f"{tuple(weight.shape)} it must be {tuple(shape)} of {' or '.join(map(str, dtypes))} on {weight.device}, "
            "contiguous."
        )
