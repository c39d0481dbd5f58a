"""Finds numbers that are not finite in a training, on this process and on all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from liger_trainer.callbacks.logged import is_distributed
from liger_trainer.compat.private import require
from liger_trainer.compat.torch import NORMS_OF_MANY
from liger_trainer.kernels.runtime import local_part

(foreach_norm,) = require(NORMS_OF_MANY)

A_PARAMETER = 0  # the rank of parameters in the order in which one bad quantity causes the next


@dataclasses.dataclass
class Observation:
    """The losses and gradient norms of one optimizer step, still on the device."""

    step: int
    flag: torch.Tensor
    losses: torch.Tensor | None
    names: list[str]
    norms: torch.Tensor | None
    host_flag: torch.Tensor | None = None
    ready: Any = None


def observe(
    step: int, losses: list[torch.Tensor], gradients: tuple[list[str], torch.Tensor] | None, device: Any
) -> Observation | None:
    """What this process has observed, with a flag that all processes agree on; None if there is nothing to observe.

    Args:
        step: The optimizer step, from 1.
        losses: The losses of its micro-batches, 0-d.
        gradients: Names of parameters and the norms of their gradients; None if they are not observed.
        device: The device of the flag if there are neither losses nor gradients.
    """
    names, norms = gradients if gradients is not None else ([], None)
    stacked = torch.stack(losses) if losses else None
    parts = [part for part in (stacked, norms) if part is not None]
    if not parts and not is_distributed():
        return None
    device = parts[-1].device if parts else device
    bad = [torch.isfinite(part).all().logical_not().to(device) for part in parts]
    flag = torch.stack(bad).any() if bad else torch.zeros((), dtype=torch.bool, device=device)
    return Observation(step, _of_any_process(flag) if is_distributed() else flag, stacked, names, norms)


def _of_any_process(flag: torch.Tensor) -> torch.Tensor:
    """Whether the flag is set on any process: a loss, or a shard of the gradients, is known to one of them only."""
    count = flag.to(torch.int32)
    torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX)
    return count.bool()


def first_of_all_processes(observed: Observation, model: nn.Module) -> tuple[int, str]:
    """The first bad quantity, in the order of causes and then of ranks. All processes call this in the same step."""
    found = [next(_bad_quantities(observed, model), None)]
    if is_distributed():
        mine, found = found[0], found * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, mine)
    place, rank, what = min((quantity[0], rank, quantity[1]) for rank, quantity in enumerate(found) if quantity)
    return place, f", rank {rank}: {what}" if len(found) > 1 else f": {what}"


def _bad_quantities(observed: Observation, model: nn.Module) -> Iterator[tuple[int, str]]:
    """The bad quantities of this process, with their rank in the order of causes. Waits for the device."""
    for name, parameter in _parameters(model):
        if not torch.isfinite(parameter).all():
            yield A_PARAMETER, f"parameter {name!r}"
    if observed.losses is not None:
        for micro_batch, loss in enumerate(observed.losses.tolist()):
            if not math.isfinite(loss):
                of = f" of micro-batch {micro_batch + 1} of {len(observed.losses)}" if len(observed.losses) > 1 else ""
                yield 1, f"the loss{of} ({loss})"
    if observed.norms is not None:
        finite = torch.isfinite(observed.norms).tolist()
        for name, good in reversed(list(zip(observed.names, finite, strict=True))):
            if not good:
                yield 2, f"the gradient of {name!r}, and with it grad_norm,"


def first_bad_parameter(model: nn.Module, args: TrainingArguments, alike: bool) -> str | None:
    """The first parameter that is not finite; of all processes if `alike`, which all of them then call."""
    parameters = [parameter for _, parameter in _parameters(model)]
    flag = torch.zeros((), dtype=torch.bool, device=args.device)
    if parameters:
        largest = foreach_norm(parameters, math.inf)  # NaN and infinity stay, and it cannot overflow
        flag = torch.stack([norm.to(args.device, torch.float32) for norm in largest]).isfinite().all().logical_not()
    alike = alike and is_distributed()
    if not bool(_of_any_process(flag) if alike else flag):
        return None
    observed = Observation(0, flag, losses=None, names=[], norms=None)
    return first_of_all_processes(observed, model)[1] if alike else f": {next(_bad_quantities(observed, model))[1]}"


def _parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """This process's part of the parameters, without those that a quantiser has packed, also into a subclass."""
    quantised = getattr(model, "is_quantized", False)
    for name, parameter in model.named_parameters():
        held = local_part(getattr(parameter, "ds_tensor", parameter).detach())  # the partition of ZeRO-3
        number = type(held) is torch.Tensor and held.is_floating_point() and held.dtype.itemsize > 1
        if number and held.numel() and not held.is_meta and (parameter.requires_grad or not quantised):
            yield name, held
