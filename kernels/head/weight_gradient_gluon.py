"""One chunk of a head's weight gradient on Hopper, where the kernel of weight_gradient.py lets the tensor cores wait.

It computes and stores the same bits as that kernel; the work is divided differently. A tile of sums fills the registers
of the warps that multiply, and Hopper has no other place for it: while these warps decode, add and encode the tile,
they cannot begin the next one. Only other warps, with registers of their own, can. Here three groups of warps run side
by side on each multiprocessor:

    producer, 1 warp               copies steps of dZ (DEPTH, ROWS) and X (DEPTH, COLUMNS) of one tile after another
    consumers 0 and 1, 4 warps     multiply half the rows of the tile each, by all its columns, and finish their half

Between them lies a ring of STAGES steps in shared memory, with two barriers a stage: `filled` (the copies have arrived)
and `emptied` (both consumers have read it). The groups share nothing else. One consumer may be ahead of the other by
the ring's depth, and multiplies while the other finishes its half; meanwhile the producer fills the ring with the
first steps of the next tile. After LATE steps of its own multiplication, long before it needs it, a consumer requests
the half tile that the previous chunk stored; `returned` is the barrier of its arrival. It arrives in the buffer that
the new half tile is stored from.

Gluon, the layer of Triton that assigns work to warps, is experimental and changes from release to release:
weight_gradient.py uses this kernel only with the releases it has run with, and its own kernel with all others.

Shapes: n tokens of a chunk, H hidden size, V vocabulary: dZ (n, V), X (n, H), dW (V, H).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from liger_trainer.kernels.runtime import num_sms, on_device

# The second name of each is the one that Triton had before 3.8.
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

ROWS, COLUMNS, DEPTH = gl.constexpr(128), gl.constexpr(256), gl.constexpr(64)
STAGES = gl.constexpr(3)
GROUP = gl.constexpr(8)
LATE = gl.constexpr(2)  # at least 1
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(232), gl.constexpr(40)
HEIGHT = gl.constexpr(64)  # of ROWS, one consumer's
BLOCK = gl.constexpr(128)  # of COLUMNS, those under one exponent
_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.int16: gl.int16}


@gluon.jit
def _corner(tile, row_tiles, column_tiles):
    """First row and column of a tile, GROUP tiles of rows together so that the columns of dZ they read stay in L2."""
    first = tile // (GROUP * column_tiles) * GROUP
    height = gl.minimum(row_tiles - first, GROUP)
    within = tile % (GROUP * column_tiles)
    return (first + within % height) * ROWS, within // height * COLUMNS


@gluon.jit
def _after(stage, phase):
    """The next stage of the ring and the phase of its barriers, which flips with every round."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _before(stage):
    """The previous stage of the ring. Carried in a variable (`last = stage`), Triton 3.6 miscompiles it and hangs."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _produce(dz_desc, x_desc, ring, shape, PROGRAMS: gl.constexpr):
    """Copies the operands of every step of every tile of this program into the ring."""
    dz_ring, x_ring, filled, emptied = ring
    tokens, vocab_size, hidden_size = shape
    row_tiles = gl.cdiv(vocab_size, ROWS)
    column_tiles = gl.cdiv(hidden_size, COLUMNS)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # a stage never used counts as emptied
    for tile in range(gl.program_id(0), row_tiles * column_tiles, PROGRAMS):
        row, column = _corner(tile, row_tiles, column_tiles)
        for step in range(0, gl.cdiv(tokens, DEPTH)):
            mbarrier.wait(emptied.index(stage), phase)
            barrier = filled.index(stage)
            mbarrier.expect(barrier, 2 * DEPTH * (ROWS + COLUMNS))
            _tma_load(dz_desc, [step * DEPTH, row], barrier, dz_ring.index(2 * stage))
            _tma_load(dz_desc, [step * DEPTH, row + HEIGHT], barrier, dz_ring.index(2 * stage + 1))
            _tma_load(x_desc, [step * DEPTH, column], barrier, x_ring.index(stage))
            stage, phase = _after(stage, phase)


@gluon.jit
def _multiply(sums, dz_ring, x_ring, filled, stage, phase, WARPGROUP: gl.constexpr):
    """Starts the multiplication of one step and waits for the previous one."""
    mbarrier.wait(filled.index(stage), phase)
    dz = dz_ring.index(2 * stage + WARPGROUP).permute((1, 0))
    sums = warpgroup_mma(dz, x_ring.index(stage), sums, is_async=True)
    return warpgroup_mma_wait(1, deps=(sums,))


@gluon.jit
def _decode(mantissas, exponents):
    """The fp32 values of stored integers, as in weight_gradient.py."""
    scale = gl.where(exponents == 255, float("nan"), ((exponents.to(gl.int32) - 14) << 23).to(gl.float32, bitcast=True))
    # The low 16 bits of 2**23 + 2**15 + m; memory past the end of a row reads as zeros, which decode to m = 0.
    bits = mantissas.to(gl.uint16, bitcast=True).to(gl.uint32) ^ 0x4B008000
    return (bits.to(gl.float32, bitcast=True) - 8421376.0) * gl.expand_dims(scale, 1)


@gluon.jit
def _finish(
    sums,
    old_exponents,
    buffer,
    stored_desc,
    exponents_ptrs,
    exists,
    row,
    column,
    DTYPE: gl.constexpr,
    ADD: gl.constexpr,
    KEEP: gl.constexpr,
):
    """Adds the stored block to one block of sums, and stores it: with KEEP as integers with their exponents."""
    if ADD:
        sums += _decode(buffer.load(sums.type.layout), old_exponents)
    if KEEP:
        peak = gl.max(gl.abs(sums), 1).to(gl.int32, bitcast=True)
        peak = gl.minimum(peak, 0x7F800000)  # NaN as infinity
        exponents = gl.maximum((peak + 256) >> 23, 15)
        gl.store(exponents_ptrs, exponents.to(gl.uint8), mask=exists)
        inverse = ((268 - exponents) << 23).to(gl.float32, bitcast=True)
        bits = (sums * gl.expand_dims(inverse, 1) + 12582912.0).to(gl.uint32, bitcast=True)  # 1.5 * 2**23
        stored = bits.to(gl.uint16).to(gl.int16, bitcast=True)
    else:
        stored = sums.to(DTYPE).to(gl.int16, bitcast=True)
    buffer.store(stored)
    fence_async_shared()
    _tma_store(stored_desc, [row, column], buffer)


@gluon.jit
def _consume(
    stored_desc,
    exponents,
    ring,
    buffers,
    returned,
    shape,
    WARPGROUP: gl.constexpr,
    ADD: gl.constexpr,
    KEEP: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """Multiplies half the rows of every tile of this program, and finishes and stores that half."""
    dz_ring, x_ring, filled, emptied = ring
    tokens, vocab_size, hidden_size = shape
    exponents_ptr, exponents_stride = exponents
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    block: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    left_buffer = buffers.index(2 * WARPGROUP)
    right_buffer = buffers.index(2 * WARPGROUP + 1)
    row_tiles = gl.cdiv(vocab_size, ROWS)
    column_tiles = gl.cdiv(hidden_size, COLUMNS)
    steps = gl.cdiv(tokens, DEPTH)
    early = gl.minimum(steps, LATE)
    position = gl.to_tensor(0)  # steps multiplied so far
    turn = gl.to_tensor(0)
    for tile in range(gl.program_id(0), row_tiles * column_tiles, PROGRAMS):
        row, column = _corner(tile, row_tiles, column_tiles)
        row += WARPGROUP * HEIGHT
        rows = row + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, block))
        exists = rows < vocab_size
        left_exponents = exponents_ptr + (column // BLOCK).to(gl.int64) * exponents_stride + rows
        right_exponents = left_exponents + exponents_stride
        stage = position % STAGES
        phase = (position // STAGES) & 1
        position += steps
        sums = gl.zeros((HEIGHT, COLUMNS), gl.float32, whole)
        for step in range(0, early):
            sums = _multiply(sums, dz_ring, x_ring, filled, stage, phase, WARPGROUP)
            mbarrier.arrive(emptied.index(_before(stage)), count=1, pred=step > 0)
            stage, phase = _after(stage, phase)
        tma.store_wait(0)  # the last tile has left the buffers
        left_old = 0
        right_old = 0
        if ADD:
            barrier = returned.index(WARPGROUP)
            mbarrier.expect(barrier, 2 * HEIGHT * COLUMNS)
            _tma_load(stored_desc, [row, column], barrier, left_buffer)
            _tma_load(stored_desc, [row, column + BLOCK], barrier, right_buffer)
            left_old = gl.load(left_exponents, mask=exists, other=15)
            right_old = gl.load(right_exponents, mask=exists, other=15)
        for _ in range(early, steps):
            sums = _multiply(sums, dz_ring, x_ring, filled, stage, phase, WARPGROUP)
            mbarrier.arrive(emptied.index(_before(stage)), count=1)
            stage, phase = _after(stage, phase)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(emptied.index(_before(stage)), count=1)
        if ADD:
            mbarrier.wait(returned.index(WARPGROUP), turn)
            turn ^= 1
        left, right = gl.split(gl.permute(gl.reshape(sums, (HEIGHT, 2, BLOCK)), (0, 2, 1)))
        left = gl.convert_layout(left, block, assert_trivial=True)
        right = gl.convert_layout(right, block, assert_trivial=True)
        dtype: gl.constexpr = dz_ring.dtype
        _finish(left, left_old, left_buffer, stored_desc, left_exponents, exists, row, column, dtype, ADD, KEEP)
        _finish(
            right, right_old, right_buffer, stored_desc, right_exponents, exists, row, column + BLOCK, dtype, ADD, KEEP
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["exponents_stride", "tokens", "vocab_size", "hidden_size"])
def _weight_gradient_gluon_kernel(
    dz_desc,
    x_desc,
    stored_desc,  # dW's memory as integers
    exponents_ptr,  # (2 * tiles of columns, V), or V of the columns of one that is wider
    exponents_stride,
    tokens,
    vocab_size,
    hidden_size,
    ADD: gl.constexpr,
    KEEP: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """Allocates the ring and its barriers, and starts the three groups of warps."""
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    dz_ring = gl.allocate_shared_memory(dz_desc.dtype, [2 * STAGES, DEPTH, HEIGHT], dz_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, DEPTH, COLUMNS], x_desc.layout)
    buffers = gl.allocate_shared_memory(gl.int16, [4, HEIGHT, BLOCK], stored_desc.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    returned = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(emptied.index(stage), count=2)
    for warpgroup in gl.static_range(2):
        mbarrier.init(returned.index(warpgroup), count=1)
    fence_async_shared()
    ring = (dz_ring, x_ring, filled, emptied)
    shape = (tokens, vocab_size, hidden_size)
    exponents = (exponents_ptr, exponents_stride)
    gl.warp_specialize(
        [
            (
                _consume,
                (stored_desc, exponents, ring, buffers, returned, shape, gl.constexpr(0), ADD, KEEP, PROGRAMS),
            ),
            (
                _consume,
                (stored_desc, exponents, ring, buffers, returned, shape, gl.constexpr(1), ADD, KEEP, PROGRAMS),
            ),
            (_produce, (dz_desc, x_desc, ring, shape, PROGRAMS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def _descriptor(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(
        tensor, block, gl.NVMMASharedLayout.get_default_for(block, _DTYPES[tensor.dtype])
    )


def launch(
    weight_gradient: torch.Tensor,
    exponents: torch.Tensor,
    logits_gradient: torch.Tensor,
    hidden: torch.Tensor,
    add: bool,
    keep: bool,
) -> None:
    """As `launch` of weight_gradient.py; either kernel can continue the sum of the other."""
    (tokens, vocab_size), hidden_size = logits_gradient.shape, hidden.shape[1]
    programs = num_sms(hidden.device)
    with on_device(hidden):
        _weight_gradient_gluon_kernel[(programs,)](
            _descriptor(logits_gradient, [DEPTH.value, HEIGHT.value]),
            _descriptor(hidden, [DEPTH.value, COLUMNS.value]),
            _descriptor(weight_gradient.view(torch.int16), [HEIGHT.value, BLOCK.value]),
            exponents,
            exponents.stride(0),
            tokens,
            vocab_size,
            hidden_size,
            ADD=add,
            KEEP=keep,
            PROGRAMS=programs,
            num_warps=4,
        )
