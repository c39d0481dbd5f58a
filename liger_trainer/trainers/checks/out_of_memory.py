"""Advice for an accelerator that runs out of memory in training: which arguments would take less, and how much.

The advice surrounds `train()`. So it covers the optimizer's step, and comes after the retries of
`auto_find_batch_size`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import Trainer

from liger_trainer.configs.flags import activation_memory_of, kernel_config_of
from liger_trainer.configs.trl_configs import PackingFlags
from liger_trainer.plan.estimate import Memory, estimate
from liger_trainer.plan.running import checkpoints_layers, running
from liger_trainer.plan.settings import Setting
from liger_trainer.plan.work import Run
from liger_trainer.trainers.choose_packing import reason_against_splitting

logger = logging.getLogger("liger_trainer")

_GIB = 2**30
_FIXED_BATCH = ("KTO", "GRPO", "RLOO")  # their loss depends on the size of a micro-batch
_PARTS = ("weights", "gradients", "optimizer", "reference", "buffers", "activations", "logits")


@dataclasses.dataclass(frozen=True)
class Budget:
    """An argument that trades time for memory, as a recipe has it, and whether it is already set so (`on`).

    A plan's run and setting are mapped to those with the argument (`applied`).
    """

    text: str
    on: bool
    applied: Callable[[Run, Setting], tuple[Run, Setting]]


@contextlib.contextmanager
def memory_advice(trainer: Any) -> Iterator[None]:
    """Around training: raises the error of an accelerator that is out of memory again, with advice.

    Raises:
        torch.OutOfMemoryError: from the original error, with whose text it begins.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        try:
            text = advice(error, trainer, trainer._step_shape)
        except Exception as problem:  # whatever it is, the user needs to see the original error
            logger.debug("No advice on the memory: %s", problem)
            raise error from None
        raise torch.OutOfMemoryError(f"{error}\n\n{text}") from error


def advice(error: BaseException, trainer: Trainer, shape: tuple[int, int] | None) -> str:
    """Says what failed and what would take less memory, with estimates if a plan can be made."""
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", str(error))
    size = f"An allocation of {asked.group(1)} failed" if asked else "An allocation failed"
    lines = [f"{size}, in or after a micro-batch of {shape[0]} × {shape[1]} tokens." if shape else f"{size}."]
    found = budgets(trainer)
    off = [budget for budget in found if not budget.on]
    estimates: list[str] = []
    try:
        estimates = _estimated(off, *running(trainer, shape)) if shape is not None else []
    except Exception as problem:  # the names of the arguments help without estimates too
        logger.debug("No estimate of the memory: %s", problem)
    lines += estimates or ["What may take less memory:", *(f"  {budget.text}" for budget in off)]
    on = [budget.text for budget in found if budget.on]
    lines += [f"Already set: {'; '.join(on)}."] if on else []
    lines.append(
        f"`liger-trainer plan RECIPE --gpus {trainer.args.world_size}` estimates their combinations; shorter sequences "
        "and adapters (`use_peft`) take less too."
    )
    return "\n".join(lines)


def _estimated(off: list[Budget], run: Run, setting: Setting) -> list[str]:
    """The memory as it is and with each of the budgets; those that save most come first."""
    now = estimate(run, setting)
    with_each = sorted((estimate(*budget.applied(run, setting)).total, budget.text) for budget in off)
    helps = [f"  {text}  ({total / _GIB:.2f} GiB)" for total, text in with_each if total < now.total]
    idle = [text for total, text in with_each if total >= now.total]
    lines = [f"Estimated at its peak ({now.moment}): {now.total / _GIB:.2f} GiB, {_parts(now)}."]
    lines += ["What takes less memory, each alone:", *helps] if helps else []
    return lines + ([f"By these estimates no help here: {'; '.join(idle)}."] if idle else [])


def budgets(trainer: Trainer) -> list[Budget]:
    """The arguments of this trainer that trade time for memory, on or off."""
    args: Any = trainer.args
    kernels = kernel_config_of(args)
    found = []
    if not args.use_liger_kernel:
        found.append(Budget("use_liger_kernel: true", False, _with_head(fused=True, cross_entropy=True)))
    elif hasattr(args, "logits_memory"):
        half = int(kernels.logits_memory) // 2
        text = f"logits_memory: {half // 2**20}MiB" if half >= 2**20 else f"logits_memory: {half}"
        found.append(Budget(text, half == 0, _with_head(logits_memory=half)))
    checkpointing = checkpoints_layers(trainer)
    by_fsdp = checkpointing and not args.gradient_checkpointing
    text = f"{'fsdp_activation' if by_fsdp else 'gradient'}_checkpointing: true"
    found.append(Budget(text, checkpointing, _with(checkpointing=True)))
    if args.use_liger_kernel:
        text = 'liger_kernel_config: {"tiled_mlp": true}'
        found.append(Budget(text, kernels.tiled_mlp, _with(tiled_mlp=True)))
    found += [
        *_kept_results(args, checkpointing),
        *_smaller_batch(trainer),
        *_offloading(args, checkpointing),
        *_splitting(trainer),
    ]
    return found


def _smaller_batch(trainer: Any) -> Iterator[Budget]:
    tokens = 0 if getattr(trainer, "_packing", None) is None else trainer._packing.tokens_of_last_forward
    if tokens > 1 and _may_split(trainer):
        half = _with(batch=max(trainer.args.per_device_train_batch_size // 2, 1))
        yield Budget(f"tokens_per_micro_batch: {tokens // 2}", False, half)
    if getattr(trainer, "_name", None) in _FIXED_BATCH:
        return
    batch, steps = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
    less = next((size for size in range(batch // 2, 0, -1) if batch % size == 0), 1)
    more = steps * batch // less
    text = f"per_device_train_batch_size: {less}, gradient_accumulation_steps: {more}"
    yield Budget(text, batch == 1, _with(batch=less, accumulation=more))


def _may_split(trainer: Any) -> bool:
    """Whether the trainer has the argument `tokens_per_micro_batch`, and would take it."""
    has_router_loss = getattr(trainer, "aux_loss_enabled", False)
    return isinstance(trainer.args, PackingFlags) and not reason_against_splitting(trainer.args, has_router_loss)


def _kept_results(args: Any, checkpointing: bool) -> Iterator[Budget]:
    """`activation_memory` takes memory, so less of it is proposed, and nothing where it is not set."""
    size = activation_memory_of(args)
    if not size or not checkpointing:
        return
    if size != "auto":
        yield Budget(f"activation_memory: {size // 2}", False, _with(activation_memory=size // 2))
    text = "activation_memory: 0" if size != "auto" else "activation_memory: 0, or a size in place of auto"
    yield Budget(text, False, _with(activation_memory=0))


def _offloading(args: Any, checkpointing: bool) -> Iterator[Budget]:
    if not hasattr(args, "activation_offloading"):
        return
    needed = "" if checkpointing else ", gradient_checkpointing: true"
    applied = _with(checkpointing=True, offloading=1.0)
    yield Budget(f"activation_offloading: true{needed}", args.activation_offloading, applied)
    if args.activation_offloading and getattr(args, "activation_offloading_fraction", 1.0) < 1:
        yield Budget("activation_offloading_fraction: 1.0", False, applied)


def _splitting(trainer: Trainer) -> Iterator[Budget]:
    kind, gpus = trainer.accelerator.distributed_type.value, max(trainer.args.world_size, 2)
    if kind in ("FSDP", "DEEPSPEED"):
        yield Budget(f"split over {gpus} GPUs ({kind})", True, _with())
        return
    for strategy in ("zero2", "fsdp2"):
        yield Budget(f"--accelerate_config {strategy} on {gpus} GPUs", False, _with(strategy=strategy, gpus=gpus))


def _with(**changes: Any) -> Callable[[Run, Setting], tuple[Run, Setting]]:
    return lambda run, setting: (run, dataclasses.replace(setting, **changes))


def _with_head(**changes: Any) -> Callable[[Run, Setting], tuple[Run, Setting]]:
    def applied(run: Run, setting: Setting) -> tuple[Run, Setting]:
        head = dataclasses.replace(run.work.head, **changes)
        return dataclasses.replace(run, work=dataclasses.replace(run.work, head=head)), setting

    return applied


def _parts(memory: Memory) -> str:
    return ", ".join(f"{part} {getattr(memory, part) / _GIB:.2f}" for part in _PARTS if getattr(memory, part))
