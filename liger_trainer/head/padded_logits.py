"""Deferred logits with more tokens, whose logits are all one number.

The Trainer pads the logits of its processes to one length before it gives them to the user's functions. Padding the
hidden states does the same: one more column of theirs marks the tokens that are padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.nn import functional as F

from liger_trainer.head.chunked_module import ModuleCall
from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.head.lm_head import HeadCall, Recorded, version_of
from liger_trainer.head.recorded import NOTHING_DONE, RecordedChain


@dataclasses.dataclass(eq=False)
class _PaddedCall(ModuleCall):
    """The call `inner` and the steps of `chain`, for hidden states `(..., H + 1)`; `value` where the last is not 0."""

    inner: HeadCall | ModuleCall
    chain: RecordedChain
    value: float

    def gathered_product(self) -> Callable[[torch.Tensor], torch.Tensor]:
        product = self.inner.gathered_product()

        def padded(hidden: torch.Tensor) -> torch.Tensor:
            return self.chain.replay(product(hidden[..., :-1])).masked_fill(hidden[..., -1:] != 0, self.value)

        return padded


def padded_logits(logits: DeferredLogits, length: int, value: float) -> DeferredLogits:
    """Deferred `logits` `(B, S, V)` without a graph as `(B, length, V)`, with `value` behind the S tokens."""
    recorded = logits.recorded
    recorded.check()
    call, (rows, tokens, vocab_size) = recorded.call, logits.meta.shape
    whole = _PaddedCall(
        *(call.head, vocab_size, logits.meta.dtype, None, call.logits_memory, call, recorded.chain, value)
    )
    marked = F.pad(recorded.hidden.detach(), (0, 1))
    marked = F.pad(marked, (0, 0, 0, length - tokens), value=1.0)
    meta = torch.empty(rows, length, vocab_size, dtype=logits.meta.dtype, device="meta")
    with torch.no_grad():
        return DeferredLogits.create(Recorded(whole, marked, NOTHING_DONE, version_of(marked)), meta)
