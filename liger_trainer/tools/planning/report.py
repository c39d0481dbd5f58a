"""The output of `liger-trainer plan`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from liger_trainer.attention.interface import NAME
from liger_trainer.configs.liger_adamw import LIGER_ADAMW
from liger_trainer.plan.activations import is_masked
from liger_trainer.plan.estimate import ALLOCATOR_SLACK, host_bytes, kept
from liger_trainer.plan.settings import CONFIGS, Setting
from liger_trainer.recipe.schema import mapping
from liger_trainer.tools.planning.choose import GIB, Plan, Row, written_setting
from liger_trainer.tools.planning.inputs import Inputs, checkpointing_key, kernels_of

if TYPE_CHECKING:
    from liger_trainer.plan.parameters import Parameters
    from liger_trainer.plan.work import Run

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
