"""Copies of rows, and a gradient that is the same bit for bit in every run.

::

    y[c] = x[index[c]]                      dx[r] = sum of dy[c] over the c with index[c] = r

It serves rows that are read several times, such as the keys of a prompt that several completions see. Which copies a
row has is known before the forward, so the backward sorts nothing: a program handles some columns of one row, and adds
its copies in their order, in fp32, rounded once. There are no atomics. (An embedding learns its ids on the device and
has to sort them in each backward: `liger/operators/embedding.py`.)

Bytes moved in bf16 for T rows, K copies and H columns: 4 K H forward, 2 (K + T) H backward. Saved for the backward: the
lists of `Copies`.

Shapes: T rows, K copies, H columns.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.autograd import refuse_second_derivative
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import cdiv, next_power_of_2, on_device, sent, tl, triton, use_triton

_MAX_BLOCK = 1024


class Copies(NamedTuple):
    """Which row each of K copies is of; see `copies_of`.

    Attributes:
        index: int32 (K,), the row.
        order: int32 (K,), the copies sorted by their row, those of one row in their order.
        begins: int32 (rows + 1,), where those of each row begin in `order`, and K.
    """

    index: torch.Tensor  # type: ignore[assignment]  # not the method of tuples
    order: torch.Tensor
    begins: torch.Tensor


def copies_of(index: torch.Tensor, rows: int, device: torch.device | str = "cpu") -> Copies:
    """The copies of these rows, which are found on the host.

    Args:
        index: int64 or int32 (K,), on the CPU, each from 0 to rows - 1.
        rows: How many rows there are to copy; some may have no copy.
        device: Where the copies will be.
    """
    begins = torch.zeros(rows + 1, dtype=torch.int32)
    begins[1:] = torch.bincount(index, minlength=rows).cumsum(0)
    # torch sorts on all cores that it sees, which takes a hundred times as long in a container that may use a few.
    order = torch.from_numpy(index.numpy().argsort(kind="stable"))
    parts = index.int(), order.int(), begins
    return Copies(*(sent(part, torch.device(device)) for part in parts))


@triton.jit
def sum_kernel(d_ptr, order_ptr, begins_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """BLOCK columns of the sum of one row's copies."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(tl.load(begins_ptr + row), tl.load(begins_ptr + row + 1)):
        copy = tl.load(order_ptr + place).to(tl.int64)
        total += tl.load(d_ptr + copy * columns + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + column, total.to(out_ptr.dtype.element_ty), mask=exists)


def _launch(d: torch.Tensor, order: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    rows, columns = begins.numel() - 1, math.prod(d.shape[1:])
    out = d.new_empty((rows, *d.shape[1:]))
    if out.numel():
        block = min(next_power_of_2(columns), _MAX_BLOCK)
        with on_device(d):
            grid = (rows, cdiv(columns, block))
            sum_kernel[grid](d.contiguous(), order, begins, out, columns, BLOCK=block, num_warps=4)
    return out


def sum_of_copies(d: torch.Tensor, copies: Copies) -> torch.Tensor:
    """For each row the sum of its copies, in fp32 (float64 for float64) and rounded once; 0 for a row without copies.

    Args:
        d: (K, ...), what the copies have.
        copies: The K copies, on the device of `d`.

    Returns:
        A new contiguous (rows, ...) in the dtype of `d`. Where Triton runs, the same bits in every run.
    """
    if use_triton(d):
        return _launch(d, copies.order, copies.begins)
    wide = torch.promote_types(d.dtype, torch.float32)
    sums = d.new_zeros((copies.begins.numel() - 1, *d.shape[1:]), dtype=wide)
    return sums.index_add_(0, copies.index, d.to(wide)).to(d.dtype)


@operator("liger_trainer::copied_rows")
def _copied_rows(x: torch.Tensor, index: torch.Tensor, order: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    return x[index].contiguous()  # its strides are those of x


@operator("liger_trainer::copied_rows_backward")
def _copied_rows_backward(dy: torch.Tensor, order: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    return _launch(dy, order, begins)


@_copied_rows_backward.register_fake
def _(dy, order, begins):
    return dy.new_empty((begins.shape[0] - 1, *dy.shape[1:]))


refuse_second_derivative(_copied_rows_backward, "copied_rows")


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[2:])


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _copied_rows_backward(dy, *ctx.saved_tensors), None, None, None


_copied_rows.register_autograd(_backward, setup_context=_setup_context)


def copied_rows(x: torch.Tensor, copies: Copies) -> torch.Tensor:
    """The row of each copy.

    Args:
        x: (T, ...), of any strides; float16, bfloat16 or float32 for the kernel, anything else runs the reference.
        copies: K copies of these T rows, on the device of `x`.

    Returns:
        A new contiguous (K, ...). The gradient of a row is the sum of its copies', as of `sum_of_copies`.
    """
    return _copied_rows(x, *copies) if use_triton(x) else copied_rows_reference(x, copies)


def copied_rows_reference(x: torch.Tensor, copies: Copies) -> torch.Tensor:
    """`copied_rows` in plain torch."""
    wide = torch.promote_types(x.dtype, torch.float32)  # of the gradient's sums
    return x.to(wide).index_select(0, copies.index).to(x.dtype)
