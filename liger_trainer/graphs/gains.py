"""For which calls of layers graphs gain something: those for which the host takes longer than the device."""

from __future__ import annotations

import torch

NEVER = torch.iinfo(torch.int64).max


class Gains:
    """How many tokens of a call keep the device busy, as far as calls have been timed.

    A forward without gradients launches less for its tokens than one with a backward, so each has numbers of its own.

    Args:
        always: Whether calls run from graphs without being timed.

    Attributes:
        busy_from: The fewest tokens of a call in training that is known to keep the device busy, int64 (1,). Processes
            that collate batches may share its memory.
    """

    def __init__(self, always: bool) -> None:
        self.busy_from = torch.full((1,), NEVER)
        self._busy = {True: self.busy_from, False: self.busy_from.clone()}  # with gradients, and without
        self._waiting = dict.fromkeys(self._busy, NEVER if always else 0)  # the most tokens that leave it waiting

    @property
    def in_training(self) -> int | None:
        """`busy_from`; None if no batch is known to keep the device busy."""
        return None if self.busy_from == NEVER else int(self.busy_from)

    def is_busy(self, tokens: int, differentiated: bool) -> bool:
        """Whether a call is known to keep the device busy."""
        return tokens >= int(self._busy[differentiated])

    def is_timed(self, tokens: int, differentiated: bool) -> bool:
        """Whether calls as large have been timed, or need not be."""
        return tokens <= self._waiting[differentiated] or self.is_busy(tokens, differentiated)

    def note(self, tokens: int, differentiated: bool, busy: bool) -> None:
        """Notes what a call did that has been timed."""
        if busy:
            self._busy[differentiated].clamp_(max=tokens)
        else:
            self._waiting[differentiated] = max(self._waiting[differentiated], tokens)
