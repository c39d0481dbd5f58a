"""What a TRL loss needs from the LM head: for each label its log-probability, and statistics of its distribution."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from liger_trainer.head.chunked_module import chunked_log_probs
from liger_trainer.head.context import expected_gradient
from liger_trainer.head.deferred_logits import DeferredLogits, build, without_owner
from liger_trainer.head.fused_loss import head_log_probs
from liger_trainer.kernels.head.log_probs import log_probs
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX

_KERNEL_NAMES = {
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_squared_probs",
    "mean_logits": "mean_logit",
    "is_top1": "top1",
}


@dataclasses.dataclass(frozen=True)
class StatisticsOptions:
    """What a trainer asks of its LM head in every call.

    Args:
        outputs: TRL's names of the statistics, among the fields of [`TokenStatistics`].
        temperature: Divides the logits.
        uniform_gradient: Whether the trainer's own loss weighs all labels alike. If so, the gradients of the head are
            computed in the forward of that loss, and recomputed in the backward of any other.
        retain_memory: Bytes of logits to save for the backward of any other loss; one chunk by default.
        recomputed: Whether the caller's checkpoint computes what the head saves again, which then retains no logits.
    """

    outputs: tuple[str, ...] = ("log_probs",)
    temperature: float = 1.0
    uniform_gradient: bool = False
    retain_memory: int | None = None
    recomputed: bool = False

    @property
    def kernel_outputs(self) -> tuple[str, ...]:
        """The statistics by the names of the kernels, at least one."""
        return tuple(ours for theirs, ours in _KERNEL_NAMES.items() if theirs in self.outputs) or ("top1",)

    @property
    def expected_grad(self) -> float | torch.Tensor | None:
        """The gradient to expect for the summed loss while the trainer computes its own, uniform one; else None."""
        return expected_gradient("sum") if self.uniform_gradient else None


class TokenStatistics(NamedTuple):
    """Per-label statistics in the shape of the labels, zero where a label is `IGNORE_INDEX`; None if not asked for.

    Attributes:
        log_probs: fp32, differentiable.
        entropy: fp32, differentiable.
        log_sum_sq_probs: fp32, the logarithm of the sum of the squared probabilities, not differentiable.
        mean_logits: fp32, mean of the logits over the vocabulary, after the temperature, not differentiable.
        is_top1: bool, whether the label is the most likely token.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None


def token_statistics(logits: torch.Tensor, labels: torch.Tensor, options: StatisticsOptions) -> TokenStatistics:
    """Statistics of `labels` `(...)` under `logits` `(..., V)`, without building logits that are deferred."""
    outputs, temperature = options.kernel_outputs, options.temperature
    found: Any
    logits = without_owner(logits)
    if not isinstance(logits, DeferredLogits) or not logits.recordable:
        found = log_probs(build(logits), labels, IGNORE_INDEX, temperature, outputs=outputs)
    elif not logits.recorded.call.fused or logits.recorded.chain.fused_form() is None:
        found = chunked_log_probs(logits, labels, outputs, temperature, IGNORE_INDEX)
    else:
        found = head_log_probs(
            logits, labels, outputs, temperature, options.retain_memory, IGNORE_INDEX, options.expected_grad,
            options.recomputed,
        )  # fmt: skip
    asked = {theirs: getattr(found, ours) for theirs, ours in _KERNEL_NAMES.items() if theirs in options.outputs}
    return TokenStatistics(found.log_probs, **asked)
