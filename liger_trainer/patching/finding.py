"""What a recogniser says about one module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from torch import nn

from liger_trainer.patching.binding import bind_forward
from liger_trainer.patching.report import KernelReportRow


@dataclasses.dataclass(frozen=True)
class Finding:
    """A candidate and the verdict on it.

    Args:
        component: A key of `liger_kernel_config`.
        target: What it is in the model, for the report.
        module: The instance.
        kernel: What would run instead; None where it is left alone.
        forward: The forward to bind; None where it is left alone.
        error: The probe's float32 error; None without a probe.
        reason: Why it is left alone, or a remark.
        bind: How the forward gets into the module.
    """

    component: str
    target: str
    module: nn.Module
    kernel: str | None = None
    forward: Callable | None = None
    error: float | None = None
    reason: str = ""
    bind: Callable[[nn.Module, Callable], None] = bind_forward


def rows(findings: Iterable[Finding]) -> list[KernelReportRow]:
    """The report's rows: findings of one kind are counted together, in the order in which they appear."""
    groups: dict[tuple, list[Finding]] = {}
    for finding in findings:
        key = (finding.component, finding.target, finding.kernel, finding.reason)
        groups.setdefault(key, []).append(finding)
    result = []
    for (component, target, kernel, reason), group in groups.items():
        errors = [finding.error for finding in group if finding.error is not None and kernel is not None]
        result.append(KernelReportRow(component, target, len(group), kernel, max(errors, default=None), reason))
    return result
