"""The distillation losses of [`liger_trainer.nn`]: divergences of two heads, and of distributions that are given.

The base class for losses of one's own has the hook and the arguments of Liger's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

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


class LigerFusedLinearDistillationBase(torch.autograd.Function):
    """A distillation loss over two heads, in chunks of tokens, so that only one chunk of logits exists at a time.

    A subclass defines `distillation_loss_fn` as a static method, and a `forward` that calls the one here with
    ``cls=cls, ctx=ctx`` and tensors and options by name. In plain torch; the losses of [`liger_trainer.losses`] have
    kernels and do not come from it.
    """

    @staticmethod
    def distillation_loss_fn(student_logits: Tensor, teacher_logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The sum of the losses of a chunk, of logits, (tokens, vocab), divided by the temperature."""
        raise NotImplementedError("A subclass of LigerFusedLinearDistillationBase defines `distillation_loss_fn`.")

    @staticmethod
    def forward(  # type: ignore[override]
        cls: type[LigerFusedLinearDistillationBase],
        ctx: Any,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        target: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        chunk_size: int = 1024,
        ignore_index: int = -100,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        compute_ce_loss: bool = True,
        temperature: float = 1.0,
        compiled: bool = True,
        return_soft_hard_loss: bool = False,
        **loss_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The weighted sum of both losses, each divided by the number of tokens that count.

        Tensors and options are those of [`liger_trainer.nn.LigerFusedLinearJSDLoss`], with `target` for the labels. The
        subclass is `cls`, and the soft loss its `distillation_loss_fn`, which gets `beta` and `loss_kwargs`.
        `chunk_size` is the number of tokens of one chunk, and `compute_ce_loss` says whether the cross entropy counts.
        """
        if student_weight.shape[0] != teacher_weight.shape[0]:
            raise ValueError(
                f"`student_weight` has {student_weight.shape[0]} rows and `teacher_weight` {teacher_weight.shape[0]}; "
                "they must be equal."
            )
        valid = (target != ignore_index).sum().clamp(min=1)
        grad_input, grad_weight = torch.zeros_like(student_input), torch.zeros_like(student_weight)
        grad_bias = None if student_bias is None else torch.zeros_like(student_bias)
        hard, soft = (torch.zeros((), dtype=torch.float32, device=student_input.device) for _ in range(2))
        weight = student_weight.detach().requires_grad_()
        bias = None if student_bias is None else student_bias.detach().requires_grad_()
        for start in range(0, student_input.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            hidden = student_input[rows].detach().requires_grad_()
            teacher = torch.nn.functional.linear(teacher_input[rows], teacher_weight, teacher_bias).detach()
            with torch.enable_grad():
                logits = torch.nn.functional.linear(hidden, weight, bias)
                soft_chunk = cls.distillation_loss_fn(
                    *(logits / temperature, teacher / temperature),
                    target=target[rows],
                    ignore_index=ignore_index,
                    beta=beta,
                    **loss_kwargs,
                )
                hard_chunk = soft_chunk.new_zeros(())
                if compute_ce_loss and (weight_hard_loss != 0 or return_soft_hard_loss):
                    hard_chunk = torch.nn.functional.cross_entropy(
                        logits.float(), target[rows], ignore_index=ignore_index, reduction="sum"
                    )
                loss = (weight_hard_loss * hard_chunk + weight_soft_loss * soft_chunk) / valid
            found = torch.autograd.grad(loss, [leaf for leaf in (hidden, weight, bias) if leaf is not None])
            grad_input[rows] = found[0]
            grad_weight += found[1]
            if grad_bias is not None:
                grad_bias += found[2]
            hard += hard_chunk.detach() / valid
            soft += soft_chunk.detach() / valid
        ctx.save_for_backward(grad_input, grad_weight, grad_bias)
        total = weight_hard_loss * hard + weight_soft_loss * soft
        return (total, soft, hard) if return_soft_hard_loss else total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *args: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradients of the first six tensors of `forward`; a subclass adds None for its further arguments."""
        hidden, weight, bias = (None if value is None else value * grad_output for value in ctx.saved_tensors)
        return hidden, weight, None, None, None, bias
