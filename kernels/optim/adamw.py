"""A step of AdamW on bf16 weights that trains them as fp32 weights, in 8 to 14 bytes a parameter with the gradient.

With m and v the moments, g the gradient, t the step, r the learning rate (Loshchilov and Hutter 2019,
https://arxiv.org/abs/1711.05101, in torch's order of operations):

    w = w (1 - r decay)        m = m + (1 - beta1) (g - m)        v = beta2 v + (1 - beta2) g^2
    w = w - r / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

**The weight.** With b the 32 bits of an fp32 number, the bf16 weight is the upper half of b + 0x8000, that is, rounded
to nearest and half away from zero, and the remainder is the lower half of b as an int16, -32768 ... 32767, so that

    b = (weight << 16) + remainder

holds for every number but NaN, which becomes bf16's NaN with remainder 0. Weight and remainder are an exact fp32 master
in 4 bytes (the split of Apex's and TransformerEngine's `store_param_remainders`).

Without a remainder, the new weight can be rounded stochastically: up with the probability of what would be cut, which
keeps its expectation (Gupta et al. 2015, https://arxiv.org/abs/1502.02551). The random bits are a hash of a seed, the
step and the element's index in the whole tensor: the same on every replica, for every sharding of the first dimension,
and in a resumed run. A second moment in bf16 is rounded so as well, since to nearest it would stop at 7 times its value
(1 - beta2 is below half of bf16's precision).

**Bytes** moved for an element, with a bf16 gradient and a remainder: 26 with fp32 moments, 18 with bf16, 14.1 with 8
bits; without a remainder 4 less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from liger_trainer.kernels.optim.block_codes import BLOCK, decode, decode_block, encode, encode_block
from liger_trainer.kernels.runtime import cdiv, on_device, tl, triton, use_triton

_ROWS = 16  # blocks of a program


class Moments(NamedTuple):
    """Both moments of a weight, in its shape: fp32, bf16, or uint8 codes, each with the fp32 scales of its blocks."""

    first: torch.Tensor
    second: torch.Tensor
    first_scales: torch.Tensor | None = None
    second_scales: torch.Tensor | None = None


class Rates(NamedTuple):
    """The numbers of a parameter group, as `torch.optim.AdamW` calls them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class Corrections(NamedTuple):
    """One row of what [`corrections`] returns: all that the update of a weight needs to know of its step."""

    rows: torch.Tensor
    row: int


class Rounding(NamedTuple):
    """Where the random bits of stochastic rounding come from.

    Attributes:
        seed: Of the whole training, 32 bits.
        offset: The index of the weight's first element in the whole tensor, of which the weight may be a shard.
        weight: Whether the weight is rounded with them; a second moment in bf16 always is.
    """

    seed: int
    offset: int
    weight: bool


class Scaler(NamedTuple):
    """What a gradient scaler leaves to do: to divide the gradients by their scale, and to leave an update out."""

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None


def corrections(steps: Sequence[torch.Tensor], rates: Rates) -> torch.Tensor:
    """For each step t a row of r / (1 - beta1^t), sqrt(1 - beta2^t) and t, computed in fp64, as fp32."""
    t = torch.stack(list(steps)).double()
    return torch.stack([rates.lr / (1 - rates.beta1**t), (1 - rates.beta2**t).sqrt(), t], dim=1).float()


@triton.jit
def mixed(bits):
    """A hash of 32 bits, uint32 (Wellons, https://nullprogram.com/blog/2018/07/31, lowbias32)."""
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def stochastic_bf16(bits, random):
    """The bits of an fp32 number, and 16 random bits, to bf16."""
    infinite = (bits & 0x7F800000) == 0x7F800000
    up = tl.where(infinite, bits, bits + random)
    return (up >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["row", "seed", "offset"])
def _adamw_kernel(
    weight_ptr,
    remainder_ptr,
    gradient_ptr,
    first_ptr,
    second_ptr,
    first_scales_ptr,
    second_scales_ptr,
    corrections_ptr,
    grad_scale_ptr,
    found_inf_ptr,
    numel,
    row,
    seed,
    offset,
    decay,
    beta1_rest,
    beta2,
    beta2_rest,
    eps,
    STOCHASTIC: tl.constexpr,
    CODED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Updates ROWS blocks; the tensor has row `row` of the corrections."""
    if found_inf_ptr is not None and tl.load(found_inf_ptr) != 0.0:
        return
    blocks = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = at < numel
    corrections_ptr += 3 * row
    step_size = tl.load(corrections_ptr)
    second_root = tl.load(corrections_ptr + 1)

    gradient = tl.load(gradient_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if grad_scale_ptr is not None:
        gradient /= tl.load(grad_scale_ptr)
    bits = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
    if remainder_ptr is not None:
        bits += tl.load(remainder_ptr + at, mask=mask, other=0).to(tl.int32)
    weight = bits.to(tl.float32, bitcast=True)
    if CODED:
        first_scale = tl.load(first_scales_ptr + blocks, mask=blocks * BLOCK < numel, other=0.0)
        second_scale = tl.load(second_scales_ptr + blocks, mask=blocks * BLOCK < numel, other=0.0)
        first = decode_block(tl.load(first_ptr + at, mask=mask, other=0), first_scale, True)
        second = decode_block(tl.load(second_ptr + at, mask=mask, other=0), second_scale, False)
    else:
        first = tl.load(first_ptr + at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(second_ptr + at, mask=mask, other=0.0).to(tl.float32)

    weight *= decay
    first += beta1_rest * (gradient - first)
    second = second * beta2 + beta2_rest * gradient * gradient
    weight -= step_size * first / (tl.sqrt(second) / second_root + eps)

    bits = weight.to(tl.int32, bitcast=True)
    if STOCHASTIC:
        step = tl.load(corrections_ptr + 2).to(tl.uint32)
        key = mixed(seed.to(tl.uint32) ^ mixed(step))
        element = offset + at
        random = mixed(element.to(tl.uint32) ^ ((element >> 32).to(tl.uint32) * 0x9E3779B9) ^ key)
    if remainder_ptr is not None:
        bits = tl.where(weight == weight, bits, 0x7FC00000)
        upper = (bits + 0x8000) >> 16
        tl.store(remainder_ptr + at, (bits - (upper << 16)).to(tl.int16), mask=mask)
        tl.store(weight_ptr + at, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    elif STOCHASTIC:
        tl.store(weight_ptr + at, stochastic_bf16(bits, (random & 0xFFFF).to(tl.int32)), mask=mask)
    else:
        tl.store(weight_ptr + at, weight.to(tl.bfloat16), mask=mask)

    if CODED:
        first, first_scale = encode_block(first, True)
        second, second_scale = encode_block(second, False)
        tl.store(first_scales_ptr + blocks, first_scale, mask=blocks * BLOCK < numel)
        tl.store(second_scales_ptr + blocks, second_scale, mask=blocks * BLOCK < numel)
    elif second_ptr.dtype.element_ty == tl.bfloat16:
        second = stochastic_bf16(second.to(tl.int32, bitcast=True), (random >> 16).to(tl.int32))
    tl.store(first_ptr + at, first.to(first_ptr.dtype.element_ty), mask=mask)
    tl.store(second_ptr + at, second.to(second_ptr.dtype.element_ty), mask=mask)


def adamw_(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    moments: Moments,
    remainder: torch.Tensor | None,
    corrected: Corrections,
    rates: Rates,
    rounding: Rounding,
    scaler: Scaler,
) -> None:
    """Updates a weight and its moments in place.

    Args:
        weight: bf16, of any shape.
        gradient: bf16, fp16 or fp32, of the same shape.
        moments: The moments; codes if the last dimension is a multiple of 256.
        remainder: What the weight lacks of an fp32 number, int16 of the same shape; None to round the weight.
        corrected: What the bias corrections are in this step.
        rates: The learning rate and the other numbers of the parameter group.
        rounding: How the weight is rounded without a remainder.
        scaler: What a gradient scaler has set.
    """
    if not weight.numel():
        return
    tensors = [weight, gradient, *(tensor for tensor in (remainder, *moments) if tensor is not None)]
    if not use_triton(weight) or not all(tensor.is_contiguous() for tensor in tensors):
        _adamw_in_torch_(weight, gradient, moments, remainder, corrected, rates, rounding, scaler)
        return
    with on_device(weight):
        _adamw_kernel[(cdiv(weight.numel(), _ROWS * BLOCK),)](
            weight,
            remainder,
            gradient,
            *moments,
            corrected.rows,
            *scaler,
            weight.numel(),
            corrected.row,
            rounding.seed,
            rounding.offset,
            1 - rates.lr * rates.weight_decay,
            1 - rates.beta1,
            rates.beta2,
            1 - rates.beta2,
            rates.eps,
            STOCHASTIC=rounding.weight or moments.second.dtype == torch.bfloat16,
            CODED=moments.second.dtype == torch.uint8,
            ROWS=_ROWS,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,  # torch rounds after each operation
        )


def _adamw_in_torch_(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    moments: Moments,
    remainder: torch.Tensor | None,
    corrected: Corrections,
    rates: Rates,
    rounding: Rounding,
    scaler: Scaler,
) -> None:
    """The reference: the operations of `torch.optim.AdamW(foreach=False)` on fp32 tensors, and so its bits."""
    if scaler.found_inf is not None and scaler.found_inf.item():
        return
    gradient = gradient.float()
    if scaler.grad_scale is not None:
        gradient = gradient / scaler.grad_scale
    step_size, second_root, step = corrected.rows[corrected.row].tolist()
    wide = weight.float() if remainder is None else joined(weight, remainder)
    if moments.second.dtype == torch.uint8:
        assert moments.first_scales is not None
        assert moments.second_scales is not None
        first = decode(moments.first, moments.first_scales, signed=True)
        second = decode(moments.second, moments.second_scales, signed=False)
    else:
        first, second = moments.first.float(), moments.second.float()

    wide.mul_(1 - rates.lr * rates.weight_decay)
    first.lerp_(gradient, 1 - rates.beta1)
    second.mul_(rates.beta2).addcmul_(gradient, gradient, value=1 - rates.beta2)
    wide.addcdiv_(first, (second.sqrt() / second_root).add_(rates.eps), value=-step_size)

    if remainder is not None:
        for target, source in zip((weight, remainder), split(wide)):
            target.copy_(source)
    elif rounding.weight:
        weight.copy_(_stochastic_bf16(wide, random_bits(weight, rounding, int(step)) & 0xFFFF))
    else:
        weight.copy_(wide)
    stored: tuple[torch.Tensor, ...] = (first, second)
    if moments.second.dtype == torch.uint8:
        (first, first_scales), (second, second_scales) = encode(first, signed=True), encode(second, signed=False)
        stored = (first, second, first_scales, second_scales)
    elif moments.second.dtype == torch.bfloat16:
        stored = (first, _stochastic_bf16(second, random_bits(weight, rounding, int(step)) >> 16))
    for moment, value in zip(moments, stored):
        assert moment is not None
        moment.copy_(value)


def split(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An fp32 tensor as bf16, rounded half away from zero, and the int16 remainder; see the formula above."""
    bits = torch.where(wide.isnan(), 0x7FC00000, wide.view(torch.int32))
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 tensor that was [`split`]."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def random_bits(weight: torch.Tensor, rounding: Rounding, step: int) -> torch.Tensor:
    """32 bits for each element of `weight`, as int64: those that the kernel draws."""

    def mixed_in_torch(bits: torch.Tensor) -> torch.Tensor:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
        return bits

    key = mixed_in_torch(rounding.seed ^ mixed_in_torch(torch.tensor(step, device=weight.device)))
    element = torch.arange(rounding.offset, rounding.offset + weight.numel(), device=weight.device).view(weight.shape)
    return mixed_in_torch((element & 0xFFFFFFFF) ^ (((element >> 32) * 0x9E3779B9) & 0xFFFFFFFF) ^ key)


def _stochastic_bf16(wide: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """`wide` rounded to bf16 by 16 random bits."""
    bits = wide.view(torch.int32)
    up = torch.where(wide.isfinite(), bits + random.int(), bits)
    return (up >> 16).to(torch.int16).view(torch.bfloat16)
