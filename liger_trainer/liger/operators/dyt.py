"""Dynamic tanh (DyT), a replacement for norms that needs no statistics.

Formula (Zhu et al. 2025, https://arxiv.org/abs/2503.10622), for an element x of column c:

    y = gamma_c * t + beta_c        t = tanh(alpha * x)

and, with s = 1 - t^2 and sums over all rows,

    dx = alpha * gamma_c * s * dy        dgamma_c = sum of t * dy        dbeta_c = sum of dy
    dalpha = sum over rows and columns of x * gamma_c * s * dy

Forward reads x and writes y (4 bytes per element in bf16); backward reads x and dy and writes dx (6 bytes). Saved for
backward: the inputs. tanh and s are computed from exp(-2 |alpha x|) without cancellation, and tanh near zero from its
power series. The gradients of the parameters are summed as in `rms_norm`, without atomics.

Shapes: x, y and their gradients (N, H); gamma and beta (H,); alpha (1,).
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.activation import tanh_and_derivative
from liger_trainer.kernels.autograd import differentiate_norm
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.rows import (
    NormConfig,
    as_rows,
    column_sum,
    empty_gradients,
    empty_in_order,
    memory_order,
)
from liger_trainer.kernels.runtime import (
    cdiv,
    check_all_dtensors,
    check_norm_arguments,
    has_elements,
    next_power_of_2,
    num_sms,
    on_device,
    reference_of,
    tl,
    triton,
    use_triton,
)

_BLOCK = 1024  # largest number of columns in a tile
_TILE = 2048  # elements in a tile


@triton.jit(do_not_specialize=["num_rows"])
def _dyt_forward_kernel(
    x_ptr,
    alpha_ptr,
    gamma_ptr,
    beta_ptr,
    y_ptr,
    x_stride,
    num_rows,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes one (ROWS, BLOCK) tile of y."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
    x = tl.load(x_ptr + (rows * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    y, _ = tanh_and_derivative(tl.load(alpha_ptr).to(tl.float32) * x)
    y *= tl.load(gamma_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    if beta_ptr is not None:
        y += tl.load(beta_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + (rows * H)[:, None] + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _dyt_backward_kernel(
    dy_ptr,
    x_ptr,
    alpha_ptr,
    gamma_ptr,
    dx_ptr,
    dalpha_ptr,
    dgamma_ptr,
    dbeta_ptr,
    dy_stride,
    x_stride,
    num_rows,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Writes dx of every num_programs-th tile of BLOCK columns, and this program's share of the parameters' sums."""
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    alpha = tl.load(alpha_ptr).to(tl.float32)
    gamma = tl.load(gamma_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    if dalpha_ptr is not None:
        dalpha = tl.zeros((ROWS, BLOCK), tl.float32)
    if dgamma_ptr is not None:
        dgamma = tl.zeros((ROWS, BLOCK), tl.float32)
    if dbeta_ptr is not None:
        dbeta = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=NUM_STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
        x = tl.load(x_ptr + (rows * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + (rows * dy_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        tanh, derivative = tanh_and_derivative(alpha * x)
        g = dy * gamma * derivative
        if dx_ptr is not None:
            tl.store(dx_ptr + (rows * H)[:, None] + cols[None, :], (alpha * g).to(dx_ptr.dtype.element_ty), mask=mask)
        if dalpha_ptr is not None:
            dalpha += x * g
        if dgamma_ptr is not None:
            dgamma += tanh * dy
        if dbeta_ptr is not None:
            dbeta += dy
    partial = tl.program_id(0) * H + cols
    if dalpha_ptr is not None:
        tl.store(dalpha_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(dalpha))
    if dgamma_ptr is not None:
        tl.store(dgamma_ptr + partial, tl.sum(dgamma, axis=0), mask=cols < H)
    if dbeta_ptr is not None:
        tl.store(dbeta_ptr + partial, tl.sum(dbeta, axis=0), mask=cols < H)


def launch_config(hidden_size: int) -> NormConfig:
    """Rows of a tile, warps, and for the backward kernel stages and persistent grid.

    16 elements per thread are two 16-byte loads of bf16, and leave registers for the three sums.
    """
    return NormConfig(rows=_TILE // _block(hidden_size), num_warps=4, num_stages=3, programs_per_sm=4)


def _block(hidden_size: int) -> int:
    return min(_BLOCK, next_power_of_2(hidden_size))


@operator("liger_trainer::dyt")
def _dyt(x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None) -> torch.Tensor:
    hidden_size, order = x.shape[-1], memory_order(x)
    y = empty_in_order(x, order, x.dtype)
    if not has_elements(x):
        return y
    rows, block, config = as_rows(x, order), _block(hidden_size), launch_config(hidden_size)
    with on_device(x):
        _dyt_forward_kernel[(cdiv(rows.shape[0], config.rows), cdiv(hidden_size, block))](
            rows,
            alpha,
            gamma.contiguous(),
            beta if beta is None else beta.contiguous(),
            y,
            rows.stride(0),
            rows.shape[0],
            H=hidden_size,
            ROWS=config.rows,
            BLOCK=block,
            num_warps=config.num_warps,
        )
    return y


@operator("liger_trainer::dyt_backward")
def _dyt_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    alpha: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dalpha, dgamma, dbeta = empty_gradients(needed, x, alpha, gamma, beta)
    if not has_elements(x):
        return dx, dalpha.zero_(), dgamma.zero_(), dbeta.zero_()
    hidden_size, order = x.shape[-1], memory_order(x)
    rows, dy_rows = as_rows(x, order), as_rows(dy, order)
    block, config = _block(hidden_size), launch_config(hidden_size)
    columns = cdiv(hidden_size, block)
    programs = cdiv(num_sms(x.device) * config.programs_per_sm, columns)
    programs = min(programs, cdiv(rows.shape[0], config.rows))
    sums = [tensor for tensor in (dgamma, dbeta) if tensor.numel()]
    partial = x.new_empty(len(sums), programs, hidden_size, dtype=torch.float32)
    alpha_partial = x.new_empty(1, programs * columns, 1, dtype=torch.float32) if needed[1] else None
    with on_device(x):
        _dyt_backward_kernel[(programs, columns)](
            dy_rows,
            rows,
            alpha,
            gamma.contiguous(),
            dx if needed[0] else None,
            alpha_partial,
            partial[0] if needed[2] else None,
            partial[-1] if dbeta.numel() else None,
            dy_rows.stride(0),
            rows.stride(0),
            rows.shape[0],
            H=hidden_size,
            ROWS=config.rows,
            BLOCK=block,
            NUM_STAGES=config.num_stages,
            num_warps=config.num_warps,
        )
        if sums:
            column_sum(partial, *sums)
        if alpha_partial is not None:
            column_sum(alpha_partial, dalpha)
    return dx, dalpha, dgamma, dbeta


differentiate_norm(_dyt, _dyt_backward, "dyt", (0, 1, 2, 3))


def dyt(x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None) -> torch.Tensor:
    """Dynamic tanh: `tanh(alpha * x) * gamma + beta`, computed in fp32 and rounded once.

    The result has the memory layout of `x` (permuted leading dimensions stay permuted, gaps are closed).

    Args:
        x: Input of shape (..., hidden_size) and any floating dtype.
        alpha: One number, of shape () or (1,), on the device of `x`, where the kernel reads it.
        gamma: Weight of shape (hidden_size,). The dtypes of alpha, gamma and beta may differ from that of `x`.
        beta: Bias of shape (hidden_size,), or None (default) for 0.

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        ValueError: If `alpha` is not one floating point number on the device of `x`, `gamma` or `beta` does not fit
            `x` in shape or device, a dtype is not floating point, or `x` has no last dimension of at least 1.
    """
    check_norm_arguments("dyt", x, gamma=gamma, beta=beta)
    check_all_dtensors("dyt", x, alpha=alpha)
    if alpha.numel() != 1 or not alpha.is_floating_point() or alpha.device != x.device:
        raise ValueError(
            f"`alpha` of dyt has shape {tuple(alpha.shape)}, dtype {alpha.dtype} and is on {alpha.device}; give one "
            f"floating point number, of shape (1,), on {x.device}, where `x` is."
        )
    if use_triton(x) and use_triton(alpha) and use_triton(gamma) and (beta is None or use_triton(beta)):
        return _dyt(x, alpha, gamma, beta)
    compute = torch.promote_types(x.dtype, torch.float32)
    y = torch.tanh(alpha.to(compute).reshape(()) * x.to(compute)) * gamma.to(compute)
    return (y if beta is None else y + beta.to(compute)).to(x.dtype)


dyt_reference = reference_of(dyt, "use_triton")
