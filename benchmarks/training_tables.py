"""The tables of training steps, as Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

from liger_trainer.benchmarks.models import MODELS
from liger_trainer.benchmarks.records import PADDED, UNSHARED, Results, TrainingRecord, grouped
from liger_trainer.benchmarks.registry import family
from liger_trainer.benchmarks.report import longest_cells, markdown, outcome, rows_in_words, sweep, with_settings
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
_ALIGNMENT_TEXT = """\
## Alignment and long sequences

DPO on pairs and GRPO's loss on given completions, through TRL's trainers, every layer checkpointed: tokens/s of all
that the policy reads / peak GiB / GiB above the weights. Then the longest sequence that trains.

```bash
liger-trainer bench training --model llama3-8b --trainer dpo --lora 16 --length 2048
liger-trainer bench longest --model llama3-8b --lora 16 --length 65536
```"""
UNEVEN_LIBRARIES = {"hf": "TRL", "liger-kernel": "+ Liger", PADDED: PADDED, UNSHARED: UNSHARED, _OURS: _OURS}
_UNEVEN_RESULTS_TEXT = f"""\
Alignment, tokens/s of TRL's padded batch / peak GiB, every layer checkpointed. `{PADDED}` has
`padding_free` off, and `{UNSHARED}` has `share_prompt` off."""
_UNEVEN_TEXT = f"""\
## Alignment on uneven lengths

One step through TRL's trainers, every layer checkpointed; GRPO and RLOO on given completions. Lengths are drawn
uniformly, anew for every step and the same for every provider. Tokens/s / peak GiB; the tokens are those of TRL's
padded batch, so that ratios are of time. `{PADDED}` has `padding_free` off, and
`{UNSHARED}` has `share_prompt` off.

```bash
liger-trainer bench training --model llama3-8b --trainer dpo --lora 16 --batch 8 --prompt 1024 --lengths 64:1024 \\
    --providers "hf,{PADDED},{UNSHARED},liger_trainer"
```"""
_SEVERAL_GPUS_TEXT = """\
## Several GPUs

Tokens/s a GPU / peak GiB of the fullest GPU / MFU, by the tokens of a sequence. All providers start from the same
weights and tokens under the same accelerate configuration; FSDP2 with bf16 keeps fp32 weights, gradients and AdamW
states, split over the GPUs. With several numbers of GPUs: also tokens/s a GPU relative to the fewest, each with the
same work and the same configuration.

```bash
liger-trainer bench training --model llama3-8b --gpus 2 --batch 8 --length 4096,8192,16384,32768
liger-trainer bench training --model llama3-8b --layers 16 --gpus 1,2 --batch 8 --length 4096 --providers liger_trainer
```"""


_cost = partial(outcome, mfu=False)
_LONGEST_IN_RESULTS = 4096  # tokens: longer sequences are in docs/performance.md alone


def results_table(results: Results) -> str:
    """README's table: tokens/s / peak GiB of steps on one GPU with every layer checkpointed, without their sources.

    Below it, if there are results, the table and the picture of alignment on uneven lengths.
    """
    tasks = [records for records in _on_one_gpu(results) if not _is_alignment(records) and records[0].checkpointing]
    tasks = [records for records in tasks if records[0].length <= _LONGEST_IN_RESULTS]
    tasks.sort(key=lambda records: (bool(records[0].lora), records[0].quantize))
    table, uneven = _steps(results, tasks, _cost), _uneven(results)
    below = [_UNEVEN_RESULTS_TEXT, _uneven_table(uneven), _uneven_picture("docs/images/alignment.png")]
    return "\n\n".join([table, *below]) if uneven else table


def training_table(results: Results) -> str:
    """Full fine-tuning on one GPU: tokens/s / peak GiB, and the share of the hardware's peak if it is known."""
    tasks = [records for records in _on_one_gpu(results) if not _is_alignment(records)]
    return _steps_table(results, [records for records in tasks if not records[0].lora])


def lora_table(results: Results) -> str:
    """Training of adapters, on bf16 and on quantised base models; empty without results."""
    tasks = [records for records in _on_one_gpu(results) if records[0].lora and not _is_alignment(records)]
    tasks.sort(key=lambda records: (records[0].quantize, not records[0].checkpointing))
    return _steps_table(results, tasks) if tasks else ""


def several_gpus_section(results: Results) -> str:
    """The section on several GPUs, with a table for each sweep over lengths; empty without results."""
    records = itertools.chain(*results.tasks.values())
    sweeps = grouped((record for record in records if record.accelerate_config), lambda record: record.sweep)
    made = [_sweep_table(results, found) for found in sweeps.values()]
    return "\n\n".join([_SEVERAL_GPUS_TEXT, *made]) if made else ""


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
    """The section on DPO, GRPO's loss and the longest sequences, with its tables; empty without results."""
    tasks = [records for records in _on_one_gpu(results) if _is_alignment(records)]
    made = [_steps_table(results, tasks)] if tasks else []
    made += [longest_table(results)] if results.longest else []
    return "\n\n".join([_ALIGNMENT_TEXT, *made]) if made else ""


def uneven_section(results: Results) -> str:
    """The section on alignment on uneven lengths, with its table and picture; empty without results."""
    tasks = _uneven(results)
    parts = [_UNEVEN_TEXT, _uneven_table(tasks), _source(results, tasks), _uneven_picture("images/alignment.png")]
    return "\n\n".join(parts) if tasks else ""


def _uneven(results: Results) -> Tasks:
    tasks = [records for records in results.tasks.values() if records[0].lengths]
    return [records for records in tasks if not records[0].accelerate_config]


def _uneven_table(tasks: Tasks) -> str:
    measured = {record.provider for records in tasks for record in records}
    columns = [name for name in UNEVEN_LIBRARIES if name in measured]
    rows = []
    for records in tasks:
        bold, found = _fastest_of_several(records), {record.provider: record for record in records}
        cells = [with_settings([found[name]] if name in found else [], name, _cost, bold) for name in columns]
        ratios = [_speedup(found.get(_OURS), found.get(name)) for name in ("hf", PADDED)]
        rows.append([task_title(records[0]), *cells, *ratios])
    return markdown(["work", *(UNEVEN_LIBRARIES[name] for name in columns), "× TRL", "× padded"], rows)


def _speedup(ours: TrainingRecord | None, other: TrainingRecord | None) -> str:
    if ours is None or other is None or not ours.tokens_per_second or not other.tokens_per_second:
        return "–"
    return f"{ours.tokens_per_second / other.tokens_per_second:.2f}"


def _uneven_picture(file: str) -> str:
    return f"![Tokens per second and peak GiB of each row of the table, a bar for each provider]({file})"


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


def longest_table(results: Results) -> str:
    """The longest sequences, one row per provider and task."""
    rows = [
        [
            _title(record.model, record.layers, record.trainer, _rank(record.lora), f"batch {record.batch}"),
            *longest_cells(record, "–"),
        ]
        for record in results.longest.values()
    ]
    header = ["model", "provider", "longest that trains", "too long", "tokens/s", "peak GiB"]
    return markdown(header, rows) + "\n\n" + results.source(results.longest)


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


def _rank(lora: int) -> str:
    return f"LoRA r={lora}" if lora else ""


def _adapters(record: TrainingRecord) -> str:
    return _rank(record.lora) + (f" on {record.quantize}" if record.quantize else "")


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
