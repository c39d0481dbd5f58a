"""A step of AdamW on bf16 weights that trains them as fp32 weights, in 8 to 14 bytes a parameter with the gradient.

With m and v the moments, g the gradient, t the step, r the learning rate (Loshchilov and Hutter 2019,
https://arxiv.org/abs/1711.05101, in torch's order of operations):

    w = w (1 - r decay)        m = m + (1 - beta1) (g - m)        v = beta2 v + (1 - beta2) g^2
    w = w - r / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

**The weight.** With b the 32 bits of an fp32 number, the bf16 weight is the upper half of b + 0x8000, that is, rounded
to nearest and half away from zero, and the remainder is the lower half of b as an int16, -32768 ... 32767, so that

    b = (weight << 16) + remainder

holds for every number (a NaN stays a NaN). Weight and remainder are an exact fp32 master in 4 bytes, as in Apex's and
TransformerEngine's `store_param_remainders`. A weight that is changed from outside keeps its remainder, at most half of
its last bit; with a weight that was set to 0, as by a mask, a negative one counts as 0, since the sum would be a NaN.

Without a remainder, the new weight can be rounded stochastically: up with the probability of what would be cut, which
keeps its expectation (Gupta et al. 2015, https://arxiv.org/abs/1502.02551). The random bits are a hash of a seed, the
step, the tensor and the element's index in it: the same on every replica, for every sharding of the first dimension,
and in a resumed run. A second moment in bf16 is rounded so as well, since to nearest it would stop at 7 times its value
(1 - beta2 is below half of bf16's precision).

**Bytes** moved for an element, with a bf16 gradient and a remainder: 26 with fp32 moments, 18 with bf16, 14.1 with 8
bits; without a remainder 4 less.

Shapes: weight, gradient and moments of one shape, which the kernels see as one flat array.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from liger_trainer.kernels.activation import fast_quotient, fast_sqrt, has_lg2
from liger_trainer.kernels.optim.block_codes import BLOCK, decode, decode_block, encode, encode_block
from liger_trainer.kernels.runtime import cdiv, on_device, tl, triton, use_triton

_ROWS, _WARPS = 4, 4  # blocks of a program
_COLUMNS = tl.constexpr(11)  # of the table of tensors
_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
}


class Moments(NamedTuple):
    """Both moments of a weight, in its shape: fp32, bf16, or uint8 codes, each with the fp32 scales of its blocks."""

    first: torch.Tensor
    second: torch.Tensor
    first_scales: torch.Tensor | None = None
    second_scales: torch.Tensor | None = None


class Update(NamedTuple):
    """What a step reads and writes of one weight.

    Attributes:
        weight: bf16, of any shape.
        gradient: bf16, fp16 or fp32, of that shape.
        moments: Codes only if the last dimension is a multiple of 256.
        remainder: The lower half of an fp32 number, int16 of the weight's shape; None if it is rounded away.
        offset: The place of the weight's first element in the random numbers of a step: its index in the whole tensor,
            of which the weight may be a shard, plus a multiple of 2^40 that is another for each tensor.
    """

    weight: torch.Tensor
    gradient: torch.Tensor
    moments: Moments
    remainder: torch.Tensor | None
    offset: int


class Options(NamedTuple):
    """What all weights of a parameter group share: torch's numbers, and how a weight is rounded without a remainder."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    stochastic: bool
    seed: int  # 32 bits


class Scaler(NamedTuple):
    """What a gradient scaler leaves to do: to divide the gradients by their scale, and to leave an update out."""

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None


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
    finite = (bits & 0x7F800000) != 0x7F800000
    up = tl.where(finite, bits + random, bits)
    return (up >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _pointer(table_ptr, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a column of the table, as a pointer."""
    pointer = tl.load(table_ptr + column).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["tensors", "seed"])
def _adamw_kernel(
    table_ptr,
    tensors,
    corrections_ptr,
    grad_scale_ptr,
    found_inf_ptr,
    seed,
    decay,
    beta1_rest,
    beta2,
    beta2_rest,
    eps,
    GRADIENT: tl.constexpr,
    MOMENTS: tl.constexpr,
    REMAINDER: tl.constexpr,
    ALIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FAST: tl.constexpr,
    SEARCH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Updates ROWS blocks of one of the tensors in the table, which is found by bisection of their first programs."""
    if found_inf_ptr is not None and tl.load(found_inf_ptr) != 0.0:
        return
    tensor = 0
    for bit in tl.static_range(SEARCH):
        later = tensor + (1 << (SEARCH - 1 - bit))
        start = tl.load(table_ptr + later * _COLUMNS, mask=later < tensors, other=2**62)
        tensor = tl.where(start <= tl.program_id(0), later, tensor)
    table_ptr += tensor * _COLUMNS
    program = tl.program_id(0) - tl.load(table_ptr)
    numel = tl.load(table_ptr + 1)
    if ALIGNED:
        numel = tl.multiple_of(numel, 16)
    offset = tl.load(table_ptr + 2)
    corrections_ptr += 3 * tl.load(table_ptr + 3)
    weight_ptr = _pointer(table_ptr, 4, tl.bfloat16, ALIGNED)
    gradient_ptr = _pointer(table_ptr, 5, GRADIENT, ALIGNED)
    first_ptr = _pointer(table_ptr, 6, MOMENTS, ALIGNED)
    second_ptr = _pointer(table_ptr, 7, MOMENTS, ALIGNED)
    CODED: tl.constexpr = MOMENTS.is_uint8()
    if CODED:
        first_scales_ptr = _pointer(table_ptr, 8, tl.float32, ALIGNED)
        second_scales_ptr = _pointer(table_ptr, 9, tl.float32, ALIGNED)
    if REMAINDER:
        remainder_ptr = _pointer(table_ptr, 10, tl.int16, ALIGNED)

    step_size = tl.load(corrections_ptr)
    inverse_second_root = 1.0 / tl.load(corrections_ptr + 1)
    blocks = (program * ROWS + tl.arange(0, ROWS))[:, None]
    inside = blocks * BLOCK < numel
    # 8 numbers a thread, of codes too: one layout for all.
    at = tl.max_contiguous(blocks * BLOCK + tl.arange(0, BLOCK)[None, :], [1, 8])
    mask = inside if CODED else at < numel
    gradient = tl.load(gradient_ptr + at, mask=mask).to(tl.float32)
    if grad_scale_ptr is not None:
        gradient /= tl.load(grad_scale_ptr)
    bits = tl.load(weight_ptr + at, mask=mask).to(tl.int16, bitcast=True).to(tl.int32) << 16
    if REMAINDER:
        remainder = tl.load(remainder_ptr + at, mask=mask).to(tl.int32)
        zero = bits.to(tl.float32, bitcast=True) == 0.0
        bits += tl.where(zero, tl.maximum(remainder, 0), remainder)
    weight = bits.to(tl.float32, bitcast=True)
    if CODED:
        first_scale = tl.load(first_scales_ptr + blocks, mask=inside)
        second_scale = tl.load(second_scales_ptr + blocks, mask=inside)
        first = decode_block(tl.load(first_ptr + at, mask=mask), first_scale, True)
        second = decode_block(tl.load(second_ptr + at, mask=mask), second_scale, False)
    else:
        first = tl.load(first_ptr + at, mask=mask).to(tl.float32)
        second = tl.load(second_ptr + at, mask=mask).to(tl.float32)

    weight *= decay
    first += beta1_rest * (gradient - first)
    second = second * beta2 + beta2_rest * gradient * gradient
    weight -= fast_quotient(step_size * first, fast_sqrt(second, FAST) * inverse_second_root + eps, FAST)

    bits = weight.to(tl.int32, bitcast=True)
    if STOCHASTIC or MOMENTS.is_bf16():
        step = tl.load(corrections_ptr + 2).to(tl.uint32)
        key = mixed(seed.to(tl.uint32) ^ mixed(step))
        element = offset + at
        random = mixed(element.to(tl.uint32) ^ ((element >> 32).to(tl.uint32) * 0x9E3779B9) ^ key)
    if REMAINDER:
        bits = tl.minimum(bits, 0x7FFF7FFF)  # a GPU's NaN, 0x7FFFFFFF, would become -0
        upper = (bits + 0x8000) >> 16
        tl.store(remainder_ptr + at, bits.to(tl.int16), mask=mask)
        tl.store(weight_ptr + at, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    elif STOCHASTIC:
        tl.store(weight_ptr + at, stochastic_bf16(bits, (random & 0xFFFF).to(tl.int32)), mask=mask)
    else:
        tl.store(weight_ptr + at, weight.to(tl.bfloat16), mask=mask)

    if CODED:
        first, first_scale = encode_block(first, True)
        second, second_scale = encode_block(second, False)
        tl.store(first_scales_ptr + blocks, first_scale, mask=inside)
        tl.store(second_scales_ptr + blocks, second_scale, mask=inside)
    elif MOMENTS.is_bf16():
        second = stochastic_bf16(second.to(tl.int32, bitcast=True), (random >> 16).to(tl.int32))
    tl.store(first_ptr + at, first.to(MOMENTS), mask=mask)
    tl.store(second_ptr + at, second.to(MOMENTS), mask=mask)


def adamw_(updates: Sequence[Update], steps: Sequence[torch.Tensor], options: Options, scaler: Scaler) -> None:
    """A step of AdamW, in place.

    Args:
        updates: The weights, all on one device.
        steps: The step of each, from 1: fp32 numbers on the device.
        options: The options that all parameters share.
        scaler: Scale and flag that a gradient scaler has set.
    """
    rows = _corrections(steps, options)
    alike: defaultdict[tuple[torch.dtype, torch.dtype, bool, bool], list[tuple[int, Update]]] = defaultdict(list)
    for row, update in enumerate(updates):
        tensors = [tensor for tensor in _tensors(update) if tensor is not None]
        if not update.weight.numel():
            continue
        if not use_triton(update.weight) or not all(tensor.is_contiguous() for tensor in tensors):
            _adamw_in_torch_(update, rows[row], options, scaler)
            continue
        aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors) and update.weight.numel() % 16 == 0
        dtypes = update.gradient.dtype, update.moments.second.dtype
        alike[(*dtypes, update.remainder is not None, aligned)].append((row, update))
    for kind, group in alike.items():
        _launch(*kind, group, rows, options, scaler)


def _corrections(steps: Sequence[torch.Tensor], options: Options) -> torch.Tensor:
    """For each step t a row of r / (1 - beta1^t), sqrt(1 - beta2^t) and t, computed in fp64, as fp32."""
    t = torch.stack(list(steps)).double()
    return torch.stack([options.lr / (1 - options.beta1**t), (1 - options.beta2**t).sqrt(), t], dim=1).float()


def _tensors(update: Update) -> tuple[torch.Tensor | None, ...]:
    """In the order of the table's columns from the fourth on."""
    return update.weight, update.gradient, *update.moments, update.remainder


def _launch(
    gradient: torch.dtype,
    moments: torch.dtype,
    has_remainder: bool,
    aligned: bool,
    updates: Sequence[tuple[int, Update]],
    rows: torch.Tensor,
    options: Options,
    scaler: Scaler,
) -> None:
    """One launch for all weights whose tensors have the same dtypes."""
    table, programs = [], 0
    for row, update in updates:
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in _tensors(update))
        table.append([programs, update.weight.numel(), update.offset, row, *addresses])
        programs += cdiv(update.weight.numel(), _ROWS * BLOCK)
    device = updates[0][1].weight.device
    on_host = torch.tensor(table, device="cpu", pin_memory=device.type == "cuda")
    with on_device(rows):
        _adamw_kernel[(programs,)](
            on_host.to(device, non_blocking=True),
            len(table),
            rows,
            *scaler,
            options.seed,
            1 - options.lr * options.weight_decay,
            1 - options.beta1,
            options.beta2,
            1 - options.beta2,
            options.eps,
            GRADIENT=_TYPES[gradient],
            MOMENTS=_TYPES[moments],
            REMAINDER=has_remainder,
            ALIGNED=aligned,
            STOCHASTIC=options.stochastic,
            FAST=has_lg2(rows),
            SEARCH=(len(table) - 1).bit_length(),
            ROWS=_ROWS,
            BLOCK=BLOCK,
            num_warps=_WARPS,
        )


def _adamw_in_torch_(update: Update, corrections: torch.Tensor, options: Options, scaler: Scaler) -> None:
    """The reference: the operations of `torch.optim.AdamW(foreach=False)` on fp32 tensors, and so its bits."""
    weight, gradient, moments, remainder, _ = update
    if scaler.found_inf is not None and scaler.found_inf.item():
        return
    gradient = gradient.float()
    if scaler.grad_scale is not None:
        gradient = gradient / scaler.grad_scale
    step_size, second_root, step = corrections.tolist()
    wide = weight.float() if remainder is None else joined(weight, remainder)
    if moments.second.dtype == torch.uint8:
        assert moments.first_scales is not None
        assert moments.second_scales is not None
        first = decode(moments.first, moments.first_scales, signed=True)
        second = decode(moments.second, moments.second_scales, signed=False)
    else:
        first, second = moments.first.float(), moments.second.float()

    wide.mul_(1 - options.lr * options.weight_decay)
    first.lerp_(gradient, 1 - options.beta1)
    second.mul_(options.beta2).addcmul_(gradient, gradient, value=1 - options.beta2)
    wide.addcdiv_(first, (second.sqrt() / second_root).add_(options.eps), value=-step_size)

    if remainder is not None:
        for target, source in zip((weight, remainder), split(wide)):
            target.copy_(source)
    elif options.stochastic:
        weight.copy_(_stochastic_bf16(wide, random_bits(update, options.seed, int(step)) & 0xFFFF))
    else:
        weight.copy_(wide)
    stored: tuple[torch.Tensor, ...] = (first, second)
    if moments.second.dtype == torch.uint8:
        (first, first_scales), (second, second_scales) = encode(first, signed=True), encode(second, signed=False)
        stored = (first, second, first_scales, second_scales)
    elif moments.second.dtype == torch.bfloat16:
        stored = (first, _stochastic_bf16(second, random_bits(update, options.seed, int(step)) >> 16))
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
    remainder = torch.where(weight == 0, remainder.clamp(min=0), remainder)
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def random_bits(update: Update, seed: int, step: int) -> torch.Tensor:
    """32 bits for each element of the weight, as int64: those that the kernel draws."""

    def mixed_in_torch(bits: torch.Tensor) -> torch.Tensor:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
        return bits

    weight, first = update.weight, update.offset
    key = mixed_in_torch(seed ^ mixed_in_torch(torch.tensor(step, device=weight.device)))
    element = torch.arange(first, first + weight.numel(), device=weight.device).view(weight.shape)
    return mixed_in_torch((element & 0xFFFFFFFF) ^ (((element >> 32) * 0x9E3779B9) & 0xFFFFFFFF) ^ key)


def _stochastic_bf16(wide: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """`wide` rounded to bf16 by 16 random bits."""
    bits = wide.view(torch.int32)
    up = torch.where(wide.isfinite(), bits + random.int(), bits)
    return (up >> 16).to(torch.int16).view(torch.bfloat16)
