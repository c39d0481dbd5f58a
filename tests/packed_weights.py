"""Random weights in the packed formats of published checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from liger_trainer.kernels.lowbit.formats import (
    Int4Weight,
    PackedWeight,
    fp8_weight,
    int4_weight,
    mxfp4_weight,
    nvfp4_weight,
)
from liger_trainer.kernels.runtime import cdiv


def _any_byte(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def _e4m3(*shape: int, any_code: bool) -> torch.Tensor:
    """Codes of e4m3: all, or those of numbers up to 14."""
    codes = _any_byte(*shape)
    return codes if any_code else codes & 0x80 | (codes & 0x7F) % 0x58


def _e8m0(*shape: int, any_code: bool) -> torch.Tensor:
    return _any_byte(*shape) if any_code else torch.randint(120, 126, shape, dtype=torch.uint8)


def _scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape) / 8 + 0.01).to(dtype)


def _fp8(
    *shape: int, any_code: bool, block: tuple[int, int] | None = None, e8m0: bool = False, one: bool = False
) -> PackedWeight:
    """A scale for each block; without `block`, for each row or, if `one`, each matrix."""
    *leading, rows, columns = shape
    grid = (cdiv(rows, block[0]), cdiv(columns, block[1])) if block else (1, 1) if one else (rows, 1)
    scales = _e8m0(*leading, *grid, any_code=any_code) if e8m0 else _scales(*leading, *grid)
    return fp8_weight(_e4m3(*shape, any_code=any_code), scales, block)


def _mxfp4(*shape: int, any_code: bool) -> PackedWeight:
    *leading, rows, columns = shape
    scales = _e8m0(*leading, rows, columns // 32, any_code=any_code)
    return mxfp4_weight(_any_byte(*leading, rows, columns // 32, 16), scales)


def _nvfp4(*shape: int, any_code: bool, divides: bool, parts: int = 1) -> PackedWeight:
    *leading, rows, columns = shape
    scales = _e4m3(*leading, rows, columns // 16, any_code=any_code) & 0x7F
    above = _scales(*leading, parts)
    return nvfp4_weight(_any_byte(*leading, rows, columns // 2), scales, 1 / above if divides else above, divides)


def int4(
    *shape: int, any_code: bool = False, order: str = "compressed", zeros: bool = True, group: int = 16,
    group_of: bool = False,
) -> Int4Weight:  # fmt: skip
    *leading, rows, columns = shape
    groups, words = cdiv(columns, group), cdiv(rows, 8)
    sizes = {
        "compressed": ((rows, cdiv(columns, 8)), (rows, groups), (words, groups)),
        "awq": ((columns, words), (groups, rows), (groups, words)),
    }.get(order, ((cdiv(columns, 8), rows), (groups, rows), (groups, words)))
    codes, scales, of_zeros = ((*leading, *size) for size in sizes)
    return int4_weight(
        _words(*codes),
        _scales(*scales, dtype=torch.bfloat16 if order == "compressed" else torch.float16),
        _words(*of_zeros) if zeros else None,
        torch.randint(0, groups, (*leading, columns)) if group_of else None,
        group=group,
        columns=columns,
        order=order,
    )


FORMATS: dict[str, Callable[..., PackedWeight]] = {
    "fp8, blocks": partial(_fp8, block=(128, 128)),
    "fp8, small blocks of powers of two": partial(_fp8, block=(8, 16), e8m0=True),
    "fp8, rows": _fp8,
    "fp8, one scale": partial(_fp8, one=True),
    "mxfp8": partial(_fp8, block=(1, 32), e8m0=True),
    "mxfp4": _mxfp4,
    "nvfp4, compressed-tensors": partial(_nvfp4, divides=True),
    "nvfp4, ModelOpt": partial(_nvfp4, divides=False, parts=2),
    "int4, symmetric": partial(int4, zeros=False),
    "int4, zeros": int4,
    "int4, order of columns": partial(int4, group_of=True),
    "gptq": partial(int4, order="gptq", group_of=True),
    "gptq, groups in order": partial(int4, order="gptq"),
    "gptq_v2": partial(int4, order="gptq_v2"),
    "awq": partial(int4, order="awq"),
}
"""Name -> a function of (N, K) or (E, N, K), and of `any_code`: whether there may be NaN and scales of every size.

K is a multiple of 32 for fp4, else any; N is even.
"""


def packed(name: str, *shape: int, any_code: bool = False) -> PackedWeight:
    """A random weight of one of `FORMATS`."""
    return FORMATS[name](*shape, any_code=any_code)


def on(weight: PackedWeight, device: str) -> PackedWeight:
    """The weight on another device."""
    parts = {name: part.to(device) for name, part in weight._asdict().items() if isinstance(part, torch.Tensor)}
    return weight._replace(**parts)
