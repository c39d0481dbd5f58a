"""The cross entropies of [`liger_trainer.nn`]: of logits, of a head over hidden states, and of a split vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from liger_trainer.functional import (
    CrossEntropyOutput,
    cross_entropy,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from liger_trainer.kernels.head.loss_options import checked_class_weights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class OptionsModule(nn.Module):
    """A module that is a dataclass of its options, in the order of Liger's arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """A module to which options can be set, parameters too."""
        self = super().__new__(cls)
        nn.Module.__init__(self)
        return self


class _CrossEntropy(OptionsModule):
    ignore_index: int
    lse_square_scale: float
    label_smoothing: float
    reduction: str
    softcap: float | None
    return_z_loss: bool
    return_token_accuracy: bool
    return_predicted_tokens: bool

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"`label_smoothing` is {self.label_smoothing!r}; it must be between 0 and 1.")
        if self.reduction not in ("mean", "sum", "none"):
            raise ValueError(f"`reduction` is {self.reduction!r}; it must be 'mean', 'sum' or 'none'.")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"`softcap` is {self.softcap!r}; it must be more than 0, or None.")

    def _loss(
        self,
        function: Callable[..., Any],
        tensors: tuple[Any, ...],
        target: torch.Tensor,
        class_weights: torch.Tensor | None,
        token_scaling: bool = False,
    ) -> torch.Tensor | CrossEntropyOutput:
        per_token_accuracy = self.return_token_accuracy and self.reduction == "none"
        asked = {
            "z_loss": self.return_z_loss,
            "token_accuracy": self.return_token_accuracy and not per_token_accuracy,
            "predicted_tokens": self.return_predicted_tokens or per_token_accuracy,
            "token_nll": token_scaling,
        }
        outputs = tuple(name for name, wanted in asked.items() if wanted)
        weights = None if class_weights is None else class_weights.to(target.device)
        if token_scaling and weights is not None:
            average = self.reduction == "mean"  # the function itself gets "none": it must not reduce yet
            weights = checked_class_weights(weights, len(weights), tensors[0], target, self.ignore_index, average)
        result = function(
            *tensors,
            ignore_index=self.ignore_index,
            reduction="none" if token_scaling else self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.lse_square_scale,
            softcap=self.softcap,
            class_weights=weights,
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
        return total / (target != self.ignore_index).sum().clamp(min=1)


@dataclasses.dataclass(eq=False, repr=False)
class LigerCrossEntropyLoss(_CrossEntropy):
    """Cross entropy of logits; see [`liger_trainer.functional.cross_entropy`]. The loss is float32.

    `weight` and `lse_square_scale` are the function's `class_weights` and `z_loss`. What the function does not have:

    - `return_z_loss`: Return the z-loss too;
    - `return_token_accuracy`: Return the share of valid tokens whose largest logit is the target; with reduction
      ``"none"``, 1 or 0 for every token;
    - `return_predicted_tokens`: Return the index of every token's largest logit.

    Raises:
        ValueError: for a value out of range.
    """

    weight: torch.Tensor | None = None
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    return_z_loss: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False

    def forward(self, _input: torch.Tensor, target: torch.Tensor) -> torch.Tensor | CrossEntropyOutput:
        """The loss of `_input`, (tokens, vocab), against `target`, (tokens,).

        Returns:
            The loss, or a `CrossEntropyOutput` if any `return_*` is set.
        """
        return self._loss(cross_entropy, (_input, target), target, self.weight)


@dataclasses.dataclass(eq=False, repr=False)
class LigerFusedLinearCrossEntropyLoss(_CrossEntropy):
    """Cross entropy of ``_input @ lin_weight.T + bias`` without the logits in memory.

    See [`liger_trainer.functional.linear_cross_entropy`]. The options are those of [`LigerCrossEntropyLoss`], with
    `ce_weight` for `weight`, and `use_token_scaling`: weight every token's loss with its predicted probability
    (detached), as in Liger. `accum_dtype` has no effect: what is accumulated over chunks always has float32 accuracy or
    a tested bound.

    Raises:
        ValueError: for a value out of range.
    """

    ce_weight: torch.Tensor | None = None
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    return_z_loss: bool = False
    accum_dtype: torch.dtype | None = None
    use_token_scaling: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | CrossEntropyOutput:
        """The loss of `_input`, (tokens, hidden), under the head `lin_weight`, (vocab, hidden), and `bias`, (vocab,).

        Returns:
            The loss against `target`, (tokens,), or a `CrossEntropyOutput` if any `return_*` is set.
        """
        tensors = (_input, lin_weight, target, bias)
        return self._loss(linear_cross_entropy, tensors, target, self.ce_weight, self.use_token_scaling)


@dataclasses.dataclass(eq=False, repr=False)
class LigerVocabParallelCrossEntropy(OptionsModule):
    """Cross entropy of logits whose vocabulary is split over processes.

    See [`liger_trainer.functional.vocab_parallel_cross_entropy`]. The loss is float32, one number a token.

    Args:
        ignore_index: Target that does not count.
        label_smoothing: At least 0 and less than 1.
        reduction: ``"none"``: reducing is the caller's.
        label_smoothing_formula: ``"pytorch"`` spreads the smoothing over all classes, ``"megatron"`` over all but the
            target.
        label_smoothing_mode: ``"global"`` spreads it over the whole vocabulary, ``"partition"`` over the columns of
            each process, whose losses then differ, as in Megatron-LM.

    Raises:
        ValueError: for a value out of range.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "none"
    label_smoothing_formula: str = "pytorch"
    label_smoothing_mode: str = "global"

    def __post_init__(self) -> None:
        formula, mode = self.label_smoothing_formula, self.label_smoothing_mode
        if self.reduction != "none":
            raise ValueError(f"`reduction` is {self.reduction!r}; it must be 'none', as the caller reduces the losses.")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"`label_smoothing` is {self.label_smoothing}; it must be at least 0 and less than 1.")
        if formula not in ("pytorch", "megatron"):
            raise ValueError(f"`label_smoothing_formula` is {formula!r}; it must be 'pytorch' or 'megatron'.")
        if mode not in ("global", "partition"):
            raise ValueError(f"`label_smoothing_mode` is {mode!r}; it must be 'global' or 'partition'.")

    def forward(
        self, vocab_parallel_logits: torch.Tensor, target: torch.Tensor, tp_group: ProcessGroup | None = None
    ) -> torch.Tensor:
        """The loss of every token, (seq, batch), of the logits (seq, batch, columns of this process).

        Args:
            vocab_parallel_logits: The columns of this process.
            target: Ids of the whole vocabulary, (seq, batch).
            tp_group: The processes; without them the columns are all there are.
        """
        processes = 1 if tp_group is None else tp_group.size()
        smoothing = self.label_smoothing
        if self.label_smoothing_formula == "megatron":
            shards = processes if self.label_smoothing_mode == "global" else 1
            classes = vocab_parallel_logits.shape[-1] * shards
            smoothing = smoothing * classes / (classes - 1)
        if tp_group is None:
            loss = cross_entropy(vocab_parallel_logits, target, self.ignore_index, "none", label_smoothing=smoothing)
        else:
            loss = vocab_parallel_cross_entropy(
                vocab_parallel_logits,
                target,
                tp_group,
                self.ignore_index,
                "none",
                label_smoothing=smoothing,
                smoothing_scope=self.label_smoothing_mode,
            )
        assert isinstance(loss, torch.Tensor)
        return loss
