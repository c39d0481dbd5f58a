"""The norms as modules, with the call signatures of Liger's; RMSNorm also with the defaults of model families."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from liger_trainer import functional as F
from liger_trainer.kernels.norms.rms_norm import CASTINGS


def _initial_weight(size: int, init_fn: str) -> nn.Parameter:
    if init_fn not in ("ones", "zeros"):
        raise ValueError(f"`init_fn` is {init_fn!r}; it must be 'ones' or 'zeros'.")
    return nn.Parameter(torch.ones(size) if init_fn == "ones" else torch.zeros(size))


class LigerRMSNorm(nn.Module):
    """RMSNorm over the last dimension; see [`liger_trainer.functional.rms_norm`] for the formula.

    `hidden_size` is the size of the last dimension. `eps`, `offset` and `casting_mode` (there `casting`) are those of
    the function. `init_fn` is the initial weight, ``"ones"`` or ``"zeros"``, and `elementwise_affine` says whether
    there is one. `in_place` and `row_mode` have no effect: the caller's gradient tensor is never overwritten, and the
    launch follows from the shape.

    Raises:
        ValueError: for an unknown `init_fn` or `casting_mode`.
    """

    weight: nn.Parameter | None

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
        if casting_mode not in CASTINGS:
            raise ValueError(f"`casting_mode` is {casting_mode!r}; it must be one of {', '.join(CASTINGS)}.")
        weight = _initial_weight(hidden_size, init_fn)
        self.register_parameter("weight", weight if elementwise_affine else None)
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.offset = offset
        self.casting_mode = casting_mode
        self.elementwise_affine = elementwise_affine

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalises `hidden_states`, (..., hidden_size)."""
        return F.rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    def extra_repr(self) -> str:
        """What printing the module shows."""
        return f"{self.hidden_size}, eps={self.variance_epsilon}, offset={self.offset}, casting={self.casting_mode}"


class LigerLayerNorm(nn.Module):
    """LayerNorm over the last dimension; it always has a bias.

    `hidden_size` and `init_fn` are those of [`LigerRMSNorm`], `eps` is added to the variance. `bias` starts the bias
    from random values, as Liger does, and not from zero. `impl`, `mode` and `backend`, Liger's old name of `impl`, have
    no effect: there is one implementation.

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
        return F.layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        """What printing the module shows."""
        return f"{self.hidden_size}, eps={self.variance_epsilon}"


class LigerGroupNorm(nn.Module):
    """GroupNorm of (batch, num_channels, ...) in `num_groups` groups, a divisor of `num_channels`.

    `eps`, `bias` and `init_fn` are those of [`LigerLayerNorm`].

    Raises:
        ValueError: for an unknown `init_fn`, or groups that do not divide the channels.
    """

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(f"`num_groups` is {num_groups}, which does not divide `num_channels`, {num_channels}.")
        self.num_channels = num_channels
        self.num_groups = num_groups
        self.weight = _initial_weight(num_channels, init_fn)
        self.bias = nn.Parameter(torch.randn(num_channels) if bias else torch.zeros(num_channels))
        self.eps = self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalises `hidden_states`, (batch, num_channels, ...)."""
        return F.group_norm(hidden_states, self.num_groups, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        """What printing the module shows."""
        return f"{self.num_channels}, num_groups={self.num_groups}, eps={self.variance_epsilon}"


class LigerPolyNorm(nn.Module):
    """PolyNorm; see [`liger_trainer.functional.poly_norm`] for the formula. Weights start at 1/3, the bias at 1.

    `in_place` has no effect, as in [`LigerRMSNorm`].
    """

    def __init__(self, eps: float = 1e-6, in_place: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalises `hidden_states`, (..., hidden_size)."""
        return F.poly_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        """What printing the module shows."""
        return f"eps={self.variance_epsilon}"


class LigerDyT(nn.Module):
    """Dynamic tanh, `tanh(alpha * x) * gamma + beta`, in place of a norm.

    Args:
        hidden_size: Size of the last dimension.
        beta: Whether there is a bias.
        init_alpha: Initial alpha.
    """

    beta: nn.Parameter | None

    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.init_alpha = init_alpha
        self.alpha = nn.Parameter(torch.full((1,), float(init_alpha)))
        self.gamma = nn.Parameter(torch.ones(hidden_size))
        self.register_parameter("beta", nn.Parameter(torch.zeros(hidden_size)) if beta else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the function to `x`, (..., hidden_size)."""
        return F.dyt(x, self.alpha, self.gamma, self.beta)

    def extra_repr(self) -> str:
        """What printing the module shows."""
        return f"{self.hidden_size}, init_alpha={self.init_alpha}, beta={self.beta is not None}"


class _Spelled(LigerRMSNorm):
    """[`LigerRMSNorm`] with the parameters of a class of Liger's, written as text, as in Liger's own source."""

    def __init_subclass__(cls, parameters: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if parameters:
            cls.__init__ = _constructor(parameters)  # type: ignore[method-assign]

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...


def _constructor(parameters: str) -> Any:
    signature = inspect.signature(eval(f"lambda self, {parameters}: None"))

    def __init__(self: LigerRMSNorm, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        ours = {"dim": "hidden_size", "with_scale": "elementwise_affine"}
        values = {ours.get(name, name): value for name, value in given.arguments.items()}
        if values["hidden_size"] is None:
            if values["elementwise_affine"]:
                raise ValueError("`dim` is None; give the size of the weight, or `with_scale=False` for none.")
            values["hidden_size"] = 0
        LigerRMSNorm.__init__(**values)

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__


_LLAMA = "eps=1e-6, offset=0.0, casting_mode='llama', init_fn='ones'"
_GEMMA = "eps=1e-6, offset=1.0, casting_mode='gemma', init_fn='zeros'"
_GEMMA4 = "eps=1e-6, offset=0.0, casting_mode='gemma', init_fn='ones', in_place=False, with_scale=True"


class LigerFusedAddRMSNorm(_Spelled, parameters=f"hidden_size, {_LLAMA}, in_place=False"):
    """Residual addition and RMSNorm in one pass; see [`liger_trainer.functional.fused_add_rms_norm`].

    The arguments are those of [`LigerRMSNorm`].
    """

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised sum of `hidden_states` and `residual`, and the sum."""
        return F.fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerModulatedRMSNorm(_Spelled, parameters=f"hidden_size, {_LLAMA}, in_place=True, elementwise_affine=True"):
    """RMSNorm, then `* (1 + scale) + shift` (adaLN); see [`liger_trainer.functional.modulated_rms_norm`].

    The arguments are those of [`LigerRMSNorm`].
    """

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalises and modulates `hidden_states`, (..., hidden_size), by a row for each sample, token, or for all."""
        return F.modulated_rms_norm(
            hidden_states, self.weight, scale, shift, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerRMSNormForGemma(_Spelled, parameters=f"hidden_size, {_GEMMA}, in_place=True, row_mode=None"):
    """[`LigerRMSNorm`] with Gemma's defaults: `1 + weight`, a weight that starts at zero, one rounding at the end."""


class LigerRMSNormForGemma2(LigerRMSNormForGemma):
    """[`LigerRMSNorm`] with Gemma 2's defaults, which are Gemma's."""


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma):
    """[`LigerRMSNorm`] with Qwen3-Next's defaults, which are Gemma's."""


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma):
    """[`LigerRMSNorm`] with Muse Glimmer's defaults for centred weights, which are Gemma's."""


class LigerRMSNormForGemma3(LigerRMSNormForGemma, parameters=f"dim, {_GEMMA}, in_place=False"):
    """[`LigerRMSNorm`] with Gemma 3's defaults, which are Gemma's; the size is called `dim`."""


class LigerRMSNormForGemma4(_Spelled, parameters=f"dim, {_GEMMA4}"):
    """[`LigerRMSNorm`] with Gemma 4's defaults: the plain weight, one rounding; none `with_scale=False`."""

    @property
    def with_scale(self) -> bool:
        """Whether there is a weight."""
        return self.elementwise_affine


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4, parameters=f"dim=None, {_GEMMA4}"):
    """[`LigerRMSNorm`] with Muse Glimmer's defaults, which are Gemma 4's; `with_scale=False` needs no `dim`.

    Raises:
        ValueError: for a weight without `dim`.
    """


class LigerRMSNormForOlmo2(_Spelled, parameters=f"hidden_size, {_LLAMA}, in_place=False, row_mode=None"):
    """[`LigerRMSNorm`] with Liger's defaults for OLMo 2; transformers' own module rounds as `casting_mode="olmo2"`."""


class LigerRMSNormForGlm4(LigerRMSNormForOlmo2):
    """[`LigerRMSNorm`] with GLM-4's defaults."""
