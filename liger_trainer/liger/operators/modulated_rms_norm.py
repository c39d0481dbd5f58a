"""RMSNorm, then a scale and a shift that depend on the sample: the adaptive norm (adaLN) of diffusion transformers.

    y = rms_norm(x, weight) * (1 + scale) + shift

(Peebles and Xie 2022, https://arxiv.org/abs/2212.09748, with RMSNorm for LayerNorm). `scale` and `shift` have a row for
each sample, one for all, or one for each token. A group is a run of tokens with the same row. With
w = offset + weight and m = 1 + scale, the backward is

    g = dy * m * w        dx = rstd * (g - x_hat * mean(g * x_hat))
    dscale = w * P        dshift = D        dweight = sum over groups of m * P
    P = sum over the rows of the group of dy * x_hat        D = the same sum of dy

so two column sums per group give three gradients. Programs of the persistent grid share the rows of one group or, where
there are many groups, take several groups each. Where each token has its own row, the kernel treats all rows as one
group and reads scale along with x; the gradient of shift is then dy itself.

Forward reads x and writes y (4 bytes per element in bf16, plus 2 for each of scale and shift where every token has its
own); backward reads x and dy and writes dx (6 bytes; 10 with a scale for every token, which is read and its gradient
written). Saved for backward: x, weight, scale and rstd (fp32, one per row). Partial sums are taken in fp32 registers
and added by a second, small kernel, without atomics.

Shapes: x and y (batch, tokens, H); weight (H,); scale and shift (batch, 1 or tokens, H).
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import refuse_second_derivative, where_needed
from liger_trainer.kernels.norms.layer_norm import backward_config
from liger_trainer.kernels.norms.rms_norm import CASTINGS, load_scale, normalise, rms_norm_reference, unknown_casting
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.rows import (
    as_row_values,
    as_rows,
    column_sum,
    fit_config,
    forward_tiles,
)
from liger_trainer.kernels.runtime import (
    cdiv,
    check_all_dtensors,
    check_norm_arguments,
    has_elements,
    num_sms,
    on_device,
    reference_of,
    tl,
    triton,
    use_triton,
)


@triton.jit(do_not_specialize=["num_rows", "rows_per_group"])
def _modulated_rms_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    scale_stride,
    shift_stride,
    num_rows,
    rows_per_group,
    eps,
    offset,
    H: tl.constexpr,
    CASTING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Normalises and modulates ROWS rows."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    groups = rows // rows_per_group
    cols = tl.arange(0, BLOCK_H)
    mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
    x = tl.load(x_ptr + (rows * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + (groups * scale_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
    y, rstd = normalise(x, eps, dtype, H, CASTING)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    if weight_ptr is not None:
        y *= load_scale(weight_ptr, cols, offset, H, CASTING)
        if CASTING == "gemma" or CASTING == "olmo2" or weight_ptr.dtype.element_ty == dtype:
            y = y.to(dtype).to(tl.float32)  # rms_norm rounds its result so
    else:
        y = y.to(dtype).to(tl.float32)
    y *= 1.0 + scale.to(tl.float32)
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + (groups * shift_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
        y += shift.to(tl.float32)
    tl.store(y_ptr + (rows * H)[:, None] + cols[None, :], y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_groups", "rows_per_group", "splits"])
def _modulated_rms_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    dscale_ptr,
    dshift_ptr,
    dy_stride,
    x_stride,
    scale_stride,
    num_groups,
    rows_per_group,
    splits,
    offset,
    H: tl.constexpr,
    CASTING: tl.constexpr,
    PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Computes dx, and sums for the gradients of weight, scale and shift, of a share of the rows."""
    # When a row is short, summing the rows of a tile crosses warps, so that sum waits until the end.
    SUM_LATE: tl.constexpr = ROWS == 1 or BLOCK_H <= 1024
    SUM_ROWS: tl.constexpr = ROWS if SUM_LATE else 1
    cols = tl.arange(0, BLOCK_H)
    split = tl.program_id(0) % splits
    if dweight_ptr is not None:
        dweight = tl.zeros((SUM_ROWS if PER_ROW else 1, BLOCK_H), tl.float32)
    first_group = tl.program_id(0).to(tl.int64) // splits  # int64, and with it the offsets of groups
    for group in range(first_group, num_groups, tl.num_programs(0) // splits):
        if PER_ROW:
            if weight_ptr is not None:
                weight = load_scale(weight_ptr, cols, offset, H, CASTING)
        else:
            group_scale = scale_ptr + group * scale_stride + cols
            factor = 1.0 + tl.load(group_scale, mask=cols < H, other=0.0).to(tl.float32)[None, :]
            if weight_ptr is not None:
                factor *= load_scale(weight_ptr, cols, offset, H, CASTING)
            product_sum = tl.zeros((SUM_ROWS, BLOCK_H), tl.float32)
            dy_sum = tl.zeros((SUM_ROWS, BLOCK_H), tl.float32)
        for tile in tl.range(split, tl.cdiv(rows_per_group, ROWS), splits, num_stages=NUM_STAGES):
            local = tile * ROWS + tl.arange(0, ROWS)
            rows = group * rows_per_group + local
            mask = (local < rows_per_group)[:, None] & (cols < H)[None, :]
            out = (rows * H)[:, None] + cols[None, :]
            x = tl.load(x_ptr + (rows * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
            dy = tl.load(dy_ptr + (rows * dy_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            rstd = tl.load(rstd_ptr + rows, mask=local < rows_per_group, other=0.0)[:, None]
            x_hat = x.to(tl.float32) * rstd
            if PER_ROW:
                if dscale_ptr is not None:
                    dscale = dy * x_hat
                    if weight_ptr is not None:
                        dscale *= weight
                    tl.store(dscale_ptr + out, dscale.to(dscale_ptr.dtype.element_ty), mask=mask)
                scale = tl.load(scale_ptr + (rows * scale_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
                dnorm = dy * (1.0 + scale.to(tl.float32))
                if dweight_ptr is not None:
                    if SUM_LATE:
                        dweight += dnorm * x_hat
                    else:
                        dweight += tl.sum(dnorm * x_hat, axis=0)[None, :]
                g = dnorm
                if weight_ptr is not None:
                    g = dnorm * weight
            else:
                g = dy * factor
                if dweight_ptr is not None or dscale_ptr is not None:
                    if SUM_LATE:
                        product_sum += dy * x_hat
                    else:
                        product_sum += tl.sum(dy * x_hat, axis=0)[None, :]
                if dshift_ptr is not None:
                    if SUM_LATE:
                        dy_sum += dy
                    else:
                        dy_sum += tl.sum(dy, axis=0)[None, :]
            if dx_ptr is not None:
                dx = rstd * (g - x_hat * (tl.sum(g * x_hat, axis=1)[:, None] * (1.0 / H)))
                tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if not PER_ROW:
            out = (group * splits + split) * H + cols[None, :]
            product = tl.sum(product_sum, axis=0)[None, :]
            if dscale_ptr is not None:
                dscale = product
                if weight_ptr is not None:  # read again rather than held in registers through the loop
                    dscale = product * load_scale(weight_ptr, cols, offset, H, CASTING)
                tl.store(dscale_ptr + out, dscale.to(dscale_ptr.dtype.element_ty), mask=(cols < H)[None, :])
            if dshift_ptr is not None:
                dshift = tl.sum(dy_sum, axis=0)[None, :]
                tl.store(dshift_ptr + out, dshift.to(dshift_ptr.dtype.element_ty), mask=(cols < H)[None, :])
            if dweight_ptr is not None:
                dweight += product * (1.0 + tl.load(group_scale, mask=cols < H, other=0.0).to(tl.float32)[None, :])
    if dweight_ptr is not None:
        tl.store(dweight_ptr + tl.program_id(0) * H + cols, tl.sum(dweight, axis=0), mask=cols < H)


@operator("liger_trainer::modulated_rms_norm")
def _modulated_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    offset: float,
    casting: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if not has_elements(x):
        return y, rstd
    rows, scale_rows = as_rows(x, None), as_rows(scale, None)
    shift_rows = None if shift is None else as_rows(shift, None)
    programs, options = forward_tiles(rows)
    with on_device(x):
        _modulated_rms_norm_forward_kernel[(programs,)](
            rows,
            weight if weight is None else weight.contiguous(),
            scale_rows,
            shift_rows,
            y,
            rstd,
            rows.stride(0),
            scale_rows.stride(0),
            0 if shift_rows is None else shift_rows.stride(0),
            rows.shape[0],
            rows.shape[0] // scale_rows.shape[0],
            eps,
            offset,
            CASTING=casting,
            **options,
        )
    return y, rstd


@operator("liger_trainer::modulated_rms_norm_backward")
def _modulated_rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    casting: str,
    needed: list[bool],
    shift_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients = (
        x.new_empty(x.shape if needed[0] else 0),
        x.new_empty(0) if weight is None or not needed[1] else weight.new_empty(weight.shape),
        scale.new_empty(scale.shape if needed[2] else 0),
        x.new_empty(0) if shift_dtype is None else x.new_empty(scale.shape, dtype=shift_dtype),
    )
    if not has_elements(x):
        for gradient in gradients:
            gradient.zero_()
        return gradients
    dx, dweight, dscale, dshift = (gradient if gradient.numel() else None for gradient in gradients)
    hidden_size = x.shape[-1]
    rows, dy_rows, scale_rows = (as_rows(tensor, None) for tensor in (x, dy, scale))
    per_row = scale_rows.shape[0] == rows.shape[0]
    streams = (rows, dy_rows, scale_rows) if per_row else (rows, dy_rows)
    bytes_per_column = sum(tensor.element_size() for tensor in streams)
    config = fit_config(backward_config(hidden_size), hidden_size, bytes_per_column, x.device)

    num_groups = 1 if per_row else scale_rows.shape[0]
    rows_per_group = rows.shape[0] // num_groups
    programs = num_sms(x.device) * config.programs_per_sm
    splits = max(1, min(programs // num_groups, cdiv(rows_per_group, config.rows)))
    programs = splits * min(num_groups, programs)
    sums = [] if per_row or splits == 1 else [tensor for tensor in (dscale, dshift) if tensor is not None]
    partial = x.new_empty(len(sums), num_groups, splits, hidden_size, dtype=torch.float32)
    dweight_partial = None if dweight is None else x.new_empty(1, programs, hidden_size, dtype=torch.float32)
    with on_device(x):
        _modulated_rms_norm_backward_kernel[(programs,)](
            dy_rows,
            rows,
            weight if weight is None else weight.contiguous(),
            scale_rows,
            as_row_values(rstd, None),
            dx,
            dweight_partial,
            partial[0] if sums and dscale is not None else dscale,
            partial[-1] if sums and dshift is not None else dshift,
            dy_rows.stride(0),
            rows.stride(0),
            scale_rows.stride(0),
            num_groups,
            rows_per_group,
            splits,
            offset,
            CASTING=casting,
            PER_ROW=per_row,
            NUM_STAGES=config.num_stages,
            **config.options(hidden_size),
        )
        if sums:
            column_sum(partial, *sums)
        if dweight is not None and dweight_partial is not None:
            column_sum(dweight_partial, dweight)
    return gradients


refuse_second_derivative(_modulated_rms_norm_backward, "modulated_rms_norm")


def _setup_context(ctx, inputs, output):
    x, weight, scale, shift, _, ctx.offset, ctx.casting = inputs
    ctx.shift_dtype = None if shift is None else shift.dtype
    ctx.save_for_backward(x, weight, scale, output[1])


def _backward(ctx, dy, _):
    x, weight, scale, rstd = ctx.saved_tensors
    *needed, needs_dshift = ctx.needs_input_grad[:4]
    shift_per_token = scale.numel() == x.numel()  # its gradient is dy
    shift_dtype = ctx.shift_dtype if needs_dshift and not shift_per_token else None
    dx = dweight = dscale = dshift = None
    if any(needed) or shift_dtype is not None:
        dx, dweight, dscale, dshift = _modulated_rms_norm_backward(
            dy, x, weight, scale, rstd, ctx.offset, ctx.casting, needed, shift_dtype
        )
    if shift_per_token and needs_dshift:
        dshift = dy.reshape(scale.shape).to(ctx.shift_dtype)
    return *where_needed(ctx.needs_input_grad, dx, dweight, dscale, dshift), None, None, None


_modulated_rms_norm.register_autograd(_backward, setup_context=_setup_context)


def modulated_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    """Modulated RMSNorm (adaLN): `rms_norm(x, weight, eps, offset, casting) * (1 + scale) + shift`.

    The norm is rounded as in `rms_norm`; scale and shift are applied in fp32, and the result is rounded once.

    Args:
        x: Input of shape (..., hidden_size) and any floating dtype, such as (batch, tokens, hidden_size).
        weight: Weight of the norm, of shape (hidden_size,), or None; its dtype may differ from that of `x`.
        scale: Any floating dtype, of shape

            - (batch, hidden_size) or (batch, 1, hidden_size): a row for each sample. Leading dimensions, however many,
              are matched with those of `x` from the left;
            - (hidden_size,) or (1, hidden_size): one row for all;
            - the shape of `x`, or (number of tokens, hidden_size): a row for each token;
            - with `x` of shape (tokens, hidden_size), also (groups, hidden_size) for `groups` equal runs of tokens;
            - anything else that broadcasts to `x` is expanded to a row for each token.

        shift: A tensor of a dtype and shape as for `scale`; None for no shift.
        eps: Added to the mean square.
        offset: Added to the weight; 1.0 for Gemma.
        casting: ``"llama"`` (default), ``"gemma"``, ``"olmo2"`` or ``"none"``, see `rms_norm`.

    Returns:
        Tensor of the shape and dtype of `x`, contiguous.

    Raises:
        ValueError: If `scale` or `shift` does not fit `x` in shape or device or has no floating dtype, and as
            `rms_norm`.
    """
    if casting not in CASTINGS:
        raise unknown_casting("modulated_rms_norm", casting)
    on_triton = check_norm_arguments("modulated_rms_norm", x, weight=weight)
    check_all_dtensors("modulated_rms_norm", x, scale=scale, shift=shift)
    scale_rows, shift_rows = _scale_and_shift(scale, shift, x)
    if on_triton and use_triton(scale_rows) and (shift_rows is None or use_triton(shift_rows)):
        return _modulated_rms_norm(x, weight, scale_rows, shift_rows, eps, offset, casting)[0]
    compute = torch.promote_types(x.dtype, torch.float32)
    y = rms_norm_reference(x, weight, eps, offset, casting).to(compute)
    y = y.reshape(scale_rows.shape[0], -1 if y.numel() else 0, x.shape[-1]) * (1 + scale_rows.to(compute)[:, None])
    if shift_rows is not None:
        y = y + shift_rows.to(compute)[:, None]
    return y.reshape(x.shape).to(x.dtype)


modulated_rms_norm_reference = reference_of(modulated_rms_norm, "check_norm_arguments")


def _scale_and_shift(
    scale: torch.Tensor, shift: torch.Tensor | None, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`scale` and `shift` as (groups, hidden_size), of the same groups of tokens of `x`."""
    scale = _groups("scale", scale, x)
    if shift is None:
        return scale, None
    shift = _groups("shift", shift, x)
    if shift.shape == scale.shape:
        return scale, shift
    return _for_each_token(scale, x), _for_each_token(shift, x)


def _groups(argument: str, modulation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`modulation` as (groups, hidden_size): a row for each of `groups` equal runs of the tokens of `x`.

    Raises:
        ValueError: If it does not fit `x`.
    """
    if not modulation.is_floating_point() or modulation.device != x.device:
        raise ValueError(
            f"`{argument}` of modulated_rms_norm is {modulation.dtype} on {modulation.device}; give a floating point "
            f"tensor on {x.device}, where `x` is."
        )
    hidden_size, leading = x.shape[-1], tuple(x.shape[:-1])
    shape = tuple(modulation.shape)
    if shape[-1:] == (hidden_size,):
        own = shape[:-1]
        while own and own[-1] == 1:
            own = own[:-1]
        if own == leading[: len(own)]:
            return modulation.reshape(-1, hidden_size)
        tokens = x.numel() // hidden_size
        if len(shape) == 2 and (shape[0] == tokens or (x.dim() == 2 and shape[0] > 0 and tokens % shape[0] == 0)):
            return modulation
        sizes = zip(reversed(shape), reversed(x.shape))
        if len(shape) <= x.dim() and all(size in (1, of_x) for size, of_x in sizes):
            return modulation.expand(x.shape).reshape(-1, hidden_size)
    raise ValueError(
        f"`{argument}` of modulated_rms_norm has shape {shape}, which does not fit `x` of shape {tuple(x.shape)}; give "
        f"a row of {hidden_size} numbers for each sample, {(*leading[:1], hidden_size)}, for each token, or for all."
    )


def _for_each_token(modulation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`modulation`, of shape (groups, hidden_size), as (tokens, hidden_size)."""
    hidden_size, groups = x.shape[-1], max(1, modulation.shape[0])
    tokens = x.numel() // hidden_size
    return modulation[:, None].expand(-1, tokens // groups, -1).reshape(tokens, hidden_size)
