"""RMSNorm with an addition or a modulation, and RMSNorm under the names and defaults of model families, as Liger's."""

from __future__ import annotations

import torch

from liger_trainer.functional import fused_add_rms_norm, modulated_rms_norm
from liger_trainer.liger.nn.norms import LigerRMSNorm


class LigerFusedAddRMSNorm(LigerRMSNorm):
    """Residual addition and RMSNorm in one pass; see [`liger_trainer.functional.fused_add_rms_norm`].

    The arguments are those of [`LigerRMSNorm`].
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place)

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised sum of `hidden_states` and `residual`, and the sum."""
        return fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerModulatedRMSNorm(LigerRMSNorm):
    """RMSNorm, then `* (1 + scale) + shift` (adaLN); see [`liger_trainer.functional.modulated_rms_norm`].

    The arguments are those of [`LigerRMSNorm`].
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__(
            hidden_size, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=elementwise_affine
        )

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalises and modulates `hidden_states`, (..., hidden_size), by a row for each sample, token, or for all."""
        return modulated_rms_norm(
            hidden_states, self.weight, scale, shift, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerRMSNormForGemma(LigerRMSNorm):
    """[`LigerRMSNorm`] with Gemma's defaults: `1 + weight`, a weight that starts at zero, one rounding at the end."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNormForGemma):
    """[`LigerRMSNorm`] with Gemma 2's defaults, which are Gemma's."""


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma):
    """[`LigerRMSNorm`] with Qwen3-Next's defaults, which are Gemma's."""


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma):
    """[`LigerRMSNorm`] with Muse Glimmer's defaults for centred weights, which are Gemma's."""


class LigerRMSNormForGemma3(LigerRMSNormForGemma):
    """[`LigerRMSNorm`] with Gemma 3's defaults, which are Gemma's; the size is called `dim`."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """[`LigerRMSNorm`] with Gemma 4's defaults: the plain weight, one rounding; none `with_scale=False`."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """[`LigerRMSNorm`] with Muse Glimmer's defaults, which are Gemma 4's; `with_scale=False` needs no `dim`.

    Raises:
        ValueError: for a weight without `dim`.
    """

    def __init__(
        self,
        dim: int | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        if dim is None and with_scale:
            raise ValueError("`dim` is None; give the size of the weight, or `with_scale=False` for none.")
        super().__init__(0 if dim is None else dim, eps, offset, casting_mode, init_fn, in_place, with_scale)


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """[`LigerRMSNorm`] with Liger's defaults for OLMo 2; transformers' own module rounds as `casting_mode="olmo2"`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGlm4(LigerRMSNormForOlmo2):
    """[`LigerRMSNorm`] with GLM-4's defaults."""
