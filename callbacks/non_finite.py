"""Finds losses and gradients that are not finite before they reach the weights, and such weights before a save.

One flag an update says of all processes whether anything was not finite; then they tell each other what it was.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from liger_trainer.callbacks.logged import LoggedMetricsCallback, is_distributed
from liger_trainer.compat.accelerate import WRAPPED_OPTIMIZER
from liger_trainer.compat.private import available, require
from liger_trainer.compat.torch import NORMS_OF_MANY, SKIPPED_ON_DEVICE
from liger_trainer.kernels.runtime import local_part

(foreach_norm,) = require(NORMS_OF_MANY)
require(WRAPPED_OPTIMIZER)

logger = logging.getLogger("liger_trainer")

_A_PARAMETER = 0  # the rank of parameters in the order in which one bad quantity causes the next


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

    The losses are those of the micro-batches, the gradients names of parameters and the norms of their gradients, None
    if they are not observed. Without either, the flag is on `device`.
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
            yield _A_PARAMETER, f"parameter {name!r}"
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


# ---------------------------------------------------------------------------------------------------------------------
# The callback
# ---------------------------------------------------------------------------------------------------------------------


class NonFiniteError(FloatingPointError):
    """A parameter is not finite, or training has stopped because something was not; the text is the whole message."""


def parameters_with_gradients(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that have a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.grad is not None}


class NonFiniteGuardCallback(LoggedMetricsCallback):
    """Skips every update whose loss or gradients are not finite, and says which quantity was first.

    So the weights and the optimizer's state are always those of the last good step. With `action="stop"`, a checkpoint
    of them is saved and training ends; with `"skip"`, it goes on with the next batch. The learning rate schedule
    advances in both cases. After the first such update, each log has `non_finite_updates`, the number of skipped ones.
    The message names the step and the first bad quantity, in the order in which one causes the next: a parameter, the
    loss, a parameter's gradient (the one nearest to the loss). Several processes decide alike, by one number that they
    reduce in each update. The message, which the main process logs, then names the rank that has the first quantity.

    If a parameter is not finite, no good state is left: that is a [`NonFiniteError`] with either action. Parameters are
    checked before training and, by the Liger trainers, before every save, since an update can overflow although its
    gradients are finite. The check is one reduction over the parameters; if it fails, nothing is saved.

    A fused optimizer (`adamw_torch_fused`, the default) on an accelerator skips the update on the device (`found_inf`,
    as with a gradient scaler), and the flag is read one step later, when its copy has arrived, so no step waits.
    Otherwise one flag is read per update. With fp16 loss scaling, the scaler checks the gradients, and this callback
    only the loss. The same holds for DeepSpeed, which does not show its gradients; its updates are not skipped.

    The Liger trainers call [`observe_loss`], and [`observe_gradients`] before clipping, which spreads a NaN over all
    gradients. With a stock `Trainer`, the callback checks the gradients after clipping, and not the loss.

    Args:
        action: `"stop"` or `"skip"`.

    Attributes:
        findings: One line for each update that was skipped.
        stopped: Whether the last training was ended by `action="stop"`.

    Raises:
        NonFiniteError: while training, if a parameter is not finite.
    """

    def __init__(self, action: Literal["stop", "skip"] = "stop") -> None:
        if action not in ("stop", "skip"):
            raise ValueError(f"`action` is {action!r}; it must be 'stop' or 'skip'.")
        self.action = action
        self.findings: list[str] = []
        self._losses: list[torch.Tensor] = []
        self._gradients: tuple[list[str], torch.Tensor] | None = None
        self._pending: list[Observation] = []
        self._device_skip: Any = None
        self.stopped = False
        self._left_out = 0

    def observe_loss(self, loss: torch.Tensor) -> None:
        """Records the loss of one micro-batch."""
        self._losses.append(loss.detach().reshape(()))

    def observe_gradients(self, trained: Mapping[str, nn.Parameter]) -> torch.Tensor | None:
        """Records the norm of each gradient as it is now; the norm is not finite if any element is not.

        Args:
            trained: The parameters by name, as [`parameters_with_gradients`] finds them.

        Returns:
            The norm of all of them, as `torch.nn.utils.get_total_norm` computes it; None if it needs more than the
            dense gradients of this process (sharded or sparse gradients, several devices).
        """
        gradients = {name: parameter.grad for name, parameter in trained.items() if parameter.grad is not None}
        named = [(name, local_part(grad)) for name, grad in gradients.items()]
        named = [(name, grad) for name, grad in named if grad.numel() and not grad.is_sparse]
        if not named:
            return None
        dense = [grad for _, grad in named]
        # In their own dtype, as in clipping, except float16, which could overflow.
        dtype = torch.float32 if any(grad.dtype == torch.float16 for grad in dense) else None
        norms = foreach_norm(dense, 2.0, dtype=dtype)
        stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
        self._gradients = [name for name, _ in named], stacked
        whole = len(named) == len(gradients) and not any(isinstance(grad, DTensor) for grad in gradients.values())
        one_device = all(grad.device == dense[0].device for grad in dense)
        return torch.linalg.vector_norm(stacked) if whole and one_device and dtype is None else None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Resets everything, and checks the parameters."""
        self._losses, self._gradients, self._pending, self.stopped = [], None, [], False
        self._left_out = 0
        found = first_bad_parameter(kwargs["model"], args, alike=True)
        if found is not None:
            raise NonFiniteError(
                f"Stopped before step {state.global_step + 1}{found} is not finite, as the model was loaded. Load "
                "other weights; `non_finite='off'` trains these as they are."
            )

    def check_before_save(self, model: nn.Module, args: TrainingArguments, state: TrainerState, alike: bool) -> None:
        """Checks the parameters before they are saved; `alike`, if all processes call this and have to decide alike."""
        found = first_bad_parameter(model, args, alike)
        if found is not None:
            raise NonFiniteError(f"Stopped at step {state.global_step}{found} is not finite. {_nothing_saved(args)}")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Skips the update if anything observed since the last one is not finite."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        scaled = getattr(optimizer, "scaler", None) is not None
        if self._gradients is None and not scaled:
            self.observe_gradients(parameters_with_gradients(model))
        parts = self._losses, None if scaled else self._gradients
        self._losses, self._gradients = [], None
        observed = observe(state.global_step + 1, *parts, device=getattr(args, "device", None))
        if observed is None:
            return
        inner = getattr(optimizer, "optimizer", optimizer)
        if not scaled and _skips_on_device(inner) and observed.flag.device.type != "cpu":
            inner.grad_scale, inner.found_inf = None, observed.flag.float()
            self._device_skip = inner
            observed.host_flag = torch.empty((), dtype=torch.bool, pin_memory=observed.flag.device.type == "cuda")
            observed.host_flag.copy_(observed.flag, non_blocking=True)
            observed.ready = torch.get_device_module(observed.flag.device).Event()
            observed.ready.record()
            self._pending.append(observed)
        elif bool(observed.flag):
            if not scaled:
                for group in inner.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            self._report(observed, model, args)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Removes the flag from the optimizer."""
        if self._device_skip is not None:
            del self._device_skip.grad_scale, self._device_skip.found_inf
            self._device_skip = None

    def metrics(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """How many updates of this run were skipped, if any."""
        return {"non_finite_updates": float(self._left_out)} if self._left_out else {}

    summary = metrics

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stops with a checkpoint if that is the action."""
        # Reads the flag of the previous step, whose copy has arrived while the kernels of this step are still queued.
        # Every process reads it in the same step. After the last step there is no later one to wait for.
        self._collect(kwargs["model"], args, keep=0 if state.global_step >= state.max_steps else 1)
        if self.stopped:
            control.should_training_stop = True
            control.should_save = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Reads the flags that have not been read."""
        self._collect(kwargs["model"], args, keep=0)

    def _collect(self, model: nn.Module, args: TrainingArguments, keep: int) -> None:
        while len(self._pending) > keep:
            observed = self._pending.pop(0)
            observed.ready.synchronize()
            if bool(observed.host_flag):
                self._report(observed, model, args)

    def _report(self, observed: Observation, model: nn.Module, args: TrainingArguments) -> None:
        place, what = first_of_all_processes(observed, model)
        if place == _A_PARAMETER:  # they were finite when training began
            raise NonFiniteError(
                f"Stopped at step {observed.step}{what} is not finite since the update before. {_nothing_saved(args)}"
            )
        end = {"stop": "the training stops with a checkpoint of the last good state", "skip": "the training goes on"}
        finding = f"Step {observed.step}{what} is not finite. The update was left out and {end[self.action]}."
        self.findings.append(finding)
        self._left_out += 1
        if not is_distributed() or torch.distributed.get_rank() == 0:
            logger.error(finding)
        self.stopped = self.action == "stop"


def _nothing_saved(args: TrainingArguments) -> str:
    """The end of an error: what a run whose parameters are lost can start from."""
    folder = str(args.output_dir)
    last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    if last is None:
        return f"Nothing was saved of it, and {folder!r} holds no checkpoint; start again with a lower `learning_rate`."
    return f"Nothing was saved of it; {last!r} is the last good checkpoint."


def _skips_on_device(optimizer: Any) -> bool:
    """Whether the optimizer itself skips an update by the tensor `found_inf`, with its state and step count."""
    if not available(SKIPPED_ON_DEVICE) or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    return all(group.get("fused") for group in groups) and not any(isinstance(p, DTensor) for p in parameters)
