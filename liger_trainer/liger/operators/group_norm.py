"""GroupNorm: the channels of a sample in groups, each group normalised over its channels and all positions.

Formula (Wu and He 2018, https://arxiv.org/abs/1803.08494), for one group of one sample and a channel c of the group:

    x_hat = (x - mean) * rstd        rstd = 1 / sqrt(mean((x - mean)^2) + eps)        y = x_hat * weight_c + bias_c

and, with g = dy * weight_c,

    dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat))
    dweight_c = sum over samples and positions of dy * x_hat        dbias_c = the same sum of dy

Where a group fits one program (32768 elements, 16384 in the backward), forward reads x and writes y (4 bytes per
element in bf16) and backward reads x and dy and writes dx (6 bytes). A larger group is split over several programs and
its inputs are read twice: 6 and 10 bytes, less what the L2 cache still holds. Saved for backward: x, weight, bias, and
mean and rstd (fp32, one per group). No gradient uses atomics. The kernels are in `group_norm_kernels`.

Shapes: x and y (samples, channels, positions...); weight and bias (channels,); mean and rstd (samples, groups).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_trainer.kernels.autograd import differentiate_norm
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.rows import (
    NormConfig,
    autocast_dtype,
    column_sum,
    device_limits,
    empty_gradients,
    fit_config,
)
from liger_trainer.kernels.runtime import (
    cdiv,
    has_elements,
    is_dtensor,
    next_power_of_2,
    num_sms,
    on_device,
    reference_of,
    use_triton,
)
from liger_trainer.liger.operators.group_norm_kernels import (
    MAX_CHUNKS,
    channel_sums_kernel,
    group_norm_backward_kernel,
    group_norm_forward_kernel,
    moments_kernel,
)

_TILE = 4096
_WHOLE_FORWARD = 32768
_WHOLE_BACKWARD = 16384  # x and dy are in registers together
_PROGRAMS_PER_SM = 8


class _Tiles(NamedTuple):
    """Tiles of (channels, positions): their shape, how many a row has, and the launch of a program that takes them."""

    channels: int
    positions: int
    per_row: int
    config: NormConfig

    @property
    def constants(self) -> dict[str, int]:
        """The constants and options of a kernel launch."""
        whole = self.per_row == 1
        return {
            "CHANNELS": self.channels,
            "POSITIONS": self.positions,
            "NUM_STAGES": 1 if whole else self.config.num_stages,
            "num_warps": self.config.num_warps,
        }


def _cut(group_channels: int, positions: int, whole: int, bytes_per_number: int, device: torch.device) -> _Tiles:
    """One tile for a row that pads to at most `whole` elements, else tiles of `_TILE`: 16 or 32 elements per thread."""
    channels, block = next_power_of_2(group_channels), next_power_of_2(positions)
    if channels * block <= whole:
        warps = max(1, min(device_limits(device).max_warps, channels * block // 512))
        return _Tiles(channels, block, 1, NormConfig(rows=1, num_warps=warps))
    block = min(block, _TILE)
    channels = min(channels, _TILE // block)
    count = cdiv(group_channels, channels) * cdiv(positions, block)
    config = NormConfig(rows=1, num_warps=8, num_stages=3)
    return _Tiles(channels, block, count, fit_config(config, _TILE, bytes_per_number, device))


def _by_position(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` of shape (samples, channels, ...) as contiguous (samples, channels, positions)."""
    return tensor.reshape(*tensor.shape[:2], tensor.shape[2:].numel()).contiguous()


@operator("liger_trainer::group_norm")
def _group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    mean, rstd = (x.new_empty(x.shape[0], num_groups, dtype=torch.float32) for _ in range(2))
    if not has_elements(x):
        return y, mean, rstd
    x = _by_position(x)
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
            weight if weight is None else weight.contiguous(),
            bias if bias is None else bias.contiguous(),
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
    return y, mean, rstd


@operator("liger_trainer::group_norm_backward")
def _group_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dweight, dbias = empty_gradients(needed, x.contiguous(), weight, bias)
    if not has_elements(x):
        return dx, dweight.zero_(), dbias.zero_()
    dy, x, mean, rstd = _by_position(dy), _by_position(x), mean.contiguous(), rstd.contiguous()
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
    sums = [tensor for tensor in (dweight, dbias) if tensor.numel()]
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
        if needed[0] or whole:
            group_norm_backward_kernel[(rows * splits,)](
                dy,
                x,
                weight if weight is None else weight.contiguous(),
                mean,
                rstd,
                dx if needed[0] else None,
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
            column_sum(partial if len(sums) == 2 else partial[:1] if dweight.numel() else partial[1:], *sums)
    return dx, dweight, dbias


differentiate_norm(_group_norm, _group_norm_backward, "group_norm", (0, 2, 3))


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """GroupNorm: `torch.nn.functional.group_norm(x, num_groups, weight, bias, eps)`.

    Statistics and gradients are computed in fp32 with one rounding at the end. An input that is not contiguous
    (channels last, say) is copied, and the result is contiguous, as from torch on a GPU.

    Args:
        x: Input of shape (samples, channels, ...) and any floating dtype.
        num_groups: Number of groups, a divisor of the number of channels.
        weight: Weight of shape (channels,), or None for 1. Its dtype may differ from that of `x`.
        bias: Bias of shape (channels,), or None for 0. Its dtype may differ from that of `x`.
        eps: Added to the variance.

    Returns:
        Tensor of the shape and dtype of `x`; fp32 under autocast on an accelerator, as in torch.

    Raises:
        ValueError: If `x` has no channels, `num_groups` does not divide them, `weight` or `bias` does not fit `x` in
            shape or device, or a dtype is not floating point.
    """
    _check(x, num_groups, weight=weight, bias=bias)
    result = autocast_dtype(x)
    if use_triton(x) and (weight is None or use_triton(weight)) and (bias is None or use_triton(bias)):
        return _group_norm(x, num_groups, weight, bias, eps, result)[0]
    if x.numel() == 0:  # torch gives a weight the gradient NaN
        return sum((p.sum() * 0 for p in (weight, bias) if p is not None), x).to(result)
    if weight is None and bias is not None:  # torch has no backward for that
        weight = torch.ones_like(bias)
    compute = torch.promote_types(x.dtype, torch.float32)  # as `layer_norm`
    weight, bias = (None if tensor is None else tensor.to(compute) for tensor in (weight, bias))
    return torch.group_norm(x.to(compute), num_groups, weight, bias, eps).to(result)


group_norm_reference = reference_of(group_norm, "use_triton")


def _check(x: torch.Tensor, num_groups: int, **parameters: torch.Tensor | None) -> None:
    if not x.is_floating_point() or x.dim() < 2:
        raise ValueError(
            f"`x` of group_norm has shape {tuple(x.shape)} and dtype {x.dtype}; give a floating point tensor of shape "
            f"(samples, channels, ...)."
        )
    for argument, tensor in {"x": x, **parameters}.items():
        if tensor is not None and is_dtensor(tensor):
            raise ValueError(
                f"`{argument}` of group_norm is a DTensor, which torch's own group_norm does not support either; give "
                f"the whole tensor, `{argument}.full_tensor()`."
            )
    channels = x.shape[1]
    if num_groups < 1 or channels < 1 or channels % num_groups:
        raise ValueError(
            f"`num_groups` of group_norm is {num_groups}, which does not divide the {channels} channels of `x`, "
            f"whose shape is {tuple(x.shape)}."
        )
    for argument, parameter in parameters.items():
        if parameter is None:
            continue
        if parameter.shape != (channels,) or not parameter.is_floating_point() or parameter.device != x.device:
            raise ValueError(
                f"`{argument}` of group_norm has shape {tuple(parameter.shape)} and dtype {parameter.dtype} and is on "
                f"{parameter.device}; give a floating point tensor of shape ({channels},), one number for each channel "
                f"of `x`, on {x.device}, or None."
            )
