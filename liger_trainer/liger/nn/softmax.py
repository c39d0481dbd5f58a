"""Softmax, sparsemax and multi-token attention as modules, with the call signatures of Liger's."""

from __future__ import annotations

import math

import torch
from torch import nn

from liger_trainer.functional import multi_token_attention, softmax, sparsemax


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


class LigerSoftmax(nn.Module):
    """Softmax over the last dimension; see [`liger_trainer.functional.softmax`]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The softmax of `x`, of any shape."""
        return softmax(x)


class LigerSparsemax(nn.Module):
    """Sparsemax along a dimension; see [`liger_trainer.functional.sparsemax`].

    Args:
        dim: The dimension that sums to 1.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sparsemax of `x`, of any shape that has `dim`."""
        return sparsemax(x, self.dim)

    def extra_repr(self) -> str:
        """What printing the module shows."""
        return f"dim={self.dim}"


class LigerMultiTokenAttention(nn.Module):
    """Convolved causal attention weights; see [`liger_trainer.functional.multi_token_attention`] for the formula.

    Args:
        in_channels: Heads.
        out_channels: Heads after the convolution.
        kernel_size: Height (queries) and width (keys) of the convolution; one number for both.
        stride: Of the convolution, as are `padding`, `dilation` and `groups`.
        padding: Zeros around the attention weights.
        dilation: Distance of the kernel's taps.
        groups: Groups of heads that are convolved on their own.
        bias: Whether there is a bias; it starts at zero.
        sparse: Sparsemax instead of softmax.

    Raises:
        ValueError: if `groups` does not divide the heads.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(f"`groups` is {groups}; it must divide {in_channels} and {out_channels} channels.")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = _pair(kernel_size)
        self.stride = _pair(stride)
        self.padding = _pair(padding)
        self.dilation = _pair(dilation)
        self.groups = groups
        self.sparse = sparse
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random weight, as `torch.nn.Conv2d` has it, and zero bias."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        """The convolved causal attention weights of `scores`, (batch, in_channels, length, length)."""
        return multi_token_attention(
            scores, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.sparse
        )

    def extra_repr(self) -> str:
        """What printing the module shows."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, sparse={self.sparse}"
        )
