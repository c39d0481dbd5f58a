"""The operators as modules and losses, with the call signatures of Liger's.

Arguments that only steer how Liger's kernels work inside are accepted and have no effect, as each class says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.functional import (
    CrossEntropyOutput,
    cross_entropy,
    geglu,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rope,
    swiglu,
)

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


def _check_loss(label_smoothing: float, reduction: str, softcap: float | None) -> None:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"`label_smoothing` is {label_smoothing!r}; it must be between 0 and 1.")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"`reduction` is {reduction!r}; it must be 'mean', 'sum' or 'none'.")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"`softcap` is {softcap!r}; it must be more than 0, or None.")


class _CrossEntropy(nn.Module):
    def __init__(
        self,
        class_weights: torch.Tensor | None,
        ignore_index: int,
        lse_square_scale: float,
        label_smoothing: float,
        reduction: str,
        softcap: float | None,
        return_z_loss: bool,
        return_token_accuracy: bool,
        return_predicted_tokens: bool,
    ) -> None:
        super().__init__()
        _check_loss(label_smoothing, reduction, softcap)
        self._class_weights = class_weights
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def _loss(
        self, function: Callable[..., Any], tensors: tuple[Any, ...], target: torch.Tensor, token_scaling: bool = False
    ) -> torch.Tensor | CrossEntropyOutput:
        per_token_accuracy = self.return_token_accuracy and self.reduction == "none"
        asked = {
            "z_loss": self.return_z_loss,
            "token_accuracy": self.return_token_accuracy and not per_token_accuracy,
            "predicted_tokens": self.return_predicted_tokens or per_token_accuracy,
            "token_nll": token_scaling,
        }
        outputs = tuple(name for name, wanted in asked.items() if wanted)
        weights = self._class_weights
        result = function(
            *tensors,
            ignore_index=self.ignore_index,
            reduction="none" if token_scaling else self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.lse_square_scale,
            softcap=self.softcap,
            class_weights=None if weights is None else weights.to(target.device),
            outputs=outputs,
        )
        if not outputs:
            return result
        loss, z_loss, accuracy = result.loss, result.z_loss, result.token_accuracy
        if token_scaling:
            probability = result.token_nll.neg().exp()
            loss = self._reduce(loss * probability, target)
            z_loss = None if z_loss is None else self._reduce(z_loss * probability, target)
        if per_token_accuracy:
            accuracy = (result.predicted_tokens == target).to(torch.float32)
        if not (self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens):
            return loss
        predicted = result.predicted_tokens if self.return_predicted_tokens else None
        return CrossEntropyOutput(loss, z_loss=z_loss, token_accuracy=accuracy, predicted_tokens=predicted)

    def _reduce(self, losses: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.reduction == "none":
            return losses
        total = losses.sum()
        if self.reduction == "sum":
            return total
        valid = target != self.ignore_index
        counted = valid.to(losses.dtype)
        if self._class_weights is not None:
            counted = counted * self._class_weights.to(losses)[target.where(valid, 0)]
        divisor = counted.sum()
        return total / torch.where(divisor > 0, divisor, 1)


class LigerCrossEntropyLoss(_CrossEntropy):
    """Cross entropy of logits; see [`liger_trainer.functional.cross_entropy`]. The loss is float32.

    Args:
        weight: Class weights, (vocab,).
        ignore_index: Target that does not count.
        lse_square_scale: Factor of the z-loss, the squared log-sum-exp.
        label_smoothing: Between 0 and 1.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        return_z_loss: Return the z-loss too.
        return_token_accuracy: Return the share of valid tokens whose largest logit is the target; with reduction
            ``"none"``, 1 or 0 for every token.
        return_predicted_tokens: Return the index of every token's largest logit.

    Raises:
        ValueError: for a value out of range.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__(
            weight,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss,
            return_token_accuracy,
            return_predicted_tokens,
        )
        self.weight = weight

    def forward(self, _input: torch.Tensor, target: torch.Tensor) -> torch.Tensor | CrossEntropyOutput:
        """The loss of `_input`, (tokens, vocab), against `target`, (tokens,).

        Returns:
            The loss, or a `CrossEntropyOutput` if any `return_*` is set.
        """
        return self._loss(cross_entropy, (_input, target), target)


class LigerFusedLinearCrossEntropyLoss(_CrossEntropy):
    """Cross entropy of ``_input @ lin_weight.T + bias`` without the logits in memory.

    See [`liger_trainer.functional.linear_cross_entropy`].

    Args:
        ce_weight: Class weights, (vocab,).
        ignore_index: Target that does not count.
        lse_square_scale: Factor of the z-loss, the squared log-sum-exp.
        label_smoothing: Between 0 and 1.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        return_z_loss: Return the z-loss too.
        accum_dtype: No effect: what is accumulated over chunks always has float32 accuracy or a tested bound.
        use_token_scaling: Weight every token's loss with its predicted probability (detached), as in Liger.
        return_token_accuracy: Return the share of valid tokens whose largest logit is the target; with reduction
            ``"none"``, 1 or 0 for every token.
        return_predicted_tokens: Return the index of every token's largest logit.

    Raises:
        ValueError: for a value out of range.
    """

    def __init__(
        self,
        ce_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__(
            ce_weight,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss,
            return_token_accuracy,
            return_predicted_tokens,
        )
        self.ce_weight = ce_weight
        self.use_token_scaling = use_token_scaling

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | CrossEntropyOutput:
        """The loss of `_input`, (tokens, hidden), under the head `lin_weight`, (vocab, hidden), and `bias`, (vocab,).

        Returns:
            The loss against `target`, (tokens,), or a `CrossEntropyOutput` if any `return_*` is set.
        """
        tensors = (_input, lin_weight, target, bias)
        return self._loss(linear_cross_entropy, tensors, target, token_scaling=self.use_token_scaling)


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
