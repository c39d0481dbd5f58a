"""The layers whose forwards the `kernels` library gives to a model's modules.

As the library demands, they have a forward with the arguments of those that they replace, no state and no constructor.
`self` is the module of the model. Its class's own forward is compared with ours on a small dummy first, as by
`apply_liger_kernel`; where they differ, and in compiled code, the class's own runs.
"""

from __future__ import annotations

import torch
from torch import nn

from liger_trainer.patching.hub_kernels import prove_function, prove_mlp, prove_norm, proved_forward


class RMSNorm(nn.Module):
    """``"RMSNorm"`` and ``"RMSNormZeroCentered"`` of transformers."""

    has_backward = True
    can_torch_compile = False

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalises over the last dimension."""
        return proved_forward(self, hidden_states, prove_norm)(self, hidden_states)


class GatedMLP(nn.Module):
    """A SwiGLU or GEGLU with its three projections, or with gate and up in one."""

    has_backward = True
    can_torch_compile = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP of hidden states (..., H)."""
        return proved_forward(self, x, prove_mlp)(self, x)


class RotaryPosEmb(nn.Module):
    """``"rotary_pos_emb"`` of transformers, a function that the library has made a module."""

    has_backward = True
    can_torch_compile = False

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, (batch, heads, seq, head_dim) or as `unsqueeze_dim` says."""
        return proved_forward(self, q, prove_function)(self, q, k, cos, sin, unsqueeze_dim)
