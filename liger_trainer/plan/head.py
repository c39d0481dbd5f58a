"""The memory of the LM head and its loss, besides the hidden states.

The fused head with vocabulary V over N hidden states of size H holds one chunk of logits (`logits_memory`, or N V
elements if that is less). Cross entropy computes both gradients in the forward pass: dX (N H) and, for a trained head,
dW (V H). Losses of log-probabilities compute dX and dW in the backward pass; for a frozen head, the forward pass saves
the gradient of each log-probability with respect to its hidden state, (N, H) in fp32, from which the backward pass
computes dX. Logits that are saved for backward (`retain_logits_memory`) are added to a chunk.

Without the fused head, all logits are built: 12 bytes each in half precision (the logits, their fp32 copy, and both
gradients), or twice their size (the logits and their gradient) if the cross entropy is a kernel.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from liger_trainer.configs.flags import kernel_config_of, retained_bytes_of

UNFUSED_BYTES = 12  # peak per logit in eager cross entropy: half precision, fp32, fp32, half precision


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """How the head runs.

    Args:
        loss: ``"cross_entropy"``, ``"log_probs"``, or ``"none"`` for a model without an LM head.
        fused: Whether the fused head runs.
        cross_entropy: Without the fused head, whether the cross entropy on all logits is a kernel.
        logits_memory: Bytes of one chunk of logits.
        retained: Bytes of logits that may be saved for backward; None for one chunk, which is the working chunk itself.
    """

    loss: str = "cross_entropy"
    fused: bool = True
    cross_entropy: bool = True
    logits_memory: int = 512 * 2**20
    retained: int | None = None

    @classmethod
    def of(cls, arguments: Any, loss: str) -> HeadSettings:
        """Those of training arguments, or of a namespace with a recipe's keys."""
        kernels, ours = kernel_config_of(arguments), arguments.use_liger_kernel
        return cls(
            loss,
            fused=bool(ours and kernels.linear_cross_entropy),
            cross_entropy=bool(ours and kernels.cross_entropy),
            logits_memory=int(kernels.logits_memory),
            retained=retained_bytes_of(arguments),
        )


@dataclasses.dataclass(frozen=True)
class HeadMemory:
    """Bytes of the head: its peak, and the weight gradient that remains when the layers' backward begins."""

    peak: float
    weight_gradient: float


def head_memory(
    settings: HeadSettings, tokens: int, hidden: int, vocab: int, compute: int, weight: int, trained: bool
) -> HeadMemory:
    """The memory of the head.

    Args:
        settings: How it runs.
        tokens: N, the tokens with a loss.
        hidden: H.
        vocab: V.
        compute: Bytes of a hidden state and of a logit.
        weight: Bytes per element of the weight's gradient.
        trained: Whether the head is trained.
    """
    if settings.loss == "none":
        return HeadMemory(0.0, 0.0)
    gradient = vocab * hidden * weight if trained else 0
    states = 2 * tokens * hidden * compute  # the last norm's output, and its gradient
    logits = tokens * vocab * compute
    if not settings.fused:
        whole = 2 * logits if settings.cross_entropy else tokens * vocab * max(UNFUSED_BYTES, 3 * compute)
        return HeadMemory(whole + states + gradient, gradient)
    chunk = min(settings.logits_memory, logits)
    retained = min(settings.retained or 0, logits) if trained and settings.loss == "log_probs" else 0
    unit = tokens * hidden * 4 if settings.loss == "log_probs" and not trained else 0
    return HeadMemory(chunk + retained + states + unit + gradient, gradient)
