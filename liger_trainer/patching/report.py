"""What was patched, with the proof, and what was left alone, with the reason."""

from __future__ import annotations

import dataclasses
import io
import shutil
from collections.abc import Iterator
from typing import Literal


@dataclasses.dataclass(frozen=True)
class KernelReportRow:
    """One line of the report.

    Args:
        component: A key of `liger_kernel_config`, such as ``"rms_norm"``, or an option, such as ``"padding_free"``;
            ``"other"`` for what no kernel is for.
        target: The class (or function) in the model, such as ``"LlamaRMSNorm"``.
        count: How many instances.
        kernel: What runs instead, such as ``"rms_norm (casting=llama)"``; None where the target is left alone.
        probe_error: Largest relative difference between the original and ours in the probe; None without a probe.
        reason: Why it was left alone, or a remark.
        share: The part of the model's parameters that a target of ``"other"`` has; None for all else.
    """

    component: str
    target: str
    count: int
    kernel: str | None
    probe_error: float | None = None
    reason: str = ""
    share: float | None = None

    @property
    def applied(self) -> bool:
        """Whether our kernel runs."""
        return self.kernel is not None


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """Result of [`apply_liger_kernel`]: iterate over its rows, or print it.

    Args:
        model: The class of the model.
        rows: One for each kind of candidate.
        remarks: Sentences about the whole model.
        seconds: Time of proving and patching. Reports that differ only in `seconds` are equal.
    """

    model: str
    rows: tuple[KernelReportRow, ...]
    remarks: tuple[str, ...] = ()
    seconds: float = dataclasses.field(default=0.0, compare=False)

    def __iter__(self) -> Iterator[KernelReportRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def applied(self) -> tuple[KernelReportRow, ...]:
        """The rows whose kernels run."""
        return tuple(row for row in self.rows if row.applied)

    @property
    def left_alone(self) -> tuple[KernelReportRow, ...]:
        """The rows that run as the model's own code, each with its reason."""
        return tuple(row for row in self.rows if not row.applied)

    def __str__(self) -> str:
        try:
            from rich.console import Console
            from rich.table import Table
        except ModuleNotFoundError:  # it comes with `liger-trainer[train]`
            return "\n".join([f"liger_trainer kernels in {self.model}", *map(_line, self.rows), *self._last_lines()])

        table = Table(title=f"liger_trainer kernels in {self.model}", title_justify="left")
        for heading in ("component", "target", "count", "kernel", "probe error", "remark"):
            justify: Literal["left", "right"] = "right" if heading in ("count", "probe error") else "left"
            table.add_column(heading, justify=justify, no_wrap=heading == "component")
        for row in self.rows:
            error = "" if row.probe_error is None else f"{row.probe_error:.1e}"
            table.add_row(row.component, row.target, str(row.count), row.kernel or "left alone", error, row.reason)
        text = io.StringIO()
        width = min(120, shutil.get_terminal_size((120, 24)).columns)
        Console(file=text, width=width).print(table)
        return "\n".join([text.getvalue().rstrip(), *self._last_lines()])

    def _last_lines(self) -> list[str]:
        return [*self.remarks, f"Proved and patched in {self.seconds:.1f} s."]


def _line(row: KernelReportRow) -> str:
    """A row where there is no library for tables."""
    error = "" if row.probe_error is None else f", probe error {row.probe_error:.1e}"
    remark = f" ({row.reason})" if row.reason else ""
    return f"  {row.component}: {row.count} x {row.target}: {row.kernel or 'left alone'}{error}{remark}"
