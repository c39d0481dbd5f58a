"""The kernels of `qk_norm_rope`: RMSNorm of every head of q and k, then the rotation, in one pass each way.

Forward, for a head x:     n = round(x * rstd) * scale;  y = rotate(n)
Backward:                  d = rotate^T(dy);  g = d * scale;  dx = rstd * (g - x_hat * mean(g * x_hat))

with scale = offset + weight and x_hat = x * rstd; the weight gradient is the sum of d * x_hat. A tile is a block of
tokens of one sequence times a block of heads, so that a token's table is read once for several heads. Queries and keys
differ in number of heads, weight and strides, so each launch runs the same code first on the tiles of q, then on those
of k.

Shapes: tiles of tokens by heads by columns; HEAD_DIM columns of a head, HALF pairs that turn.
"""

from __future__ import annotations

from liger_trainer.kernels.norms.rms_norm import scale_of_weight, times_rstd
from liger_trainer.kernels.rope.rope_kernel import load_pairs, load_rotation, store_pairs
from liger_trainer.kernels.runtime import tl, triton


@triton.jit
def _locate(tile, seq_len, HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """The sequence, the tokens (tokens, 1, 1) and the heads (1, heads, 1) of a tile."""
    head_blocks: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS if HEADS > 0 else 1
    blocks_per_sequence = tl.cdiv(seq_len, BLOCK_TOKENS)
    token_block = tile // head_blocks
    batch = (token_block // blocks_per_sequence).to(tl.int64)
    token = (token_block % blocks_per_sequence) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS).to(tl.int64)
    head = (tile % head_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS).to(tl.int64)
    return batch, token[:, None, None], head[None, :, None]


@triton.jit
def _load_tables(
    table,
    batch,
    token,
    head,
    seq_len,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    SPREAD: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    cos_ptr, sin_ptr, cos_stride_batch, cos_stride_seq, sin_stride_batch, sin_stride_seq = table
    cos_row = batch * cos_stride_batch + token * cos_stride_seq
    sin_row = batch * sin_stride_batch + token * sin_stride_seq
    if SPREAD:  # load the entry for every head: in the shape of x, it also gets the layout of x
        cos_row += head * 0
        sin_row += head * 0
    return load_rotation(
        cos_ptr, sin_ptr, cos_row, sin_row, 0, 0, token < seq_len, HALF, BLOCK_HALF, "halves", (), TRANSPOSED
    )


@triton.jit
def _load_scale(weight_ptr, column, mask, offset, CASTING: tl.constexpr):
    return scale_of_weight(tl.load(weight_ptr + column, mask=mask, other=0.0), offset, CASTING)


@triton.jit
def _normalise(x, rstd, scale, DTYPE: tl.constexpr, NORM_DTYPE: tl.constexpr, CASTING: tl.constexpr):
    """The norm's result, rounded as if it were stored."""
    return (times_rstd(x, rstd, DTYPE, CASTING) * scale).to(NORM_DTYPE).to(tl.float32)


@triton.jit
def forward_tile(
    tile,
    x_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    strides,
    table,
    seq_len,
    eps,
    offset,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    CASTING: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Normalises and rotates one tile of q or k."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PROMOTED: tl.constexpr = CASTING == "llama" and weight_ptr.dtype.element_ty != DTYPE
    NORM_DTYPE: tl.constexpr = tl.float32 if PROMOTED else DTYPE
    batch, token, head = _locate(tile, seq_len, HEADS, BLOCK_TOKENS, BLOCK_HEADS)
    mask = (token < seq_len) & (head < HEADS)
    x_row = x_ptr + batch * strides[0] + token * strides[1] + head * strides[2]
    row = (batch * seq_len + token) * HEADS + head
    column = tl.arange(0, BLOCK_HALF)[None, None, :]
    tail = 2 * HALF + tl.arange(0, BLOCK_TAIL)[None, None, :]

    # Everything is loaded before anything is stored: the compiler cannot move a load above a store it might alias.
    x1, x2 = load_pairs(x_row, mask, HALF, BLOCK_HALF, False)
    square = tl.sum(x1 * x1 + x2 * x2, axis=2)
    if 2 * HALF < HEAD_DIM:
        x3 = tl.load(x_row + tail, mask=mask & (tail < HEAD_DIM), other=0.0).to(tl.float32)
        square += tl.sum(x3 * x3, axis=2)
        scale3 = _load_scale(weight_ptr, tail, tail < HEAD_DIM, offset, CASTING)
    cos1, cos2, sin1, sin2 = _load_tables(table, batch, token, head, seq_len, HALF, BLOCK_HALF, SPREAD, False)
    scale1 = _load_scale(weight_ptr, column, column < HALF, offset, CASTING)
    scale2 = _load_scale(weight_ptr + HALF, column, column < HALF, offset, CASTING)

    rstd = tl.rsqrt(square[:, :, None] * (1.0 / HEAD_DIM) + eps)
    n1 = _normalise(x1, rstd, scale1, DTYPE, NORM_DTYPE, CASTING)
    n2 = _normalise(x2, rstd, scale2, DTYPE, NORM_DTYPE, CASTING)
    y_row = y_ptr + row * HEAD_DIM
    tl.store(rstd_ptr + row, rstd, mask=mask)
    store_pairs(y_row, n1 * cos1 - n2 * sin1, n2 * cos2 + n1 * sin2, mask, HALF, BLOCK_HALF, False)
    if 2 * HALF < HEAD_DIM:
        n3 = _normalise(x3, rstd, scale3, DTYPE, NORM_DTYPE, CASTING)
        tl.store(y_row + tail, n3.to(y_ptr.dtype.element_ty), mask=mask & (tail < HEAD_DIM))


@triton.jit
def backward_tiles(
    program,
    num_tiles,
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,  # None: no gradient of x is needed
    partial_ptr,  # None: no gradient of the weight is needed
    dy_strides,
    x_strides,
    table,
    seq_len,
    offset,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    CASTING: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    SPREAD: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """This program's share of the tiles of q or k, and its part of the weight gradient."""
    HAS_TAIL: tl.constexpr = 2 * HALF < HEAD_DIM
    column = tl.arange(0, BLOCK_HALF)[None, None, :]
    tail = 2 * HALF + tl.arange(0, BLOCK_TAIL)[None, None, :]
    scale1 = _load_scale(weight_ptr, column, column < HALF, offset, CASTING)
    scale2 = _load_scale(weight_ptr + HALF, column, column < HALF, offset, CASTING)
    # Summing a tile crosses warps, so that sum waits until the end.
    dweight1 = tl.zeros((BLOCK_TOKENS, BLOCK_HEADS, BLOCK_HALF), tl.float32)
    dweight2 = tl.zeros((BLOCK_TOKENS, BLOCK_HEADS, BLOCK_HALF), tl.float32)
    if HAS_TAIL:
        scale3 = _load_scale(weight_ptr, tail, tail < HEAD_DIM, offset, CASTING)
        dweight3 = tl.zeros((BLOCK_TOKENS, BLOCK_HEADS, BLOCK_TAIL), tl.float32)

    # Asynchronous copies bypass the L1 cache, which holds the entries of a spread table.
    STAGES: tl.constexpr = 1 if SPREAD else NUM_STAGES
    for tile in tl.range(program, num_tiles, tl.num_programs(0), num_stages=STAGES):
        batch, token, head = _locate(tile, seq_len, HEADS, BLOCK_TOKENS, BLOCK_HEADS)
        mask = (token < seq_len) & (head < HEADS)
        x_row = x_ptr + batch * x_strides[0] + token * x_strides[1] + head * x_strides[2]
        dy_row = dy_ptr + batch * dy_strides[0] + token * dy_strides[1] + head * dy_strides[2]
        row = (batch * seq_len + token) * HEADS + head
        x1, x2 = load_pairs(x_row, mask, HALF, BLOCK_HALF, False)
        dy1, dy2 = load_pairs(dy_row, mask, HALF, BLOCK_HALF, False)
        cos1, cos2, sin1, sin2 = _load_tables(table, batch, token, head, seq_len, HALF, BLOCK_HALF, SPREAD, True)
        rstd = tl.load(rstd_ptr + row, mask=mask, other=0.0)
        x1 *= rstd
        x2 *= rstd
        d1 = dy1 * cos1 - dy2 * sin1
        d2 = dy2 * cos2 + dy1 * sin2
        if partial_ptr is not None:
            dweight1 += d1 * x1
            dweight2 += d2 * x2
        d1 *= scale1
        d2 *= scale2
        dot = tl.sum(d1 * x1 + d2 * x2, axis=2)
        if HAS_TAIL:
            in_tail = mask & (tail < HEAD_DIM)
            x3 = tl.load(x_row + tail, mask=in_tail, other=0.0).to(tl.float32) * rstd
            d3 = tl.load(dy_row + tail, mask=in_tail, other=0.0).to(tl.float32)
            if partial_ptr is not None:
                dweight3 += d3 * x3
            d3 *= scale3
            dot += tl.sum(d3 * x3, axis=2)
        if dx_ptr is not None:
            mean = dot[:, :, None] * (1.0 / HEAD_DIM)
            dx_row = dx_ptr + row * HEAD_DIM
            store_pairs(dx_row, rstd * (d1 - x1 * mean), rstd * (d2 - x2 * mean), mask, HALF, BLOCK_HALF, False)
            if HAS_TAIL:
                dx3 = (rstd * (d3 - x3 * mean)).to(dx_ptr.dtype.element_ty)
                tl.store(dx_row + tail, dx3, mask=in_tail)

    if partial_ptr is not None:
        partial_ptr += tl.program_id(0) * HEAD_DIM
        pair = tl.arange(0, BLOCK_HALF)
        tl.store(partial_ptr + pair, tl.sum(tl.sum(dweight1, axis=0), axis=0), mask=pair < HALF)
        tl.store(partial_ptr + HALF + pair, tl.sum(tl.sum(dweight2, axis=0), axis=0), mask=pair < HALF)
        if HAS_TAIL:
            rest = 2 * HALF + tl.arange(0, BLOCK_TAIL)
            tl.store(partial_ptr + rest, tl.sum(tl.sum(dweight3, axis=0), axis=0), mask=rest < HEAD_DIM)


@triton.jit(do_not_specialize=["seq_len", "q_tiles"])
def forward_kernel(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,  # results and rstd are contiguous (batch, seq, heads, ...)
    k_out_ptr,
    q_rstd_ptr,
    k_rstd_ptr,
    seq_len,
    q_tiles,
    q_stride_batch,
    q_stride_seq,
    q_stride_head,
    k_stride_batch,
    k_stride_seq,
    k_stride_head,
    cos_stride_batch,
    cos_stride_seq,
    sin_stride_batch,
    sin_stride_seq,
    eps,
    offset,
    NUM_Q_HEADS: tl.constexpr,
    NUM_K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    CASTING: tl.constexpr,
    Q_TOKENS: tl.constexpr,  # of a tile
    Q_HEADS: tl.constexpr,
    K_TOKENS: tl.constexpr,
    K_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    SPREAD_Q: tl.constexpr,
    SPREAD_K: tl.constexpr,
):
    """Runs one tile, of q in the first q_tiles programs and of k in the others."""
    table = (cos_ptr, sin_ptr, cos_stride_batch, cos_stride_seq, sin_stride_batch, sin_stride_seq)
    tile = tl.program_id(0)
    if tile < q_tiles:  # each branch has names of its own, as q's strides may have another integer width than k's
        q_strides = (q_stride_batch, q_stride_seq, q_stride_head)
        forward_tile(
            tile, q_ptr, q_weight_ptr, q_out_ptr, q_rstd_ptr, q_strides, table, seq_len, eps, offset,
            NUM_Q_HEADS, HEAD_DIM, HALF, CASTING, Q_TOKENS, Q_HEADS, BLOCK_HALF, BLOCK_TAIL, SPREAD_Q,
        )  # fmt: skip
    else:
        k_strides = (k_stride_batch, k_stride_seq, k_stride_head)
        forward_tile(
            tile - q_tiles, k_ptr, k_weight_ptr, k_out_ptr, k_rstd_ptr, k_strides, table, seq_len, eps, offset,
            NUM_K_HEADS, HEAD_DIM, HALF, CASTING, K_TOKENS, K_HEADS, BLOCK_HALF, BLOCK_TAIL, SPREAD_K,
        )  # fmt: skip


@triton.jit(do_not_specialize=["seq_len", "q_tiles", "k_tiles"])
def backward_kernel(
    dq_out_ptr,  # None: neither dq nor the gradient of q's weight is needed
    dk_out_ptr,
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_rstd_ptr,
    k_rstd_ptr,
    cos_ptr,
    sin_ptr,
    dq_ptr,
    dk_ptr,
    q_partial_ptr,
    k_partial_ptr,
    seq_len,
    q_tiles,
    k_tiles,
    dq_out_stride_batch,
    dq_out_stride_seq,
    dq_out_stride_head,
    dk_out_stride_batch,
    dk_out_stride_seq,
    dk_out_stride_head,
    q_stride_batch,
    q_stride_seq,
    q_stride_head,
    k_stride_batch,
    k_stride_seq,
    k_stride_head,
    cos_stride_batch,
    cos_stride_seq,
    sin_stride_batch,
    sin_stride_seq,
    offset,
    NUM_Q_HEADS: tl.constexpr,
    NUM_K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    CASTING: tl.constexpr,
    Q_TOKENS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_TOKENS: tl.constexpr,
    K_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    SPREAD_Q: tl.constexpr,
    SPREAD_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Runs a share of the tiles of q, then a share of those of k, in a persistent grid."""
    table = (cos_ptr, sin_ptr, cos_stride_batch, cos_stride_seq, sin_stride_batch, sin_stride_seq)
    if dq_out_ptr is not None:
        dy_strides = (dq_out_stride_batch, dq_out_stride_seq, dq_out_stride_head)
        x_strides = (q_stride_batch, q_stride_seq, q_stride_head)
        backward_tiles(
            tl.program_id(0), q_tiles, dq_out_ptr, q_ptr, q_weight_ptr, q_rstd_ptr, dq_ptr, q_partial_ptr, dy_strides,
            x_strides, table, seq_len, offset, NUM_Q_HEADS, HEAD_DIM, HALF, CASTING, Q_TOKENS, Q_HEADS, BLOCK_HALF,
            BLOCK_TAIL, SPREAD_Q, NUM_STAGES,
        )  # fmt: skip
    if dk_out_ptr is not None:
        dy_strides = (dk_out_stride_batch, dk_out_stride_seq, dk_out_stride_head)
        x_strides = (k_stride_batch, k_stride_seq, k_stride_head)
        # Counted from the other end, so that the programs with one tile of q less take the first tiles of k.
        backward_tiles(
            tl.num_programs(0) - 1 - tl.program_id(0), k_tiles, dk_out_ptr, k_ptr, k_weight_ptr, k_rstd_ptr, dk_ptr,
            k_partial_ptr, dy_strides, x_strides, table, seq_len, offset, NUM_K_HEADS, HEAD_DIM, HALF, CASTING,
            K_TOKENS, K_HEADS, BLOCK_HALF, BLOCK_TAIL, SPREAD_K, NUM_STAGES,
        )  # fmt: skip
