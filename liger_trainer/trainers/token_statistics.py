"""What a TRL loss needs of the LM head: per label, its log-probability, the entropy, and whether it came first."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.head.fused_loss import head_loss


class TokenStatistics(NamedTuple):
    """Per-label statistics, each shaped as the labels and zero where a label is ignored.

    Attributes:
        log_probs: fp32, carries the gradient.
        entropy: fp32, without gradient.
        is_top1: bool, whether the label is the most likely token.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    is_top1: torch.Tensor


def token_statistics(
    logits: torch.Tensor, labels: torch.Tensor, uniform_gradient: bool, ignore_index: int = -100
) -> TokenStatistics:
    """Statistics of `labels` under `logits`, without building the logits where they are deferred.

    Args:
        logits: `(..., V)`, deferred or not.
        labels: `(...)`, class ids, `ignore_index` where there is none.
        uniform_gradient: Whether the loss weighs all labels alike. Then the gradients of the head are computed in the
            forward, and a backward that turns out to weigh them differently gives NaN gradients. Otherwise any
            backward is right, and the logits are computed once more for it.
        ignore_index: Label of the positions to leave out.
    """
    if isinstance(logits, DeferredLogits) and logits.recordable and logits.recorded.call.fused:
        fused = _from_head(logits, labels, uniform_gradient, ignore_index)
        if fused is not None:
            return fused
    return _from_logits(logits, labels, ignore_index)


def _from_head(
    logits: DeferredLogits, labels: torch.Tensor, uniform_gradient: bool, ignore_index: int
) -> TokenStatistics | None:
    """The statistics by the fused head; None where the model does more to its logits than a soft-cap and a scale."""
    if logits.recorded.chain.fused_form() is None or logits.recorded.hidden.shape[:-1] != labels.shape:
        return None
    fused = head_loss(
        logits,
        labels,
        ignore_index=ignore_index,
        reduction="sum" if uniform_gradient else "none",
        outputs=("token_nll", "entropy", "predicted_tokens"),
    )
    log_probs = _PerToken.apply(fused.loss, fused.token_nll, labels, ignore_index) if uniform_gradient else -fused.loss
    is_top1 = (fused.predicted_tokens == labels) & (labels != ignore_index)
    return TokenStatistics(log_probs, fused.entropy.detach(), is_top1)


def _from_logits(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> TokenStatistics:
    """The same from built logits: what an adapter on the head, or a head that is not fused, gives."""
    ignored = labels == ignore_index
    log_softmax = logits.float().log_softmax(-1)
    chosen = log_softmax.gather(-1, labels.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        is_top1 = (logits.argmax(-1) == labels) & ~ignored
    return TokenStatistics(chosen.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0), is_top1)


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
