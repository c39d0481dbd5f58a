"""How the row kernels of softmax and sparsemax are launched."""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_trainer.kernels.norms.launch import device_limits
from liger_trainer.kernels.parity.row_softmax_kernels import (
    backward_kernel,
    forward_kernel,
    long_backward_kernel,
    long_forward_kernel,
)
from liger_trainer.kernels.runtime import cdiv, next_power_of_2, on_device

MAX_IN_REGISTERS = 32768
"""Longest row that one program holds; a longer one is read tile by tile."""

_LONG_TILE = 8192  # 16 numbers for each thread of 16 warps


class _Config(NamedTuple):
    rows: int
    block: int
    num_warps: int


def _config(num_cols: int, numbers_a_thread: int, device: torch.device) -> _Config:
    """Rows of a tile, its columns (a power of two) and its warps.

    The fewer warps share a row, the less its reductions wait for each other, and several programs share a
    multiprocessor to keep it busy meanwhile: sparsemax, which reduces the row in every step, gives a thread 64 numbers,
    softmax 32, and the two-input backward 32 of each.
    """
    if num_cols > MAX_IN_REGISTERS:
        return _Config(1, _LONG_TILE, 16)
    block = max(16, next_power_of_2(num_cols))
    rows = max(1, 1024 // block)
    num_warps = max(1, rows * block // (32 * numbers_a_thread))
    return _Config(rows, block, min(num_warps, device_limits(device).max_warps))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(rows, columns) with contiguous columns; a view wherever the strides allow one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def launch_forward(
    x: torch.Tensor, y: torch.Tensor, sparse: bool, causal: bool, lse: torch.Tensor | None = None
) -> None:
    """Writes the (sparse, causal) softmax of the rows of `x` to the contiguous `y`, and their log-sum-exp to `lse`."""
    rows = _rows(x)
    num_rows, num_cols = rows.shape
    config = _config(num_cols, 64 if sparse else 32, x.device)
    options = {"SPARSE": sparse, "CAUSAL": causal, "BLOCK": config.block, "num_warps": config.num_warps}
    with on_device(x):
        if num_cols > MAX_IN_REGISTERS:
            long_forward_kernel[(num_rows,)](rows, y, lse, rows.stride(0), num_cols, **options)
        else:
            forward_kernel[(cdiv(num_rows, config.rows),)](
                rows,
                y,
                lse,
                rows.stride(0),
                num_rows,
                num_cols,
                ROWS=config.rows,
                LANES=min(config.block, 256 * config.num_warps),
                **options,
            )


def launch_backward(
    dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, sparse: bool, causal: bool, lse: torch.Tensor | None = None
) -> None:
    """Writes the gradient of the rows to the contiguous `dx`.

    `y` is the result of the forward, or with the `lse` that it wrote the scores.
    """
    rows, results = _rows(dy), _rows(y)
    num_rows, num_cols = rows.shape
    config = _config(num_cols, 32, dy.device)
    options = {"SPARSE": sparse, "CAUSAL": causal, "BLOCK": config.block, "num_warps": config.num_warps}
    with on_device(dy):
        if num_cols > MAX_IN_REGISTERS:
            long_backward_kernel[(num_rows,)](
                rows, results, lse, dx, rows.stride(0), results.stride(0), num_cols, **options
            )
        else:
            backward_kernel[(cdiv(num_rows, config.rows),)](
                *(rows, results, lse, dx, rows.stride(0), results.stride(0), num_rows, num_cols),
                ROWS=config.rows,
                **options,
            )
