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
from liger_trainer.plan.cluster import Cluster
from liger_trainer.plan.estimate import ALLOCATOR_SLACK, Memory, estimate, host_bytes, kept, largest_activation_memory
from liger_trainer.plan.settings import CONFIGS, Setting, candidates
from liger_trainer.plan.speed import LARGEST_ERROR, StepTime, step_time
from liger_trainer.plan.work import Run
from liger_trainer.recipe.file import accelerate_config
from liger_trainer.recipe.schema import TRAINERS, mapping
from liger_trainer.tools.planning.inputs import Inputs, checkpointing_key, kernels_of
from liger_trainer.tools.planning.layouts import layouts

if TYPE_CHECKING:
    from liger_trainer.plan.parameters import Parameters
    from liger_trainer.plan.work import Run


GIB = 2**30
MOST_GPUS = 1024
FIRST_BUDGET = 4 * GIB  # of the table of `activation_memory`; each further one is twice as large


@dataclasses.dataclass(frozen=True)
class Row:
    """A setting with its memory and the time of its step."""

    setting: Setting
    memory: Memory
    fits: bool
    time: StepTime

    @property
    def cost(self) -> float:
        """Seconds a token, to compare with other rows."""
        return self.time.token


@dataclasses.dataclass(frozen=True)
class Plan:
    """The compared settings."""

    # A row for each strategy and way, with the fastest batch that fits, or the smallest if none does.
    rows: tuple[Row, ...]
    best: Row | None  # the fastest row that fits; None if none does
    written: Row  # the recipe as written, split as it says; as DDP if it does not say, or in a way that is not planned
    cluster: Cluster  # its GPUs
    room: float  # bytes of a GPU that a plan may use


def room_of(gpu_memory: float, run: Run) -> float:
    """Bytes that a plan may use of a GPU: without the allocator's slack and vLLM's share."""
    return gpu_memory * (1 - ALLOCATOR_SLACK - run.work.reserved_fraction)


def make_plan(inputs: Inputs, cluster: Cluster, gpu_memory: float) -> Plan:
    """Estimates every setting and chooses the fastest that fits into `gpu_memory`, the bytes of each GPU."""
    room = room_of(gpu_memory, inputs.run)
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in _rows(inputs, cluster, room):
        one = row.setting
        groups.setdefault((_layout(one), one.checkpointing, one.tiled_mlp, one.offloading), []).append(row)
    rows = tuple(  # those that do not fit, by their memory alone
        min(group, key=lambda row: (not row.fits, row.cost if row.fits else row.memory.total))
        for group in groups.values()
    )
    fitting = [row for row in rows if row.fits]
    best = min(fitting, key=lambda row: row.cost, default=None)
    written = _row(inputs, written_setting(inputs, cluster.gpus), cluster, room)
    return Plan(rows, best, written, cluster, room)


def _layout(setting: Setting) -> tuple[object, ...]:
    """How a setting splits the model, without the size of a group that shares experts."""
    return setting.strategy, setting.replicas, setting.sequence_parts, setting.tensor_parallel_size


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


def least(inputs: Inputs, cluster: Cluster) -> Row:
    """The setting with the least memory, without `activation_memory`."""
    inputs = dataclasses.replace(inputs, activation_memory=0)
    return min(_rows(inputs, cluster, 0.0), key=lambda row: row.memory.total)


def gpus_that_fit(inputs: Inputs, cluster: Cluster, gpu_memory: float) -> int | None:
    """The first of 2, 4, 8 ... times the GPUs on which a setting fits; None if `MOST_GPUS` are too few."""
    room = room_of(gpu_memory, inputs.run)
    while 2 * cluster.gpus <= MOST_GPUS:
        hosts = cluster.hosts * (2 if cluster.hosts > 1 else 1)
        cluster = dataclasses.replace(cluster, gpus=2 * cluster.gpus, hosts=hosts)
        if any(row.fits for row in _rows(inputs, cluster, room)):
            return cluster.gpus
    return None


def _rows(inputs: Inputs, cluster: Cluster, room: float) -> Iterable[Row]:
    values, shape = inputs.values, inputs.run.shape
    settings = candidates(
        layouts(inputs.run, values, inputs.obstacles, inputs.shared_experts, inputs.packed, cluster),
        values["per_device_train_batch_size"],
        values["gradient_accumulation_steps"],
        tiles=bool(shape.intermediate) and not shape.experts_per_token,
        fixed_batch=TRAINERS[inputs.values["trainer"]].batch_is_fixed,
    )
    return (_row(inputs, setting, cluster, room) for setting in settings)


def _row(inputs: Inputs, setting: Setting, cluster: Cluster, room: float) -> Row:
    """The row of a setting, with the recipe's `activation_memory` if it is checkpointed."""
    if setting.checkpointing and inputs.activation_memory:
        budget = inputs.activation_memory
        size = largest_activation_memory(inputs.run, setting, room) if budget == "auto" else budget
        setting = dataclasses.replace(setting, activation_memory=size)
    return _row_of(inputs.run, setting, cluster, room)


def _row_of(run: Run, setting: Setting, cluster: Cluster, room: float) -> Row:
    memory = estimate(run, setting)
    return Row(setting, memory, memory.total <= room, step_time(run, setting, cluster))


def activation_memory_rows(run: Run, plan: Plan) -> list[Row]:
    """A checkpointed setting with ever more `activation_memory`, from 0 to all that fits or can be kept.

    The setting is the recipe's own if that is checkpointed and fits, else the fastest that is and does. There are no
    rows if no such setting fits, or nothing can be kept.
    """
    others = sorted(plan.rows, key=lambda row: row.cost)
    settings = [
        row.setting for row in (plan.written, *others) if row.setting.checkpointing and row.setting.sharing == 1
    ]
    bare = [
        _row_of(run, dataclasses.replace(setting, activation_memory=0), plan.cluster, plan.room) for setting in settings
    ]
    first = next((row for row in bare if row.fits), None)
    largest = largest_activation_memory(run, first.setting, plan.room) if first else 0
    if first is None or not largest:
        return []
    doubled = (FIRST_BUDGET << power for power in itertools.count())
    sizes = [*itertools.takewhile(lambda size: size < largest, doubled), largest]
    return [first] + [
        _row_of(run, dataclasses.replace(first.setting, activation_memory=size), plan.cluster, plan.room)
        for size in sizes
    ]


_PARTS = ("weights", "gradients", "optimizer", "reference", "buffers", "activations", "logits", "generation")
_NAMES = {
    "single": "one GPU",
    "ddp": "DDP",
    "zero2": "ZeRO-2",
    "fsdp2": "FSDP2",
    "expert_parallel": "EP of {}",
    "tensor_parallel": "TP of {}",
}


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
    """A table with a row per setting: GiB per GPU at the peak, with `parts` those of the memory that are not all 0.

    GPUs that share sequences or matrices, and copies of a split model, are only in `layout_table`, but for the best.
    """
    usual = [row for row in plan.rows if row is plan.best or row.setting.sharing * row.setting.replicas == 1]
    rows = [(_as_written(plan), plan.written), *((way(row.setting), row) for row in usual)]
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


def layout_table(plan: Plan, title: str) -> Table:
    """A table with the fastest row that fits of each kind of layout, or the smallest: what it sends, and its speed."""
    table = Table(title=title, title_justify="left")
    table.add_column("layout", overflow="fold")
    for heading in ("batch", "GiB", "GB in hosts", "between", "hidden", "tokens/s"):
        table.add_column(heading, justify="right")
    table.add_column("", overflow="fold")
    for row in fastest_layouts(plan):
        sent, setting = row.time.sent, row.setting
        sizes = [f"{row.memory.total / GIB:.1f}", f"{sent.within / 1e9:.1f}", f"{sent.between / 1e9:.1f}"]
        speed = [f"{row.time.hidden:.0%}", f"{1 / row.time.token:,.0f}"]
        batch = f"{setting.batch} × {setting.accumulation}"
        table.add_row(way(setting), batch, *sizes, *speed, verdict(plan, row))
    return table


def fastest_layouts(plan: Plan) -> list[Row]:
    """Of each kind of layout the fastest row that fits, or the smallest; those that fit first, the fastest first."""
    kinds: dict[tuple[object, ...], list[Row]] = {}
    for row in plan.rows:
        one = row.setting
        kinds.setdefault((one.strategy, one.replicas > 1, one.sequence_parts > 1), []).append(row)
    found = [min(rows, key=lambda row: _order(row, row.memory.total)) for rows in kinds.values()]
    return sorted(found, key=lambda row: _order(row, row.cost))


def _order(row: Row, otherwise: float) -> tuple[bool, float]:
    return (not row.fits, row.cost if row.fits else otherwise)


def verdict(plan: Plan, row: Row) -> str:
    """Why a row is the best, or was left out."""
    if row is plan.best:
        return "best"
    if not row.fits or plan.best is None:
        return f"too big by {(row.memory.total - plan.room) / GIB:.1f} GiB"
    slower = f"{1 - plan.best.cost / row.cost:.1%} slower"
    waiting = row.time.waiting / (row.time.computing + row.time.waiting)
    return f"{slower}, waits {waiting:.0%}" if waiting >= 0.01 else slower


def speed_of(plan: Plan, best: Row, card: str, measured: bool) -> str:
    """The speed of the best row in words, with the error of the model as it was measured."""
    time = best.time
    text = f"About {1 / time.token:,.0f} tokens/s a GPU at the rates of {card}. "
    if time.sent.seconds:
        text += (
            f"A step of {time.computing + time.waiting:.2f} s sends {time.sent.within / 1e9:.1f} GB a GPU in its host"
        )
        text += f" and {time.sent.between / 1e9:.1f} GB between hosts; of the {time.sent.seconds:.2f} s of these "
        text += f"messages {time.hidden:.0%} are hidden. "
    text += f"The largest error was {LARGEST_ERROR:.0%}, in the measured runs on one to four H100 and H200"
    one, measured_ways = best.setting, ("single", "fsdp2")
    unknown = ["between hosts"] if plan.cluster.hosts > 1 else []
    unknown += [] if one.strategy in measured_ways and one.replicas * one.sharing == 1 else [f"under {_split(one)}"]
    unknown += [] if measured else [f"on {card}"]
    return text + (f"; {' and '.join(unknown)} nothing was measured." if unknown else ".")


def not_proposed(inputs: Inputs) -> str:
    """The layouts that the recipe cannot be started with, and why; empty if there are none."""
    reasons = "; ".join(f"{layout} ({reason})" for layout, reason in inputs.obstacles.items())
    return f"Not proposed: {reasons}." if reasons else ""


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
    """A setting in words; HSDP with the number of copies, and of the GPUs of each."""
    options = ["checkpointing"] if setting.checkpointing else ["no checkpointing"]
    options += ["tiled_mlp"] if setting.tiled_mlp else []
    options += ["offloading"] if setting.offloading else []
    return f"{_split(setting)}, {', '.join(options)}"


def _split(setting: Setting) -> str:
    if setting.replicas > 1:
        return f"HSDP of {setting.replicas} × {setting.shards}"
    name = _NAMES[setting.strategy].format(max(setting.expert_parallel_size, setting.tensor_parallel_size))
    return f"{name}, CP of {setting.sequence_parts}" if setting.sequence_parts > 1 else name


def recommendation(inputs: Inputs, plan: Plan, best: Row) -> str:
    """The best setting in words, and why it is best."""
    setting, fitting = best.setting, sum(row.fits for row in plan.rows)
    free = (plan.room - best.memory.total) / GIB
    text = (
        f"Take {way(setting)}, batch {setting.batch} × {setting.accumulation} steps: by its matmuls and its "
        f"communication the fastest of the {fitting} ways that fit (of {len(plan.rows)}), with {free:.1f} GiB to spare "
        f"besides the {ALLOCATOR_SLACK:.0%} of the GPU that are left free for the allocator."
    )
    host = host_bytes(inputs.run, setting, plan.cluster.hosts) / GIB
    if host:
        text += f" Offloading takes {host:.1f} GiB of pinned memory on each machine."
    if setting.expert_parallel_size > 1:
        text += _about_expert_parallel(inputs)
    if setting.strategy == "zero2":
        text += " It needs the deepspeed package."
    return text


def _about_expert_parallel(inputs: Inputs) -> str:
    text = " This assumes that experts are chosen evenly; a GPU whose experts are chosen more often takes more."
    if inputs.run.weight_bytes < 4 and not inputs.values["use_peft"] and inputs.run.optim != LIGER_ADAMW:
        text += " Weights and states stay in the recipe's `dtype`; `--dtype float32` keeps them in fp32, as FSDP2 does."
    return text


def command(inputs: Inputs, setting: Setting, recipe: str, options: Sequence[str] = (), hosts: int = 1) -> list[str]:
    """The command line that trains `recipe` with `options` in this setting; other keys appear only if they change.

    On several hosts it runs on each; `MACHINE_RANK` and `MAIN_HOST` are left to the shell.
    """
    line = _launcher(setting, hosts)
    line += [recipe] if line[0] == "accelerate" else [recipe, "--accelerate_config", CONFIGS[setting.strategy]]
    if setting.gpus > 1 and line[0] != "accelerate":
        line += ["--num_processes", str(setting.gpus)]
    changed = changed_keys(inputs, setting)
    line += _without(options, {*changed, "accelerate_config", "num_processes"})
    for key, value in changed.items():
        text = json.dumps(value) if isinstance(value, (bool, dict)) else str(value)
        line += [f"--{key}", text]
    return line


def _launcher(setting: Setting, hosts: int) -> list[str]:
    """What starts the processes: our command, or accelerate's for what ours has no option for."""
    sizes = {"dp_replicate": setting.replicas, "dp_shard": setting.shards, "cp": setting.sequence_parts}
    sizes["dp_shard"] //= setting.sequence_parts
    meshed = setting.replicas * setting.sequence_parts > 1
    if hosts == 1 and not meshed:
        return ["liger-trainer", "train"]
    file = str(accelerate_config(CONFIGS[setting.strategy]))
    line = ["accelerate", "launch", "--config_file", file, "--num_processes", str(setting.gpus)]
    if hosts > 1:
        line += ["--num_machines", str(hosts), "--machine_rank", "$MACHINE_RANK"]
        line += ["--main_process_ip", "$MAIN_HOST", "--main_process_port", "29500"]
    if meshed:
        line += ["--use_parallelism_config", "--use_fsdp", "--fsdp_version", "2"]
        for name, size in sizes.items():
            line += [f"--parallelism_config_{name}_size", str(size)]
    return [*line, "-m", "liger_trainer", "train"]


def how_to_load(inputs: Inputs, setting: Setting) -> str:
    """The Python that splits matrices, for which recipes have no key; empty for other settings."""
    size = setting.tensor_parallel_size
    if size == 1:
        return ""
    split = f"DistributedConfig(tp_size={size}, fsdp_size={setting.shards // size})"
    keys = ", ".join(f"{key}={value!r}" for key, value in changed_keys(inputs, setting).items())
    arguments = f", and the arguments {keys}" if keys else ""
    return (
        f"Recipes have no key for it: in a script under torchrun, `from_pretrained(..., distributed_config={split})`"
        f"{arguments} (docs/distributed.md)."
    )


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
