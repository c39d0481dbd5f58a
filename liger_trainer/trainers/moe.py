"""What mixtures of experts need from a trainer: the losses of their routers, and a check of experts in 4 bits.

A model that is given labels adds its auxiliary loss to the cross entropy. The Trainer divides the cross entropy by the
labels of a whole step, so its sum over micro-batches and processes is a mean. Each auxiliary loss is already a mean, so
their sum would grow with both numbers. The models read their coefficient in every forward, so it is divided there.

The losses of TRL's trainers have no z-loss of the routers. So the forwards inside a `compute_loss` record it in
`Step.z_losses`, and it is added to what `compute_loss` returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from liger_trainer.head.warn_once import warn_once
from liger_trainer.patching.moe.load_balancing import COMPONENT
from liger_trainer.patching.moe.lora_experts import adapted_experts_left_to_peft
from liger_trainer.patching.moe.quantized_experts import check_adapted, four_bits
from liger_trainer.patching.probe import class_of
from liger_trainer.patching.report import KernelReport
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


def check_experts_in_4_bits(trainer: Any) -> None:
    """Checks that every adapter exists for the weights that it names, and that the launch does not split the model."""
    if not any(four_bits(module) for module in trainer.model.modules()):
        return
    check_adapted(trainer.model)
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        way = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
        raise ValueError(
            f"`model` has experts in 4 bits, which cannot be split, and the launch splits it with {way}. Launch it on "
            "one GPU, or with `--accelerate_config ddp`."
        )


def check_adapted_experts(model: nn.Module) -> None:
    """Checks that adapters on experts in few bits run in our operator, as PEFT's own forward is wrong for them."""
    left = adapted_experts_left_to_peft(model)
    if left is not None:
        raise ValueError(
            f"the adapters on {class_of(left).__name__} in few bits run only in our operator, which is switched off or "
            "not proved for them (`kernel_report: true` says which). Keep the defaults of `use_liger_kernel` and "
            "`liger_kernel_config`, or set `load_in_4bit` and `packed_base` to false."
        )
