"""Rotary embeddings, with the call signatures of Liger's."""

from __future__ import annotations

import torch

from liger_trainer.functional import rope


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
        cos: (batch or 1, seq, rotary_dim), or half as wide where its two halves are equal.
        sin: As `cos`.
        position_ids: No effect: `cos` and `sin` are already those of the positions.
        unsqueeze_dim: Where the heads are: 1, or 2 for (batch, seq, heads, head_dim).
        rotary_dim: How many leading entries of a head are rotated; needed only where the tables are half as wide.

    Returns:
        q and k, rotated.

    Raises:
        ValueError: if `rotary_dim` is neither the width of the tables nor twice that.
    """
    if rotary_dim is not None and rotary_dim != cos.shape[-1]:
        if rotary_dim != 2 * cos.shape[-1]:
            raise ValueError(
                f"`rotary_dim` is {rotary_dim}; with tables {cos.shape[-1]} wide it is that or twice that."
            )
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
