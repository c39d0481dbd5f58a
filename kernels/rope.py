"""Rotary position embedding of queries and keys in one launch, on the layout attention projections leave in memory.

With ``x = [x1, x2]`` the two halves of the rotary part of a head, and ``cos = [c1, c2]``, ``sin = [s1, s2]`` the halves
of a position's table (half-split convention, as in Hugging Face's Llama)::

    y1 = x1 * c1 - x2 * s1          dx1 = dy1 * c1 + dy2 * s2
    y2 = x2 * c2 + x1 * s2          dx2 = dy2 * c2 - dy1 * s1

The two halves of the tables are read as given: they are equal in plain RoPE, but need not be. What lies beyond the
rotary part passes through. The backward is the forward with ``s1`` and ``s2`` exchanged and negated, so one kernel and
one operator do both, and a second derivative works too.

Bytes moved, each way: q and k read once and written once; the tables come from L2 for all but the first reader.
Saved for backward: cos and sin alone. The results are new tensors (queries and keys are the caller's), so the peak is
one q and one k of one layer; both inputs are free as soon as the caller drops them.

Memory layout: q and k are usually transposed views of (batch, seq, heads, head_dim) memory. They are read through
their strides, and results and gradients are laid out in that same memory order, so that the projections' backward
matmul takes the gradient without a copy.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels.runtime import on_device, tl, triton, use_triton

# ---------------------------------------------------------------------------------------------------------------------
# Kernel
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def _load_halves(x_ptr, offsets, mask, HALF: tl.constexpr):
    first = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_rotated(y_ptr, offsets, mask, x1, x2, cos1, cos2, sin1, sin2, HALF: tl.constexpr):
    dtype = y_ptr.dtype.element_ty
    tl.store(y_ptr + offsets, (x1 * cos1 - x2 * sin1).to(dtype), mask=mask)
    tl.store(y_ptr + offsets + HALF, (x2 * cos2 + x1 * sin2).to(dtype), mask=mask)


@triton.jit
def _copy_tail(x_ptr, y_ptr, x_offsets, y_offsets, mask):
    tl.store(y_ptr + y_offsets, tl.load(x_ptr + x_offsets, mask=mask).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["seq_len"])
def _rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,  # outputs are contiguous (batch, seq, heads, head_dim)
    k_out_ptr,
    seq_len,
    q_stride_batch,
    q_stride_seq,
    q_stride_head,
    k_stride_batch,
    k_stride_seq,
    k_stride_head,
    cos_stride_batch,  # 0 where the table is shared by the batch
    cos_stride_seq,
    sin_stride_batch,
    sin_stride_seq,
    NUM_Q_HEADS: tl.constexpr,
    NUM_K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # multiply by the transposed rotation, as the backward does
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """One program rotates BLOCK_TOKENS tokens of one sequence: a block of query heads and a block of key heads."""
    blocks_per_sequence = tl.cdiv(seq_len, BLOCK_TOKENS)
    batch = (tl.program_id(0) // blocks_per_sequence).to(tl.int64)
    first_token = (tl.program_id(0) % blocks_per_sequence) * BLOCK_TOKENS
    # Tiles are (tokens, heads, columns).
    token = (first_token + tl.arange(0, BLOCK_TOKENS).to(tl.int64))[:, None, None]
    q_head = (tl.program_id(1) * BLOCK_Q_HEADS + tl.arange(0, BLOCK_Q_HEADS).to(tl.int64))[None, :, None]
    k_head = (tl.program_id(1) * BLOCK_K_HEADS + tl.arange(0, BLOCK_K_HEADS).to(tl.int64))[None, :, None]
    column = tl.arange(0, BLOCK_HALF)[None, None, :]
    in_table = (token < seq_len) & (column < HALF)

    # Everything is loaded before anything is stored: loads cannot move above stores they might alias.
    cos_offsets = batch * cos_stride_batch + token * cos_stride_seq + column
    sin_offsets = batch * sin_stride_batch + token * sin_stride_seq + column
    cos1, cos2 = _load_halves(cos_ptr, cos_offsets, in_table, HALF)
    sin1, sin2 = _load_halves(sin_ptr, sin_offsets, in_table, HALF)
    if TRANSPOSED:
        sin1, sin2 = -sin2, -sin1
    q_row = batch * q_stride_batch + token * q_stride_seq + q_head * q_stride_head
    k_row = batch * k_stride_batch + token * k_stride_seq + k_head * k_stride_head
    q_out_row = ((batch * seq_len + token) * NUM_Q_HEADS + q_head) * HEAD_DIM
    k_out_row = ((batch * seq_len + token) * NUM_K_HEADS + k_head) * HEAD_DIM
    q_mask = in_table & (q_head < NUM_Q_HEADS)
    k_mask = in_table & (k_head < NUM_K_HEADS)
    if NUM_Q_HEADS > 0:
        q1, q2 = _load_halves(q_ptr, q_row + column, q_mask, HALF)
    if NUM_K_HEADS > 0:
        k1, k2 = _load_halves(k_ptr, k_row + column, k_mask, HALF)
    if NUM_Q_HEADS > 0:
        _store_rotated(q_out_ptr, q_out_row + column, q_mask, q1, q2, cos1, cos2, sin1, sin2, HALF)
    if NUM_K_HEADS > 0:
        _store_rotated(k_out_ptr, k_out_row + column, k_mask, k1, k2, cos1, cos2, sin1, sin2, HALF)

    if 2 * HALF < HEAD_DIM:  # partial rotary: the tail passes through
        tail = 2 * HALF + tl.arange(0, BLOCK_TAIL)[None, None, :]
        in_tail = (token < seq_len) & (tail < HEAD_DIM)
        if NUM_Q_HEADS > 0:
            _copy_tail(q_ptr, q_out_ptr, q_row + tail, q_out_row + tail, in_tail & (q_head < NUM_Q_HEADS))
        if NUM_K_HEADS > 0:
            _copy_tail(k_ptr, k_out_ptr, k_row + tail, k_out_row + tail, in_tail & (k_head < NUM_K_HEADS))


# ---------------------------------------------------------------------------------------------------------------------
# Launcher
# ---------------------------------------------------------------------------------------------------------------------


def _launch_config(num_heads: int, block_half: int) -> tuple[int, int, int]:
    """(tokens a program, programs the heads of a token are split over, warps), from the elements of half a token.

    One program takes a whole token where that is 2,048 to 8,192 elements a half, enough to keep loads in flight,
    several tokens where heads are few, and a share of the heads where they would spill registers.
    """
    elements = triton.next_power_of_2(num_heads) * block_half
    tokens = max(1, min(16, 2048 // elements))
    splits = max(1, elements // 8192)
    return tokens, splits, 4 if tokens * elements // splits <= 4096 else 8


def _contiguous_heads(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    transposed: bool,
    config: tuple[int, int, int] | None = None,
) -> None:
    """Launches on q and k as (batch, seq, heads, head_dim), either of which may have no heads.

    Of the outputs only the memory counts, which holds contiguous (batch, seq, heads, head_dim).
    """
    batch, seq_len, num_q_heads, head_dim = q.shape
    num_k_heads, half = k.shape[2], cos.shape[-1] // 2
    if batch * seq_len * (num_q_heads + num_k_heads) == 0:
        return
    q, k, cos, sin = (_contiguous_heads(x) for x in (q, k, cos, sin))
    block_half = triton.next_power_of_2(max(half, 1))
    block_tokens, splits, num_warps = config or _launch_config(max(num_q_heads, num_k_heads), block_half)
    grid = (batch * triton.cdiv(seq_len, block_tokens), splits)
    with on_device(q):
        _rope_kernel[grid](
            q,
            k,
            cos,
            sin,
            q_out,
            k_out,
            seq_len,
            q.stride(0),
            q.stride(1),
            q.stride(2),
            k.stride(0),
            k.stride(1),
            k.stride(2),
            cos.stride(0) if cos.shape[0] > 1 else 0,
            cos.stride(1),
            sin.stride(0) if sin.shape[0] > 1 else 0,
            sin.stride(1),
            NUM_Q_HEADS=num_q_heads,
            NUM_K_HEADS=num_k_heads,
            HEAD_DIM=head_dim,
            HALF=half,
            TRANSPOSED=transposed,
            BLOCK_TOKENS=block_tokens,
            BLOCK_Q_HEADS=triton.next_power_of_2(triton.cdiv(max(num_q_heads, 1), splits)),
            BLOCK_K_HEADS=triton.next_power_of_2(triton.cdiv(max(num_k_heads, 1), splits)),
            BLOCK_HALF=block_half,
            BLOCK_TAIL=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
            num_warps=num_warps,
        )


# ---------------------------------------------------------------------------------------------------------------------
# Operator
# ---------------------------------------------------------------------------------------------------------------------


def _by_token(x: torch.Tensor, unsqueeze_dim: int) -> torch.Tensor:
    """(batch, seq, heads, head_dim) view of `x`, or back again; what lies contiguous in memory."""
    return x.transpose(1, 2) if unsqueeze_dim == 1 else x


def _empty_by_token(x: torch.Tensor, unsqueeze_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return _by_token(x.new_empty(_by_token(x, unsqueeze_dim).shape, dtype=dtype), unsqueeze_dim)


@torch.library.custom_op("liger_trainer::rope", mutates_args=())
def _rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int,
    transposed: bool,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out = _empty_by_token(q, unsqueeze_dim, out_dtype)
    k_out = _empty_by_token(k, unsqueeze_dim, out_dtype)
    _launch(_by_token(q, unsqueeze_dim), _by_token(k, unsqueeze_dim), cos, sin, q_out, k_out, transposed)
    return q_out, k_out


@_rope.register_fake
def _(q, k, cos, sin, unsqueeze_dim, transposed, out_dtype):
    return _empty_by_token(q, unsqueeze_dim, out_dtype), _empty_by_token(k, unsqueeze_dim, out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, _k, cos, sin, unsqueeze_dim, transposed, _out_dtype = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(cos, sin)
    ctx.unsqueeze_dim, ctx.transposed, ctx.in_dtype = unsqueeze_dim, transposed, q.dtype


def _backward(ctx: Any, dq_out: torch.Tensor | None, dk_out: torch.Tensor | None) -> tuple[Any, ...]:
    dq_out = dq_out if ctx.needs_input_grad[0] else None
    dk_out = dk_out if ctx.needs_input_grad[1] else None
    some = dk_out if dq_out is None else dq_out
    if some is None:
        return (None,) * 7
    cos, sin = ctx.saved_tensors
    no_heads = some.narrow(ctx.unsqueeze_dim, 0, 0)
    dq, dk = _rope(
        no_heads if dq_out is None else dq_out,
        no_heads if dk_out is None else dk_out,
        cos,
        sin,
        ctx.unsqueeze_dim,
        not ctx.transposed,
        ctx.in_dtype,
    )
    return (None if dq_out is None else dq, None if dk_out is None else dk, None, None, None, None, None)


_rope.register_autograd(_backward, setup_context=_setup_context)


# ---------------------------------------------------------------------------------------------------------------------
# Public functions
# ---------------------------------------------------------------------------------------------------------------------


def _check(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int) -> None:
    if unsqueeze_dim not in (1, 2):
        raise ValueError(
            f"`unsqueeze_dim` is {unsqueeze_dim!r}; it must be 1 for q and k of (batch, heads, seq, head_dim), or 2 "
            "for (batch, seq, heads, head_dim)."
        )
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(
            f"`q` is {tuple(q.shape)} and `k` is {tuple(k.shape)}; both must have 4 dimensions, (batch, heads, seq, "
            "head_dim), or (batch, seq, heads, head_dim) with `unsqueeze_dim=2`."
        )
    batch, seq_len = q.shape[0], q.shape[3 - unsqueeze_dim]
    if (k.shape[0], k.shape[3 - unsqueeze_dim], k.shape[3]) != (batch, seq_len, q.shape[3]):
        raise ValueError(
            f"`q` is {tuple(q.shape)} and `k` is {tuple(k.shape)}; with `unsqueeze_dim={unsqueeze_dim}` they may "
            f"differ only in dimension {unsqueeze_dim}, the heads."
        )
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != seq_len:
        raise ValueError(
            f"`cos` is {tuple(cos.shape)} and `sin` is {tuple(sin.shape)}; both must be (batch or 1, seq, rotary_dim), "
            f"here ({batch} or 1, {seq_len}, up to {q.shape[3]})."
        )
    if cos.shape[2] % 2 or cos.shape[2] > q.shape[3]:
        raise ValueError(
            f"`cos` and `sin` rotate {cos.shape[2]} of the {q.shape[3]} dimensions of a head; rotary_dim must be even "
            "and at most head_dim."
        )
    if not q.device == k.device == cos.device == sin.device:
        raise ValueError(
            f"`q`, `k`, `cos` and `sin` must be on one device; they are on {q.device}, {k.device}, {cos.device} and "
            f"{sin.device}."
        )


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of queries and keys, half-split convention (RoFormer, arXiv 2104.09864).

    The result is that of ``apply_rotary_pos_emb`` in Hugging Face's Llama and, with a narrower table, Phi-3, rounded
    once. No gradient flows to `cos` and `sin` from the kernel; where either requires one, and where q and k or cos and
    sin differ in dtype, the reference runs instead.

    Args:
        q: Queries, (batch, q_heads, seq, head_dim), or (batch, seq, q_heads, head_dim) with ``unsqueeze_dim=2``. Any
            strides; float16, bfloat16 or float32 for the kernel, and any floating dtype for the reference.
        k: Keys, as `q` with any number of heads (grouped-query and multi-query attention).
        cos: Cosines, (batch or 1, seq, rotary_dim), rotary_dim even and at most head_dim; dimensions of a head beyond
            rotary_dim pass through.
        sin: Sines, shaped as `cos`.
        unsqueeze_dim: The heads' dimension of `q` and `k`, 1 or 2.

    Returns:
        Rotated q and k: new tensors shaped as the inputs, in the dtype that torch promotes q and cos to, laid out in
        memory as (batch, seq, heads, head_dim) whatever `unsqueeze_dim` is.

    Raises:
        ValueError: if shapes or devices do not fit together.
    """
    _check(q, k, cos, sin, unsqueeze_dim)
    one_dtype = q.dtype == k.dtype and cos.dtype == sin.dtype
    table_gradient = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    if not (use_triton(q) and use_triton(cos) and one_dtype) or table_gradient:
        return rope_reference(q, k, cos, sin, unsqueeze_dim)
    return _rope(q, k, cos, sin, unsqueeze_dim, False, torch.promote_types(q.dtype, cos.dtype))


def rope_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`rope`] in plain torch, differentiable in all four tensors."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    rotary_dim = cos.shape[-1]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        rotary, tail = x[..., :rotary_dim], x[..., rotary_dim:]
        first, second = rotary.chunk(2, dim=-1)
        rotated = rotary * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((rotated, tail), dim=-1) if tail.shape[-1] else rotated

    return rotate(q), rotate(k)
