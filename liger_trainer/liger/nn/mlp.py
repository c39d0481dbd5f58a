"""The MLPs as modules, whole and in tiles of the sequence, with the call signatures of Liger's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from liger_trainer.compat.hooks import is_linear_without_bias, outputs_are_unhooked
from liger_trainer.functional import geglu, relu_squared, swiglu, swiglu_down, swiglu_fused, tiled_mlp


def activation_of(config: Any) -> str | None:
    """The name of the activation of a config; a Gemma config has two, and its models read `hidden_activation`."""
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)


def check_silu(module: nn.Module, activation: str | None) -> None:
    """Raises ValueError if a SwiGLU's config names another activation."""
    if activation not in ("silu", "swish"):
        name = type(module).__name__
        raise ValueError(f"`config.hidden_act` is {activation!r}; {name} needs 'silu' or 'swish'.")


class GatedMLP(nn.Module):
    """The three projections; subclasses have the forward."""

    def __init__(self, config: Any, intermediate_size: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    def gate_and_up(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Both projections of `x`, and whether a backward may write over them."""
        return self.gate_proj(x), self.up_proj(x), outputs_are_unhooked(self.gate_proj, self.up_proj)


# ---------------------------------------------------------------------------------------------------------------------
# SwiGLU
# ---------------------------------------------------------------------------------------------------------------------


class LigerSwiGLUMLP(GatedMLP):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, without biases.

    Args:
        config: Has `hidden_size`, `intermediate_size` and `hidden_act`.
        intermediate_size: Instead of the config's.

    Raises:
        ValueError: if the config's activation is not SiLU.
    """

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__(config, intermediate_size)
        check_silu(self, config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the MLP to `x`, (..., hidden_size)."""
        gate, up, unhooked = self.gate_and_up(x)
        return self.down_proj(swiglu(gate, up, inplace_backward=unhooked))


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """The dense MLP of Qwen3-MoE; the same as [`LigerSwiGLUMLP`]."""


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """[`LigerSwiGLUMLP`] of Hunyuan V1, which keeps `layer_idx` as an attribute. `is_shared_mlp` has no effect."""

    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """[`LigerSwiGLUMLP`] for a config that names its activation `hidden_activation`."""

    def __init__(self, config: Any) -> None:
        GatedMLP.__init__(self, config)
        check_silu(self, activation_of(config))


class LigerPhi3SwiGLUMLP(nn.Module):
    """[`LigerSwiGLUMLP`] with one projection ``gate_up_proj(x) = [gate, up]``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        check_silu(self, config.hidden_act)
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the MLP to `x`, (..., hidden_size)."""
        gate_up = self.gate_up_proj(x)
        return self.down_proj(swiglu_fused(gate_up, inplace_backward=outputs_are_unhooked(self.gate_up_proj)))


class LigerBlockSparseTop2MLP(nn.Module):
    """One expert of Mixtral: [`LigerSwiGLUMLP`] as ``w2(silu(w1(x)) * w3(x))``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        check_silu(self, config.hidden_act)
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the MLP to `x`, (..., hidden_size)."""
        return self.w2(swiglu(self.w1(x), self.w3(x), inplace_backward=outputs_are_unhooked(self.w1, self.w3)))


class LigerFalconH1SwiGLUMLP(GatedMLP):
    """``down_proj(silu(gate_proj(x) * gate_multiplier) * up_proj(x)) * down_multiplier``.

    The config is that of [`LigerSwiGLUMLP`], with `mlp_multipliers` and maybe `mlp_bias`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config, bias=getattr(config, "mlp_bias", False))
        check_silu(self, config.hidden_act)
        self.gate_multiplier, self.down_multiplier = (float(multiplier) for multiplier in config.mlp_multipliers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the MLP to `x`, (..., hidden_size)."""
        gate, up, unhooked = self.gate_and_up(x)
        inside = self.down_multiplier if is_linear_without_bias(self.down_proj) else 1.0
        h = swiglu(*(gate, up), gate_multiplier=self.gate_multiplier, down_multiplier=inside, inplace_backward=unhooked)
        y = self.down_proj(h)
        return y if inside == self.down_multiplier else y * self.down_multiplier


class LigerMLP(GatedMLP):
    """[`LigerSwiGLUMLP`] that recomputes the product in its backward; see [`swiglu_down`].

    It reads `down_proj.weight` itself, so an adapter or a hook on `down_proj` is not seen.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_silu(self, config.hidden_act)
        self.gate_multiplier = self.down_multiplier = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the MLP to `x`, (..., hidden_size)."""
        gate, up, unhooked = self.gate_and_up(x)
        return swiglu_down(
            *(gate, up, self.down_proj.weight),
            gate_multiplier=self.gate_multiplier,
            down_multiplier=self.down_multiplier,
            inplace_backward=unhooked,
        )


class LigerFalconH1MLP(LigerMLP):
    """[`LigerFalconH1SwiGLUMLP`] that recomputes the product in its backward, as [`LigerMLP`].

    Raises:
        ValueError: if the config's activation is not SiLU, or it asks for biases.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if getattr(config, "mlp_bias", False):
            raise ValueError("`config.mlp_bias` is set; LigerFalconH1MLP has no biases, LigerFalconH1SwiGLUMLP has.")
        self.gate_multiplier, self.down_multiplier = (float(multiplier) for multiplier in config.mlp_multipliers)


# ---------------------------------------------------------------------------------------------------------------------
# GeGLU and squared ReLU
# ---------------------------------------------------------------------------------------------------------------------


class LigerGEGLUMLP(GatedMLP):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))``, without biases.

    GELU is exact where the config's `hidden_activation` (or `hidden_act`) is ``"gelu"``, and the tanh approximation
    otherwise, as in Gemma.

    Args:
        config: Has `hidden_size` and `intermediate_size`.
    """

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__(config, intermediate_size)
        self.approximate = "none" if activation_of(config) in ("gelu", "gelu_python") else "tanh"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the MLP to `x`, (..., hidden_size)."""
        gate, up, unhooked = self.gate_and_up(x)
        return self.down_proj(geglu(gate, up, approximate=self.approximate, inplace_backward=unhooked))


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """The MLP of Gemma 4, twice as wide in layers that share another's keys and values if the config says so.

    Args:
        config: See [`LigerGEGLUMLP`]; maybe `use_double_wide_mlp`, `num_hidden_layers` and `num_kv_shared_layers`.
        layer_idx: Which layer it is in.
    """

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        shared = getattr(config, "num_kv_shared_layers", 0) or 0
        first = getattr(config, "num_hidden_layers", 0) - shared
        doubled = getattr(config, "use_double_wide_mlp", False) and shared > 0
        factor = 2 if doubled and layer_idx is not None and layer_idx >= first else 1
        super().__init__(config, factor * config.intermediate_size)


class LigerReLUSquared(nn.Module):
    """``relu(x) ** 2``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies it to `x`, of any shape."""
        return relu_squared(x)


class LigerTiledSwiGLUMLP(LigerSwiGLUMLP):
    """[`LigerSwiGLUMLP`] that saves only its input and recomputes the rest, tile by tile; see [`tiled_mlp`].

    `num_shards` is the number of tiles; None for as many as hold half a GiB each.
    """

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the MLP to `x`, (..., tokens, hidden_size)."""
        return tiled_mlp(LigerSwiGLUMLP.forward, self, x, self.num_shards, preserve_rng_state=False)


class LigerTiledGEGLUMLP(LigerGEGLUMLP):
    """[`LigerGEGLUMLP`] in tiles, as [`LigerTiledSwiGLUMLP`].

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
