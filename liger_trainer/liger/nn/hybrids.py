"""Parts of hybrids as modules: short convolutions, and RMSNorm with a gate. Liger has none of them.

Recurrences have no parameters of their own, and are functions alone: [`liger_trainer.functional.delta_rule`],
[`liger_trainer.functional.state_space`] and [`liger_trainer.functional.decayed_attention`].
"""

from __future__ import annotations

import torch
from torch import nn

from liger_trainer import functional as F
from liger_trainer.kernels.conv.short_conv import MAX_TAPS
from liger_trainer.kernels.documents import ROWS, Documents
from liger_trainer.kernels.norms.gated_rms_norm import ACTIVATIONS, CASTINGS


class _ShortConv(nn.Conv1d):
    """A causal `nn.Conv1d` of each channel by itself, whose forward takes (batch, tokens, channels)."""

    def __init__(self, channels: int, kernel_size: int, bias: bool) -> None:
        if not 2 <= kernel_size <= MAX_TAPS:
            raise ValueError(f"`kernel_size` is {kernel_size}; it must be from 2 to {MAX_TAPS}.")
        super().__init__(channels, channels, kernel_size, groups=channels, padding=kernel_size - 1, bias=bias)


class LigerShortConv(_ShortConv):
    """A causal convolution of each channel over tokens of a document; see [`liger_trainer.functional.short_conv`].

    `channels` and `kernel_size`, the number of taps, 2 to 8, are the sizes of `weight`, (channels, 1, kernel_size), and
    `bias` says whether there is one, (channels,). Both are those of `nn.Conv1d`, names and initial values too, so the
    state of a model's own convolution fits. `activation` and `residual` are those of the function.

    Raises:
        ValueError: for a `kernel_size` below 2 or above 8, or an unknown `activation`.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = None,
        residual: bool = False,
    ) -> None:
        if activation not in (None, "silu"):
            raise ValueError(f'`activation` is {activation!r}; it must be None or "silu".')
        super().__init__(channels, kernel_size, bias)
        self.activation, self.residual = activation, residual

    def forward(self, x: torch.Tensor, documents: Documents = ROWS) -> torch.Tensor:  # type: ignore[override]
        """The convolution of `x`, (batch, tokens, channels); each row is a document unless `documents` says more."""
        weight, bias = self.weight.flatten(1), self.bias
        y = F.short_conv(x, weight, bias, activation=self.activation, residual=self.residual, documents=documents)
        assert isinstance(y, torch.Tensor)
        return y

    def extra_repr(self) -> str:
        """What printing the module shows."""
        return f"{super().extra_repr()}, activation={self.activation}, residual={self.residual}"


class LigerGatedShortConv(_ShortConv):
    """The gated convolution of LFM2, `C * (conv(B * x) + bias)`; see [`liger_trainer.functional.gated_short_conv`].

    The arguments are those of [`LigerShortConv`].

    Raises:
        ValueError: for a `kernel_size` below 2 or above 8.
    """

    def __init__(self, channels: int, kernel_size: int, bias: bool = False) -> None:
        super().__init__(channels, kernel_size, bias)

    def forward(self, bcx: torch.Tensor, documents: Documents = ROWS) -> torch.Tensor:  # type: ignore[override]
        """The result, (batch, tokens, channels), for B, C and x in one: `bcx`, (batch, tokens, 3 * channels)."""
        return F.gated_short_conv(bcx, self.weight.flatten(1), self.bias, documents=documents)


class LigerGatedRMSNorm(nn.Module):
    """RMSNorm with a gate over the last dimension; see [`liger_trainer.functional.gated_rms_norm`] for the formula.

    `hidden_size` is the size of the last dimension and of `weight`, which begins with ones. The other arguments are
    those of the function, with `casting_mode` for `casting`.

    Raises:
        ValueError: for an unknown `activation` or `casting_mode`, or a `group_size` that does not divide `hidden_size`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        group_size: int | None = None,
        activation: str = "silu",
        gate_first: bool = False,
        casting_mode: str = "llama",
    ) -> None:
        super().__init__()
        given = (("activation", activation, ACTIVATIONS), ("casting_mode", casting_mode, CASTINGS))
        for argument, value, allowed in given:
            if value not in allowed:
                raise ValueError(f"`{argument}` is {value!r}; it must be {' or '.join(map(repr, allowed))}.")
        if group_size is not None and (group_size < 1 or hidden_size % group_size):
            raise ValueError(f"`group_size` is {group_size}; it must divide `hidden_size`, {hidden_size}.")
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps
        self.options = (group_size, activation, gate_first, casting_mode)

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalises `hidden_states`, (..., hidden_size), with a gate of the same shape, before its activation."""
        return F.gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon, *self.options)

    def extra_repr(self) -> str:
        """What printing the module shows."""
        group_size, activation, gate_first, casting = self.options
        of_groups = f"group_size={group_size}, activation={activation}, gate_first={gate_first}, casting={casting}"
        return f"{len(self.weight)}, eps={self.variance_epsilon}, {of_groups}"
