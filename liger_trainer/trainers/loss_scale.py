"""How the Trainer scales the loss of a micro-batch, so that terms which we add are scaled alike."""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import LOSS_SCALE

require(LOSS_SCALE)


def loss_divisor(trainer: Any, num_items: torch.Tensor | int | None) -> int:
    """The divisor for a term of one micro-batch: the accumulation steps, or 1 if the Trainer divides by them."""
    scaled = trainer.loss_is_scaled_for_ga
    if scaled is None:
        by_items = trainer.model_accepts_loss_kwargs and num_items is not None
        scaled = by_items or trainer.compute_loss_func is not None
    return getattr(trainer, "current_gradient_accumulation_steps", 1) if scaled else 1


def process_scale(trainer: Any, num_items: torch.Tensor | int | None) -> int:
    """The factor by which the Trainer multiplies a loss that was divided by the labels of all processes.

    Processes that share their batches (tensor parallelism) count as one.
    """
    if num_items is None or not trainer.args.average_tokens_across_devices:
        return 1
    return trainer.accelerator.num_processes // trainer.get_tp_size()
