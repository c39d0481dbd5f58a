"""The tables of training steps, as Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

from liger_trainer.benchmarks.models import MODELS
from liger_trainer.benchmarks.records import PADDED, UNSHARED, Results, TrainingRecord, grouped
from liger_trainer.benchmarks.registry import family
from liger_trainer.benchmarks.report import markdown, outcome, rows_in_words, sweep, with_settings
from liger_trainer.benchmarks.training import ALIGNMENT, PAIRS

Tasks = list[list[TrainingRecord]]
_OURS = "liger_trainer"
_LIBRARIES = {
    "hf": "Hugging Face",
    "torch.compile": "torch.compile",
    "liger-kernel": "+ Liger",
    "unsloth": "Unsloth",
    _OURS: "liger_trainer",
}
_TRAINERS = {"sft": "TRL's `SFTTrainer`", "reward": "reward model", "grpo": "GRPO's loss", "rloo": "RLOO's loss"}
_TRAINERS |= {name: name.upper() for name in ("dpo", "kto", "orpo", "cpo")}
UNEVEN_LIBRARIES = {"hf": "TRL", "liger-kernel": "+ Liger", PADDED: PADDED, UNSHARED: UNSHARED, _OURS: _OURS}

_cost = partial(outcome, mfu=False)
_LONGEST_IN_RESULTS = 4096  # tokens: longer sequences are in docs/performance.md alone


def results_table(results: Results) -> str:
    """README's table: tokens/s / peak GiB of steps on one GPU with every layer checkpointed, without their sources."""
    return _steps(results, _in_results(results), _cost)


def tasks_on_whole_models(results: Results) -> Tasks:
    """Those of README's tables that train all layers of a model."""
    return [records for records in (*_in_results(results), *_uneven(results)) if not records[0].layers]


def _in_results(results: Results) -> Tasks:
    tasks = [records for records in _on_one_gpu(results) if not _is_alignment(records) and records[0].checkpointing]
    tasks = [records for records in tasks if records[0].length <= _LONGEST_IN_RESULTS]
    return sorted(tasks, key=lambda records: (bool(records[0].lora), records[0].quantize))


def training_table(results: Results) -> str:
    """Full fine-tuning on one GPU: tokens/s / peak GiB, and the share of the hardware's peak if it is known."""
    tasks = [records for records in _on_one_gpu(results) if not _is_alignment(records)]
    return _steps_table(results, [records for records in tasks if not records[0].lora])


def lora_table(results: Results) -> str:
    """Training of adapters, on bf16 and on quantised base models."""
    tasks = [records for records in _on_one_gpu(results) if records[0].lora and not _is_alignment(records)]
    tasks.sort(key=lambda records: (records[0].quantize, not records[0].checkpointing))
    return _steps_table(results, tasks)


def several_gpus_tables(results: Results) -> str:
    """A table for each sweep over lengths on several GPUs."""
    records = itertools.chain(*results.tasks.values())
    sweeps = grouped((record for record in records if record.accelerate_config), lambda record: record.sweep)
    return "\n\n".join(_sweep_table(results, found) for found in sweeps.values())


def _sweep_table(results: Results, records: list[TrainingRecord]) -> str:
    first = records[0]
    lengths, rows = sweep(records)
    gpus = " and ".join(str(count) for count in sorted({record.gpus for record in records}))
    more = (rows_in_words(first), f"batch {first.batch} a GPU", f"{gpus} GPUs", first.accelerate_config)
    title = _title(first.model, first.layers, first.trainer, _adapters(first), *more)
    header = ["provider", *(f"{length:,}" for length in lengths)]
    table = markdown(header, [[name, *cells] for name, cells in rows])
    return f"{title}:\n\n{table}\n\n{results.source(record.group for record in records)}"


def alignment_table(results: Results) -> str:
    """DPO and GRPO's loss on sequences of one length: tokens/s / peak GiB / GiB above the weights."""
    return _steps_table(results, [records for records in _on_one_gpu(results) if _is_alignment(records)])


def uneven_table(results: Results) -> str:
    """README's table of alignment on uneven lengths: tokens/s / peak GiB, without their sources."""
    tasks = _uneven(results)
    measured = {record.provider for records in tasks for record in records}
    columns = [name for name in UNEVEN_LIBRARIES if name in measured]
    rows = []
    for records in tasks:
        bold, found = _fastest_of_several(records), {record.provider: record for record in records}
        cells = [with_settings([found[name]] if name in found else [], name, _cost, bold) for name in columns]
        ratios = [_speedup(found.get(_OURS), found.get(name)) for name in ("hf", PADDED)]
        rows.append([task_title(records[0]), *cells, *ratios])
    return markdown(["work", *(UNEVEN_LIBRARIES[name] for name in columns), "× TRL", "× padded"], rows)


def uneven_table_and_source(results: Results) -> str:
    """The same table, and where it comes from."""
    return f"{uneven_table(results)}\n\n{_source(results, _uneven(results))}"


def _uneven(results: Results) -> Tasks:
    tasks = [records for records in results.tasks.values() if records[0].lengths]
    return [records for records in tasks if not records[0].accelerate_config]


def _speedup(ours: TrainingRecord | None, other: TrainingRecord | None) -> str:
    if ours is None or other is None or not ours.tokens_per_second or not other.tokens_per_second:
        return "–"
    return f"{ours.tokens_per_second / other.tokens_per_second:.2f}"


def _on_one_gpu(results: Results) -> Tasks:
    """The tasks on one GPU, without uneven lengths and the sizes of `activation_memory`, which are in a picture."""
    tasks = (records for records in results.tasks.values() if not records[0].accelerate_config)
    tasks = (records for records in tasks if not records[0].lengths)
    shown = ([record for record in records if record.activation_memory in ("", "auto")] for records in tasks)
    return [records for records in shown if records]


def _is_alignment(records: Sequence[TrainingRecord]) -> bool:
    return records[0].trainer in ALIGNMENT


def _source(results: Results, tasks: Tasks) -> str:
    return results.source(records[0].group for records in tasks)


def _steps_table(results: Results, tasks: Tasks) -> str:
    """A table that also shows the GiB above the weights for alignment, and MFU where it is known."""
    table = _steps(results, tasks, lambda record: outcome(record, above=record.trainer in ALIGNMENT))
    return f"{table}\n\n{_source(results, tasks)}"


def _steps(results: Results, tasks: Tasks, show: Callable[[TrainingRecord], str]) -> str:
    measured = {family(record.provider) for records in tasks for record in records}
    columns = [name for name in _LIBRARIES if name in measured]
    rows = []
    for records in tasks:
        bold = _fastest_of_several(records)
        rows.append([task_title(records[0]), *(_cell(records, name, bold, show) for name in columns)])
    versions = {"liger-kernel": results.version("liger-kernel"), "unsloth": results.version("unsloth").split(" (")[0]}
    return markdown(["model", *(_LIBRARIES[name] + versions.get(name, "") for name in columns)], rows)


def task_title(record: TrainingRecord) -> str:
    """A task in words."""
    unit = ("pair " if record.batch == 1 else "pairs ") if record.trainer in PAIRS else ""
    sizes = f"{record.batch} {unit}× {record.length}" if record.trainer in ALIGNMENT else ""
    if record.lengths:
        sizes = f"{record.batch} {unit}".strip() if unit else f"batch {record.batch}"
    return _title(
        *(record.model, record.layers, record.trainer, _adapters(record), sizes, rows_in_words(record)),
        "" if record.checkpointing else "nothing checkpointed",
    )


def _title(model: str, layers: int, trainer: str, *more: str) -> str:
    parts = [MODELS[model].title, f"{layers} of its layers" if layers else "", _TRAINERS.get(trainer, "")]
    return ", ".join(part for part in (*parts, *more) if part)


def _adapters(record: TrainingRecord) -> str:
    rank = f"LoRA r={record.lora}" if record.lora else ""
    return rank + (f" on {record.quantize}" if record.quantize else "")


def _fastest_of_several(records: Sequence[TrainingRecord]) -> TrainingRecord | None:
    """Our record, if it is the fastest and another library was measured; else None."""
    best = max(records, key=lambda record: record.tokens_per_second or 0.0)
    compared = any(record.tokens_per_second for record in records if family(record.provider) != _OURS)
    return best if compared and family(best.provider) == _OURS else None


def _cell(
    records: Sequence[TrainingRecord],
    library: str,
    bold: TrainingRecord | None,
    show: Callable[[TrainingRecord], str],
) -> str:
    """A library at its defaults, then at each of its settings."""
    own = sorted((record for record in records if family(record.provider) == library), key=lambda one: one.provider)
    return with_settings(own, library, show, bold)
