"""How GroupNorm's rows (a group of a sample each) are cut into tiles and chunks, and its kernels launched."""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_trainer.kernels.norms.launch import NormConfig, column_sum, device_limits, fit_config
from liger_trainer.kernels.parity.group_norm_kernels import (
    MAX_CHUNKS,
    channel_sums_kernel,
    group_norm_backward_kernel,
    group_norm_forward_kernel,
    moments_kernel,
)
from liger_trainer.kernels.runtime import cdiv, next_power_of_2, num_sms, on_device

_TILE = 4096
_WHOLE_FORWARD = 32768
_WHOLE_BACKWARD = 16384  # x and dy are in registers together
_PROGRAMS_PER_SM = 8


class _Tiles(NamedTuple):
    """Tiles of (channels, positions), how many of them a row has, and how a program that works on them is launched."""

    channels: int
    positions: int
    per_row: int
    config: NormConfig

    @property
    def constants(self) -> dict[str, int]:
        """The constants and options of a launch."""
        whole = self.per_row == 1
        return {
            "CHANNELS": self.channels,
            "POSITIONS": self.positions,
            "NUM_STAGES": 1 if whole else self.config.num_stages,
            "num_warps": self.config.num_warps,
        }


def _cut(group_channels: int, positions: int, whole: int, bytes_per_number: int, device: torch.device) -> _Tiles:
    """One tile for a row that pads to at most `whole` numbers, else tiles of `_TILE`: 16 or 32 numbers a thread."""
    channels, block = next_power_of_2(group_channels), next_power_of_2(positions)
    if channels * block <= whole:
        warps = max(1, min(device_limits(device).max_warps, channels * block // 512))
        return _Tiles(channels, block, 1, NormConfig(rows=1, num_warps=warps))
    block = min(block, _TILE)
    channels = min(channels, _TILE // block)
    count = cdiv(group_channels, channels) * cdiv(positions, block)
    config = NormConfig(rows=1, num_warps=8, num_stages=3)
    return _Tiles(channels, block, count, fit_config(config, _TILE, bytes_per_number, device))


def launch_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_groups: int,
    eps: float,
    y: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> None:
    """Runs the forward kernels on `x` of shape (samples, channels, positions); fills `y`, `mean` and `rstd`."""
    samples, channels, positions = x.shape
    rows, group_channels = samples * num_groups, channels // num_groups
    tiles = _cut(group_channels, positions, _WHOLE_FORWARD, x.element_size(), x.device)
    chunks, chunk_size, splits, chunk_mean, chunk_square = 1, 1, 1, None, None
    programs = num_sms(x.device) * _PROGRAMS_PER_SM
    with on_device(x):
        if tiles.per_row > 1:
            blocks = cdiv(group_channels * positions, _TILE)
            chunk_size = cdiv(blocks, min(MAX_CHUNKS, cdiv(programs, rows), blocks)) * _TILE
            chunks = cdiv(group_channels * positions, chunk_size)
            splits = min(tiles.per_row, cdiv(programs, rows))
            chunk_mean, chunk_square = x.new_empty(2, rows, chunks, dtype=torch.float32)
            moments_kernel[(rows * chunks,)](
                x,
                chunk_mean,
                chunk_square,
                group_channels * positions,
                chunks,
                chunk_size,
                BLOCK=_TILE,
                NUM_STAGES=tiles.config.num_stages,
                num_warps=tiles.config.num_warps,
            )
        group_norm_forward_kernel[(rows * splits,)](
            x,
            weight,
            bias,
            y,
            mean,
            rstd,
            chunk_mean,
            chunk_square,
            positions,
            group_channels,
            num_groups,
            group_channels * positions,
            tiles.per_row,
            splits,
            chunks,
            chunk_size,
            eps,
            WHOLE=tiles.per_row == 1,
            **tiles.constants,
        )


def launch_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dx: torch.Tensor | None,
    dweight: torch.Tensor | None,
    dbias: torch.Tensor | None,
) -> None:
    """Runs the backward kernels, which fill `dx`, `dweight` and `dbias`; those that are None are not computed."""
    samples, channels, positions = x.shape
    num_groups = mean.shape[-1]
    rows, group_channels = samples * num_groups, channels // num_groups
    bytes_per_number = x.element_size() + dy.element_size()
    tiles = _cut(group_channels, positions, _WHOLE_BACKWARD, bytes_per_number, x.device)
    whole, chunks, splits = tiles.per_row == 1, 1, 1
    programs = num_sms(x.device) * _PROGRAMS_PER_SM
    chunk_tiles = cdiv(positions, tiles.positions)
    if not whole:
        sum_rows = rows * cdiv(group_channels, tiles.channels)
        chunk_tiles = cdiv(chunk_tiles, min(chunk_tiles, cdiv(programs, sum_rows)))
        chunks = cdiv(cdiv(positions, tiles.positions), chunk_tiles)
        splits = min(tiles.per_row, cdiv(programs, rows))
    sums = [] if dweight is None else [dweight]
    sums += [] if dbias is None else [dbias]
    partial = x.new_empty(2, samples * chunks, channels, dtype=torch.float32) if sums or not whole else None
    product, dy_sum = (None, None) if partial is None else (partial[0], partial[1])
    with on_device(x):
        if not whole:
            channel_sums_kernel[(sum_rows * chunks,)](
                dy,
                x,
                mean,
                rstd,
                product,
                dy_sum,
                positions,
                group_channels,
                num_groups,
                chunks,
                chunk_tiles,
                **tiles.constants,
            )
        if dx is not None or whole:
            group_norm_backward_kernel[(rows * splits,)](
                dy,
                x,
                weight,
                mean,
                rstd,
                dx,
                product,
                dy_sum,
                positions,
                group_channels,
                num_groups,
                group_channels * positions,
                tiles.per_row,
                splits,
                chunks,
                WHOLE=whole,
                GROUP_CHANNELS=next_power_of_2(group_channels),
                **tiles.constants,
            )
        if sums and partial is not None:
            column_sum(partial if len(sums) == 2 else partial[:1] if dbias is None else partial[1:], *sums)
