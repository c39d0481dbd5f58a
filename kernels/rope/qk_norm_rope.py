"""RMSNorm of every head of queries and keys, and their rotary position embedding, in one pass over both.

For a head x of D numbers, with the pairs, tables and rotation of `rope`:

    rstd = 1 / sqrt(mean(x^2) + eps)        n = x * rstd * (offset + weight)        y = rotate(n)

and, with d the rotation of dy by the opposite angles and g = d * (offset + weight),

    dx = rstd * (g - x_hat * mean(g * x_hat))        dweight = sum over heads and tokens of d * x_hat

as in the attention of Qwen3 and Gemma3. `rms_norm` twice and `rope` read and write q and k twice; this once. Bytes
moved for N numbers of q and k in bf16: 4 N forward (8 N apart) and 6 N backward (10 N apart). Saved for backward: q, k,
the weights, the tables and rstd (fp32, one a head). Weight gradients are summed in fp32 in the registers of a
persistent grid, and a second small kernel adds up what each program found: no atomics, the same bits in every run.

Memory layout: as `rope`, any strides in, (batch, seq, heads, head_dim) memory out, gradients too.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels.autograd import refuse_second_derivative
from liger_trainer.kernels.norms.launch import check_arguments
from liger_trainer.kernels.norms.rms_norm import rms_norm, rms_norm_reference
from liger_trainer.kernels.norms.rms_norm_kernels import check_casting, output_dtype
from liger_trainer.kernels.rope.qk_norm_rope_launch import launch_backward, launch_forward
from liger_trainer.kernels.rope.rope import check_rope_arguments, rope, rope_reference, runs_on_triton

MAX_HEAD_DIM = 4096
"""Longest head that is fused; a tile holds whole heads in registers."""


def _results(
    q: torch.Tensor, k: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, casting: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(output_dtype(q, weight, casting), cos.dtype)
    q_out, k_out = (x.new_empty(x.shape, dtype=dtype) for x in (q, k))
    q_rstd, k_rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for x in (q, k))
    return q_out, k_out, q_rstd, k_rstd


@torch.library.custom_op("liger_trainer::qk_norm_rope", mutates_args=())
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
    launch_forward(q, k, q_weight, k_weight, cos, sin, *results, eps, offset, casting)
    return results


@qk_norm_rope_forward.register_fake
def _(q, k, q_weight, k_weight, cos, sin, eps, offset, casting):
    return _results(q, k, q_weight, cos, casting)


def _gradients(tensors: list[torch.Tensor], needed: list[bool]) -> list[torch.Tensor]:
    """New tensors for the gradients of q, k and their weights; empty ones where none is needed."""
    return [x.new_empty(x.shape if need else (0,)) for x, need in zip(tensors, needed)]


@torch.library.custom_op("liger_trainer::qk_norm_rope_backward", mutates_args=())
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
    gradients = _gradients([q, k, q_weight, k_weight], needed)
    wanted = [gradient if need else None for gradient, need in zip(gradients, needed)]
    saved = (q, k, q_weight, k_weight, q_rstd, k_rstd, cos, sin)
    launch_backward(dq_out, dk_out, *saved, *wanted, offset, casting)
    dq, dk, dq_weight, dk_weight = gradients
    return dq, dk, dq_weight, dk_weight


@qk_norm_rope_backward.register_fake
def _(dq_out, dk_out, q, k, q_weight, k_weight, q_rstd, k_rstd, cos, sin, offset, casting, needed):
    return tuple(_gradients([q, k, q_weight, k_weight], needed))


refuse_second_derivative(qk_norm_rope_backward, "qk_norm_rope")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, q_weight, k_weight, cos, sin, _eps, ctx.offset, ctx.casting = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(q, k, q_weight, k_weight, *output[2:], cos, sin)


def _backward(ctx: Any, dq_out: torch.Tensor | None, dk_out: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    upstream = [dq_out, dk_out]
    # An output without a gradient gives none to its input and its weight; one whose input and weight need none is idle.
    needed = [need and upstream[index % 2] is not None for index, need in enumerate(ctx.needs_input_grad[:4])]
    upstream = [dy if needed[index] or needed[index + 2] else None for index, dy in enumerate(upstream)]
    if not any(needed):
        return (None,) * 9
    gradients = qk_norm_rope_backward(*upstream, *ctx.saved_tensors, ctx.offset, ctx.casting, needed)
    return (*(gradient if need else None for gradient, need in zip(gradients, needed)), *(None,) * 5)


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

    The result is that of `rms_norm` on q and on k, followed by `rope`, roundings included. Where the kernel does
    not run (see `rope`; also where q and k, or the two weights, differ in dtype, and with ``casting="none"``), that is
    what is computed.

    Args:
        q: Queries, (batch, seq, q_heads, head_dim), or (batch, q_heads, seq, head_dim) with ``unsqueeze_dim=1``. Any
            strides and floating dtype.
        k: Keys, as `q` with any number of heads.
        q_weight: Weight of the queries' norm, (head_dim,).
        k_weight: Weight of the keys' norm, (head_dim,).
        cos: Cosines, (batch or 1, seq, rotary_dim), rotary_dim even and at most head_dim; dimensions of a head beyond
            rotary_dim are normalised only.
        sin: Sines, shaped as `cos`.
        eps: Added to the mean square.
        offset: Added to the weights; 1.0 for Gemma.
        casting: Where the norm rounds, as `rms_norm` takes it: ``"llama"`` (Qwen3), ``"gemma"``, ``"olmo2"``.
        unsqueeze_dim: The heads' dimension of `q` and `k`, 1 or 2.

    Returns:
        Normalised and rotated q and k: new tensors shaped as the inputs, in the dtype that the two operations promote
        to, laid out in memory as (batch, seq, heads, head_dim) whatever `unsqueeze_dim` is.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit together, or `casting` is unknown.
    """
    check_casting("qk_norm_rope", casting)
    check_rope_arguments(q, k, cos, sin, unsqueeze_dim)
    check_arguments("qk_norm_rope", q, q_weight=q_weight, k_weight=k_weight)
    fused = q.shape[-1] <= MAX_HEAD_DIM and casting != "none" and q_weight.dtype == k_weight.dtype
    if not (fused and runs_on_triton(q, k, cos, sin) and runs_on_triton(q_weight, k_weight, cos, sin)):
        q, k = rms_norm(q, q_weight, eps, offset, casting), rms_norm(k, k_weight, eps, offset, casting)
        return rope(q, k, cos, sin, unsqueeze_dim)
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k, *_ = qk_norm_rope_forward(q, k, q_weight, k_weight, cos, sin, eps, offset, casting)
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 1 else (q, k)


def qk_norm_rope_reference(
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
    """`qk_norm_rope` in plain torch."""
    q = rms_norm_reference(q, q_weight, eps, offset, casting)
    k = rms_norm_reference(k, k_weight, eps, offset, casting)
    return rope_reference(q, k, cos, sin, unsqueeze_dim)
