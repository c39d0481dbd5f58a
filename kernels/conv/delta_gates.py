"""The gates of a gated delta rule, one of each a head.

    g = -exp(A_log) * softplus(a + dt_bias)        beta = beta_scale * sigmoid(b)

and, with s the sigmoid of a + dt_bias,

    da = -dg * exp(A_log) * s        dt_bias: the sum of da        A_log: the sum of dg * g
    db = dbeta * beta_scale * sigmoid(b) * (1 - sigmoid(b))

Forward reads a and b and writes g and beta (10 bytes per gate in bf16); backward reads a, b, dg and dbeta and writes
da and db (14 bytes). Saved for backward: the arguments. The gradients of A_log and dt_bias are fp32 rows, one of each
program, added up in a fixed order after that.

Shapes: a, b (batch, tokens, heads); A_log, dt_bias (heads,).
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative, where_needed
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.rows import as_rows, column_sum
from liger_trainer.kernels.runtime import (
    cdiv,
    check_all_dtensors,
    has_elements,
    next_power_of_2,
    num_sms,
    on_device,
    reference_of,
    tl,
    triton,
    use_triton,
)

_TILE = 2048
"""Numbers of a tile."""


@triton.jit
def _softplus(z):
    """log(1 + exp(z)), exact for small exp(z) too; z itself above 20, as in torch."""
    exponential = tl.exp(z)
    shifted = 1.0 + exponential  # rounded, which the quotient corrects
    logarithm = tl.where(shifted == 1.0, exponential, tl.log(shifted) * (exponential / (shifted - 1.0)))
    return tl.where(z > 20.0, z, logarithm)


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit(do_not_specialize=["num_rows"])
def _delta_gates_forward_kernel(
    a_ptr,
    b_ptr,
    rate_ptr,
    bias_ptr,
    g_ptr,
    beta_ptr,
    a_stride,
    b_stride,
    num_rows,
    scale,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gates of ROWS tokens."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
    rate = tl.exp(tl.load(rate_ptr + cols, mask=cols < H, other=0.0).to(tl.float32))[None, :]
    bias = tl.load(bias_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    a = tl.load(a_ptr + (rows * a_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + (rows * b_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    out = (rows * H)[:, None] + cols[None, :]
    tl.store(g_ptr + out, -rate * _softplus(a + bias), mask=mask)
    tl.store(beta_ptr + out, (scale * _sigmoid(b)).to(beta_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _delta_gates_backward_kernel(
    dg_ptr,
    dbeta_ptr,
    a_ptr,
    b_ptr,
    rate_ptr,
    bias_ptr,
    da_ptr,
    db_ptr,
    partial_ptr,
    dg_stride,
    dbeta_stride,
    a_stride,
    b_stride,
    num_rows,
    scale,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes da and db of every num_programs-th tile of ROWS tokens, and a share of the parameters' gradients."""
    cols = tl.arange(0, BLOCK)
    rate = tl.exp(tl.load(rate_ptr + cols, mask=cols < H, other=0.0).to(tl.float32))[None, :]
    bias = tl.load(bias_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    of_rate = tl.zeros((ROWS, BLOCK), tl.float32)
    of_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
        out = (rows * H)[:, None] + cols[None, :]
        a = tl.load(a_ptr + (rows * a_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dg = tl.load(dg_ptr + (rows * dg_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        z = a + bias
        da = -dg * rate * _sigmoid(z)
        tl.store(da_ptr + out, da.to(da_ptr.dtype.element_ty), mask=mask)
        of_rate -= dg * rate * _softplus(z)
        of_bias += da
        b = tl.load(b_ptr + (rows * b_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dbeta = tl.load(dbeta_ptr + (rows * dbeta_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
        sigmoid = _sigmoid(b)
        db = dbeta.to(tl.float32) * scale * sigmoid * (1.0 - sigmoid)
        tl.store(db_ptr + out, db.to(db_ptr.dtype.element_ty), mask=mask)
    share = partial_ptr + tl.program_id(0) * H + cols
    tl.store(share, tl.sum(of_rate, axis=0), mask=cols < H)
    tl.store(share + tl.num_programs(0) * H, tl.sum(of_bias, axis=0), mask=cols < H)


def _tile(heads: int) -> dict[str, int]:
    block = next_power_of_2(heads)
    return {"H": heads, "ROWS": max(1, _TILE // block), "BLOCK": block, "num_warps": 4}


@operator("liger_trainer::delta_gates")
def _delta_gates(
    a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    g, beta = a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape)
    if has_elements(a):
        a_rows, b_rows, options = as_rows(a, None), as_rows(b, None), _tile(a.shape[-1])
        with on_device(a):
            _delta_gates_forward_kernel[(cdiv(len(a_rows), options["ROWS"]),)](
                a_rows,
                b_rows,
                rate.contiguous(),
                bias.contiguous(),
                g,
                beta,
                a_rows.stride(0),
                b_rows.stride(0),
                len(a_rows),
                scale,
                **options,
            )
    return g, beta


@operator("liger_trainer::delta_gates_backward")
def _delta_gates_backward(
    dg: torch.Tensor,
    dbeta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    da, db = a.new_empty(a.shape), b.new_empty(b.shape)
    if not has_elements(a):
        return da, db, rate.new_zeros(rate.shape), bias.new_zeros(bias.shape)
    drate, dbias = rate.new_empty(rate.shape), bias.new_empty(bias.shape)
    dg_rows, dbeta_rows, a_rows, b_rows = (as_rows(each, None) for each in (dg, dbeta, a, b))
    options = _tile(a.shape[-1])
    programs = min(cdiv(len(a_rows), options["ROWS"]), num_sms(a.device))
    partial = a.new_empty(2, programs, a.shape[-1], dtype=torch.float32)
    with on_device(a):
        _delta_gates_backward_kernel[(programs,)](
            dg_rows,
            dbeta_rows,
            a_rows,
            b_rows,
            rate.contiguous(),
            bias.contiguous(),
            da,
            db,
            partial,
            dg_rows.stride(0),
            dbeta_rows.stride(0),
            a_rows.stride(0),
            b_rows.stride(0),
            len(a_rows),
            scale,
            **options,
        )
        column_sum(partial, drate, dbias)
    return da, db, drate, dbias


refuse_second_derivative(_delta_gates_backward, "delta_gates")


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dg, dbeta):
    gradients = _delta_gates_backward(dg, dbeta, *ctx.saved_tensors, ctx.scale)
    return input_gradients(ctx, *where_needed(ctx.needs_input_grad[:4], *gradients))


_delta_gates.register_autograd(_backward, setup_context=_setup_context, materialize_grads=True)


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, *, beta_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gates of a gated delta rule: its log-decays g and its step sizes beta.

    Args:
        a: The decays' projection of shape (batch, tokens, heads) and any floating dtype and strides.
        b: The step sizes' projection of the shape of `a`. Its dtype may differ.
        A_log: Logarithms of the rates of shape (heads,).
        dt_bias: Bias of `a` of shape (heads,).
        beta_scale: The factor of the sigmoid of `b`; 2.0 for a delta rule that may turn its state's sign.

    Returns:
        ``-exp(A_log) * softplus(a + dt_bias)`` in fp32, and ``beta_scale * sigmoid(b)`` in the dtype of `b`, both
        contiguous and of the shape of `a`.

    Raises:
        ValueError: If a shape, dtype or device does not fit `a`.
    """
    if _check_arguments(a, b, A_log, dt_bias):
        return _delta_gates(a, b, A_log, dt_bias, beta_scale)
    compute = torch.promote_types(a.dtype, torch.float32)
    g = -A_log.to(compute).exp() * torch.nn.functional.softplus(a.to(compute) + dt_bias.to(compute))
    return g.contiguous(), (b.sigmoid() * beta_scale).contiguous()


def _check_arguments(a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> bool:
    """Checks the arguments of `delta_gates`; whether it runs as a Triton kernel."""
    if a.dim() != 3:
        raise ValueError(f"`a` of delta_gates has shape {tuple(a.shape)}; give (batch, tokens, heads).")
    check_all_dtensors("delta_gates", a, b=b, A_log=A_log, dt_bias=dt_bias)
    for argument, given, shape in (
        ("a", a, a.shape),
        ("b", b, a.shape),
        ("A_log", A_log, a.shape[-1:]),
        ("dt_bias", dt_bias, a.shape[-1:]),
    ):
        if given.shape != shape or not given.is_floating_point() or given.device != a.device:
            raise ValueError(
                f"`{argument}` of delta_gates has shape {tuple(given.shape)}, dtype {given.dtype} and is on "
                f"{given.device}; give a floating point tensor of shape {tuple(shape)} on {a.device}."
            )
    return all(map(use_triton, (a, b, A_log, dt_bias)))


delta_gates_reference = reference_of(delta_gates, "_check_arguments")
