"""Options of Liger's loss in a call of a patched model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

# The forwards of Liger's patched models have these. Hugging Face's take any name, and their loss drops it.
_OPTIONS = (
    "ce_weight",
    "label_smoothing",
    "lse_square_scale",
    "return_predicted_tokens",
    "return_token_accuracy",
    "return_z_loss",
    "use_token_scaling",
)


def refuse_ignored_options(model: Any, names: Sequence[str], kwargs: dict[str, Any]) -> None:
    """Raises ValueError for an option in `kwargs` that neither the model's forward nor its loss would read.

    Args:
        model: The model, whose `loss_function` may be the user's own.
        names: Parameters of its forward.
        kwargs: What it was called with.
    """
    values = {name: kwargs[name] for name in _OPTIONS if name in kwargs and name not in names}
    asked = [name for name, value in values.items() if isinstance(value, torch.Tensor) or value]
    if not asked:
        return
    from transformers.loss.loss_utils import LOSS_MAPPING

    loss = model.loss_function
    if loss not in LOSS_MAPPING.values():  # the user's own may read it from its `**kwargs`
        return
    taken = inspect.signature(loss).parameters
    ignored = ", ".join(f"`{name}`" for name in asked if name not in taken)
    if ignored:
        raise ValueError(
            f"{ignored}: the loss of {type(model).__name__} has no such option and would ignore it. Leave it out, or "
            "compute the loss from the hidden states with liger_trainer.nn.LigerFusedLinearCrossEntropyLoss."
        )
