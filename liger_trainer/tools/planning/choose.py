"""Chooses the fastest setting that fits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from liger_trainer.configs.liger_adamw import LIGER_ADAMW
from liger_trainer.plan.estimate import ALLOCATOR_SLACK, Memory, estimate, kept, largest_activation_memory
from liger_trainer.plan.settings import CONFIGS, Setting, candidates, relative_cost
from liger_trainer.plan.work import Run
from liger_trainer.recipe.schema import TRAINERS
from liger_trainer.tools.planning.inputs import Inputs, checkpointing_key, kernels_of

GIB = 2**30
MOST_GPUS = 1024
FIRST_BUDGET = 4 * GIB  # of the table of `activation_memory`; each further one is twice as large


@dataclasses.dataclass(frozen=True)
class Row:
    """A setting with its memory; `cost` is its time per token, to compare with other rows."""

    setting: Setting
    memory: Memory
    fits: bool
    cost: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """The compared settings."""

    # A row for each strategy and way, with the fastest batch that fits, or the smallest if none does.
    rows: tuple[Row, ...]
    best: Row | None  # the fastest row that fits; None if none does
    written: Row  # the recipe as written, split as it says; as DDP if it does not say, or in a way that is not planned
    room: float  # bytes of a GPU that a plan may use


def room_of(gpu_memory: float, run: Run) -> float:
    """Bytes that a plan may use of a GPU: without the allocator's slack and vLLM's share."""
    return gpu_memory * (1 - ALLOCATOR_SLACK - run.work.reserved_fraction)


def make_plan(inputs: Inputs, gpus: int, gpu_memory: float) -> Plan:
    """Estimates every setting and chooses the fastest that fits into `gpu_memory`, the bytes of each GPU."""
    room = room_of(gpu_memory, inputs.run)
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in _rows(inputs, gpus, room):
        one = row.setting
        groups.setdefault((one.strategy, one.checkpointing, one.tiled_mlp, one.offloading), []).append(row)
    rows = tuple(  # those that do not fit, by their memory alone
        min(group, key=lambda row: (not row.fits, row.cost if row.fits else row.memory.total))
        for group in groups.values()
    )
    fitting = [row for row in rows if row.fits]
    best = min(fitting, key=lambda row: row.cost, default=None)
    return Plan(rows, best, _row(inputs, written_setting(inputs, gpus), room), room)


def written_setting(inputs: Inputs, gpus: int) -> Setting:
    """The recipe's own keys as a setting."""
    values = inputs.values
    offloading = values["activation_offloading_fraction"] if values["activation_offloading"] else 0.0
    checkpointing = bool(values[checkpointing_key(values)])
    sharing, config = values["expert_parallel_size"] or 1, values["accelerate_config"]
    named = next((strategy for strategy in ("zero2", "fsdp2") if CONFIGS[strategy] == config), "ddp")
    return Setting(
        "expert_parallel" if sharing > 1 else "single" if gpus == 1 else named,
        gpus,
        values["per_device_train_batch_size"],
        values["gradient_accumulation_steps"],
        checkpointing,
        kernels_of(values, inputs.source).tiled_mlp,
        offloading if checkpointing else 0.0,
        sharing,
    )


def least(inputs: Inputs, gpus: int) -> Row:
    """The setting with the least memory on `gpus` GPUs, without `activation_memory`."""
    inputs = dataclasses.replace(inputs, activation_memory=0)
    return min(_rows(inputs, gpus, 0.0), key=lambda row: row.memory.total)


def gpus_that_fit(inputs: Inputs, gpus: int, gpu_memory: float) -> int | None:
    """The first of 2, 4, 8 ... times `gpus` on which a setting fits; None if `MOST_GPUS` are too few."""
    room = room_of(gpu_memory, inputs.run)
    while (gpus := 2 * gpus) <= MOST_GPUS:
        if any(row.fits for row in _rows(inputs, gpus, room)):
            return gpus
    return None


def _rows(inputs: Inputs, gpus: int, room: float) -> Iterable[Row]:
    values, shape = inputs.values, inputs.run.shape
    quantised_experts = bool(values["load_in_4bit"] and inputs.run.parameters.groups["experts"].elements)
    settings = candidates(
        gpus,
        values["per_device_train_batch_size"],
        values["gradient_accumulation_steps"],
        quantised=bool(values["load_in_4bit"] or values["load_in_8bit"] or values["fp8_base"]),
        tiles=bool(shape.intermediate) and not shape.experts_per_token,
        fixed_batch=TRAINERS[inputs.values["trainer"]].batch_is_fixed,
        experts=inputs.shared_experts,
        zero2=not (quantised_experts or values["fp8_base"]) and inputs.run.optim != LIGER_ADAMW,
    )
    return (_row(inputs, setting, room) for setting in settings)


def _row(inputs: Inputs, setting: Setting, room: float) -> Row:
    """The row of a setting, with the recipe's `activation_memory` if it is checkpointed."""
    if setting.checkpointing and inputs.activation_memory:
        budget = inputs.activation_memory
        size = largest_activation_memory(inputs.run, setting, room) if budget == "auto" else budget
        setting = dataclasses.replace(setting, activation_memory=size)
    return _row_of(inputs.run, setting, room)


def _row_of(run: Run, setting: Setting, room: float) -> Row:
    memory = estimate(run, setting)
    tokens = run.work.rows * run.work.length * setting.batch
    cost = relative_cost(setting, tokens, run.parameters, run.shape, kept(run, setting).saved)
    return Row(setting, memory, memory.total <= room, cost)


def activation_memory_rows(run: Run, plan: Plan) -> list[Row]:
    """A checkpointed setting with ever more `activation_memory`, from 0 to all that fits or can be kept.

    The setting is the recipe's own if that is checkpointed and fits, else the fastest that is and does. There are no
    rows if no such setting fits, or nothing can be kept.
    """
    others = sorted(plan.rows, key=lambda row: row.cost)
    settings = [row.setting for row in (plan.written, *others) if row.setting.checkpointing]
    bare = [_row_of(run, dataclasses.replace(setting, activation_memory=0), plan.room) for setting in settings]
    first = next((row for row in bare if row.fits), None)
    largest = largest_activation_memory(run, first.setting, plan.room) if first else 0
    if first is None or not largest:
        return []
    doubled = (FIRST_BUDGET << power for power in itertools.count())
    sizes = [*itertools.takewhile(lambda size: size < largest, doubled), largest]
    return [first] + [
        _row_of(run, dataclasses.replace(first.setting, activation_memory=size), plan.room) for size in sizes
    ]
