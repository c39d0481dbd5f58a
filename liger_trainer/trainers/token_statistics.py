"""What a TRL loss needs of the LM head: per label, its log-probability, and statistics of its distribution."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from liger_trainer.head.chunked_module import chunked_log_probs
from liger_trainer.head.deferred_logits import DeferredLogits, build, without_owner
from liger_trainer.head.fused_loss import head_log_probs, head_loss
from liger_trainer.kernels.log_probs import log_probs

_KERNEL_NAMES = {
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_squared_probs",
    "mean_logits": "mean_logit",
    "is_top1": "top1",
}
_OF_THE_LOSS = {"log_probs", "entropy", "is_top1"}  # what comes with a summed loss


@dataclasses.dataclass(frozen=True)
class StatisticsOptions:
    """What a trainer asks of its LM head, for every call alike.

    Args:
        outputs: TRL's names of the statistics, among the fields of [`TokenStatistics`].
        temperature: Divides the logits.
        uniform_gradient: Whether the loss weighs all labels alike. Then the gradients of the head are computed in the
            forward, and a backward that turns out to weigh them differently gives NaN gradients. Otherwise any backward
            is right.
        retain_memory: Bytes of logits that are kept for the backward of any other loss; one chunk by default.
        ignore_index: Label of the positions to leave out.
    """

    outputs: tuple[str, ...] = ("log_probs",)
    temperature: float = 1.0
    uniform_gradient: bool = False
    retain_memory: int | None = None
    ignore_index: int = -100

    @property
    def kernel_outputs(self) -> tuple[str, ...]:
        """The statistics by the names of the kernels, at least one."""
        return tuple(ours for theirs, ours in _KERNEL_NAMES.items() if theirs in self.outputs) or ("top1",)

    @property
    def of_summed_loss(self) -> bool:
        """Whether the statistics come with a summed loss whose gradient is known in the forward."""
        return self.uniform_gradient and self.temperature == 1.0 and set(self.outputs) <= _OF_THE_LOSS


class TokenStatistics(NamedTuple):
    """Per-label statistics, each shaped as the labels and zero where a label is ignored; None where not asked for.

    Attributes:
        log_probs: fp32, carries the gradient.
        entropy: fp32; it carries a gradient too, unless the loss was said to weigh all labels alike.
        log_sum_sq_probs: fp32, the logarithm of the sum of the squared probabilities, without gradient.
        mean_logits: fp32, mean of the logits over the vocabulary, after the temperature, without gradient.
        is_top1: bool, whether the label is the most likely token.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None


def token_statistics(logits: torch.Tensor, labels: torch.Tensor, options: StatisticsOptions) -> TokenStatistics:
    """Statistics of `labels` `(...)` under `logits` `(..., V)`, without building the logits where they are deferred."""
    outputs, temperature, ignore_index = options.kernel_outputs, options.temperature, options.ignore_index
    found: Any
    logits = without_owner(logits)
    if not isinstance(logits, DeferredLogits) or not logits.recordable:
        found = log_probs(build(logits), labels, ignore_index, temperature, outputs=outputs)
    elif not logits.recorded.call.fused or logits.recorded.chain.fused_form() is None:
        found = chunked_log_probs(logits, labels, outputs, temperature, ignore_index)
    elif options.of_summed_loss:
        return _of_summed_loss(logits, labels, options)
    else:
        found = head_log_probs(logits, labels, outputs, temperature, options.retain_memory, ignore_index)
    asked = {theirs: getattr(found, ours) for theirs, ours in _KERNEL_NAMES.items() if theirs in options.outputs}
    return TokenStatistics(found.log_probs, **asked)


def _of_summed_loss(logits: Any, labels: torch.Tensor, options: StatisticsOptions) -> TokenStatistics:
    fused = head_loss(
        logits,
        labels,
        ignore_index=options.ignore_index,
        reduction="sum",
        outputs=("token_nll", "entropy", "predicted_tokens"),
    )
    is_top1 = (fused.predicted_tokens == labels) & (labels != options.ignore_index)
    found = {"entropy": fused.entropy.detach(), "is_top1": is_top1}
    chosen = _PerToken.apply(fused.loss, fused.token_nll, labels, options.ignore_index)
    return TokenStatistics(chosen, **{name: value for name, value in found.items() if name in options.outputs})


class _PerToken(torch.autograd.Function):
    """Per-token log-probabilities as a view of a summed loss that has its gradients already."""

    @staticmethod
    def forward(
        ctx: Any, summed: torch.Tensor, token_nll: torch.Tensor, labels: torch.Tensor, ignore_index: int
    ) -> torch.Tensor:
        ctx.save_for_backward(labels)
        ctx.ignore_index = ignore_index
        return -token_nll

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (labels,) = ctx.saved_tensors
        ignored = labels == ctx.ignore_index
        low = grad.masked_fill(ignored, float("inf")).amin()
        high = grad.masked_fill(ignored, float("-inf")).amax()
        # log_probs = -nll, so the loss gets the negative. Unequal weights are beyond the sum: no gradient is better
        # than a wrong one. Without labels, low > high and the gradient is zero.
        uniform = torch.where(low == high, -high, torch.full_like(high, float("nan")))
        return torch.where(low > high, torch.zeros_like(high), uniform), None, None, None
