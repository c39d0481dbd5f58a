"""The gated MLPs as modules, with the call signatures of Liger's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from liger_trainer.functional import geglu, swiglu


class _GatedMLP(nn.Module):
    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)


def _activation_name(config: Any) -> str | None:
    # A Gemma config has both: `hidden_activation` is the one its models read.
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)


class LigerSwiGLUMLP(_GatedMLP):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, without biases.

    Args:
        config: Has `hidden_size`, `intermediate_size` and `hidden_act`.
        intermediate_size: Instead of the config's.

    Raises:
        ValueError: if the config's activation is not SiLU.
    """

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__(config, intermediate_size)
        if config.hidden_act not in ("silu", "swish"):
            raise ValueError(f"`config.hidden_act` is {config.hidden_act!r}; LigerSwiGLUMLP needs 'silu' or 'swish'.")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the MLP to `x`, (..., hidden_size)."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class LigerGEGLUMLP(_GatedMLP):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))``, without biases.

    GELU is exact where the config's `hidden_activation` (or `hidden_act`) is ``"gelu"``, and the tanh approximation
    otherwise, as in Gemma.

    Args:
        config: Has `hidden_size` and `intermediate_size`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.approximate = "none" if _activation_name(config) in ("gelu", "gelu_python") else "tanh"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the MLP to `x`, (..., hidden_size)."""
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x), approximate=self.approximate))
