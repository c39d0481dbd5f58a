"""The weight gradient of a head summed over chunks of tokens, in 16 bits an element and yet rounded once.

    dW (V, H) = sum over chunks of dZ_c.T @ X_c,        dZ_c (n, V) the gradient of the logits, X_c (n, H) hidden states

A sum in bf16 is rounded at every chunk; an fp32 sum takes twice the memory of dW. Here the sum lives in dW's own memory
as block floating point until the last chunk: 128 elements of a row share one power of two 2**e, and each is a 16-bit
integer that counts units of it (15 bits below the largest element of the block, where bf16 has 8). The matmul's tile is
in fp32 registers; its epilogue adds the stored integers and either stores new ones or, in the last chunk, rounds to
dW's dtype. So dW has the error of one matmul over all tokens.

    encode: peak = max |a| of the block;  e = exponent of peak, one more if rounding would carry;  m = a / 2**(e-14)
    decode: a = m * 2**(e-14);  an infinite or NaN peak has e = 255 and decodes to NaN
            (a NaN in dZ fills its row, as in every gradient of a softmax, and so whole blocks of dW)

Integers are converted to floats and back through the low bits of a float near 2**23, which hold an integer unchanged:
the GPU's conversion instructions run at an eighth of the speed of an addition.

Bytes moved besides the matmul's operands: 2*V*H a chunk to store and 2*V*H a chunk after the first to read, the same as
for a half-precision accumulation. Memory: dW, and V*H/128 bytes of exponents.

Two kernels compute the same: the one here, and for Hopper the one of weight_gradient_gluon.py.

Shapes: n tokens of a chunk, H hidden size, V vocabulary: dZ (n, V), X (n, H), dW (V, H).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from liger_trainer.kernels.runtime import HAS_TRITON, INTERPRETED, num_sms, on_device, tl, triton

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

_TILE = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}

Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool, bool], None]
"""The type of `launch`, for either kernel."""

_GLUON_TRIED = ("3.6.", "3.7.", "3.8.", "3.9.")
"""Triton versions with which the Gluon kernel has run on a GPU; with any other, its barriers might deadlock."""

MAX_HALF_CHUNKS = 8
"""A half-precision sum of c chunks multiplies the error of one rounding by sqrt((c + 1) / 2); this is the largest c."""


@triton.jit
def _decode(mantissas, exponents):
    """The fp32 values of stored integers."""
    scale = tl.where(exponents == 255, float("nan"), ((exponents.to(tl.int32) - 14) << 23).to(tl.float32, bitcast=True))
    # The low 16 bits of 2**23 + 2**15 + m; memory past the end of a row reads as zeros, which decode to m = 0.
    bits = mantissas.to(tl.uint16, bitcast=True).to(tl.uint32) ^ 0x4B008000
    return (bits.to(tl.float32, bitcast=True) - 8421376.0) * scale[:, None]


@triton.jit
def _finish(sums, stored_desc, dw_desc, exponents_ptr, row, column, vocab_size, KEEP: tl.constexpr, ROWS: tl.constexpr):
    """Stores one block of sums: with KEEP as integers with their exponents, else in dW's dtype."""
    if KEEP:
        rows = row + tl.arange(0, ROWS)
        peak = tl.max(tl.abs(sums), 1).to(tl.int32, bitcast=True)
        peak = tl.minimum(peak, 0x7F800000)  # NaN as infinity
        exponents = tl.maximum((peak + 256) >> 23, 15)
        tl.store(exponents_ptr + rows, exponents.to(tl.uint8), mask=rows < vocab_size)
        inverse = ((268 - exponents) << 23).to(tl.float32, bitcast=True)
        bits = (sums * inverse[:, None] + 12582912.0).to(tl.uint32, bitcast=True)  # 1.5 * 2**23
        stored_desc.store([row, column], bits.to(tl.uint16).to(tl.int16, bitcast=True))
    else:
        dw_desc.store([row, column], sums.to(dw_desc.dtype))


@triton.jit
def _weight_gradient_kernel(
    dz_desc,
    x_desc,
    stored_desc,  # dW's memory as integers
    dw_desc,
    exponents_ptr,  # (2 * tiles of columns, V), or V of the columns of one that is wider
    exponents_stride,
    tokens,
    vocab_size,
    hidden_size,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """One program a multiprocessor, each taking every PROGRAMS-th tile."""
    BLOCK: tl.constexpr = COLUMNS // 2
    row_tiles = tl.cdiv(vocab_size, ROWS)
    column_tiles = tl.cdiv(hidden_size, COLUMNS)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        # GROUP tiles of rows together, so that the columns of dZ they read stay in L2.
        first = tile // (GROUP * column_tiles) * GROUP
        height = tl.minimum(row_tiles - first, GROUP)
        within = tile % (GROUP * column_tiles)
        row = (first + within % height) * ROWS
        column = within // height * COLUMNS
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(tl.cdiv(tokens, DEPTH)):
            dz = dz_desc.load([step * DEPTH, row])
            x = x_desc.load([step * DEPTH, column])
            sums = tl.dot(dz.T, x, sums)
        halves = tl.permute(tl.reshape(sums, (ROWS, 2, BLOCK)), (0, 2, 1))
        left, right = tl.split(halves)
        left_exponents = exponents_ptr + (column // BLOCK).to(tl.int64) * exponents_stride
        right_exponents = left_exponents + exponents_stride
        if ADD:
            rows = row + tl.arange(0, ROWS)
            left_old = tl.load(left_exponents + rows, mask=rows < vocab_size, other=15)
            right_old = tl.load(right_exponents + rows, mask=rows < vocab_size, other=15)
            left += _decode(stored_desc.load([row, column]), left_old)
        _finish(left, stored_desc, dw_desc, left_exponents, row, column, vocab_size, KEEP, ROWS)
        if ADD:
            right += _decode(stored_desc.load([row, column + BLOCK]), right_old)
        _finish(right, stored_desc, dw_desc, right_exponents, row, column + BLOCK, vocab_size, KEEP, ROWS)


def launch(
    weight_gradient: torch.Tensor,
    exponents: torch.Tensor,
    logits_gradient: torch.Tensor,
    hidden: torch.Tensor,
    add: bool,
    keep: bool,
) -> None:
    """Adds a chunk to the sum in `weight_gradient` and `exponents`; starts it without `add`, rounds it without `keep`.

    `weight_gradient` may be some rows of dW, with the corresponding columns of the logits' gradient and the exponents.
    """
    (tokens, vocab_size), hidden_size = logits_gradient.shape, hidden.shape[1]
    rows, columns, depth = _TILE["ROWS"], _TILE["COLUMNS"], _TILE["DEPTH"]
    programs = num_sms(hidden.device)
    with on_device(hidden):
        _weight_gradient_kernel[(programs,)](
            TensorDescriptor.from_tensor(logits_gradient, [depth, rows]),
            TensorDescriptor.from_tensor(hidden, [depth, columns]),
            TensorDescriptor.from_tensor(weight_gradient.view(torch.int16), [rows, columns // 2]),
            TensorDescriptor.from_tensor(weight_gradient, [rows, columns // 2]),
            exponents,
            exponents.stride(0),
            tokens,
            vocab_size,
            hidden_size,
            ADD=add,
            KEEP=keep,
            PROGRAMS=programs,
            **_TILE,
        )


def hopper_launch() -> Launch | None:
    """The launcher of the kernel for Hopper; None if this Triton has no Gluon that the kernel is written for."""
    try:
        from liger_trainer.kernels.head.weight_gradient_gluon import launch
    except (ImportError, AttributeError):
        return None
    return launch


@functools.cache
def launch_for(device: torch.device) -> Launch | None:
    """The launcher that is as fast as the vendor's matmul on `device`; None if no matmul written in Triton is.

    That takes tensor cores fed by a bulk copy engine: the kernel of this file on Blackwell, and its Gluon version on
    Hopper.
    """
    if device.type != "cuda" or not HAS_TRITON or torch.version.hip is not None:
        return launch if INTERPRETED else None
    capability = torch.cuda.get_device_capability(device)
    if capability == (9, 0) and triton.__version__.startswith(_GLUON_TRIED) and not INTERPRETED:
        return hopper_launch() or launch
    return launch if capability[0] in (9, 10) else None


@torch.compiler.assume_constant_result
def _has_launch(device: torch.device) -> bool:
    return launch_for(device) is not None


def sums_in_block_floating_point(weight: torch.Tensor) -> bool:
    """Whether the gradient of `weight` is summed, over chunks, as block floating point in its own memory."""
    half = weight.dtype in (torch.float16, torch.bfloat16)
    return half and weight.shape[1] % 8 == 0 and weight.is_contiguous() and _has_launch(weight.device)


def empty_exponents(weight_gradient: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory for the exponents of the blocks of dW, `(blocks of a row, V)`."""
    vocab_size, hidden_size = weight_gradient.shape
    return weight_gradient.new_empty(2 * triton.cdiv(hidden_size, _TILE["COLUMNS"]), vocab_size, dtype=torch.uint8)
