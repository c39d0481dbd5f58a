"""Rotary embeddings, with the call signatures of Liger's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from liger_trainer.functional import rope, rope_complex, rope_multimodal, rope_vision


def liger_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates q and k; see [`liger_trainer.functional.rope`].

    Args:
        q: Queries, (batch, heads, seq, head_dim).
        k: Keys, (batch, kv_heads, seq, head_dim).
        cos: (batch or 1, seq, rotary_dim) or (seq, rotary_dim), or half as wide where its two halves are equal.
        sin: As `cos`.
        position_ids: No effect: `cos` and `sin` are already those of the positions.
        unsqueeze_dim: Where the heads are: 1, or 2 for (batch, seq, heads, head_dim).
        rotary_dim: How many leading entries of a head are rotated; needed only where the tables are half as wide.

    Returns:
        q and k, rotated.

    Raises:
        ValueError: if `rotary_dim` is neither the width of the tables nor twice that.
    """
    if cos.dim() == sin.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, rotary_dim=rotary_dim)


def liger_rotary_pos_emb_gpt_oss(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates q and k of (batch, heads, seq, head_dim) by tables of (batch or 1, seq, head_dim / 2)."""
    return rope(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates packed q and k of (seq, heads, head_dim); see [`liger_trainer.functional.rope_vision`]."""
    return rope_vision(q, k, cos, sin)


def liger_multimodal_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mrope_section: Sequence[int],
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`liger_rotary_pos_emb`] with tables of three axes, (3, batch or 1, seq, head_dim).

    `mrope_section` says how many pairs follow time, height and width; see
    [`liger_trainer.functional.rope_multimodal`].
    """
    return rope_multimodal(q, k, cos, sin, mrope_section, unsqueeze_dim)


def liger_llama4_text_rotary_pos_emb(
    xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates q and k of (batch, seq, heads, head_dim) by complex factors of (batch or 1, seq, head_dim / 2)."""
    return rope_complex(xq, xk, freqs_cis)


def liger_llama4_vision_rotary_pos_emb(
    query: torch.Tensor, key: torch.Tensor, freqs_ci: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates q and k of (batch, seq, heads, head_dim) by the complex factors of Llama 4's vision tower.

    `freqs_ci` is (seq, head_dim / 2), with a dimension of 1 in the middle or not, or (1, seq, 1, head_dim / 2). A real
    table is what is left of a complex buffer when a model is cast to bf16: it is taken as it is, as the model's own
    code does, and then only scales.
    """
    if freqs_ci.dim() == 4:
        freqs_ci = freqs_ci.squeeze(2)
    if not freqs_ci.is_complex():
        freqs_ci = torch.complex(freqs_ci.float(), torch.zeros_like(freqs_ci, dtype=torch.float32))
    return rope_complex(query, key, freqs_ci)
