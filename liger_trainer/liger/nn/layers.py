"""Embedding, softmax, sparsemax, attention, experts and rotary embeddings, with the call signatures of Liger's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from liger_trainer.functional import (
    embedding,
    moe_experts,
    multi_token_attention,
    rope,
    rope_complex,
    rope_multimodal,
    rope_vision,
    softmax,
    sparsemax,
)
from liger_trainer.kernels.moe.sort_by_expert import check_ids
from liger_trainer.liger.nn.mlp import activation_of


class LigerEmbedding(nn.Module):
    """A table of vectors with a deterministic backward; see [`liger_trainer.functional.embedding`].

    Args:
        num_embeddings: Rows of the table.
        embedding_dim: Columns of the table.
        padding_idx: An id whose row starts as zeros and gets no gradient; negative ones count from the end.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.weight = nn.Parameter(torch.randn(num_embeddings, embedding_dim))
        if padding_idx is not None:
            with torch.no_grad():
                self.weight[padding_idx].zero_()

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """The rows of `indices`, any shape of integers: ``(*indices.shape, embedding_dim)``."""
        return embedding(indices, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        """What printing the module shows."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


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

    The arguments are those of ``torch.nn.Conv2d``, of which channels are heads, queries height and keys width, and
    `sparse`: sparsemax instead of softmax. The bias starts at zero.

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


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}


class LigerExperts(nn.Module):
    """The experts of Mixtral, Qwen3-MoE and many more: gated MLPs without biases, their weights stacked.

    Args:
        config: Has `hidden_size`; `num_experts` or `num_local_experts`; `moe_intermediate_size` or `intermediate_size`;
            and `hidden_act`, one of silu, swish, gelu, gelu_pytorch_tanh, relu and relu2. Weights are drawn with its
            `initializer_range`, or 0.02.

    Raises:
        ValueError: If there is no kernel for the config's activation.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        activation = activation_of(config)
        if activation not in _ACTIVATIONS:
            raise ValueError(f"`config.hidden_act` is {activation!r}; it must be one of {', '.join(_ACTIVATIONS)}.")
        self.activation = _ACTIVATIONS[activation]
        self.num_experts = _first(config, "num_experts", "num_local_experts")
        self.intermediate_dim = _first(config, "moe_intermediate_size", "intermediate_size")
        self.hidden_dim = config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=getattr(config, "initializer_range", 0.02))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted experts `top_k_index` (T, k) of `hidden_states` (T, hidden_size); see [`moe_experts`].

        Raises:
            ValueError: As there, and on the CPU if an id is none of an expert; an accelerator asserts it.
        """
        check_ids(top_k_index, self.num_experts, type(self).__name__)
        return moe_experts(
            *(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj), activation=self.activation
        )


def _first(config: Any, *names: str) -> int:
    return next(value for name in names if (value := getattr(config, name, None)) is not None)


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
