"""The operators as modules and losses, with the call signatures of Liger's.

Arguments that only steer how Liger's kernels work inside are accepted and have no effect, as each class says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from liger_trainer.functional import geglu, layer_norm, rms_norm, rope, swiglu
from liger_trainer.loss_modules import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss

__all__ = [
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerGEGLUMLP",
    "LigerLayerNorm",
    "LigerRMSNorm",
    "LigerSwiGLUMLP",
    "liger_rotary_pos_emb",
]

_CASTINGS = ("llama", "gemma", "olmo2", "none")


def _initial_weight(size: int, init_fn: str) -> nn.Parameter:
    if init_fn not in ("ones", "zeros"):
        raise ValueError(f"`init_fn` is {init_fn!r}; it must be 'ones' or 'zeros'.")
    return nn.Parameter(torch.ones(size) if init_fn == "ones" else torch.zeros(size))


class LigerRMSNorm(nn.Module):
    """RMSNorm over the last dimension; see [`liger_trainer.functional.rms_norm`] for the formula.

    Args:
        hidden_size: Size of the last dimension.
        eps: Added to the mean square.
        offset: Added to the weight (1.0 in Gemma).
        casting_mode: Where the result is rounded: ``"llama"``, ``"gemma"``, ``"olmo2"`` or ``"none"``.
        init_fn: Initial weight, ``"ones"`` or ``"zeros"``.
        in_place: No effect: the caller's gradient tensor is never overwritten.
        row_mode: No effect: the launch follows from the shape.
        elementwise_affine: Whether there is a weight.

    Raises:
        ValueError: for an unknown `init_fn` or `casting_mode`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        if casting_mode not in _CASTINGS:
            raise ValueError(f"`casting_mode` is {casting_mode!r}; it must be one of {', '.join(_CASTINGS)}.")
        weight = _initial_weight(hidden_size, init_fn)
        self.register_parameter("weight", weight if elementwise_affine else None)
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.offset = offset
        self.casting_mode = casting_mode
        self.elementwise_affine = elementwise_affine

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalises `hidden_states`, (..., hidden_size)."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    def extra_repr(self) -> str:
        """What printing the module shows."""
        return f"{self.hidden_size}, eps={self.variance_epsilon}, offset={self.offset}, casting={self.casting_mode}"


class LigerLayerNorm(nn.Module):
    """LayerNorm over the last dimension; it always has a bias, which starts at zero unless `bias` is set.

    Args:
        hidden_size: Size of the last dimension.
        eps: Added to the variance.
        bias: Start the bias from random values, as Liger does, and not from zero.
        init_fn: Initial weight, ``"ones"`` or ``"zeros"``.
        impl: No effect: there is one implementation.
        mode: No effect.
        backend: No effect; Liger's old name of `impl`.

    Raises:
        ValueError: for an unknown `init_fn`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        impl: str | None = None,
        mode: str | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.weight = _initial_weight(hidden_size, init_fn)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))
        self.eps = self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalises `hidden_states`, (..., hidden_size)."""
        return layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        """What printing the module shows."""
        return f"{self.hidden_size}, eps={self.variance_epsilon}"


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
