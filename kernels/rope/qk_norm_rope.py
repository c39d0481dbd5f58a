"""RMSNorm of every head of queries and keys, then rotary position embedding, in one pass over both.

For a head x of D elements, with the pairs, tables and rotation of `rope`:

    rstd = 1 / sqrt(mean(x^2) + eps)        n = x * rstd * (offset + weight)        y = rotate(n)

and, where d is dy rotated by the opposite angles and g = d * (offset + weight),

    dx = rstd * (g - x_hat * mean(g * x_hat))        dweight = sum over heads and tokens of d * x_hat

as in the attention of Qwen3 and Gemma3. Two `rms_norm` and a `rope` read and write q and k twice; this does so once.
Bytes moved for N elements of q and k in bf16: 4 N forward (8 N apart) and 6 N backward (10 N apart). Saved for
backward: q, k, the weights, the tables and rstd (fp32, one per head). Each program of a persistent grid sums its share
of the weight gradients in fp32 registers, and a second, small kernel adds the shares in a fixed order: no atomics, so
every run gives the same bits. The kernels are in `qk_norm_rope_kernels`.

Memory layout: as for `rope`, inputs of any strides; results and gradients in (batch, seq, heads, head_dim) order.

Shapes: batch sequences of seq tokens, q_heads and k_heads heads of D = head_dim, rotary_dim columns that turn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative, where_needed
from liger_trainer.kernels.norms.rms_norm import CASTINGS, output_dtype, rms_norm, rms_norm_reference, unknown_casting
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.rope.qk_norm_rope_kernels import backward_kernel, forward_kernel
from liger_trainer.kernels.rope.rope import check_rope_arguments, rope, rope_reference
from liger_trainer.kernels.rope.rope_kernel import contiguous_columns, table_strides
from liger_trainer.kernels.rows import NormConfig, column_sum, fit_config
from liger_trainer.kernels.runtime import (
    cdiv,
    check_norm_arguments,
    has_elements,
    next_power_of_2,
    num_sms,
    on_device,
    reference_of,
    use_triton,
)


def _num_warps(block: int) -> int:
    """Enough warps that half a head has fewer elements than there are threads: a weight then needs no own layout."""
    return min(16, max(4, block // 32))


def forward_config(block: int) -> NormConfig:
    """Tile and warps of the forward kernel, for heads of up to `block` elements.

    4,096 elements on 4 warps put four 16-byte loads of bf16 in flight in each thread.
    """
    return NormConfig(rows=max(1, 4096 // block), num_warps=_num_warps(block))


def backward_config(block: int) -> NormConfig:
    """Tile, warps, stages and persistent grid of the backward kernel, for heads of up to `block` elements.

    A tile, its gradient and the weight gradient are in registers, 32 elements of each per thread with 4 warps, so that
    three programs share a multiprocessor. The next tile is fetched while one is computed.
    """
    num_warps = _num_warps(block)
    programs = max(1, 12 // num_warps)
    return NormConfig(rows=max(1, 4096 // block), num_warps=num_warps, num_stages=2, programs_per_sm=programs)


class _Tile(NamedTuple):
    """Tokens and heads of a tile, how many tiles an input has, and whether each tile loads its table for every head."""

    tokens: int
    heads: int
    number: int
    spread: bool


def _tile(x: torch.Tensor, block_half: int, config: NormConfig) -> _Tile:
    """A tile of `config.rows` rows of `x`, with all heads of a token where they fit."""
    batch, seq_len, num_heads, _ = x.shape
    heads = min(config.rows, next_power_of_2(max(num_heads, 1)))
    tokens = config.rows // heads
    # Triton would give so large a table a layout of its own and then convert it.
    spread = tokens * block_half >= 32 * config.num_warps
    return _Tile(tokens, heads, batch * cdiv(seq_len, tokens) * cdiv(num_heads, heads), spread)


def _constants(q_tile: _Tile, k_tile: _Tile, q: torch.Tensor, k: torch.Tensor, half: int) -> dict[str, int]:
    """The constants that both kernels take; `half` is half of rotary_dim."""
    head_dim = q.shape[-1]
    return {
        "NUM_Q_HEADS": q.shape[2],
        "NUM_K_HEADS": k.shape[2],
        "HEAD_DIM": head_dim,
        "HALF": half,
        "Q_TOKENS": q_tile.tokens,
        "Q_HEADS": q_tile.heads,
        "K_TOKENS": k_tile.tokens,
        "K_HEADS": k_tile.heads,
        "BLOCK_HALF": next_power_of_2(max(half, 1)),
        "BLOCK_TAIL": next_power_of_2(max(head_dim - 2 * half, 1)),
        "SPREAD_Q": q_tile.spread,
        "SPREAD_K": k_tile.spread,
    }


MAX_HEAD_DIM = 4096
"""Longest head that the kernels take; a tile holds whole heads in registers."""


def _results(
    q: torch.Tensor, k: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, casting: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(output_dtype(q, weight, casting), cos.dtype)
    q_out, k_out = (x.new_empty(x.shape, dtype=dtype) for x in (q, k))
    q_rstd, k_rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for x in (q, k))
    return q_out, k_out, q_rstd, k_rstd


@operator("liger_trainer::qk_norm_rope")
def qk_norm_rope_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    offset: float,
    casting: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated q and k, (batch, seq, heads, head_dim), and the reciprocal root mean squares of their heads."""
    results = _results(q, k, q_weight, cos, casting)
    if not (has_elements(results[0]) or has_elements(results[1])):
        return results
    q, k, cos, sin = (contiguous_columns(x) for x in (q, k, cos, sin))
    half, config = cos.shape[-1] // 2, forward_config(next_power_of_2(q.shape[-1]))
    block_half = next_power_of_2(max(half, 1))
    q_tile, k_tile = _tile(q, block_half, config), _tile(k, block_half, config)
    with on_device(q):
        forward_kernel[(q_tile.number + k_tile.number,)](
            q,
            k,
            q_weight.contiguous(),
            k_weight.contiguous(),
            cos,
            sin,
            *results,
            q.shape[1],
            q_tile.number,
            *q.stride()[:3],
            *k.stride()[:3],
            *table_strides(cos)[1:],
            *table_strides(sin)[1:],
            eps,
            offset,
            CASTING=casting,
            num_warps=config.num_warps,
            **_constants(q_tile, k_tile, q, k, half),
        )
    return results


def _gradients(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, needed: list[bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised gradients of q, k and their weights; one that is not needed has no elements."""
    dq, dk, dq_weight, dk_weight = (
        x.new_empty(x.shape if need else (0,)) for x, need in zip((q, k, q_weight, k_weight), needed)
    )
    return dq, dk, dq_weight, dk_weight


@operator("liger_trainer::qk_norm_rope_backward")
def qk_norm_rope_backward(
    dq_out: torch.Tensor | None,
    dk_out: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    q_rstd: torch.Tensor,
    k_rstd: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    offset: float,
    casting: str,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and their weights; one that is not `needed` has no elements."""
    gradients = _gradients(q, k, q_weight, k_weight, needed)
    dq, dk, dq_weight, dk_weight = where_needed(needed, *gradients)
    q, k, cos, sin = (contiguous_columns(x) for x in (q, k, cos, sin))
    dq_out, dk_out = (None if x is None else contiguous_columns(x) for x in (dq_out, dk_out))
    head_dim, half = q.shape[-1], cos.shape[-1] // 2
    block, block_half = next_power_of_2(head_dim), next_power_of_2(max(half, 1))
    config = fit_config(backward_config(block), block, 2 * q.element_size(), q.device)
    q_tile, k_tile = _tile(q, block_half, config), _tile(k, block_half, config)
    q_tiles, k_tiles = (0 if dq_out is None else q_tile.number), (0 if dk_out is None else k_tile.number)
    programs = min(q_tiles + k_tiles, num_sms(q.device) * config.programs_per_sm)
    weight_gradients = [gradient for gradient in (dq_weight, dk_weight) if gradient is not None]
    if programs == 0:
        for gradient in weight_gradients:
            gradient.zero_()
        return gradients
    partial = q.new_empty(len(weight_gradients), programs, head_dim, dtype=torch.float32)
    with on_device(q):
        backward_kernel[(programs,)](
            dq_out,
            dk_out,
            q,
            k,
            q_weight.contiguous(),
            k_weight.contiguous(),
            q_rstd,
            k_rstd,
            cos,
            sin,
            dq,
            dk,
            None if dq_weight is None else partial[0],
            None if dk_weight is None else partial[-1],
            q.shape[1],
            q_tiles,
            k_tiles,
            *(q if dq_out is None else dq_out).stride()[:3],
            *(k if dk_out is None else dk_out).stride()[:3],
            *q.stride()[:3],
            *k.stride()[:3],
            *table_strides(cos)[1:],
            *table_strides(sin)[1:],
            offset,
            CASTING=casting,
            NUM_STAGES=config.num_stages,
            num_warps=config.num_warps,
            **_constants(q_tile, k_tile, q, k, half),
        )
        if weight_gradients:
            column_sum(partial, *weight_gradients)
    return gradients


@qk_norm_rope_backward.register_fake
def _(dq_out, dk_out, q, k, q_weight, k_weight, q_rstd, k_rstd, cos, sin, offset, casting, needed):
    return _gradients(q, k, q_weight, k_weight, needed)


refuse_second_derivative(qk_norm_rope_backward, "qk_norm_rope")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, q_weight, k_weight, cos, sin, _eps, ctx.offset, ctx.casting = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(q, k, q_weight, k_weight, *output[2:], cos, sin)


def _backward(
    ctx: Any, dq_out: torch.Tensor | None, dk_out: torch.Tensor | None, _dq_rstd: None, _dk_rstd: None
) -> tuple[torch.Tensor | None, ...]:
    need_q, need_k, need_q_weight, need_k_weight, *_ = ctx.needs_input_grad
    # A result without a gradient gives none to its input and weight; one whose input and weight need none is skipped.
    if dq_out is None or not (need_q or need_q_weight):
        dq_out, need_q, need_q_weight = None, False, False
    if dk_out is None or not (need_k or need_k_weight):
        dk_out, need_k, need_k_weight = None, False, False
    if dq_out is None and dk_out is None:
        return input_gradients(ctx)
    q, k, q_weight, k_weight, q_rstd, k_rstd, cos, sin = ctx.saved_tensors
    needed = [need_q, need_k, need_q_weight, need_k_weight]
    gradients = qk_norm_rope_backward(
        dq_out, dk_out, q, k, q_weight, k_weight, q_rstd, k_rstd, cos, sin, ctx.offset, ctx.casting, needed
    )
    return input_gradients(ctx, *where_needed(needed, *gradients))


qk_norm_rope_forward.register_autograd(_backward, setup_context=_setup_context)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
    unsqueeze_dim: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over every head of queries and keys, then rotary position embedding (Qwen3, Gemma3).

    The result is that of `rms_norm` on q and on k, followed by `rope`, roundings included. Those run instead where the
    kernel does not: see `rope`, and for two weights of different dtypes and with ``casting="none"``.

    Args:
        q: Queries, (batch, seq, q_heads, head_dim), or (batch, q_heads, seq, head_dim) with ``unsqueeze_dim=1``. Any
            strides and floating dtype.
        k: Keys, shaped as `q` with any number of heads.
        q_weight: Weight of the queries' norm, (head_dim,).
        k_weight: Weight of the keys' norm, (head_dim,).
        cos: Cosines, (batch or 1, seq, rotary_dim), rotary_dim even and at most head_dim; dimensions of a head past
            rotary_dim are normalised only.
        sin: Sines, shaped as `cos`.
        eps: Added to the mean square.
        offset: Added to the weights; 1.0 for Gemma.
        casting: Where the norm rounds, see `rms_norm`: ``"llama"`` (Qwen3), ``"gemma"``, ``"olmo2"`` or ``"none"``.
        unsqueeze_dim: The heads' dimension of `q` and `k`, 1 or 2.

    Returns:
        Normalised and rotated q and k: new tensors shaped as the inputs, in the dtype that the two operations promote
        to, laid out in memory as (batch, seq, heads, head_dim) whatever `unsqueeze_dim` is.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit together, or `casting` is unknown.
    """
    if casting not in CASTINGS:
        raise unknown_casting("qk_norm_rope", casting)
    on_triton = check_rope_arguments(q, k, cos, sin, unsqueeze_dim)
    check_norm_arguments("qk_norm_rope", q, q_weight=q_weight, k_weight=k_weight)
    fused = q.shape[-1] <= MAX_HEAD_DIM and casting != "none" and q_weight.dtype == k_weight.dtype
    if not (on_triton and fused and use_triton(q_weight)):
        q, k = rms_norm(q, q_weight, eps, offset, casting), rms_norm(k, k_weight, eps, offset, casting)
        return rope(q, k, cos, sin, unsqueeze_dim)
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k, *_ = qk_norm_rope_forward(q, k, q_weight, k_weight, cos, sin, eps, offset, casting)
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 1 else (q, k)


qk_norm_rope_reference = reference_of(
    qk_norm_rope, "check_rope_arguments", rms_norm=rms_norm_reference, rope=rope_reference
)
