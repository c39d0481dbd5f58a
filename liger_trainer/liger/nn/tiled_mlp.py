"""Gated MLPs in tiles of the sequence, with the call signatures of Liger's."""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.functional import tiled_mlp
from liger_trainer.liger.nn.mlp import LigerGEGLUMLP, LigerSwiGLUMLP, activation_of


class LigerTiledSwiGLUMLP(LigerSwiGLUMLP):
    """[`LigerSwiGLUMLP`] that saves only its input and recomputes the rest, tile by tile; see [`tiled_mlp`].

    Args:
        config: See [`LigerSwiGLUMLP`].
        num_shards: How many tiles; None for as many as hold half a GiB each.

    Raises:
        ValueError: if the config's activation is not SiLU.
    """

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the MLP to `x`, (..., tokens, hidden_size)."""
        return tiled_mlp(LigerSwiGLUMLP.forward, self, x, self.num_shards, preserve_rng_state=False)


class LigerTiledGEGLUMLP(LigerGEGLUMLP):
    """[`LigerGEGLUMLP`] that saves only its input and recomputes the rest, tile by tile; see [`tiled_mlp`].

    Args:
        config: See [`LigerGEGLUMLP`].
        num_shards: How many tiles; None for as many as hold half a GiB each.

    Raises:
        ValueError: if the config names an activation that is not GELU.
    """

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config)
        activation = activation_of(config)
        if activation is not None and not activation.startswith("gelu"):
            raise ValueError(f"`config.hidden_act` is {activation!r}; LigerTiledGEGLUMLP needs a GELU.")
        self.num_shards = num_shards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the MLP to `x`, (..., tokens, hidden_size)."""
        return tiled_mlp(LigerGEGLUMLP.forward, self, x, self.num_shards, preserve_rng_state=False)
