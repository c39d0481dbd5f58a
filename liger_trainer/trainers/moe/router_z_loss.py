"""The z-loss of the routers, added to whatever loss a trainer computes.

The losses of TRL's trainers have no such term. So the forwards inside a `compute_loss` record it in
`Step.z_losses`, and it is added to what `compute_loss` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from liger_trainer.patching.moe.load_balancing import COMPONENT
from liger_trainer.patching.report import KernelReport


class RouterLogitsError(ValueError):
    """A z-loss was asked for, and the forwards of a step recorded none."""


def check_router_losses(trainer: Any, coefficient: float) -> None:
    """Raises if there is a coefficient, and it is known that no step of `trainer` will have a z-loss.

    A model whose configuration has no `output_router_logits`, or is not from transformers, may still compute one; its
    first step shows it ([`mean_z_loss`]).

    Raises:
        ValueError: if no router's loss of ours is in the model, as in a dense one.
        RouterLogitsError: if neither the trainer nor the model's configuration asks for the routers' logits.
    """
    if not coefficient:
        return
    report: KernelReport | None = trainer.kernel_report
    rows = [row for row in report or () if row.component == COMPONENT]
    if not any(row.applied for row in rows):
        reason = "`use_liger_kernel` is off" if report is None else "no load-balancing loss was found in the model"
        reason = next((f"{row.target}: {row.reason}" for row in rows), reason)
        raise ValueError(
            f"`router_z_loss_coef` is {coefficient}, but the z-loss is computed by the kernel `{COMPONENT}`, which is "
            f"not applied ({reason}). Set `router_z_loss_coef` to 0, or train a mixture of experts with that kernel."
        )
    # Unless a trainer of TRL asks for them, a forward does what its configuration says.
    config = getattr(trainer.model, "config", None)
    asks = not isinstance(config, PreTrainedConfig) or getattr(config.get_text_config(), "output_router_logits", True)
    if not (asks or getattr(trainer, "aux_loss_enabled", False)):
        raise RouterLogitsError(
            f"`router_z_loss_coef` is {coefficient}, but the model is not asked for its routers' logits. "
            f"{_how_to_ask(trainer)}, or `router_z_loss_coef` to 0."
        )


def _how_to_ask(trainer: Any) -> str:
    given = getattr(trainer, "router_aux_loss_coef", None)
    if given is not None and hasattr(trainer.args, "router_aux_loss_coef"):
        return f"Set `router_aux_loss_coef`, which is {given}, above 0"
    return "Set `model.config.get_text_config().output_router_logits = True` before the trainer is made"


def mean_z_loss(z_losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean over the forwards of one `compute_loss`."""
    if not z_losses:
        raise RouterLogitsError(
            "`router_z_loss_coef` is above 0, but the model was not asked for its routers' logits. Set "
            "`router_aux_loss_coef` above 0 (trainers of TRL) or `model.config.output_router_logits = True`; a forward "
            "compiled as a whole graph (`fullgraph=True`) has no z-loss."
        )
    return torch.stack([z_loss.to(z_losses[0].device) for z_loss in z_losses]).mean()


def with_term(result: Any, term: torch.Tensor) -> Any:
    """`result` of a `compute_loss`, a loss or a loss and outputs, with `term` added to the loss."""
    if isinstance(result, tuple):
        return (result[0] + term.to(result[0].device), *result[1:])
    return result + term.to(result.device)
