"""The result of looking at one module: what it is, and our forward for it or why it is left alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

from torch import nn

from liger_trainer.patching.binding import bind_forward, overriding_forward
from liger_trainer.patching.probe import Proof
from liger_trainer.patching.report import KernelReportRow


@dataclasses.dataclass(frozen=True)
class Finding:
    """A candidate, and what becomes of it.

    Args:
        component: A key of `liger_kernel_config`.
        target: Its class or function in the model, for the report.
        module: The instance.
        kernel: The kernel that runs instead; None if it is left alone.
        forward: The forward to bind; None if it is left alone.
        error: The probe's float32 error; None without a probe.
        reason: Why it is left alone, or a remark.
        bind: Binds the forward to the module. If it is not said what the forward reads at each call, it runs only as
            long as everything in the module stays.
    """

    component: str
    target: str
    module: nn.Module
    kernel: str | None = None
    forward: Callable | None = None
    error: float | None = None
    reason: str = ""
    bind: Callable[[nn.Module, Callable], None] = bind_forward


bind_own_code = functools.partial(bind_forward, live=None)
"""Binds a forward that runs the code of the class, or checks at each call all that it needs."""


def proved(component: str, target: str, module: nn.Module, proof: Proof) -> Finding:
    """The finding for a candidate that the probe has looked at."""
    kernel, forward, agreement, live = proof
    bind = functools.partial(bind_forward, live=live)
    return Finding(component, target, module, kernel, forward, agreement.error, agreement.reason, bind)


def rows(findings: Iterable[Finding]) -> list[KernelReportRow]:
    """The rows of the report: equal findings are counted together, in order of appearance."""
    groups: dict[tuple, list[Finding]] = {}
    for finding in findings:
        key = (finding.component, finding.target, finding.kernel, finding.reason)
        groups.setdefault(key, []).append(finding)
    result = []
    for (component, target, kernel, reason), group in groups.items():
        errors = [finding.error for finding in group if finding.error is not None and kernel is not None]
        result.append(KernelReportRow(component, target, len(group), kernel, max(errors, default=None), reason))
    return result


SWITCHED_OFF = "switched off in liger_kernel_config"
CHOSEN = "the model was loaded with attn_implementation="


def reason_to_leave(module: nn.Module, is_enabled: bool) -> str:
    """Why `module` is left alone without a proof: its kernel is off, or another library has its forward; or empty."""
    if not is_enabled:
        return SWITCHED_OFF
    foreign = overriding_forward(module)
    return "" if foreign is None else f"its forward is already overridden by {foreign}"
