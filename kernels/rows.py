"""What kernels over rows share: rows of tensors of any layout, launch limits, sums of weight gradients.

A norm treats each row of `hidden_size` elements on its own, so the order of the rows does not matter. Tensors whose
leading dimensions are permuted (queries transposed to `(batch, heads, tokens, head_dim)`, say) are therefore read and
written in memory order, without a copy, and results have the same layout.

A norm of groups treats each group of `group_size` elements of a row on its own. The second dimension of its grid is the
group, so that a program has the weight of one.

Shapes: x (..., hidden_size) as (rows, hidden_size); groups of group_size elements of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from liger_trainer.kernels.runtime import cdiv, next_power_of_2, num_sms, tl, triton

_COLUMN_SUM_TILE = 4096


class NormConfig(NamedTuple):
    """How a norm kernel is launched; `num_stages` and `programs_per_sm` are for the persistent backward kernels.

    Args:
        rows: Rows of a tile, a power of two.
        num_warps: Warps of a program.
        num_stages: Tiles in flight in a program, the one being computed included.
        programs_per_sm: Programs of the persistent grid for each multiprocessor.
    """

    rows: int
    num_warps: int
    num_stages: int = 1
    programs_per_sm: int = 1

    def options(self, hidden_size: int) -> dict[str, int]:
        """The constants and options of a launch for rows of `hidden_size` that one program holds."""
        block = next_power_of_2(hidden_size)
        return {"H": hidden_size, "ROWS": self.rows, "BLOCK_H": block, "num_warps": self.num_warps}


class DeviceLimits(NamedTuple):
    """What a program may use of a device: warps, bytes of shared memory; and two kinds of NVIDIA's devices.

    Before Ampere, a program has 64 KiB of shared memory, and on all later ones 99 KiB or more. Where tensor cores have
    a memory of their own (B200), operands take more of the shared one.
    """

    max_warps: int
    shared_memory: int
    before_ampere: bool = False
    tensor_memory: bool = False

    @property
    def as_large_as_hopper(self) -> bool:
        """Whether a program has the shared memory of Hopper, which is that of B200."""
        return self.shared_memory >= 227 * 1024


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of `device`; conservative ones where torch does not report them."""
    if device.type != "cuda":
        return DeviceLimits(max_warps=16, shared_memory=48 * 1024)
    properties = torch.cuda.get_device_properties(device)
    warp_size = getattr(properties, "warp_size", 32)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 48 * 1024)
    major = properties.major if torch.version.cuda is not None else 8
    return DeviceLimits(1024 // warp_size, shared_memory, before_ampere=major < 8, tensor_memory=major == 10)


def forward_config(hidden_size: int) -> NormConfig:
    """Tile and warps of a forward kernel.

    16 to 32 elements per thread put two to four 16-byte loads of bf16 in flight in each, and several programs share a
    multiprocessor. Short rows share a tile; rows longer than 4096 get more warps. Measured on an H200.
    """
    block = next_power_of_2(hidden_size)
    rows = min(128, max(1, 2048 // block))
    return NormConfig(rows=rows, num_warps=min(32, max(4, rows * block // 1024)))


@functools.cache
def fit_config(config: NormConfig, hidden_size: int, bytes_per_column: int, device: torch.device) -> NormConfig:
    """`config` with warps and stages lowered to the limits of `device`.

    Args:
        config: The configuration to launch where the device allows it.
        hidden_size: Length of a row.
        bytes_per_column: Bytes that a program reads for one element of a row, summed over its streamed inputs.
        device: Where the kernel will run.
    """
    limits = device_limits(device)
    tile_bytes = config.rows * next_power_of_2(hidden_size) * bytes_per_column
    buffers = (limits.shared_memory - 8192) // tile_bytes  # 8 KiB are for the reductions across warps
    return config._replace(
        num_warps=min(config.num_warps, limits.max_warps),
        num_stages=max(1, min(config.num_stages, buffers + 1)),  # the tile being computed is in registers
    )


def forward_tiles(rows: torch.Tensor, groups: int = 1) -> tuple[int, dict[str, int]]:
    """Programs that normalise `rows`, (num_rows, hidden_size), and the constants and options of their launch.

    Args:
        rows: The input.
        groups: Groups of a row, each with as many programs.
    """
    num_rows, hidden_size = rows.shape[0], rows.shape[1] // groups
    config = fit_config(forward_config(hidden_size), hidden_size, rows.element_size(), rows.device)
    return cdiv(num_rows, config.rows), config.options(hidden_size)


def backward_tiles(
    config: NormConfig, rows: torch.Tensor, *others: torch.Tensor | None, groups: int = 1
) -> tuple[int, dict[str, int]]:
    """Programs of the persistent grid of a backward kernel, and the constants and options of its launch.

    Args:
        config: The configuration to launch where the device allows it.
        rows: The input, (num_rows, hidden_size).
        others: The tensors of the same shape that the kernel reads beside it.
        groups: Groups of a row, each with as many programs.
    """
    num_rows, hidden_size = rows.shape[0], rows.shape[1] // groups
    bytes_per_column = sum(tensor.element_size() for tensor in (rows, *others) if tensor is not None)
    config = fit_config(config, hidden_size, bytes_per_column, rows.device)
    programs = min(cdiv(num_rows, config.rows), cdiv(num_sms(rows.device) * config.programs_per_sm, groups))
    return programs, {**config.options(hidden_size), "NUM_STAGES": config.num_stages}


def autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """fp32 under autocast, where torch runs its own norms in fp32 (except on a CPU), else the dtype of `x`."""
    device = x.device.type
    low_precision = x.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if low_precision and device != "cpu" and torch.is_autocast_enabled(device) else x.dtype


def memory_order(x: torch.Tensor) -> list[int] | None:
    """The dimensions of `x`, the leading ones sorted by falling stride; None if `x` is contiguous."""
    if x.is_contiguous():
        return None
    return [*sorted(range(x.dim() - 1), key=lambda dim: x.stride(dim), reverse=True), x.dim() - 1]


def as_rows(tensor: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    """`tensor` as (rows, hidden_size) with unit column stride: a view where its layout allows, else a copy."""
    if order is not None:
        tensor = tensor.permute(order)
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def as_row_values(tensor: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    """The values of `empty_row_values` as (rows,), or (rows * groups,), in the order of `as_rows`."""
    return (tensor if order is None else tensor.permute(order[: tensor.dim()])).reshape(-1).contiguous()


def empty_in_order(like: torch.Tensor, order: list[int] | None, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor of the shape of `like` whose memory holds the rows of `as_rows(..., order)`, without gaps."""
    return _empty(like, like.shape, order, dtype)


def empty_row_values(like: torch.Tensor, order: list[int] | None, groups: int = 1) -> torch.Tensor:
    """A new fp32 tensor of shape `like.shape[:-1]` whose memory holds `as_row_values(..., order)`.

    With more than one of the `groups` in a row, its shape is `(*like.shape[:-1], groups)`.
    """
    shape = like.shape[:-1] if groups == 1 else torch.Size((*like.shape[:-1], groups))
    return _empty(like, shape, None if order is None else order[: len(shape)], torch.float32)


def number_of_groups(name: str, x: torch.Tensor, group_size: int | None) -> int:
    """How many groups of `group_size` a row of `x` has; None stands for one of all its elements.

    Raises:
        ValueError: If `group_size` does not divide the row.
    """
    if group_size is None:
        return 1
    if group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(
            f"`group_size` of {name} is {group_size}, but the last dimension of `x` is {x.shape[-1]}; give a divisor "
            "of it, or None for one group."
        )
    return x.shape[-1] // group_size


def _empty(like: torch.Tensor, shape: torch.Size, order: list[int] | None, dtype: torch.dtype) -> torch.Tensor:
    if order is None:
        return like.new_empty(shape, dtype=dtype)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return like.new_empty([shape[dim] for dim in order], dtype=dtype).permute(inverse)


def empty_gradients(
    needed: Sequence[bool], x: torch.Tensor, *parameters: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Uninitialised gradients of `x`, in its memory order, and of the parameters.

    One that is not needed, or of a parameter that is None, has no elements.
    """
    dx = empty_in_order(x, memory_order(x), x.dtype) if needed[0] else x.new_empty(0)
    of_parameters = (
        parameter.new_empty(parameter.shape) if need and parameter is not None else x.new_empty(0)
        for need, parameter in zip(needed[1:], parameters, strict=True)
    )
    return dx, *of_parameters


@triton.jit(do_not_specialize=["num_partials"])
def _column_sum_kernel(
    partial_ptr, first_ptr, second_ptr, num_partials, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums BLOCK columns of the partial sums of one group and one output."""
    group = tl.program_id(1).to(tl.int64)
    which = tl.program_id(2)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS).to(tl.int64)
    partial_ptr += (which * tl.num_programs(1) + group) * num_partials * H
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, num_partials, ROWS):
        mask = (start + rows < num_partials)[:, None] & (cols < H)[None, :]
        total += tl.load(partial_ptr + ((start + rows) * H)[:, None] + cols[None, :], mask=mask, other=0.0)
    column = tl.sum(total, axis=0)
    out = group * H + cols
    if which == 0:
        tl.store(first_ptr + out, column.to(first_ptr.dtype.element_ty), mask=cols < H)
    else:
        tl.store(second_ptr + out, column.to(second_ptr.dtype.element_ty), mask=cols < H)


def column_sum(partial: torch.Tensor, *outputs: torch.Tensor) -> None:
    """Writes `partial[i].sum(-2)`, in a fixed order, to `outputs[i]`: the second stage of the weight gradients.

    Args:
        partial: Contiguous fp32 tensor of shape (len(outputs), programs, hidden_size), or (len(outputs), groups,
            programs, hidden_size) for separate sums of up to 65535 groups.
        outputs: One or two contiguous tensors of shape (hidden_size,), or (groups, hidden_size), of any floating dtype.
    """
    *batch, num_partials, hidden_size = partial.shape
    count, groups = batch[0], batch[1] if len(batch) == 2 else 1
    # A narrow block keeps many programs busy on a short row; 8 fp32 columns are one memory sector.
    block = 8 if hidden_size <= 1024 else 32
    grid = (cdiv(hidden_size, block), groups, count)
    _column_sum_kernel[grid](
        partial,
        outputs[0],
        outputs[-1],
        num_partials,
        H=hidden_size,
        ROWS=_COLUMN_SUM_TILE // block,
        BLOCK=block,
        num_warps=4,
    )
