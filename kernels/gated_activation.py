"""The elementwise kernels and operators under SwiGLU and GeGLU: ``h = act(gate) * up``.

With ``g`` the gate, ``u`` the up projection and ``dh`` the gradient of ``h``::

    h  = round(act(g)) * u            dg = dh * u * act'(g)            du = dh * act(g)

    silu:       act(g) = g * s(g)         act'(g) = s + g * s * (1 - s),                        s the logistic sigmoid
    gelu_tanh:  act(g) = g * s(2z)        act'(g) = s + g * s * (1 - s) * 2 dz/dg,              s = s(2z)
                                          z = sqrt(2/pi) * (g + 0.044715 g^3);  0.5 * (1 + tanh z) = s(2z)
    gelu:       act(g) = g * Phi(g)       act'(g) = Phi + g * phi(g),                           of the standard normal

The forward rounds the activation to the inputs' dtype before the product, as a model that calls its activation on its
own does, so that the result is the model's, bit for bit but for the last place of exp and erf.

Bytes moved: forward 3 elements (two read, one written), backward 5 (three read, two written). Saved for backward: gate
and up; the activation is computed again. Tensors that are contiguous are walked as one flat array; halves of a fused
projection, by row, and their gradient is written into the two halves of one tensor, so that nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels.runtime import graph_is_kept, is_expanded, on_device, tl, triton, use_triton

# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def _activation_and_derivative(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        denominator = 1.0 + tl.exp(-x)
        sigmoid = 1.0 / denominator
        activation = x / denominator
        derivative = sigmoid + x * (sigmoid * (1.0 - sigmoid))
    elif ACTIVATION == "gelu_tanh":
        two_z = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)  # 2 * sqrt(2 / pi)
        sigmoid = 1.0 / (1.0 + tl.exp(-two_z))
        activation = x * sigmoid
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        derivative = sigmoid + x * (sigmoid * (1.0 - sigmoid)) * slope
    else:
        tl.static_assert(ACTIVATION == "gelu")
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)  # 1 / sqrt(2 pi)
        activation = x * cdf
        derivative = cdf + x * density
    return activation, derivative


@triton.jit
def _row_and_columns(cols, FLAT: tl.constexpr, BLOCK: tl.constexpr):
    """The row (0 where everything is one flat array) and the columns of this program, in 64 bits."""
    row = 0
    block = tl.program_id(0)
    if not FLAT:
        blocks_per_row = tl.cdiv(cols, BLOCK)
        row = (block // blocks_per_row).to(tl.int64)
        block = block % blocks_per_row
    return row, block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _forward_kernel(
    gate_ptr,
    up_ptr,
    h_ptr,
    cols,
    gate_stride,
    up_stride,
    h_stride,
    ACTIVATION: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, columns = _row_and_columns(cols, FLAT, BLOCK)
    mask = columns < cols
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    activation, _ = _activation_and_derivative(gate.to(tl.float32), ACTIVATION)
    h = activation.to(gate.dtype).to(tl.float32) * up
    tl.store(h_ptr + row * h_stride + columns, h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dh_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    cols,
    dh_stride,
    gate_stride,
    up_stride,
    dgate_stride,
    dup_stride,
    ACTIVATION: tl.constexpr,
    NEED_GATE: tl.constexpr,
    NEED_UP: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # dgate may be gate and dup may be up: every element is read before it is written, by the same thread.
    row, columns = _row_and_columns(cols, FLAT, BLOCK)
    mask = columns < cols
    dh = tl.load(dh_ptr + row * dh_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if NEED_GATE:
        up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    activation, derivative = _activation_and_derivative(gate, ACTIVATION)
    if NEED_GATE:
        dgate = dh * up * derivative
        tl.store(dgate_ptr + row * dgate_stride + columns, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if NEED_UP:
        dup = dh * activation
        tl.store(dup_ptr + row * dup_stride + columns, dup.to(dup_ptr.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------------------------------------------------------------
# Launcher
# ---------------------------------------------------------------------------------------------------------------------


def _launch_config(element_size: int) -> tuple[int, int]:
    """(elements a program, warps): 16 bytes a thread and tensor, for 128-bit loads with many in flight."""
    return (1024, 4) if element_size == 2 else (512, 4)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(rows, columns) with contiguous columns; a view wherever the strides allow one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(kernel: Any, tensors: list[torch.Tensor], config: tuple[int, int], **constants: Any) -> None:
    """Launches on (rows, columns) tensors, which the kernel takes first, followed by columns and row strides."""
    rows, cols = tensors[0].shape
    if rows * cols == 0:
        return
    flat = all(x.is_contiguous() for x in tensors)
    if flat:
        rows, cols = 1, rows * cols
    block, num_warps = config
    strides = [0 if flat else x.stride(0) for x in tensors]
    with on_device(tensors[0]):
        kernel[(rows * triton.cdiv(cols, block),)](
            *tensors, cols, *strides, FLAT=flat, BLOCK=block, num_warps=num_warps, **constants
        )


def _launch_forward(gate: torch.Tensor, up: torch.Tensor, h: torch.Tensor, activation: str) -> None:
    tensors = [_rows(x) for x in (gate, up, h)]
    _launch(_forward_kernel, tensors, _launch_config(gate.element_size()), ACTIVATION=activation)


def _launch_backward(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    dgate: torch.Tensor | None,
    dup: torch.Tensor | None,
    activation: str,
) -> None:
    dh, gate, up = (_rows(x) for x in (dh, gate, up))
    # A gradient nobody needs is not written; any tensor stands in for it.
    tensors = [dh, gate, up, dh if dgate is None else _rows(dgate), dh if dup is None else _rows(dup)]
    needed = {"NEED_GATE": dgate is not None, "NEED_UP": dup is not None}
    _launch(_backward_kernel, tensors, _launch_config(gate.element_size()), ACTIVATION=activation, **needed)


# ---------------------------------------------------------------------------------------------------------------------
# Operators
# ---------------------------------------------------------------------------------------------------------------------


def _empty(x: torch.Tensor, needed: bool = True) -> torch.Tensor:
    return x.new_empty(x.shape if needed else (0,))


@torch.library.custom_op("liger_trainer::gated_activation", mutates_args=())
def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str, inplace_backward: bool) -> torch.Tensor:
    """``act(gate) * up`` as an operator; call [`swiglu`] or [`geglu`], which check their inputs."""
    h = _empty(gate)
    if h.numel():
        _launch_forward(gate, up, h, activation)
    return h


@gated_activation.register_fake
def _(gate, up, activation, inplace_backward):
    return _empty(gate)


@torch.library.custom_op("liger_trainer::gated_activation_backward", mutates_args=())
def _gated_activation_backward(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str, need_gate: bool, need_up: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dgate, dup = _empty(gate, need_gate), _empty(up, need_up)
    if gate.numel():
        _launch_backward(dh, gate, up, dgate if need_gate else None, dup if need_up else None, activation)
    return dgate, dup


@_gated_activation_backward.register_fake
def _(dh, gate, up, activation, need_gate, need_up):
    return _empty(gate, need_gate), _empty(up, need_up)


@torch.library.custom_op("liger_trainer::gated_activation_backward_", mutates_args=("gate", "up"))
def _gated_activation_backward_(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    """Overwrites gate and up with their gradients."""
    if gate.numel() == 0:
        return
    dgate, dup = _rows(gate), _rows(up)
    _launch_backward(dh, dgate, dup, dgate, dup, activation)
    for x, gradient in ((gate, dgate), (up, dup)):
        if gradient.data_ptr() != x.data_ptr():  # strides that gave no view of the rows
            x.copy_(gradient.view(x.shape))


@_gated_activation_backward_.register_fake
def _(dh, gate, up, activation):
    return None


@torch.library.custom_op("liger_trainer::gated_activation_fused", mutates_args=())
def gated_activation_fused(gate_up: torch.Tensor, activation: str, inplace_backward: bool) -> torch.Tensor:
    """``act(gate) * up`` of ``gate_up = [gate, up]``; call [`swiglu_fused`] or [`geglu_fused`]."""
    gate, up = gate_up.chunk(2, dim=-1)
    h = _empty(gate)
    if h.numel():
        _launch_forward(gate, up, h, activation)
    return h


@gated_activation_fused.register_fake
def _(gate_up, activation, inplace_backward):
    return _empty(gate_up.chunk(2, dim=-1)[0])


@torch.library.custom_op("liger_trainer::gated_activation_fused_backward", mutates_args=())
def _gated_activation_fused_backward(dh: torch.Tensor, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gradient = _empty(gate_up)
    if gradient.numel():
        (gate, up), (dgate, dup) = gate_up.chunk(2, dim=-1), gradient.chunk(2, dim=-1)
        _launch_backward(dh, gate, up, dgate, dup, activation)
    return gradient


@_gated_activation_fused_backward.register_fake
def _(dh, gate_up, activation):
    return _empty(gate_up)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, activation, inplace_backward = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.activation, ctx.inplace_backward = activation, inplace_backward


def _overwrites_saved(ctx: Any) -> bool:
    # Not while another backward may follow, nor in one that is itself recorded. A second backward that could not be
    # foreseen would fail in autograd's own check of saved tensors.
    return ctx.inplace_backward and not torch.is_grad_enabled() and not graph_is_kept()


def _backward(ctx: Any, dh: torch.Tensor | None) -> tuple[Any, ...]:
    need_gate, need_up = ctx.needs_input_grad[:2]
    if dh is None:
        return None, None, None, None
    gate, up = ctx.saved_tensors
    if _overwrites_saved(ctx) and need_gate and need_up:
        dgate, dup = gate.detach(), up.detach()
        _gated_activation_backward_(dh, dgate, dup, ctx.activation)
    else:
        dgate, dup = _gated_activation_backward(dh, gate, up, ctx.activation, need_gate, need_up)
    return dgate if need_gate else None, dup if need_up else None, None, None


def _fused_backward(ctx: Any, dh: torch.Tensor | None) -> tuple[Any, ...]:
    if dh is None:
        return None, None, None
    (gate_up,) = ctx.saved_tensors
    if _overwrites_saved(ctx):
        gradient = gate_up.detach()
        _gated_activation_backward_(dh, *gradient.chunk(2, dim=-1), ctx.activation)
    else:
        gradient = _gated_activation_fused_backward(dh, gate_up, ctx.activation)
    return gradient, None, None


gated_activation.register_autograd(_backward, setup_context=_setup_context)
gated_activation_fused.register_autograd(_fused_backward, setup_context=_setup_context)


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------


def _has_memory_of_its_own(gate: torch.Tensor, up: torch.Tensor) -> bool:
    if is_expanded(gate) or is_expanded(up):
        return False
    # A compiled graph gives every mutated tensor memory of its own, and cannot ask for storages.
    return torch.compiler.is_compiling() or gate.untyped_storage()._cdata != up.untyped_storage()._cdata


def kernel_takes(gate: torch.Tensor, up: torch.Tensor, inplace_backward: bool) -> bool:
    """Checks the inputs of a gated activation; whether its kernel takes them, or its reference must.

    Raises:
        ValueError: if shapes or devices differ, or the backward is to overwrite memory that two elements share.
    """
    if gate.shape != up.shape or gate.dim() == 0:
        raise ValueError(
            f"`gate` is {tuple(gate.shape)} and `up` is {tuple(up.shape)}; they must have one shape, "
            "(..., intermediate)."
        )
    if gate.device != up.device:
        raise ValueError(f"`gate` is on {gate.device} and `up` on {up.device}; they must be on one device.")
    if inplace_backward and not _has_memory_of_its_own(gate, up):
        raise ValueError(
            "`inplace_backward=True` writes gradients over `gate` and `up`, but they share memory or are expanded; "
            "give each its own, pass a fused projection to the fused function, or leave `inplace_backward` off."
        )
    return use_triton(gate) and gate.dtype == up.dtype


def fused_kernel_takes(gate_up: torch.Tensor) -> bool:
    """Checks the input of a fused gated activation; whether its kernel takes it, or its reference must.

    Raises:
        ValueError: if the last dimension cannot be halved.
    """
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"`gate_up` is {tuple(gate_up.shape)}; its last dimension must be twice the intermediate size, "
            "gate first, then up."
        )
    return use_triton(gate_up)
