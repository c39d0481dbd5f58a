"""Logs the z-loss of the routers of a mixture of experts."""

from __future__ import annotations

import torch
from transformers import TrainerState, TrainingArguments

from liger_trainer.callbacks.logged import LoggedMetricsCallback, summed_over_processes


class RouterZLossCallback(LoggedMetricsCallback):
    """Logs `router_z_loss`, its mean over the micro-batches of all processes since the last training log.

    The coefficient is not included, as in TRL's `aux_loss`. The Liger trainers call [`observe`] if `router_z_loss_coef`
    is above 0; the sum stays on the device until it is logged.
    """

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._count = 0

    def observe(self, z_loss: torch.Tensor) -> None:
        """Records the z-loss of one micro-batch."""
        z_loss = z_loss.detach()
        self._sum = z_loss if self._sum is None else self._sum + z_loss.to(self._sum.device)
        self._count += 1

    def metrics(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """Mean since the last training log."""
        both = torch.zeros(2, device=args.device)
        if self._sum is not None:
            both[0], both[1] = self._sum, self._count
        self._sum, self._count = None, 0
        total, count = summed_over_processes(both).tolist()
        return {"router_z_loss": total / count} if count else {}
