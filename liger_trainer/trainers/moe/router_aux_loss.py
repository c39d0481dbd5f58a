"""The auxiliary loss of a mixture of experts, averaged over micro-batches and processes.

A model that is given labels adds its auxiliary loss to the cross entropy. The Trainer divides the cross entropy by the
labels of a whole step, so its sum over micro-batches and processes is a mean. Each auxiliary loss is already a mean, so
their sum would grow with both numbers. The models read their coefficient in every forward, so it is divided there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from liger_trainer.head.warn_once import warn_once
from liger_trainer.trainers.step import loss_divisor, process_scale

_NAMES = ("router_aux_loss_coef", "aux_loss_coef")  # the second is JetMoe's


def aux_loss_coefficients(model: nn.Module) -> list[tuple[Any, str]]:
    """The objects and attributes from which the forwards of `model` read the coefficient of their auxiliary loss.

    A forward reads it from its module or, in multimodal models, from the configuration of the language model. Warns if
    the configuration asks for the routers' logits and neither has a coefficient.
    """
    holders: dict[int, Any] = {id(module): module for module in model.modules()}
    asks = False
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "get_text_config"):
            text = config.get_text_config()
            holders[id(text)] = text
            asks = asks or bool(getattr(text, "output_router_logits", False))
    found = [(holder, name) for holder in holders.values() for name in _NAMES if name in vars(holder)]
    if asks and not found:
        warn_once(
            "auxiliary loss",
            "The model is asked for its routers' logits (`output_router_logits`), but has no `router_aux_loss_coef`. "
            "If the model adds an auxiliary loss, that loss grows with `gradient_accumulation_steps` and the number of "
            "processes; divide its coefficient by both. (Said once.)",
        )
    return found


@contextlib.contextmanager
def averaged_aux_loss(
    trainer: Any, coefficients: list[tuple[Any, str]], num_items: torch.Tensor | int | None
) -> Iterator[None]:
    """Inside, forwards with labels scale their auxiliary loss so that the Trainer's sum of it is a mean.

    In evaluation, the mean is over processes only. `num_items` divides the model's cross entropy; None is the mean over
    a micro-batch.
    """
    factor = process_scale(trainer, num_items) * (loss_divisor(trainer, num_items) if trainer.model.training else 1)
    given = [(holder, name, getattr(holder, name)) for holder, name in coefficients] if factor != 1 else []
    try:
        for holder, name, coefficient in given:
            setattr(holder, name, coefficient / factor)
        yield
    finally:
        for holder, name, coefficient in given:
            setattr(holder, name, coefficient)
