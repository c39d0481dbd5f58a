"""Rotary position embedding of queries and keys in one launch, in the memory layout of attention projections.

For pairs ``(x1, x2)`` of a head's rotary part, with the entries ``(c1, c2)`` and ``(s1, s2)`` of a position's tables::

    y1 = x1 * c1 - x2 * s1          dx1 = dy1 * c1 + dy2 * s2
    y2 = x2 * c2 + x1 * s2          dx2 = dy2 * c2 - dy1 * s1

A pair is an element of the first half and its counterpart in the second (Hugging Face's Llama), or two neighbours
(GLM4, Cohere, DeepSeek, Llama 4). The two entries of a table are read as given: plain RoPE has equal ones, but they may
differ; tables of half the width hold one entry for both. Dimensions before and past the rotary part are copied. The
backward is the forward with ``s1`` and ``s2`` exchanged and negated, so one kernel (in `rope_kernel`) and one operator
do both, and a second derivative works too.

Bytes moved, each way: q and k are read once and written once; after the first read the tables come from L2. Saved for
backward: cos and sin alone. The results are new tensors, since q and k belong to the caller; the operator keeps neither
alive.

Memory layout: q and k are usually transposed views of (batch, seq, heads, head_dim) memory. They are read through their
strides, and results and gradients have that same memory order, so that the backward matmul of the projections takes the
gradient without a copy.

Shapes: batch sequences of seq tokens, heads of head_dim, rotary_dim columns that turn, from column first on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.autograd import input_gradients
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.rope.rope_kernel import launch
from liger_trainer.kernels.runtime import reference_of, use_triton

_BACKWARD_PAIRS = {
    "halves": "halves",
    "interleaved": "interleaved",
    "interleaved to halves": "halves to interleaved",
    "halves to interleaved": "interleaved to halves",
}


def _by_token(x: torch.Tensor, unsqueeze_dim: int) -> torch.Tensor:
    """A (batch, seq, heads, head_dim) view of `x`, or the view back: the order in which memory is contiguous."""
    return x.transpose(1, 2) if unsqueeze_dim == 1 else x


@operator("liger_trainer::rope")
def rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int,
    transposed: bool,
    out_dtype: torch.dtype,
    pairs: str = "halves",
    table: str = "halves",
    sections: Sequence[int] | None = None,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated q and k as an operator. Call `rope` or a function of `layouts`, which check their arguments."""
    q, k = _by_token(q, unsqueeze_dim), _by_token(k, unsqueeze_dim)
    q_out, k_out = q.new_empty(q.shape, dtype=out_dtype), k.new_empty(k.shape, dtype=out_dtype)
    launch(q, k, cos, sin, q_out, k_out, transposed, pairs=pairs, table=table, sections=sections or (), first=first)
    return _by_token(q_out, unsqueeze_dim), _by_token(k_out, unsqueeze_dim)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, _k, cos, sin, unsqueeze_dim, transposed, _out_dtype, pairs, table, sections, first = inputs
    ctx.save_for_backward(cos, sin)
    ctx.unsqueeze_dim, ctx.in_dtype = unsqueeze_dim, q.dtype
    ctx.options = (not transposed, q.dtype, _BACKWARD_PAIRS[pairs], table, sections, first)


def _backward(ctx: Any, dq_out: torch.Tensor | None, dk_out: torch.Tensor | None) -> tuple[Any, ...]:
    dq_out = dq_out if ctx.needs_input_grad[0] else None
    dk_out = dk_out if ctx.needs_input_grad[1] else None
    some = dk_out if dq_out is None else dq_out
    if some is None:
        return input_gradients(ctx)
    cos, sin = ctx.saved_tensors
    no_heads = some.narrow(ctx.unsqueeze_dim, 0, 0)
    dq, dk = rotate(
        no_heads if dq_out is None else dq_out,
        no_heads if dk_out is None else dk_out,
        cos,
        sin,
        ctx.unsqueeze_dim,
        *ctx.options,
    )
    return input_gradients(ctx, None if dq_out is None else dq, None if dk_out is None else dk)


rotate.register_autograd(_backward, setup_context=_setup_context)


def check_rope_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int,
    rotary_dim: int | None = None,
    planes: tuple[int, ...] = (),
    first: int = 0,
) -> bool:
    """Checks the arguments of `rope`; `planes` are leading dimensions of the tables.

    Returns:
        Whether the kernel can run: q and k of one dtype, real tables of one dtype without a gradient, and a device that
        it runs on.

    Raises:
        ValueError: If shapes or devices do not fit together.
    """
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
    batch, seq_len, head_dim = q.shape[0], q.shape[3 - unsqueeze_dim], q.shape[3]
    if (k.shape[0], k.shape[3 - unsqueeze_dim], k.shape[3]) != (batch, seq_len, head_dim):
        raise ValueError(
            f"`q` is {tuple(q.shape)} and `k` is {tuple(k.shape)}; with `unsqueeze_dim={unsqueeze_dim}` they may "
            f"differ only in dimension {unsqueeze_dim}, the heads."
        )
    shapes = ((*planes, 1, seq_len), (*planes, batch, seq_len))  # a set would fix the batch size of a compiled graph
    if cos.shape != sin.shape or cos.dim() != 3 + len(planes) or tuple(cos.shape[:-1]) not in shapes:
        wanted = ", ".join(map(str, (*planes, f"{batch} or 1", seq_len, f"up to {head_dim}")))
        raise ValueError(
            f"`cos` is {tuple(cos.shape)} and `sin` is {tuple(sin.shape)}; both must be ({'planes, ' if planes else ''}"
            f"batch or 1, seq, rotary_dim), here ({wanted})."
        )
    width = cos.shape[-1]
    if rotary_dim not in (None, width, 2 * width):
        raise ValueError(f"`rotary_dim` is {rotary_dim}; with tables {width} wide it is that or twice that.")
    rotary_dim = width if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"`cos` and `sin` rotate {rotary_dim} of the {head_dim} dimensions of a head; rotary_dim must be even and "
            "at most head_dim."
        )
    if not 0 <= first <= head_dim - rotary_dim:
        raise ValueError(
            f"`first` is {first}; with {rotary_dim} of the {head_dim} dimensions of a head rotated, it must be from 0 "
            f"to {head_dim - rotary_dim}."
        )
    if not q.device == k.device == cos.device == sin.device:
        places = ", ".join(str(tensor.device) for tensor in (q, k, cos, sin))
        raise ValueError(f"`q`, `k`, `cos`, `sin` must be on one device; they are on {places}.")
    if q.dtype != k.dtype or cos.dtype != sin.dtype or not use_triton(q) or not use_triton(cos):
        return False
    return not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
    *,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    split_output: bool = False,
    keep_dtype: bool = False,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of queries and keys (RoFormer, arXiv 2104.09864).

    By default the result is that of ``apply_rotary_pos_emb`` in Hugging Face's Llama and, with a narrower table, Phi-3,
    rounded once. The kernel gives `cos` and `sin` no gradient: if either requires one, or q and k or cos and sin differ
    in dtype, the reference runs instead.

    Args:
        q: Queries, (batch, q_heads, seq, head_dim), or (batch, seq, q_heads, head_dim) with ``unsqueeze_dim=2``. Any
            strides; float16, bfloat16 or float32 for the kernel, and any floating dtype for the reference.
        k: Keys, shaped as `q` with any number of heads (grouped-query and multi-query attention).
        cos: Cosines, (batch or 1, seq, rotary_dim), rotary_dim even and at most head_dim; dimensions of a head past
            rotary_dim are copied. Column i belongs to dimension i of a head. With `rotary_dim` given, the table may be
            half as wide: column i then belongs to pair i (GPT-OSS; GLM4 and DeepSeek-V3 with
            ``cos[..., :rotary_dim // 2]``).
        sin: Sines, shaped as `cos`.
        unsqueeze_dim: The heads' dimension of `q` and `k`, 1 or 2.
        rotary_dim: How many dimensions of a head are rotated: the width of the tables (the default) or twice that.
        interleaved: Pairs are neighbours, (0, 1), (2, 3) and so on (GLM4, Cohere), not counterparts in two halves.
        split_output: With `interleaved`, results hold the first members of all pairs, then the second ones
            (DeepSeek-V3). The dot product of a query and a key stays the same.
        keep_dtype: Results have the dtype of `q` whatever the dtype of the tables, and the reference also computes in
            float32 and rounds once (Cohere; vision towers).
        first: The dimension of a head at which its rotary part begins. Those before it are copied: latent attention
            (DeepSeek) rotates the last dimensions of a query.

    Returns:
        Rotated q and k: new tensors shaped as the inputs, in the dtype that torch promotes q and cos to, laid out in
        memory as (batch, seq, heads, head_dim) whatever `unsqueeze_dim` is.

    Raises:
        ValueError: If shapes or devices do not fit together, or for `split_output` without `interleaved`.
    """
    on_triton = check_rope_arguments(q, k, cos, sin, unsqueeze_dim, rotary_dim, first=first)
    if split_output and not interleaved:
        raise ValueError("`split_output` needs `interleaved`; without it, results are split already.")
    if on_triton:
        pairs = "halves" if not interleaved else "interleaved to halves" if split_output else "interleaved"
        table = "interleaved" if interleaved else "halves"
        if rotary_dim not in (None, cos.shape[-1]):
            table = "shared"
        out_dtype = q.dtype if keep_dtype else torch.promote_types(q.dtype, cos.dtype)
        return rotate(q, k, cos, sin, unsqueeze_dim, False, out_dtype, pairs, table, None, first)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    if rotary_dim is None:
        rotary_dim = cos.shape[-1]
    if rotary_dim != cos.shape[-1]:
        cos, sin = (x.repeat_interleave(2, -1) if interleaved else torch.cat((x, x), dim=-1) for x in (cos, sin))
    results = []
    for x in (q, k):
        front, rotary, tail = x[..., :first], x[..., first : first + rotary_dim], x[..., first + rotary_dim :]
        if keep_dtype:
            rotary = rotary.to(torch.promote_types(x.dtype, torch.float32))
        if interleaved:
            turned = torch.stack((-rotary[..., 1::2], rotary[..., ::2]), dim=-1).flatten(-2)
        else:
            left, right = rotary.chunk(2, dim=-1)
            turned = torch.cat((-right, left), dim=-1)
        y = rotary * cos + turned * sin
        if split_output:
            y = torch.cat((y[..., ::2], y[..., 1::2]), dim=-1)
        y = y.to(x.dtype) if keep_dtype else y
        parts = [part for part in (front, y, tail) if part.shape[-1]]
        results.append(torch.cat(parts, dim=-1) if len(parts) > 1 else y)
    return results[0], results[1]


rope_reference = reference_of(rope, "check_rope_arguments")
