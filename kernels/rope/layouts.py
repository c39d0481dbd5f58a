"""Rotary position embeddings with other tables than `rope`: complex factors, several axes, no batch dimension.

Each is one launch of the same kernel; `rope` documents the formula, the bytes moved and the memory layout.

Shapes: batch sequences of seq tokens, q_heads and k_heads heads of head_dim, rotary_dim columns that turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from liger_trainer.kernels.rope.rope import check_rope_arguments, rope, rope_reference, rotate
from liger_trainer.kernels.runtime import reference_of


def rope_complex(
    q: torch.Tensor, k: torch.Tensor, freqs_cis: torch.Tensor, unsqueeze_dim: int = 2, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding with complex factors: neighbours (0, 1), (2, 3), ... form complex numbers (Llama 4).

    Args:
        q: Queries, (batch, seq, q_heads, head_dim), or (batch, q_heads, seq, head_dim) with ``unsqueeze_dim=1`` (as in
            DeepSeek-V2). Any strides and floating dtype.
        k: Keys, shaped as `q` with any number of heads.
        freqs_cis: Complex cosine + i sine of every pair, (batch or 1, seq, rotary_dim / 2); or one table for the whole
            batch, (seq, rotary_dim / 2) or, as in Llama 4's vision tower, (seq, 1, rotary_dim / 2).
        unsqueeze_dim: The heads' dimension of `q` and `k`, 1 or 2.
        first: The dimension of a head at which its rotary part begins, as for `rope`.

    Returns:
        Rotated q and k in the dtype of `q`, computed in float32 and rounded once, in the memory layout of `rope`.

    Raises:
        ValueError: If `freqs_cis` is not complex, or shapes or devices do not fit together.
    """
    if not freqs_cis.is_complex():
        raise ValueError(
            f"`freqs_cis` has dtype {freqs_cis.dtype}; it must be complex. Casting a model to a real dtype drops the "
            "imaginary part of its complex buffers: exclude this one from the cast."
        )
    seq_len = q.shape[3 - unsqueeze_dim] if q.dim() == 4 and unsqueeze_dim in (1, 2) else 0  # others are refused below
    if freqs_cis.dim() == 2 or (freqs_cis.dim() == 3 and freqs_cis.shape[:2] == (seq_len, 1) and seq_len > 1):
        freqs_cis = freqs_cis.reshape(1, -1, freqs_cis.shape[-1])
    rotary_dim = 2 * freqs_cis.shape[-1]
    parts = torch.view_as_real(freqs_cis.resolve_conj())
    cos, sin = parts.unbind(-1)
    if check_rope_arguments(q, k, cos, sin, unsqueeze_dim, rotary_dim, first=first):
        table = parts.flatten(-2)
        return rotate(q, k, table, table, unsqueeze_dim, False, q.dtype, "interleaved", "complex", None, first)
    pairs = partial(rope_reference, rotary_dim=rotary_dim, interleaved=True, keep_dtype=True)
    return pairs(q, k, cos, sin, unsqueeze_dim, first=first)


def rope_multimodal(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    sections: Sequence[int],
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multimodal rotary position embedding (M-RoPE of Qwen2-VL, arXiv 2409.12191): each pair follows one of three axes.

    Models whose rotary embedding has already combined the axes (transformers 5) call `rope`.

    Args:
        q: Queries, as `rope` takes them.
        k: Keys, as `rope` takes them.
        cos: Cosines of the positions in time, height and width, (3, batch or 1, seq, head_dim).
        sin: Sines, shaped as `cos`.
        sections: Number of pairs that follow time, height and width; they add up to head_dim / 2.
        unsqueeze_dim: The heads' dimension of `q` and `k`, 1 or 2.

    Returns:
        Rotated q and k, as from `rope`.

    Raises:
        ValueError: If shapes or devices do not fit together, or the sections do not add up.
    """
    sections = list(sections)
    on_triton = check_rope_arguments(q, k, cos, sin, unsqueeze_dim, planes=(len(sections),))
    if 2 * sum(sections) != cos.shape[-1] or min(sections) < 0:
        raise ValueError(
            f"`sections` is {sections}; it must add up to {cos.shape[-1] // 2}, half the width of the tables."
        )
    if on_triton:
        out_dtype = torch.promote_types(q.dtype, cos.dtype)
        return rotate(q, k, cos, sin, unsqueeze_dim, False, out_dtype, "halves", "planes", sections)

    def together(table: torch.Tensor) -> torch.Tensor:
        planes = [part[index] for index, part in enumerate(table.unflatten(-1, (2, -1)).split(sections, dim=-1))]
        return torch.cat(planes, dim=-1).flatten(-2)

    return rope_reference(q, k, together(cos), together(sin), unsqueeze_dim)


rope_multimodal_reference = reference_of(rope_multimodal, "check_rope_arguments")


def rope_vision(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of a packed sequence without a batch dimension, in the dtype of q (vision towers).

    Args:
        q: Queries, (seq, q_heads, head_dim).
        k: Keys, (seq, k_heads, head_dim).
        cos: Cosines, (seq, rotary_dim), usually float32.
        sin: Sines, shaped as `cos`.

    Returns:
        Rotated q and k in the dtype of `q`, computed in float32 and rounded once.

    Raises:
        ValueError: If shapes or devices do not fit together.
    """
    tensors = (q, k, cos, sin)
    if [x.dim() for x in tensors] != [3, 3, 2, 2]:
        raise ValueError(
            f"`q` is {tuple(q.shape)}, `k` {tuple(k.shape)}, `cos` {tuple(cos.shape)} and `sin` {tuple(sin.shape)}; "
            "they must be (seq, heads, head_dim), twice, and (seq, rotary_dim), twice."
        )
    q, k, cos, sin = (x.unsqueeze(0) for x in tensors)
    q_out, k_out = rope(q, k, cos, sin, unsqueeze_dim=2, keep_dtype=True)
    return q_out.squeeze(0), k_out.squeeze(0)
