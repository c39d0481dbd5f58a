"""Rewrites the tables and the pictures of README.md and of pages in docs/ from the results: `make tables`.

The results were written by `liger-trainer bench --output` and copied to `benchmarks/results/MACHINE/`. Records of one
case were measured in turns and stay together: if two files hold the same case, the newer one counts. A table is
between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from liger_trainer.benchmarks import fp8, timeline
from liger_trainer.benchmarks.evidence.results import Evidence, section
from liger_trainer.benchmarks.evidence.training import TASKS
from liger_trainer.benchmarks.models import MODELS
from liger_trainer.benchmarks.records import OPTIMIZER_STEP, Record, Results
from liger_trainer.benchmarks.registry import OPERATIONS, family, load_operations
from liger_trainer.benchmarks.report import markdown, number, percentage, with_settings
from liger_trainer.benchmarks.training_tables import (
    alignment_table,
    lora_table,
    results_table,
    several_gpus_tables,
    tasks_on_whole_models,
    training_table,
    uneven_table,
    uneven_table_and_source,
)

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/performance.md", "docs/evidence.md", "docs/guides/fp8.md")
_RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
_EVIDENCE = _RESULTS / "evidence"
_FP8 = _RESULTS / "fp8.csv"
_OPTIMIZERS = _RESULTS / "optimizers.csv"
_IMAGES = ROOT / "docs" / "images"
_TIMELINE = _RESULTS / "timelines" / "qwen3-0.6b.json"
_OURS = "liger_trainer"
_BETTER = 1.02  # runs differ by about 2 %: only more than that is printed bold


def _cost(record: Record | None) -> str:
    if record is None or record.skipped:
        return "–"
    if record.both is None:
        return record.failure or "–"
    return " / ".join(filter(None, (_milliseconds(record.both), number(record.peak_gibibytes, ".2f"))))


def _milliseconds(value: float | None) -> str:
    return number(value, ".1f" if value and value >= 10 else ".3f", "–")


def _faster(record: Record, others: Iterable[Record]) -> bool:
    """Whether `record` beats all others by more than runs differ."""
    return all(record.both * _BETTER < other.both for other in others if record.both and other.both)


def _fastest(records: Iterable[Record]) -> Record | None:
    return min(
        (record for record in records if record.both is not None), key=lambda record: record.both or 0, default=None
    )


def _shown(records: Sequence[Record], library: str) -> list[Record]:
    """A library at its defaults and, if one is clearly faster, at the best of its settings."""
    default = [record for record in records if record.provider == library]
    best = _fastest(record for record in records if family(record.provider) == library)
    return default + ([best] if best is not None and best not in default and _faster(best, default) else [])


def _work(record: Record) -> str:
    title = OPERATIONS[record.operation].title
    return f"{title}, {record.variant}, {record.shape}" if record.variant else f"{title} {record.shape}"


def operation_table(results: Results, groups: Sequence[tuple]) -> str:
    """Milliseconds of forward and backward / peak GiB, the share of the floor and the error; one row per case."""
    rows = []
    for group in groups:
        records = results.cases[group]
        compiled, liger, own = (_shown(records, name) for name in ("torch.compile", "liger-kernel", _OURS))
        others = [record for record in records if family(record.provider) != _OURS]
        best = _fastest(own)
        bold = best if best is not None and _faster(best, others) else None
        known = ("torch", "torch.compile", "liger-kernel")
        other = _fastest(record for record in others if family(record.provider) not in known)
        rows.append(
            [
                _work(records[0]),
                _milliseconds(records[0].floor),
                with_settings(compiled, "torch.compile", _cost, None),
                with_settings(liger, "liger-kernel", _cost, None),
                "–" if other is None else f"{_cost(other)} ({other.provider})",
                with_settings(own, _OURS, _cost, bold),
                percentage(None if best is None else best.fraction_of_floor(), "–"),
                number(own[0].worse_than_eager if own else None, ".2f", "–"),
            ]
        )
    header = ["work", "floor", "torch.compile", f"Liger{results.version('liger-kernel')}"]
    header += ["best other", "liger_trainer", "of the floor", "error × eager"]
    return markdown(header, rows) + "\n\n" + results.source(groups)


def error_table(results: Results, groups: Sequence[tuple]) -> str:
    """Relative error of every gradient against float64, one row per gradient."""
    rows, used = [], []
    for group in groups:
        records = {record.provider: record for record in results.cases[group]}
        eager, ours = records.get("torch"), records.get(_OURS)
        if eager is None or ours is None:
            continue
        liger = records.get("liger-kernel chunk_mem_const=8") or records.get("liger-kernel")
        names = [name for name in ours.errors if name.startswith("d") and name in eager.errors]
        for name in names:
            values = [record.errors.get(name) if record else None for record in (eager, liger, ours)]
            cells = [number(value, ".2e", "–") for value in values]
            rows.append([_work(ours), name, *cells, f"{ours.errors[name] / eager.errors[name]:.2f}"])
        used += [group] if names else []
    header = ["work", "gradient", "eager", f"Liger{results.version('liger-kernel')}", "liger_trainer", "× eager"]
    return markdown(header, rows) + "\n\n" + results.source(used)


_EXPERTS = "moe_experts"
_EXPERTS_COLUMNS = {"torch": "grouped_mm", "torch.compile": "torch.compile", "liger-kernel": "Liger", _OURS: _OURS}


def experts_table(results: Results) -> str:
    """Blocks of experts: milliseconds / peak GiB / KB a token that the forward keeps; one row per case."""
    groups = [group for group in results.cases if group[0] == _EXPERTS]
    rows = []
    for group in groups:
        records = {record.provider: record for record in results.cases[group]}
        ours = records[_OURS]
        bold = ours.both is not None and _faster(ours, [r for r in records.values() if r is not ours])
        cells = [_cost(records.get(name)) + _kept(records.get(name)) for name in _EXPERTS_COLUMNS]
        rows.append(
            [
                ", ".join(filter(None, (MODELS[group[1]].title, group[3], f"{group[2]:,} tokens"))),
                _milliseconds(ours.floor),
                *cells[:-1],
                f"**{cells[-1]}**" if bold else cells[-1],
                percentage(ours.fraction_of_floor(), "–"),
            ]
        )
    header = ["experts of", "floor", *_EXPERTS_COLUMNS.values(), "of the floor"]
    return f"{markdown(header, rows)}\n\n{results.source(groups)}"


def _kept(record: Record | None) -> str:
    if record is None or record.both is None or record.saved_gibibytes is None:
        return ""
    return f" / {record.saved_gibibytes * 2**30 / record.tokens / 1000:.1f} KB"


def optimizer_tables(results: Results) -> str:
    """The step of AdamW, with a table for each model."""
    groups = [group for group in results.cases if group[0] == OPTIMIZER_STEP]
    made = []
    for group in groups:
        records = [record for record in results.cases[group] if not record.skipped]
        rows = [
            [
                record.provider,
                record.dtype,
                record.remark.split()[0] if record.remark else "–",
                record.failure or _milliseconds(record.both),
                percentage(record.fraction_of_floor(), "–"),
            ]
            for record in records
        ]
        title = f"{MODELS[group[1]].title}, {records[0].variant}, {records[0].shape}"
        made.append(f"{title}:\n\n{markdown(['optimizer', 'weights', 'bytes a weight', 'ms', 'of the floor'], rows)}")
    return "\n\n".join([*made, results.source(groups)])


_HEADS = ("linear_", "dpo_loss", "fused_grpo_loss")  # how the names of operations over an LM head start


def _heads(results: Results, heads: bool) -> list[tuple]:
    known = [group for group in results.cases if group[0] in OPERATIONS and group[0] != _EXPERTS]
    return [group for group in known if group[0].startswith(_HEADS) is heads]


def _evidence(trainer: str) -> Callable[[Results], str]:
    return lambda _: section(trainer, _EVIDENCE / f"{trainer}.csv")


TABLES: dict[str, Callable[[Results], str]] = {
    "results": results_table,
    "training": training_table,
    "lora": lora_table,
    "alignment": alignment_table,
    "uneven-results": uneven_table,
    "uneven-lengths": uneven_table_and_source,
    "several-gpus": several_gpus_tables,
    "optimizer": optimizer_tables,
    "operations": lambda results: operation_table(results, _heads(results, heads=False)),
    "experts": experts_table,
    "heads": lambda results: operation_table(results, _heads(results, heads=True)),
    "head-errors": lambda results: error_table(results, _heads(results, heads=True)),
    "fp8": lambda _: fp8.section(_FP8),
    **{f"evidence-{trainer}": _evidence(trainer) for trainer in TASKS},
}


def render(text: str, results: Results) -> str:
    """`text` with every table rewritten."""

    def replace(found: re.Match[str]) -> str:
        return f"{found[1]}\n{TABLES[found[2]](results)}\n{found[3]}"

    return re.sub(r"(<!-- table: ([\w-]+) -->)\n.*?(<!-- end of table -->)", replace, text, flags=re.DOTALL)


def main() -> None:
    """Rewrites the documents in place, and draws the pictures for light and dark pages."""
    import matplotlib.style

    load_operations()
    results = Results.read(_RESULTS)
    for name in DOCUMENTS:
        file = ROOT / name
        file.write_text(render(file.read_text(encoding="utf-8"), results), encoding="utf-8")
    _draw(results, ".png")
    with matplotlib.style.context(["dark_background", {"savefig.transparent": True}]):
        _draw(results, "-dark.png")


def _draw(results: Results, ending: str) -> None:
    """All pictures of the documents."""
    from liger_trainer.benchmarks.plots import (
        draw_alignment,
        draw_evidence,
        draw_fp8,
        draw_gain,
        draw_optimizers,
        draw_pareto,
    )

    device = results.runs[-1].machine.device
    draw_gain(tasks_on_whole_models(results), device, _IMAGES / f"gain{ending}")
    records = [*itertools.chain(*results.tasks.values())]
    draw_pareto(records, device, _IMAGES / f"pareto{ending}")
    draw_alignment(records, device, _IMAGES / f"alignment{ending}")
    for file in _EVIDENCE.glob("*.csv"):
        draw_evidence(Evidence.read(file), _IMAGES / f"evidence-{file.stem}{ending}")
    draw_optimizers(Evidence.read(_OPTIMIZERS), _IMAGES / f"optimizers{ending}")
    found = Evidence.read(_FP8)
    timeline.draw(_TIMELINE, _IMAGES / f"timeline{ending}")
    draw_fp8(found, fp8.last_steps(found.setting["steps"]), _IMAGES / f"fp8{ending}")


if __name__ == "__main__":
    main()
