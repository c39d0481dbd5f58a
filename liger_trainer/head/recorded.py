"""What deferred logits are made of, and whether it is still what it was in the forward."""

from __future__ import annotations

import torch

from liger_trainer.head.chunked_module import ModuleCall
from liger_trainer.head.lm_head import HeadCall, version_of
from liger_trainer.head.recorded_chain import RecordedChain


class Recorded:
    """What a `DeferredLogits` is: ``chain(head(hidden))``; in-place operations replace the chain.

    Args:
        call: The call of the head.
        hidden: `(..., H)`.
        chain: What was done to the logits since.
        origin: What `hidden` was taken from, if not from the call: its changes are changes of this too.
    """

    __slots__ = ("call", "chain", "hidden", "version")

    def __init__(
        self, call: HeadCall | ModuleCall, hidden: torch.Tensor, chain: RecordedChain, origin: Recorded | None = None
    ) -> None:
        self.call, self.hidden, self.chain = call, hidden, chain
        self.version = version_of(hidden)
        if origin is not None and self.version is not None and origin.version is not None:
            self.version -= version_of(origin.hidden) - origin.version  # type: ignore[operator]

    def check(self) -> None:
        """Raises RuntimeError where the logits could only be built from other values than the call's."""
        changed = "the hidden states" if version_of(self.hidden) != self.version else ""
        changed = changed if self.call.unchanged else "the head's parameters"
        if changed:
            raise RuntimeError(
                f"The logits of a training forward are needed only now, but {changed} have since been changed in place "
                "(by an optimizer step, say), so they would be other logits. Read what you need of `outputs.logits` "
                "before the change, or train with `liger_kernel_config={'linear_cross_entropy': false, "
                "'cross_entropy': false}`, which builds them in the forward."
            )
