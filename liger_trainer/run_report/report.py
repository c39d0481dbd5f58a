"""The sections of the page, in the order of reading."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import TrainerState, TrainingArguments

from liger_trainer.pages import page, paragraph, section, table
from liger_trainer.patching.report import KernelReport
from liger_trainer.run_report.charts import charts
from liger_trainer.run_report.samples import samples
from liger_trainer.run_report.settings import changed_arguments, environment


def run_report(
    args: TrainingArguments,
    state: TrainerState,
    model: nn.Module | None = None,
    kernels: KernelReport | None = None,
    completions: Mapping[str, Any] = MappingProxyType({}),
    ended: str = "",
) -> str:
    """The text of an HTML file about a run.

    Args:
        args: Its arguments.
        state: Of the Trainer; its `log_history` has the curves.
        model: The trained model, to name it.
        kernels: What was patched; None without kernels.
        completions: The last of a policy, as [`samples`] takes them.
        ended: Why training has stopped before its last step, if it has.
    """
    folder = Path(str(args.output_dir)).resolve()
    declared = "Those that differ from the declared defaults, as the run has them."
    return page(
        f"Training run: {folder.name}",
        [
            section("Run", _pairs(_facts(args, state, model, ended))),
            section("Curves", *(charts(state.log_history) or [paragraph("Nothing has been logged.")])),
            samples(completions),
            _kernels(kernels),
            section(
                "Arguments",
                paragraph(declared),
                _pairs(changed_arguments(args)),
            ),
            section("Environment", _pairs(environment(args))),
        ],
    )


def _facts(
    args: TrainingArguments, state: TrainerState, model: nn.Module | None, ended: str
) -> list[tuple[str, object]]:
    summary: dict[str, Any] = next((entry for entry in reversed(state.log_history) if "train_runtime" in entry), {})
    facts: dict[str, object] = {
        "model": _name(model),
        "arguments": type(args).__name__,
        "step": f"{state.global_step:,} of {state.max_steps:,}",
        "epoch": None if state.epoch is None else f"{state.epoch:.2f}",
        "ended": ended,
        "best checkpoint": state.best_model_checkpoint,
        **{name.replace("_", " "): f"{summary[name]:,.4g}" for name in summary if name.startswith("train_")},
        "written": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    return [(name, fact) for name, fact in facts.items() if fact]


def _name(model: nn.Module | None) -> str:
    path = getattr(getattr(model, "config", None), "name_or_path", "")
    return " · ".join(filter(None, (type(model).__name__ if model is not None else "", path)))


def _kernels(report: KernelReport | None) -> str:
    if report is None:
        return section("Kernels", paragraph("No kernels of liger_trainer were put into the model."))
    rows = [
        (
            row.component,
            row.target,
            row.count,
            row.kernel or "left alone",
            "" if row.probe_error is None else f"{row.probe_error:.1e}",
            row.reason,
        )
        for row in report
    ]
    header = ("component", "target", "count", "kernel", "probe error", "remark")
    return section("Kernels", table(header, rows), *map(paragraph, report.remarks))


def _pairs(rows: Iterable[tuple[str, object]]) -> str:
    return table(("name", "value"), [(name, str(value)) for name, value in rows])
