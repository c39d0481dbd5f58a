"""The kernels of `qk_norm_rope`: each launch runs the same code (`_qk_norm_rope_tiles`) on the tiles of q and of k."""

from __future__ import annotations

from liger_trainer.kernels.rope.qk_norm_rope_tiles import backward_tiles, forward_tile
from liger_trainer.kernels.runtime import tl, triton


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
    """One program, one tile: those of the queries come first."""
    table = (cos_ptr, sin_ptr, cos_stride_batch, cos_stride_seq, sin_stride_batch, sin_stride_seq)
    tile = tl.program_id(0)
    if tile < q_tiles:  # names of their own in each branch: the strides of one may be wider than those of the other
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
    dq_out_ptr,  # None: nothing of q's side is needed
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
    """A persistent grid: each program takes tiles of the queries, then of the keys."""
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
        # From the other end, so that the programs with one tile of queries less are first with the keys.
        backward_tiles(
            tl.num_programs(0) - 1 - tl.program_id(0), k_tiles, dk_out_ptr, k_ptr, k_weight_ptr, k_rstd_ptr, dk_ptr,
            k_partial_ptr, dy_strides, x_strides, table, seq_len, offset, NUM_K_HEADS, HEAD_DIM, HALF, CASTING,
            K_TOKENS, K_HEADS, BLOCK_HALF, BLOCK_TAIL, SPREAD_K, NUM_STAGES,
        )  # fmt: skip
