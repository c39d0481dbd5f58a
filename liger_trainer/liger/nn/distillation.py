"""The distillation losses of [`liger_trainer.nn`]: divergences of two heads, and of distributions that are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from liger_trainer import functional as F
from liger_trainer.liger.nn.losses import OptionsModule


@dataclasses.dataclass(eq=False, repr=False)
class LigerFusedLinearJSD(OptionsModule):
    """Generalised JSD of two heads; see [`liger_trainer.functional.linear_jsd`]. The loss is float32.

    `jsd_beta` is the function's `beta`. `accum_dtype` has no effect: what is accumulated over chunks always has float32
    accuracy or a tested bound.
    """

    jsd_beta: float = 0.5
    ignore_index: int = -100
    temperature: float = 1.0
    accum_dtype: torch.dtype | None = None

    def forward(
        self,
        student_input: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_input: torch.Tensor,
        teacher_weight: torch.Tensor,
        shift_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The mean over the tokens, (tokens, hidden) of each model, whose label in `shift_labels` counts."""
        loss = F.linear_jsd(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            shift_labels,
            beta=self.jsd_beta,
            temperature=self.temperature,
            ignore_index=self.ignore_index,
        )
        assert isinstance(loss, torch.Tensor)
        return loss


@dataclasses.dataclass(eq=False, repr=False)
class LigerFusedLinearKLDivLoss(OptionsModule):
    """KL divergence of a head from given probabilities; see [`liger_trainer.functional.linear_kl_div`].

    `accum_dtype` has no effect, as in [`LigerFusedLinearJSD`].
    """

    reduction: str = "batchmean"
    ignore_index: int = -100
    temperature: float = 1.0
    eps: float = 1e-10
    accum_dtype: torch.dtype | None = None

    def forward(
        self,
        student_input: torch.Tensor,
        student_weight: torch.Tensor,
        target: torch.Tensor,
        shift_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss of `student_input`, (tokens, hidden), under its head against `target`, (tokens, vocab)."""
        loss = F.linear_kl_div(
            student_input,
            student_weight,
            target,
            shift_labels,
            temperature=self.temperature,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            eps=self.eps,
        )
        assert isinstance(loss, torch.Tensor)
        return loss


@dataclasses.dataclass(eq=False, repr=False)
class LigerJSD(OptionsModule):
    """Generalised JSD of log-probabilities; see [`liger_trainer.functional.jsd`]. The loss is float32."""

    beta: float = 0.5
    ignore_index: int = -100

    def forward(
        self, log_q: torch.Tensor, log_p: torch.Tensor, shift_labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The mean over the rows of the student's `log_q` and the teacher's `log_p`, (tokens, vocab)."""
        return F.jsd(log_q, log_p, shift_labels, beta=self.beta, ignore_index=self.ignore_index)


class LigerKLDIVLoss(nn.KLDivLoss):
    """KL divergence of log-probabilities from probabilities; see [`liger_trainer.functional.kl_div`].

    Args:
        eps: Lower bound of the probabilities in the logarithm.
        args: Arguments of ``torch.nn.KLDivLoss``.
        kwargs: Keyword arguments of it: `reduction`, by default ``"mean"``, and `log_target`.
    """

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred: torch.Tensor, y_true: torch.Tensor) -> torch.Tensor:
        """The loss of the log-probabilities `y_pred` against `y_true`, (tokens, vocab)."""
        return F.kl_div(y_pred, y_true, self.reduction, self.log_target, self.eps)


@dataclasses.dataclass(eq=False, repr=False)
class LigerTVDLoss(OptionsModule):
    """Total variation distance of probabilities; see [`liger_trainer.functional.tvd`]. The loss is float32."""

    reduction: str = "batchmean"
    ignore_index: int = -100

    def forward(self, p: torch.Tensor, q: torch.Tensor, shift_labels: torch.Tensor | None = None) -> torch.Tensor:
        """The distance of `p`, which gets the gradient, and `q`, (tokens, vocab)."""
        return F.tvd(p, q, shift_labels, self.reduction, self.ignore_index)


@dataclasses.dataclass(eq=False, repr=False)
class LigerFusedCETVDLoss(OptionsModule):
    """Cross entropy and total variation distance of each token; see [`liger_trainer.functional.fused_ce_tvd`]."""

    ignore_index: int = -100

    def forward(
        self, student_logits: torch.Tensor, teacher_logits: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both terms of the logits, (tokens, vocab), and labels `target`, (tokens,), without reduction."""
        return F.fused_ce_tvd(student_logits, teacher_logits, target, self.ignore_index)


@dataclasses.dataclass(eq=False, repr=False)
class _FusedLinearDistillation(OptionsModule):
    function: ClassVar[Callable[..., Any]]

    weight_hard_loss: float = 0.5
    weight_soft_loss: float = 0.5
    beta: float = 0.5
    ignore_index: int = -100
    temperature: float = 1.0
    compiled: bool = True
    chunk_size: int = 1024
    return_soft_hard_loss: bool = False

    def forward(
        self,
        student_input: torch.Tensor,
        student_weight: torch.Tensor,
        teacher_input: torch.Tensor,
        teacher_weight: torch.Tensor,
        true_labels: torch.Tensor,
        student_bias: torch.Tensor | None = None,
        teacher_bias: torch.Tensor | None = None,
    ) -> Any:
        """The mean over the tokens, (tokens, hidden) of each model, whose label in `true_labels` counts.

        Returns:
            The loss, or with `return_soft_hard_loss` the loss, the divergence and the cross entropy.
        """
        result = type(self).function(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            true_labels,
            beta=self.beta,
            temperature=self.temperature,
            student_bias=student_bias,
            teacher_bias=teacher_bias,
            ignore_index=self.ignore_index,
            soft_weight=self.weight_soft_loss,
            hard_weight=self.weight_hard_loss,
            vocab_size=min(student_weight.shape[0], teacher_weight.shape[0]),
            outputs=("soft_loss", "hard_loss") if self.return_soft_hard_loss else (),
        )
        if isinstance(result, F.DivergenceOutput):
            return result.loss, result.soft_loss, result.hard_loss
        return result


class LigerFusedLinearJSDLoss(_FusedLinearDistillation):
    """Cross entropy with the labels and generalised JSD with a teacher; see [`liger_trainer.functional.linear_jsd`].

    Where one head has more rows than the other, the rows that both have are compared: padding takes no part, instead of
    being compared with logits of 0.

    `weight_hard_loss` and `weight_soft_loss` are the function's `hard_weight` and `soft_weight`.
    `return_soft_hard_loss` returns the divergence and the cross entropy too. `compiled` and `chunk_size` have no
    effect: chunks are planned by memory (`logits_memory`).
    """

    function = staticmethod(F.linear_jsd)


class LigerFusedLinearCosineSimilarityLoss(_FusedLinearDistillation):
    """Cross entropy with the labels and the cosine distance of the logits of a teacher.

    See [`liger_trainer.functional.linear_cosine_distance`]. Where one head has more rows than the other, the rows that
    both have are compared.
    The arguments are those of [`LigerFusedLinearJSDLoss`], with two differences: `beta`, between 0 and 1, is another
    factor of the distance, and `temperature` has no influence on a cosine.
    """

    function = staticmethod(F.linear_cosine_distance)
