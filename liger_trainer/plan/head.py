"""What the LM head and its loss hold beside the hidden states.

The fused head of V words over N hidden states of size H keeps one chunk of logits (`logits_memory`, or N V numbers if
those are fewer). A cross entropy makes both gradients in the forward: dX (N H) and, for a trained head, dW (V H).
Losses of log-probabilities make dX and dW in the backward; for a frozen head the forward keeps the gradient of each
log-probability to its hidden state, (N, H) in fp32, and the backward makes dX of it. Logits that are kept longer
(`retain_logits_memory`) come on top of a chunk.

Without the fused head, logits are whole: 12 bytes each in half precision (they, their fp32 copy, its gradient, and
their own), or twice their size (they and their gradient) where cross entropy alone is a kernel.
"""

from __future__ import annotations

import dataclasses

UNFUSED_BYTES = 12  # of one logit in eager cross entropy at its fullest: half precision, fp32, fp32, half precision


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """How the head runs.

    Args:
        loss: ``"cross_entropy"``, ``"log_probs"``, or ``"none"`` for a model without an LM head.
        fused: Whether the fused head runs.
        cross_entropy: Whether the cross entropy on whole logits is a kernel, where the head is not fused.
        logits_memory: Bytes of one chunk of logits.
        retained: Bytes of logits that may be kept until the backward; None for one chunk, which is the chunk itself.
    """

    loss: str = "cross_entropy"
    fused: bool = True
    cross_entropy: bool = True
    logits_memory: int = 512 * 2**20
    retained: int | None = None


@dataclasses.dataclass(frozen=True)
class HeadMemory:
    """Bytes of the head: at its fullest, and what of it lives on until the layers' backward begins."""

    peak: float
    weight_gradient: float


def head_memory(
    settings: HeadSettings, tokens: int, hidden: int, vocab: int, compute: int, weight: int, trained: bool
) -> HeadMemory:
    """The memory of the head.

    Args:
        settings: How it runs.
        tokens: N, those with a loss.
        hidden: H.
        vocab: V.
        compute: Bytes of a hidden state and of a logit.
        weight: Bytes of a number of the weight's gradient.
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
    kept = min(settings.retained or 0, logits) if trained and settings.loss == "log_probs" else 0
    unit = tokens * hidden * 4 if settings.loss == "log_probs" and not trained else 0
    return HeadMemory(chunk + kept + states + unit + gradient, gradient)
