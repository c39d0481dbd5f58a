"""The z-loss of the routers, added to whatever loss a trainer computes.

The losses of TRL's trainers know nothing of it, and take of a model's outputs what they need. The forwards inside a
`compute_loss` leave it in [`recorded_z_losses`] instead, and it is added to what `compute_loss` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.patching.load_balancing import COMPONENT
from liger_trainer.patching.report import KernelReport


class RouterLogitsError(ValueError):
    """A z-loss was asked for, and the forwards of a step left none."""


def check_router_losses(coefficient: float, report: KernelReport | None) -> None:
    """Raises ValueError where there is a coefficient, and no router's loss of ours in the model.

    Args:
        coefficient: `router_z_loss_coef`.
        report: What was patched; None with the kernels off.
    """
    rows = [row for row in report or () if row.component == COMPONENT]
    if not coefficient or any(row.applied for row in rows):
        return
    reason = "`use_liger_kernel` is off" if report is None else "the model computes no load-balancing loss"
    reason = next((f"{row.target}: {row.reason}" for row in rows), reason)
    raise ValueError(
        f"`router_z_loss_coef` is {coefficient}, but the z-loss is computed by the kernel `{COMPONENT}`, which is not "
        f"applied ({reason}). Set `router_z_loss_coef` to 0, or train a mixture of experts with that kernel."
    )


def mean_z_loss(z_losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean over the forwards of one `compute_loss`.

    Raises:
        RouterLogitsError: if there is none.
    """
    if not z_losses:
        raise RouterLogitsError(
            "`router_z_loss_coef` is above 0, but the model was not asked for its routers' logits. Set "
            "`router_aux_loss_coef` above 0 (trainers of TRL) or `model.config.output_router_logits = True`; a forward "
            "compiled as a whole graph (`fullgraph=True`) has no z-loss."
        )
    return torch.stack([z_loss.to(z_losses[0].device) for z_loss in z_losses]).mean()


def with_z_loss(result: Any, term: torch.Tensor) -> Any:
    """`result` of a `compute_loss`, a loss or a loss and outputs, with `term` added to the loss."""
    if isinstance(result, tuple):
        return (result[0] + term.to(result[0].device), *result[1:])
    return result + term.to(result.device)


def loss_divisor(trainer: Any, num_items: torch.Tensor | int | None) -> int:
    """What a term of one micro-batch is to be divided by: the accumulation steps, unless the Trainer does that."""
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is None:
        by_items = trainer.model_accepts_loss_kwargs and num_items is not None
        scaled = by_items or trainer.compute_loss_func is not None
    return trainer.current_gradient_accumulation_steps if scaled else 1
