"""The operator that computes the gradient of given logits in the backward, for every loss that takes labels.

`cross_entropy`, `log_probs` and the vocabulary-parallel losses save the logits and the statistics of their rows; the
formula and the kernel are in `cross_entropy_kernel`.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.head.cross_entropy_kernel import row_gradient_
from liger_trainer.kernels.head.row_statistics import RowOptions, RowStats, Shard
from liger_trainer.kernels.operator import operator


@operator("liger_trainer::logits_gradient")
def logits_gradient(
    grad: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    nll: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    vocab_start: int,
    vocab_size: int,
) -> torch.Tensor:
    """The gradient of `logits`, contiguous, for upstream gradients of the token losses and of the entropies.

    The logits are the columns from `vocab_start` on of a vocabulary of `vocab_size` ids; `nll`, `lse` and `entropy`,
    each `(N,)`, are those of the whole vocabulary. `entropy` is read only if there is a `grad_entropy`.
    """
    options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
    stats, shard = RowStats.of_backward(nll, lse, entropy), Shard(vocab_start, vocab_size)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    row_gradient_(
        logits, target, stats, options, grad, None, class_weights, out, entropy_coefficient=grad_entropy, shard=shard
    )
    return out


@logits_gradient.register_fake
def _(
    grad, grad_entropy, logits, target, nll, lse, entropy, class_weights,
    ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature, vocab_start, vocab_size,
):  # fmt: skip
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
