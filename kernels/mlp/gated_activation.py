"""The gated activations ``h = act(gate) * up`` of SwiGLU and GeGLU, with scales and clamps: kernels and operators.

With ``g`` the gate, ``u`` the up projection and ``dh`` the gradient of ``h``::

    h  = round(act(a g)) * (u + o) * d      dg = d dh (u + o) a act'(a g)       du = d dh act(a g)

`kernels/activation.py` has act and act'. `a` and `d` are the multipliers of the gate and of the down projection and `o`
is an offset of up (by default 1, 1 and 0). With a limit `l`, `g` is first clamped from above and `u` on both sides;
where that changes a value its gradient is 0.

The forward rounds the activation to the dtype of the inputs before the product, as models do that call their activation
separately: the result matches theirs bit for bit, except in the last place of exp and erf.

Elements moved per element of h: forward 3 (two read, one written), backward 5 (three read, two written). Saved for
backward: gate and up; the activation is recomputed. Contiguous tensors are treated as one flat array. The halves of a
fused projection are read row by row, and their gradients are written into the halves of one tensor, so that nothing is
copied.

`cast_of_h` writes h in fp8 alone, in the bits that `cast_rows` makes of h: per element 4 bytes are read and 1 written,
instead of 6 and 3 with h in bf16 between two kernels. A scale needs the whole row first, so a program holds it in
registers.

Shapes: gate, up and h (..., intermediate), or rows and cols of them; M rows and K columns of the cast.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels.activation import GatedActivation, gate_and_up, rounded_product
from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative, where_needed
from liger_trainer.kernels.fp8.row_cast import cast_rows, codes_of, empty_cast, magnitude, scale_of
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import cdiv, graph_is_kept, has_elements, next_power_of_2, on_device, tl, triton


@triton.jit
def _row_and_start(cols, FLAT: tl.constexpr, BLOCK: tl.constexpr):
    """This program's row (0 in a flat array) and first column, in 64 bits."""
    row = 0
    block = tl.program_id(0)
    if not FLAT:
        blocks_per_row = tl.cdiv(cols, BLOCK)
        row = (block // blocks_per_row).to(tl.int64)
        block = block % blocks_per_row
    return row, block.to(tl.int64) * BLOCK


@triton.jit
def _load_pair(gate_row_ptr, up_row_ptr, start, cols, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of gate and up."""
    if INTERLEAVED:  # gate and up alternate: one wide load, split in registers
        pairs = 2 * start + tl.arange(0, 2 * BLOCK)
        both = tl.load(gate_row_ptr + pairs, mask=pairs < 2 * cols, other=0.0)
        gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        columns = start + tl.arange(0, BLOCK)
        gate = tl.load(gate_row_ptr + columns, mask=columns < cols, other=0.0)
        up = tl.load(up_row_ptr + columns, mask=columns < cols, other=0.0)
    return gate, up


@triton.jit
def _forward_kernel(
    gate_ptr,
    up_ptr,
    h_ptr,
    cols,
    gate_stride,
    up_stride,
    h_stride,
    gate_multiplier,
    down_multiplier,
    limit,
    up_offset,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes BLOCK columns of h."""
    row, start = _row_and_start(cols, FLAT, BLOCK)
    columns = start + tl.arange(0, BLOCK)
    gate, up = _load_pair(gate_ptr + row * gate_stride, up_ptr + row * up_stride, start, cols, INTERLEAVED, BLOCK)
    activation, _, factor, _, _ = gate_and_up(gate, up, gate_multiplier, limit, up_offset, CLAMP, ACTIVATION)
    h = rounded_product(activation, factor, down_multiplier, gate.dtype)
    tl.store(h_ptr + row * h_stride + columns, h.to(h_ptr.dtype.element_ty), mask=columns < cols)


@triton.jit
def _backward_kernel(
    dh_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    h_ptr,
    cols,
    dh_stride,
    gate_stride,
    up_stride,
    dgate_stride,
    dup_stride,
    h_stride,
    gate_multiplier,
    down_multiplier,
    limit,
    up_offset,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NEED_GATE: tl.constexpr,
    NEED_UP: tl.constexpr,
    NEED_H: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes BLOCK columns of those of dgate, dup and h that are needed."""
    # dgate may be gate, dup may be up and h may be dh: every element is read before it is written.
    row, start = _row_and_start(cols, FLAT, BLOCK)
    columns = start + tl.arange(0, BLOCK)
    mask = columns < cols
    dh = tl.load(dh_ptr + row * dh_stride + columns, mask=mask, other=0.0).to(tl.float32) * down_multiplier
    gate, up = _load_pair(gate_ptr + row * gate_stride, up_ptr + row * up_stride, start, cols, INTERLEAVED, BLOCK)
    activation, derivative, factor, gate_passes, up_passes = gate_and_up(
        gate, up, gate_multiplier, limit, up_offset, CLAMP, ACTIVATION
    )
    dgate = dh * factor * derivative
    dup = dh * activation
    if CLAMP:
        dgate = tl.where(gate_passes, dgate, 0.0)
        dup = tl.where(up_passes, dup, 0.0)
    if NEED_H:
        h = rounded_product(activation, factor, down_multiplier, gate.dtype)
        tl.store(h_ptr + row * h_stride + columns, h.to(h_ptr.dtype.element_ty), mask=mask)
    dgate_row_ptr, dup_row_ptr = dgate_ptr + row * dgate_stride, dup_ptr + row * dup_stride
    if INTERLEAVED:
        both = tl.interleave(dgate, dup).to(dgate_ptr.dtype.element_ty)
        pairs = 2 * start + tl.arange(0, 2 * BLOCK)
        tl.store(dgate_row_ptr + pairs, both, mask=pairs < 2 * cols)
    else:
        if NEED_GATE:
            tl.store(dgate_row_ptr + columns, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
        if NEED_UP:
            tl.store(dup_row_ptr + columns, dup.to(dup_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _cast_kernel(
    gate_ptr,
    up_ptr,
    codes_ptr,
    scales_ptr,
    cols,
    gate_stride,
    up_stride,
    gate_multiplier,
    down_multiplier,
    limit,
    up_offset,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the codes and the scale of a row of h, which it holds in PARTS blocks of columns."""
    row = tl.program_id(0).to(tl.int64)
    gate_row_ptr, up_row_ptr, codes_row_ptr = (
        gate_ptr + row * gate_stride,
        up_ptr + row * up_stride,
        codes_ptr + row * cols,
    )
    block = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    parts = ()
    for part in tl.static_range(PARTS):
        gate, up = _load_pair(gate_row_ptr, up_row_ptr, part * BLOCK, cols, INTERLEAVED, BLOCK)
        activation, _, factor, _, _ = gate_and_up(gate, up, gate_multiplier, limit, up_offset, CLAMP, ACTIVATION)
        h = rounded_product(activation, factor, down_multiplier, gate.dtype).to(gate.dtype)
        largest = tl.maximum(largest, magnitude(h.to(tl.float32), part * BLOCK + block < cols))
        parts += (h,)  # type: ignore[assignment]
    greatest = tl.max(largest)
    for part in tl.static_range(PARTS):
        columns = part * BLOCK + block
        codes = codes_of(parts[part].to(tl.float32), greatest)
        tl.store(codes_row_ptr + columns, codes, mask=columns < cols)
    tl.store(scales_ptr + row, scale_of(greatest))


def launch_config(element_size: int) -> tuple[int, int]:
    """(elements per program, warps): 16 bytes per thread and tensor, so that loads are 128 bits wide."""
    return (1024, 4) if element_size == 2 else (512, 4)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """(rows, columns) with contiguous columns; a view wherever the strides allow one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def halves(gate: torch.Tensor, up: torch.Tensor | None, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up as the kernels take them; an interleaved projection is passed whole, twice."""
    if up is not None:
        return gate, up
    if interleaved:
        return gate, gate
    gate, up = gate.chunk(2, dim=-1)
    return gate, up


def _launch(
    kernel: Any,
    shape: torch.Size,
    tensors: list[torch.Tensor],
    form: GatedActivation,
    **constants: bool,
) -> None:
    """Launches `kernel`, whose arguments start with (rows, columns) `tensors`, the columns and the row strides."""
    rows, cols = shape
    flat = all(x.is_contiguous() for x in tensors)
    if flat:
        rows, cols = 1, rows * cols
    block, num_warps = launch_config(tensors[0].element_size())
    strides = [0 if flat else x.stride(0) for x in tensors]
    constants |= {"FLAT": flat, **form.constants}
    with on_device(tensors[0]):
        kernel[(rows * cdiv(cols, block),)](
            *tensors, cols, *strides, *form.scalars, BLOCK=block, num_warps=num_warps, **constants
        )


def launch_forward(gate: torch.Tensor, up: torch.Tensor | None, h: torch.Tensor, form: GatedActivation) -> None:
    """Writes `h`; without `up`, `gate` is a whole fused projection."""
    if not has_elements(h):
        return
    tensors = [rows_of(x) for x in (*halves(gate, up, form.interleaved), h)]
    _launch(_forward_kernel, tensors[2].shape, tensors, form)


_LONGEST_CAST = 28672
"""Columns that a program of the casting kernel holds; longer rows would spill too many registers."""


def cast_config(cols: int) -> dict[str, int]:
    """Constants and options of the casting kernel; `benchmarks/sweeps/sweep.py fp8_casts` measures them.

    In one block, rounded up to a power of two, a row of 10240 columns would be computed as one of 16384. The registers
    are limited so that other rows are loaded while one is cast: two to four programs share a multiprocessor.
    """
    block = min(2048 if cols <= 16384 else 4096, next_power_of_2(cols))
    registers = 80 if 10240 < cols <= 16384 else 64
    return {
        "PARTS": cdiv(cols, block),
        "BLOCK": block,
        "num_warps": max(1, block // 256),
        "maxnreg": registers,
    }


def cast_of_h(gate: torch.Tensor, up: torch.Tensor | None, form: GatedActivation) -> tuple[torch.Tensor, torch.Tensor]:
    """``h`` in fp8, without autograd; without `up`, `gate` is a whole fused projection.

    Returns:
        Codes, (M, K), and scales, (M, 1), as `cast_rows` makes them of h.
    """
    gate_rows, up_rows = (rows_of(x) for x in halves(gate, up, form.interleaved))
    cols = gate_rows.shape[1] // (2 if form.interleaved else 1)
    if cols > _LONGEST_CAST:
        h = empty_h(gate, up)
        launch_forward(gate, up, h, form)
        return cast_rows(rows_of(h))
    codes, scales = empty_cast(gate_rows[:, :cols])
    with on_device(gate):
        _cast_kernel[(len(codes),)](
            gate_rows,
            up_rows,
            codes,
            scales,
            cols,
            gate_rows.stride(0),
            up_rows.stride(0),
            *form.scalars,
            **form.constants,
            **cast_config(cols),
        )
    return codes, scales


def launch_backward(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    dgate: torch.Tensor | None,
    dup: torch.Tensor | None,
    h: torch.Tensor | None,
    form: GatedActivation,
) -> None:
    """Writes the results that are not None; without `up`, `gate` and `dgate` are whole fused projections."""
    if not has_elements(gate):
        return
    dh, written = rows_of(dh), [None if x is None else rows_of(x) for x in (dgate, dup, h)]
    results = written
    if up is None:
        assert written[0] is not None
        results = [*halves(written[0], None, form.interleaved), written[2]]
    needed = dict(zip(("NEED_GATE", "NEED_UP", "NEED_H"), (x is not None for x in results)))
    # The kernel does not write results that are None; dh only fills their places among its arguments.
    both = (rows_of(x) for x in halves(gate, up, form.interleaved))
    tensors = [dh, *both, *(dh if x is None else x for x in results)]
    _launch(_backward_kernel, dh.shape, tensors, form, **needed)
    for x, rows in zip((dgate, dup, h), written):
        if x is not None and rows is not None and rows.data_ptr() != x.data_ptr():  # rows that are not views
            x.copy_(rows.view(x.shape))


FUNCTIONS = "a gated activation (swiglu, geglu, clamped_swiglu)"


def empty_h(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """Uninitialised memory for h."""
    return gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2))


def empty(x: torch.Tensor | None, like: torch.Tensor, needed: bool) -> torch.Tensor:
    """Uninitialised memory for the gradient of `x`; no elements if it is not needed."""
    return like.new_empty(x.shape if needed and x is not None else (0,))


@operator("liger_trainer::gated_activation")
def gated_activation(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    form: GatedActivation,
    inplace_backward: bool,
) -> torch.Tensor:
    """``act(gate) * up`` as an operator. Call `swiglu`, `geglu` or `clamped_swiglu`, which check their arguments.

    Here and in the backward, `up` is None if `gate` is a whole fused projection, in halves or in interleaved columns.
    """
    h = empty_h(gate, up)
    launch_forward(gate, up, h, form)
    return h


@operator("liger_trainer::gated_activation_backward")
def gated_activation_backward(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    form: GatedActivation,
    need_gate: bool,
    need_up: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up, without elements where not needed."""
    dgate, dup = empty(gate, gate, need_gate), empty(up, gate, need_up)
    results = dgate if need_gate else None, dup if need_up else None, None
    launch_backward(dh, gate, up, *results, form)
    return dgate, dup


refuse_second_derivative(gated_activation_backward, FUNCTIONS)


@operator("liger_trainer::gated_activation_backward_", mutates=("dgate", "dup", "h"))
def gated_activation_backward_(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    dgate: torch.Tensor | None,
    dup: torch.Tensor | None,
    h: torch.Tensor | None,
    form: GatedActivation,
) -> None:
    """Writes those of the gradients and of h that are given; `dgate` may be `gate`, `dup` `up`, and `h` `dh`."""
    launch_backward(dh, gate, up, dgate, dup, h, form)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate, up, ctx.form, ctx.inplace_backward = inputs
    ctx.save_for_backward(gate, up)


def overwrites_saved(ctx: Any) -> bool:
    """Whether the running backward may write gradients over the saved tensors."""
    # Not if another backward may follow, nor if this one is itself recorded. A second backward that torch did not
    # announce fails in autograd's version check of saved tensors.
    return ctx.inplace_backward and not torch.is_grad_enabled() and not graph_is_kept()


def overwrites_gate_and_up(ctx: Any, up: torch.Tensor | None) -> bool:
    """Whether the running backward may write the gradients over gate and up, its first inputs, and both are needed."""
    need_gate, need_up = ctx.needs_input_grad[:2]
    return overwrites_saved(ctx) and need_gate and (need_up or up is None)


def _backward(ctx: Any, dh: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    if overwrites_gate_and_up(ctx, up):
        dgate, dup = gate.detach(), None if up is None else up.detach()
        gated_activation_backward_(dh, gate, up, dgate, dup, None, ctx.form)
        return input_gradients(ctx, dgate, dup)
    needed = ctx.needs_input_grad[:2]
    gradients = gated_activation_backward(dh, gate, up, ctx.form, *needed)
    return input_gradients(ctx, *where_needed(needed, *gradients))


gated_activation.register_autograd(_backward, setup_context=_setup_context)
