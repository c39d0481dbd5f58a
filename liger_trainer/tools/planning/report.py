"""Chooses the fastest setting that fits, and writes the output of `liger-trainer plan`."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from liger_trainer.attention.config_names import NAME
from liger_trainer.configs.liger_adamw import LIGER_ADAMW
from liger_trainer.plan.activations import is_masked
from liger_trainer.plan.estimate import ALLOCATOR_SLACK, Memory, estimate, host_bytes, kept, largest_activation_memory
from liger_trainer.plan.settings import CONFIGS, Setting, candidates, relative_cost
from liger_trainer.plan.work import Run
from liger_trainer.recipe.schema import TRAINERS, mapping
from liger_trainer.tools.planning.inputs import Inputs, checkpointing_key, kernels_of

if TYPE_CHECKING:
    from liger_trainer.plan.parameters import Parameters
    from liger_trainer.plan.work import Run


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


_PARTS = ("weights", "gradients", "optimizer", "reference", "buffers", "activations", "logits", "generation")
_NAMES = {"single": "one GPU", "ddp": "DDP", "zero2": "ZeRO-2", "fsdp2": "FSDP2", "expert_parallel": "EP of {}"}


def parameters_line(parameters: Parameters) -> str:
    """The number of parameters, by kind, and of trained parameters."""
    total = parameters.total
    kinds = [f"{kind} {_count(group.elements)}" for kind, group in parameters.groups.items() if group.elements]
    tied = ", head tied to the embedding" if parameters.tied else ""
    trained = f"{_count(total.trained)} of {_count(total.elements)} parameters trained"
    return f"{trained}: {', '.join(kinds)}{tied}; weights {total.bytes / GIB:.1f} GiB"


def attention_line(run: Run) -> str:
    """The attention that the memory was estimated for."""
    masked = is_masked(run.shape, run.work.length, run.implementation)
    texts = {
        NAME: "liger_trainer's, without masks",
        "sdpa": "torch's SDPA, with a mask in layers with a window" if masked else "torch's SDPA",
        "eager": "eager, which keeps the scores of all pairs of tokens",
    }
    return f"attention: {texts.get(run.implementation, run.implementation)}"


def _count(elements: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if elements >= size:
            return f"{elements / size:.2f}{unit}"
    return str(elements)


def memory_table(plan: Plan, title: str, parts: bool = True) -> Table:
    """A table with a row per setting: GiB per GPU at the peak, with `parts` those of the memory that are not all 0."""
    rows = [(_as_written(plan), plan.written), *((way(row.setting), row) for row in plan.rows)]
    shown = [part for part in _PARTS if parts and any(getattr(row.memory, part) for _, row in rows)]
    table = Table(title=title, title_justify="left")
    table.add_column("setting", overflow="fold")
    for heading in ("batch", *shown, "sum"):
        table.add_column(heading, justify="right")
    table.add_column("fullest at", overflow="fold")
    table.add_column("", no_wrap=True)
    for name, row in rows:
        sizes = [f"{getattr(row.memory, part) / GIB:.1f}" for part in shown]
        verdict = "[bold green]best[/]" if row is plan.best else "fits" if row.fits else "[red]too big[/]"
        batch = f"{row.setting.batch} × {row.setting.accumulation}"
        table.add_row(name, batch, *sizes, f"{row.memory.total / GIB:.1f}", row.memory.moment, verdict)
    return table


def activation_memory_table(run: Run, rows: Sequence[Row]) -> Table:
    """A table of one setting's peak and speed over `activation_memory`.

    The last of the rows takes what the GPU has left, as ``"auto"``.
    """
    title = f"activation_memory: {way(rows[0].setting)}, batch {rows[0].setting.batch} × {rows[0].setting.accumulation}"
    table = Table(title=title, title_justify="left")
    for heading in ("activation_memory", "GiB a GPU", "fullest at", "tokens/s"):
        table.add_column(heading, justify="left" if heading == "fullest at" else "right")
    table.add_column("results kept, and in how many of the last layers", overflow="fold")
    for row in rows:
        size = row.setting.activation_memory / GIB
        name = f"auto, {size:.1f}GiB" if row is rows[-1] else f"{size:.0f}GiB" if size else "0"
        layers = kept(run, row.setting).layers
        what = " · ".join(f"{result} {count}" for result, count in layers.items() if count)
        speed = f"{rows[0].cost / row.cost:.2f} ×"
        table.add_row(name, f"{row.memory.total / GIB:.1f}", row.memory.moment, speed, what)
    return table


def parts_of(plan: Plan) -> str:
    """The parts of the memory, for the recipe as written and the best setting; for a table without these columns."""
    rows = {_as_written(plan): plan.written} | ({} if plan.best is None else {"best": plan.best})
    lines = []
    for name, row in rows.items():
        sizes = {part: getattr(row.memory, part) / GIB for part in _PARTS}
        lines.append(f"{name}: {', '.join(f'{part} {size:.1f}' for part, size in sizes.items() if size)}")
    return "\n".join(lines)


def _as_written(plan: Plan) -> str:
    return f"as written, {_split(plan.written.setting)}"


def way(setting: Setting) -> str:
    """A setting in words."""
    options = ["checkpointing"] if setting.checkpointing else ["no checkpointing"]
    options += ["tiled_mlp"] if setting.tiled_mlp else []
    options += ["offloading"] if setting.offloading else []
    return f"{_split(setting)}, {', '.join(options)}"


def _split(setting: Setting) -> str:
    return _NAMES[setting.strategy].format(setting.expert_parallel_size)


def recommendation(inputs: Inputs, plan: Plan, best: Row) -> str:
    """The best setting in words, and why it is best."""
    setting, fitting = best.setting, sum(row.fits for row in plan.rows)
    free = (plan.room - best.memory.total) / GIB
    text = (
        f"Take {way(setting)}, batch {setting.batch} × {setting.accumulation} steps: by its matmuls and its "
        f"communication the fastest of the {fitting} ways that fit (of {len(plan.rows)}), with {free:.1f} GiB to spare "
        f"besides the {ALLOCATOR_SLACK:.0%} of the GPU that are left free for the allocator."
    )
    host = host_bytes(inputs.run, setting) / GIB
    if host:
        text += f" Offloading takes {host:.1f} GiB of pinned memory on this machine."
    if setting.expert_parallel_size > 1:
        text += _about_expert_parallel(inputs)
    if setting.strategy == "zero2":
        text += " It needs the deepspeed package."
    return text


def _about_expert_parallel(inputs: Inputs) -> str:
    text = " This assumes that experts are chosen evenly and that the GPUs are in one host; a GPU whose experts are "
    text += "chosen more often takes more."
    if inputs.run.weight_bytes < 4 and not inputs.values["use_peft"] and inputs.run.optim != LIGER_ADAMW:
        text += " Weights and states stay in the recipe's `dtype`; `--dtype float32` keeps them in fp32, as FSDP2 does."
    return text


def command(inputs: Inputs, setting: Setting, recipe: str, options: Sequence[str] = ()) -> list[str]:
    """The command line that trains `recipe` with `options` in this setting; other keys appear only if they change."""
    line = ["liger-trainer", "train", recipe, "--accelerate_config", CONFIGS[setting.strategy]]
    if setting.gpus > 1:
        line += ["--num_processes", str(setting.gpus)]
    changed = changed_keys(inputs, setting)
    line += _without(options, {*changed, "accelerate_config", "num_processes"})
    for key, value in changed.items():
        text = json.dumps(value) if isinstance(value, (bool, dict)) else str(value)
        line += [f"--{key}", text]
    return line


def _without(options: Sequence[str], keys: set[str]) -> list[str]:
    """The options, with their values, except those of `keys`."""
    others: list[str] = []
    keep = True
    for word in options:
        if word.startswith("--"):
            keep = word[2:].partition("=")[0] not in keys
        if keep:
            others.append(word)
    return others


def changed_keys(inputs: Inputs, setting: Setting) -> dict[str, Any]:
    """The recipe's keys that `setting` changes, with their new values."""
    values, old = inputs.values, written_setting(inputs, setting.gpus)
    keys: dict[str, Any] = {}
    if setting.batch != old.batch:
        keys["per_device_train_batch_size"] = setting.batch
        keys["gradient_accumulation_steps"] = setting.accumulation
    if setting.expert_parallel_size != old.expert_parallel_size:
        keys["expert_parallel_size"] = setting.expert_parallel_size
    if setting.checkpointing != old.checkpointing:
        keys[checkpointing_key(values)] = setting.checkpointing
    if bool(setting.offloading) != bool(values["activation_offloading"]):
        keys["activation_offloading"] = bool(setting.offloading)
    if values["activation_offloading_fraction"] != 1:  # a plan offloads all or nothing
        keys["activation_offloading_fraction"] = 1.0
    if inputs.activation_memory and not setting.checkpointing:  # refused without checkpointing
        keys["activation_memory"] = 0
    if setting.tiled_mlp != kernels_of(values, inputs.source).tiled_mlp:
        written = mapping("liger_kernel_config", values["liger_kernel_config"]) or {}
        keys["liger_kernel_config"] = {**written, "tiled_mlp": setting.tiled_mlp}
    return keys
