"""RMSNorm, then a scale and a shift that depend on the sample: the adaptive norm (adaLN) of diffusion transformers.

    y = rms_norm(x, weight) * (1 + scale) + shift

(Peebles and Xie 2022, https://arxiv.org/abs/2212.09748, with RMSNorm for LayerNorm). `scale` and `shift` hold a row for
each sample, one for all, or one for each token.

Forward reads x and writes y (4 bytes a number in bf16, and as much again for each of scale and shift where every token
has its own); backward reads x and dy and writes dx (6 bytes; with a scale for every token, that is read and its
gradient written, 10). Saved for backward: x, weight, scale and rstd (fp32, one a row). The gradients of weight, scale
and shift are summed in fp32 in the registers of a persistent grid and added up by a second small kernel, without
atomics; where every token has its own shift, its gradient is dy itself and costs nothing.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import refuse_second_derivative
from liger_trainer.kernels.norms.launch import check_all_dtensors, check_arguments, runs_on_triton
from liger_trainer.kernels.norms.rms_norm import rms_norm_reference
from liger_trainer.kernels.norms.rms_norm_kernels import check_casting
from liger_trainer.kernels.parity.modulated_rms_norm_kernels import launch_backward, launch_forward


@torch.library.custom_op("liger_trainer::modulated_rms_norm", mutates_args=())
def _modulated_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    offset: float,
    casting: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return launch_forward(x, weight, scale, shift, eps, offset, casting)


@_modulated_rms_norm.register_fake
def _(x, weight, scale, shift, eps, offset, casting):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("liger_trainer::modulated_rms_norm_backward", mutates_args=())
def _modulated_rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    casting: str,
    needs_dx: bool,
    needs_dweight: bool,
    needs_dscale: bool,
    dshift_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients = _gradients(x, weight, scale, needs_dx, needs_dweight, needs_dscale, dshift_dtype)
    if x.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
    else:
        launch_backward(dy, x, weight, scale, rstd, offset, casting, gradients)
    return tuple(gradients)  # type: ignore[return-value]


@_modulated_rms_norm_backward.register_fake
def _(dy, x, weight, scale, rstd, offset, casting, needs_dx, needs_dweight, needs_dscale, dshift_dtype):
    return tuple(_gradients(x, weight, scale, needs_dx, needs_dweight, needs_dscale, dshift_dtype))


refuse_second_derivative(_modulated_rms_norm_backward, "modulated_rms_norm")


def _gradients(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    needs_dx: bool,
    needs_dweight: bool,
    needs_dscale: bool,
    dshift_dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    """New gradients of x, weight, scale and shift, empty where not needed."""
    return [
        x.new_empty(x.shape if needs_dx else 0),
        x.new_empty(0) if weight is None or not needs_dweight else weight.new_empty(weight.shape),
        scale.new_empty(scale.shape if needs_dscale else 0),
        x.new_empty(0) if dshift_dtype is None else x.new_empty(scale.shape, dtype=dshift_dtype),
    ]


def _setup_context(ctx, inputs, output):
    x, weight, scale, shift, _, ctx.offset, ctx.casting = inputs
    ctx.set_materialize_grads(False)
    ctx.shift_dtype = None if shift is None else shift.dtype
    ctx.save_for_backward(x, weight, scale, output[1])


def _backward(ctx, dy, _):
    if dy is None:
        return (None,) * 7
    x, weight, scale, rstd = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    shift_is_dy = needs[3] and scale.shape[0] * scale.shape[1] == x.numel()  # every token has its own
    dshift_dtype = ctx.shift_dtype if needs[3] and not shift_is_dy else None
    gradients = [None] * 4
    if any(needs[:3]) or dshift_dtype is not None:
        gradients = list(
            _modulated_rms_norm_backward(dy, x, weight, scale, rstd, ctx.offset, ctx.casting, *needs[:3], dshift_dtype)
        )
    if shift_is_dy:
        gradients[3] = dy.reshape(scale.shape).to(ctx.shift_dtype)
    return *(gradient if needed else None for gradient, needed in zip(gradients, needs)), None, None, None


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

    The norm is rounded as `rms_norm` rounds it; scale and shift are applied in fp32, and the result is rounded once.

    Args:
        x: Input of shape (..., hidden_size) and any floating dtype, such as (batch, tokens, hidden_size).
        weight: Weight of the norm, of shape (hidden_size,), or None; its dtype may differ from that of `x`.
        scale: Any floating dtype, of shape

            - (batch, hidden_size) or (batch, 1, hidden_size): a row for each sample. Leading dimensions are matched
              with those of `x` from the left, here and with more of them;
            - (hidden_size,) or (1, hidden_size): one row for all;
            - the shape of `x`, or (number of tokens, hidden_size): a row for each token;
            - with `x` of shape (tokens, hidden_size), also (groups, hidden_size) for `groups` equal runs of tokens;
            - anything else that broadcasts to `x` is expanded to a row for each token.

        shift: As `scale`; None for no shift.
        eps: Added to the mean square.
        offset: Added to the weight; 1.0 for Gemma.
        casting: ``"llama"`` (default), ``"gemma"``, ``"olmo2"`` or ``"none"``, see `rms_norm`.

    Returns:
        Tensor of the shape and dtype of `x`, contiguous.

    Raises:
        ValueError: If `scale` or `shift` does not fit `x` in shape or device or is not of a floating dtype, and as
            `rms_norm`.
    """
    check_casting("modulated_rms_norm", casting)
    check_arguments("modulated_rms_norm", x, weight=weight)
    check_all_dtensors("modulated_rms_norm", x, scale=scale, shift=shift)
    scale = _groups("scale", scale, x)
    shift = None if shift is None else _groups("shift", shift, x)
    if shift is not None and shift.shape != scale.shape:
        scale, shift = _for_each_token(scale, x), _for_each_token(shift, x)
    if not runs_on_triton(x, weight, scale, shift):
        return _reference_of_groups(x, weight, scale, shift, eps, offset, casting)
    return _modulated_rms_norm(x, weight, scale, shift, eps, offset, casting)[0]


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


def _reference_of_groups(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    offset: float,
    casting: str,
) -> torch.Tensor:
    compute = torch.promote_types(x.dtype, torch.float32)
    y = rms_norm_reference(x, weight, eps, offset, casting).to(compute)
    y = y.reshape(scale.shape[0], -1 if y.numel() else 0, x.shape[-1]) * (1 + scale.to(compute)[:, None])
    if shift is not None:
        y = y + shift.to(compute)[:, None]
    return y.reshape(x.shape).to(x.dtype)


def modulated_rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    """`modulated_rms_norm` in plain torch, with torch's own autograd."""
    scale = _for_each_token(_groups("scale", scale, x), x)
    shift = None if shift is None else _for_each_token(_groups("shift", shift, x), x)
    return _reference_of_groups(x, weight, scale, shift, eps, offset, casting)
