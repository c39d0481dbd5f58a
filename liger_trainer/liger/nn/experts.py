"""A block of experts as a module, with the call signature of Liger's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from liger_trainer.functional import moe_experts
from liger_trainer.kernels.moe.sort_by_expert import check_ids
from liger_trainer.liger.nn.mlp import activation_of

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
