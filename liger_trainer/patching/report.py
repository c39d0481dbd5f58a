"""What was found in a model: a finding for each candidate, and the report, which also names what no kernel is for.

A finding says what a module is, and our forward for it or why it is left alone. The report counts equal findings.

Modules that no kernel is for, such as Mamba's mixers, have a row with their share of the parameters. Such a module has
a class of its own, and more parameters in itself and in plain layers (linear, convolution) than in other modules inside
it. Plain layers alone, embeddings and heads need no row, and neither does what a finding is about.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal

from torch import nn

from liger_trainer.head.lm_head import find_lm_heads, without_adapters
from liger_trainer.patching.binding import bind_forward, overriding_forward
from liger_trainer.patching.probe import Proof, class_of, full_shape, is_stateless


class Choice(str):
    """A reason to leave a module alone that is the user's own choice, which `strict` accepts."""


SWITCHED_OFF = Choice("switched off in liger_kernel_config")

MIXERS = ("recurrence", "short_conv")
"""The components whose modules mix tokens without attention."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A candidate, and what becomes of it."""

    component: str  # a key of `liger_kernel_config`
    target: str  # its class or function in the model, for the report
    module: nn.Module  # the instance
    kernel: str | None = None  # the kernel that runs instead; None if it is left alone
    forward: Callable | None = None  # the forward to bind; None if it is left alone
    error: float | None = None  # the probe's float32 error; None without a probe
    reason: str = ""  # why it is left alone, or a remark
    # Binds the forward to the module. If it is not said what the forward reads at each call, it runs only as long as
    # everything in the module stays.
    bind: Callable[[nn.Module, Callable], None] = bind_forward


bind_own_code = functools.partial(bind_forward, live=None)
"""Binds a forward that runs the code of the class, or checks at each call all that it needs."""


def proved(component: str, target: str, module: nn.Module, proof: Proof) -> Finding:
    """The finding for a candidate that the probe has looked at."""
    kernel, forward, agreement, live, precisions = proof
    if not agreement.equal:
        kernel = forward = None
    bind = functools.partial(bind_forward, live=live)
    reason = agreement.reason or precisions.remark
    return Finding(component, target, module, kernel, forward, agreement.error, reason, bind)


def candidate(component: str, module: nn.Module, is_enabled: bool, prove: Callable[[], Proof]) -> Finding:
    """The finding for a module that looks like `component`: that of its proof, or why it is left alone without one."""
    target = type(module).__name__
    if reason := reason_to_leave(module, is_enabled):
        return Finding(component, target, module, reason=reason)
    return proved(component, target, module, prove())


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


def reason_to_leave(module: nn.Module, is_enabled: bool) -> str:
    """Why `module` is left alone without a proof: its kernel is off, or another library has its forward; or empty."""
    if not is_enabled:
        return SWITCHED_OFF
    foreign = overriding_forward(module)
    return "" if foreign is None else f"its forward is already overridden by {foreign}"


# ---------------------------------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class KernelReportRow:
    """One line of the report.

    Args:
        component: A key of `liger_kernel_config`, such as ``"rms_norm"``, or an option, such as ``"padding_free"``;
            ``"other"`` for what no kernel is for.
        target: The class (or function) in the model, such as ``"LlamaRMSNorm"``.
        count: How many instances.
        kernel: The kernel, such as ``"rms_norm (casting=llama)"``; None where the target is left alone.
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


# ---------------------------------------------------------------------------------------------------------------------
# What no kernel is for
# ---------------------------------------------------------------------------------------------------------------------

WITHOUT_A_GATE = "MLPs without a gate"
"""What the reason says of two projections with an activation between them.

A kernel would save no time where torch computes the activation in one pass. Recomputing it would save one tensor of the
intermediate size: a fifth to a quarter of what a layer saves, and nothing that outlives a checkpointed layer.
"""

_OF_PLAIN_LAYERS = ("fp8", "lora")


def unserved(model: nn.Module, findings: Iterable[Finding]) -> list[KernelReportRow]:
    """A row for each class of `model` that no kernel is for, the largest first."""
    base = without_adapters(model)
    findings, heads = list(findings), set(map(id, find_lm_heads(base)[0]))
    found = heads | {id(finding.module) for finding in findings}
    apart = heads | {id(finding.module) for finding in findings if finding.component not in _OF_PLAIN_LAYERS}
    sizes = {id(module): 0 for module in model.modules()}
    total = _add_sizes(model, sizes)
    counts: dict[tuple[str, str], list[int]] = {}
    for module in model.modules():
        if module in (model, base) or id(module) in found or _is_plain(module) or _may_hold_an_adapter(module):
            continue
        embeddings = sum(sizes[id(each)] for each in module.modules() if isinstance(each, nn.Embedding))
        own = _own_size(module, apart)
        if own and own >= sizes[id(module)] - embeddings - own:
            what = WITHOUT_A_GATE if _is_mlp_without_a_gate(module) else "it"
            counts.setdefault((class_of(module).__name__, what), []).append(own)
    rows = [
        KernelReportRow("other", name, len(own), None, None, _reason(what, sum(own) / total), sum(own) / total)
        for (name, what), own in counts.items()
    ]
    return sorted(rows, key=lambda row: row.share or 0.0, reverse=True)


def _reason(what: str, share: float) -> str:
    percentage = f"{100 * share:.1f} %" if share >= 5e-4 else "less than 0.1 %"
    return f"there is no kernel for {what}, with {percentage} of the parameters"


def _add_sizes(module: nn.Module, sizes: dict[int, int]) -> int:
    """Writes how many parameters each module in `module` has, with those inside it, and returns that of `module`."""
    size = _direct_size(module) + sum(
        _add_sizes(child, sizes) for child in module._modules.values() if child is not None
    )
    sizes[id(module)] = size
    return size


def _direct_size(module: nn.Module) -> int:
    return sum(math.prod(full_shape(each)) for each in module._parameters.values() if each is not None)


def _own_size(module: nn.Module, apart: Collection[int]) -> int:
    """The parameters of `module` and of the plain layers directly in it, without those with these ids."""
    size = _direct_size(module)
    for child in module._modules.values():
        if child is not None and _is_plain(child) and id(child) not in apart and not isinstance(child, nn.Embedding):
            size += _own_size(child, apart)
    return size


def _is_mlp_without_a_gate(module: nn.Module) -> bool:
    """Whether `module` is a projection to a larger size, one back, and what has no parameters."""
    children = [child for child in module._modules.values() if child is not None]
    layers = [child for child in children if not is_stateless(child)]
    if len(layers) != 2 or not all(map(_is_plain, layers)):
        return False
    (hidden, intermediate), ends = map(_features, layers)
    return None not in (hidden, intermediate) and ends == (intermediate, hidden) and intermediate > hidden


def _features(layer: nn.Module) -> tuple[Any, Any]:
    """The sizes of the input and the output of a linear layer, which GPT-2's calls nx and nf; None if it has none."""
    given = [getattr(layer, name, None) for name in ("in_features", "nx", "out_features", "nf")]
    return given[0] or given[1], given[2] or given[3]


def _may_hold_an_adapter(module: nn.Module) -> bool:
    """Whether `module` is one of LitGPT's LoRA layers, which is a linear layer where it has no adapter."""
    return isinstance(getattr(module, "linear", None), nn.Linear) and hasattr(module, "lora_alpha")


def _is_plain(module: nn.Module) -> bool:
    """Whether `module` is a layer or a container of torch, also a quantised one, an adapter around one, or ours."""
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ())  # GPT-2's linear layer
    library = class_of(module).__module__.split(".")[0]
    return isinstance(module, (nn.Linear, nn.Embedding, conv1d)) or library in ("torch", "peft", "liger_trainer")
