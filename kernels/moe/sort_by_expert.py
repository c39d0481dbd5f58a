"""The rows of a mixture of experts, sorted by expert: a stable counting sort of the chosen experts.

Token t chooses the experts ``top_k_index[t]``. Its j-th choice has the flat index t * k + j and is one row of the work.
Rows of one expert are placed next to each other, in the order of their tokens::

    order    = argsort(top_k_index.flatten(), stable=True)          slots[order[r]] = r
    offsets  = [number of choices below 0, below 1, ..., below E]

Each block of flat indices counts its experts. One scan over experts and blocks tells where the rows of every (expert,
block) end, and each block then places its own rows backwards from there, by the number of later choices of the same
expert in the block. There are no atomics and no host sync: the result is the same in every run, and no shape depends on
the choices.

Bytes moved for T tokens, R = T k rows and C blocks of 256: the index is read twice, 8 R are written, and 16 (E + 1) C
are counts. `tile_table` then cuts the rows of each expert into the tiles of a matmul.

Shapes: T tokens, k choices of each, R = T k rows sorted by expert, E experts, C blocks of flat indices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import DEVICE_ASSERTIONS
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import TRITON_DEVICES, cdiv, next_power_of_2, on_device, tl, triton

require(DEVICE_ASSERTIONS)

_MAX_ROWS = 2**31 - 1
_BLOCK = 256  # flat indices a program
_COMPARED = 8192  # pairs a program compares at a time


class ExpertRows(NamedTuple):
    """The rows of a mixture of experts, sorted by expert; all int32, on the device of the choices.

    Args:
        order: (R,), the flat index t * k + j of each row. Rows of one expert are adjacent and in token order.
        slots: (R,), the inverse of `order`: the row of each flat index.
        offsets: (num_experts + 1,), the first row of each expert; the last entry is the number of rows with an expert.
    """

    order: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor


@triton.jit
def _load_experts(index_ptr, rows, num_rows, token_stride, choice_stride, num_experts, TOP_K: tl.constexpr):
    """The experts of flat indices: at most `num_experts`, and -1 for negative ids and past the last row."""
    choices = index_ptr + (rows // TOP_K) * token_stride + (rows % TOP_K) * choice_stride
    experts = tl.load(choices, mask=rows < num_rows, other=-1)
    return tl.maximum(tl.minimum(experts, num_experts), -1).to(tl.int32)  # clamped before int64 is cut to 32 bits


@triton.jit
def _count_kernel(
    index_ptr,
    counts_ptr,
    num_rows,
    token_stride,
    choice_stride,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    BINS: tl.constexpr,
):
    """Writes column `block` of counts (num_experts + 1, blocks): how often the block chooses each expert."""
    block = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, BLOCK, STEP):
        rows = block * BLOCK + first + tl.arange(0, STEP)
        experts = _load_experts(index_ptr, rows, num_rows, token_stride, choice_stride, num_experts, TOP_K)
        counts += tl.sum((bins[:, None] == experts[None, :]).to(tl.int32), axis=1)
    column = bins.to(tl.int64) * tl.num_programs(0) + block
    tl.store(counts_ptr + column, counts, mask=bins <= num_experts)


@triton.jit
def _place_kernel(
    index_ptr,
    ends_ptr,
    order_ptr,
    slots_ptr,
    offsets_ptr,
    complete_ptr,
    num_rows,
    token_stride,
    choice_stride,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    BINS: tl.constexpr,
):
    """Places a block's rows; ends (num_experts + 1, blocks) is one past the last row of each expert and block."""
    block = tl.program_id(0).to(tl.int64)
    blocks = tl.num_programs(0).to(tl.int64)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    experts = _load_experts(index_ptr, rows, num_rows, token_stride, choice_stride, num_experts, TOP_K)
    following = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, BLOCK, STEP):
        others = block * BLOCK + first + tl.arange(0, STEP)
        theirs = _load_experts(index_ptr, others, num_rows, token_stride, choice_stride, num_experts, TOP_K)
        same = (experts[:, None] == theirs[None, :]) & (rows[:, None] < others[None, :])
        following += tl.sum(same.to(tl.int32), axis=1)
    placed = experts >= 0
    slots = tl.load(ends_ptr + experts.to(tl.int64) * blocks + block, mask=placed, other=0) - 1 - following
    tl.store(slots_ptr + rows, slots, mask=placed)
    tl.store(order_ptr + slots, rows.to(tl.int32), mask=placed)
    if block == 0:
        bins = tl.arange(0, BINS)
        ends = tl.load(ends_ptr + bins.to(tl.int64) * blocks - 1, mask=(bins > 0) & (bins <= num_experts), other=0)
        tl.store(offsets_ptr + bins, ends, mask=bins <= num_experts)
        last = tl.load(ends_ptr + blocks * (num_experts + 1) - 1)
        tl.store(complete_ptr, (last == num_rows).to(tl.int32))


def _new_rows(top_k_index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = (top_k_index.numel(), top_k_index.numel(), num_experts + 1)
    order, slots, offsets = (top_k_index.new_empty((size,), dtype=torch.int32) for size in sizes)
    return order, slots, offsets


def _launch_sort(top_k_index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows = top_k_index.numel()
    blocks = cdiv(num_rows, _BLOCK)
    bins = next_power_of_2(num_experts + 1)
    order, slots, offsets = _new_rows(top_k_index, num_experts)
    if num_rows == 0:
        return order, slots, offsets.zero_()
    counts, complete = order.new_empty(((num_experts + 1) * blocks,)), order.new_empty(())
    sizes = (num_rows, *top_k_index.stride(), num_experts)
    constants = {"TOP_K": top_k_index.shape[1], "BLOCK": _BLOCK, "BINS": bins, "num_warps": 4}
    with on_device(top_k_index):
        _count_kernel[(blocks,)](
            top_k_index, counts, *sizes, STEP=min(_BLOCK, max(1, 2 * _COMPARED // bins)), **constants
        )
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        _place_kernel[(blocks,)](
            *(top_k_index, ends, order, slots, offsets, complete), *sizes, STEP=_COMPARED // _BLOCK, **constants
        )
    torch._assert_async(complete, "`top_k_index` has a negative id; ids are 0 or more.")
    return order, slots, offsets


@operator("liger_trainer::sort_by_expert")
def _sort_by_expert(top_k_index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if top_k_index.device.type == "cpu" and top_k_index.numel() and (least := int(top_k_index.min())) < 0:
        raise ValueError(f"`top_k_index` holds {least}; ids are 0 or more; from {num_experts} on they mean no expert.")
    if top_k_index.device.type in TRITON_DEVICES:
        return _launch_sort(top_k_index, num_experts)
    order, slots, offsets = sort_by_expert_reference(top_k_index, num_experts)
    return order, slots, offsets


@_sort_by_expert.register_fake
def _(top_k_index, num_experts):
    return _new_rows(top_k_index, num_experts)


def sort_by_expert(top_k_index: torch.Tensor, num_experts: int) -> ExpertRows:
    """Sorts the choices of all tokens by expert, stably.

    Args:
        top_k_index: (T, k), the chosen experts of each token, int32 or int64, of any strides; up to 2^31 - 1 choices.
            An id of `num_experts` or more means no expert (expert parallelism marks those of other processes so): its
            rows come after ``offsets[-1]``.
        num_experts: E, the number of experts.

    Returns:
        `ExpertRows`.

    Raises:
        ValueError: If `top_k_index` has another shape or dtype or too many choices, if `num_experts` is less than 1,
            or, on the CPU, if an id is negative. On an accelerator a negative id triggers a device-side assertion.
    """
    if top_k_index.dim() != 2:
        raise ValueError(f"`top_k_index` is {tuple(top_k_index.shape)}; it must be (tokens, choices per token).")
    if top_k_index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"`top_k_index` is {top_k_index.dtype}; it must be int32 or int64.")
    if top_k_index.numel() > _MAX_ROWS:
        raise ValueError(f"`top_k_index` has {top_k_index.numel()} ids; give at most {_MAX_ROWS} at a time.")
    if num_experts < 1:
        raise ValueError(f"`num_experts` is {num_experts}; it must be 1 or more.")
    return ExpertRows(*_sort_by_expert(top_k_index, num_experts))


def check_ids(top_k_index: torch.Tensor, num_experts: int, owner: str) -> None:
    """Checks that every id is an expert, for a block of which this process holds all experts.

    Args:
        top_k_index: (T, k), the chosen experts.
        num_experts: E.
        owner: Name of the block, for the message.

    Raises:
        ValueError: On the CPU, for an id of `num_experts` or more. On an accelerator it triggers a device-side
            assertion, without a host sync.
    """
    if torch.compiler.is_compiling() or type(top_k_index) is not torch.Tensor or top_k_index.numel() == 0:
        return
    rule = f"{owner} has {num_experts} experts; ids go from 0 to {num_experts - 1}."
    if top_k_index.device.type != "cpu":
        torch._assert_async((top_k_index < num_experts).all(), f"`top_k_index` holds an id of no expert: {rule}")
    elif (largest := int(top_k_index.max())) >= num_experts:
        raise ValueError(f"`top_k_index` holds {largest}, but {rule}")


def sort_by_expert_reference(top_k_index: torch.Tensor, num_experts: int) -> ExpertRows:
    """`sort_by_expert` in plain torch; it does not check its arguments."""
    experts, order = torch.sort(top_k_index.reshape(-1).clamp(max=num_experts), stable=True)
    slots = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    bounds = torch.arange(num_experts + 1, dtype=experts.dtype, device=experts.device)
    return ExpertRows(order.int(), slots.int(), torch.searchsorted(experts, bounds, out_int32=True))


@triton.jit
def _tile_kernel(
    offsets_ptr, table_ptr, num_experts, num_tiles, TILE: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr
):
    bins = tl.arange(0, BINS)
    first = tl.load(offsets_ptr + bins, mask=bins < num_experts, other=0)
    end = tl.load(offsets_ptr + 1 + bins, mask=bins < num_experts, other=0)
    ends = tl.cumsum((end - first + TILE - 1) // TILE, axis=0)  # one past the last tile of each expert
    tiles = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = (ends[:, None] <= tiles[None, :]) & (bins < num_experts)[:, None]
    experts = tl.sum(before.to(tl.int32), axis=0)
    in_expert = tiles - tl.max(tl.where(before, ends[:, None], 0), axis=0)
    used = experts < num_experts
    row = tl.load(offsets_ptr + experts, mask=used, other=0) + in_expert * TILE
    written = tiles < num_tiles
    tl.store(table_ptr + 2 * tiles, tl.where(used, experts, -1), mask=written)
    tl.store(table_ptr + 2 * tiles + 1, tl.where(used, row, 0), mask=written)


@operator("liger_trainer::moe_tile_table")
def _tile_table(offsets: torch.Tensor, block_rows: int, num_tiles: int) -> torch.Tensor:
    if offsets.device.type not in TRITON_DEVICES:
        return _tile_table_reference(offsets, block_rows, num_tiles)
    num_experts = offsets.numel() - 1
    bins = next_power_of_2(num_experts)
    block = max(1, min(64, _COMPARED // bins))
    table = offsets.new_empty((num_tiles, 2))
    with on_device(offsets):
        _tile_kernel[(cdiv(num_tiles, block),)](
            offsets, table, num_experts, num_tiles, TILE=block_rows, BLOCK=block, BINS=bins, num_warps=4
        )
    return table


@_tile_table.register_fake
def _(offsets, block_rows, num_tiles):
    return offsets.new_empty((num_tiles, 2))


def tile_table(offsets: torch.Tensor, block_rows: int, num_rows: int) -> torch.Tensor:
    """Cuts the rows of each expert into tiles. The table has room for the tiles of any choice of experts.

    Args:
        offsets: (E + 1,), contiguous int32, as `sort_by_expert` gives them.
        block_rows: Rows per tile.
        num_rows: R, the number of all rows, including those without an expert.

    Returns:
        (ceil(num_rows / block_rows) + E, 2) int32: the expert of each tile and its first row, expert by expert. After
        the last tile, the expert is -1 and the row 0.

    Raises:
        ValueError: If `offsets` is not as above, or `block_rows` is less than 1.
    """
    if offsets.dim() != 1 or offsets.numel() < 2 or offsets.dtype != torch.int32 or not offsets.is_contiguous():
        raise ValueError(
            f"`offsets` is {tuple(offsets.shape)} of {offsets.dtype}; give the (experts + 1,) int32 of sort_by_expert."
        )
    if block_rows < 1:
        raise ValueError(f"`block_rows` is {block_rows}; it must be 1 or more.")
    return _tile_table(offsets, block_rows, cdiv(num_rows, block_rows) + offsets.numel() - 1)


def tile_table_reference(offsets: torch.Tensor, block_rows: int, num_rows: int) -> torch.Tensor:
    """`tile_table` in plain torch; it does not check its arguments."""
    return _tile_table_reference(offsets, block_rows, cdiv(num_rows, block_rows) + offsets.numel() - 1)


def _tile_table_reference(offsets: torch.Tensor, block_rows: int, num_tiles: int) -> torch.Tensor:
    num_experts = offsets.numel() - 1
    tiles_of_expert = (offsets.diff() + block_rows - 1) // block_rows
    ends = tiles_of_expert.cumsum(0)
    tiles = torch.arange(num_tiles, device=offsets.device)
    experts = torch.searchsorted(ends, tiles, right=True)
    present = experts.clamp(max=num_experts - 1)
    row = offsets[present] + (tiles - (ends - tiles_of_expert)[present]) * block_rows
    used = experts < num_experts
    return torch.stack([torch.where(used, experts, -1), torch.where(used, row, 0)], dim=1).int()
