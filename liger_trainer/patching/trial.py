"""The comparison of two computations: on the same inputs, in float32 and in bfloat16, values and gradients.

The formula is compared in plain torch, on every input and in every precision. Where Triton drives the device, the
kernels follow, in bfloat16 on the first input: they are those that training launches, and no other is compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.compile_together import Compiler
from liger_trainer.kernels.runtime import TRITON_DEVICES, plain_torch
from liger_trainer.patching.inputs import AS_DRAWN, Case
from liger_trainer.patching.side_effects import SideEffectError

FP32_TOLERANCE = 1e-5
"""Largest relative difference in float32, of values and gradients, at which two forwards count as equal."""

# In bfloat16 the two may round in different places. Ours must be as close to the float32 result as the original, give
# or take a quarter or, of fewer than 256 numbers (GPT-OSS's sinks), four deviations of the ratio of two such means; or
# as close as one rounding of the result allows: on average, or at most, where a tensor has few numbers.
_BF16_SLACK, _DEVIATIONS, _NUMBERS = 1.25, 4.0, 256
_BF16_FLOOR = 2.0**-9
_BF16_FLOOR_OF_FEW = 2.0**-8
_FEW = 32


class Slack(NamedTuple):
    """How far ours may be from the original.

    Attributes:
        rounded: How many times the original's error in bfloat16 ours may have.
        of_sums: The same for gradients of fewer than 256 numbers.
        gradients: The largest relative difference of gradients in float32.
    """

    rounded: float = _BF16_SLACK
    of_sums: float = _BF16_SLACK
    gradients: float = FP32_TOLERANCE


OF_RECURRENCES = Slack(1.5, 3.0, 1e-4)
"""For recurrences, which solve a system for each chunk, and round the factors of their products in between.

Gradients of decays are sums over all tokens of terms of either sign: those that torch computes in float32 are up to
4e-5 from those in float64. A wrong formula is off by far more.
"""

_VALUES = Case("", gradients=False)
_DRAWS = "in training it draws random numbers, as dropout does, which the kernel does not"

Computation = Callable[..., Any]
_Results = list[torch.Tensor | None]

Later = Callable[[Callable[[], _Results], Callable[[_Results], bool]], None]
"""Takes what runs kernels, and whether its results are right, to be asked later; see [`Trial`]."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How two computations compare."""

    error: float  # largest relative float32 difference of outputs and gradients; infinite if one is missing
    # Largest relative bfloat16 difference of an output, which distinguishes formulas that only round differently. Those
    # of gradients, which are sums, are mostly noise.
    distance: float = 0.0
    reason: str = ""  # why they do not agree; empty if they do
    case: str = ""  # the name of the [`Case`] that shows it; empty for the random tensors themselves

    @property
    def equal(self) -> bool:
        """Whether ours may replace the original."""
        return not self.reason

    def explained(self, what: str) -> Agreement:
        """This result with the reason that the original computes `what`, if both ran and their values differ."""
        if self.equal or not math.isfinite(self.error) or self.error <= FP32_TOLERANCE or self.reason == _DRAWS:
            return self
        return dataclasses.replace(self, reason=_differs(f"it computes {what}", self.error, self.case))


class _CannotCompareError(Exception):
    """Says why, as the reason in the report."""


class _NotTakenError(Exception):
    """The original takes no such input, and need not."""


class Trial:
    """The original of one part, which runs once on each input, however many of ours are compared with it.

    Args:
        original: A function of the tensors, and of the constants after them. For a case in evaluation mode it gets
            ``training=False`` too.
        tensors: About as large as 1, in float32; outputs and the gradients of all are compared.
        inputs: More inputs, for `everywhere`.
        constants: Tensors that stay float32 and are not differentiated.
        slack: How far ours may be from the original.
        later: Takes the kernels' run, so that kernels of several trials may be compiled together. None runs them at
            once, where the formula agrees.
    """

    def __init__(
        self,
        original: Computation,
        tensors: Sequence[torch.Tensor],
        inputs: Iterable[Case] = (),
        constants: Sequence[torch.Tensor] = (),
        slack: Slack = Slack(),  # noqa: B008  (frozen)
        later: Later | None = None,
    ) -> None:
        self._original, self._inputs, self._slack, self._later = original, tuple(inputs), slack, later
        self._tensors, self._constants = list(tensors), list(constants)
        self._known: dict[Any, _Results] = {}
        self._drawing: set[Any] = set()  # where the original draws random numbers

    def on_cpu(self) -> Trial:
        """The same on the CPU, where torch computes ours: it tells formulas apart before any kernel is compiled."""
        if self._tensors[0].device.type == "cpu":
            return self
        tensors, constants = ([each.cpu() for each in held] for held in (self._tensors, self._constants))
        return Trial(self._original, tensors, self._inputs, constants, self._slack)

    def compare(self, ours: Computation) -> Agreement:
        """Compares the two on the tensors themselves, in float32, where they agree in bfloat16, then in kernels."""
        agreement = self._in_float32(ours, AS_DRAWN)
        if not agreement.equal:
            return agreement
        try:
            _, nearby = self._results(ours, AS_DRAWN, torch.bfloat16)
        except _CannotCompareError as reason:
            return Agreement(math.inf, reason=str(reason))
        agreement = self._rounding(agreement.error, nearby)
        if not agreement.equal or self._tensors[0].device.type not in TRITON_DEVICES:
            return agreement
        return self._in_kernels(ours, agreement)

    def under_autocast(self, ours: Computation) -> bool:
        """Whether ours is as close to float32 under autocast as the original; after `compare`."""
        truth, device = self._known[AS_DRAWN, torch.float32], self._tensors[0].device
        under = functools.partial(torch.autocast, device.type, torch.bfloat16)
        for dtype in (torch.float32, torch.bfloat16):
            tensors = [tensor.to(dtype) for tensor in self._tensors]
            try:
                with plain_torch():
                    rounded = _run(self._original, tensors, self._constants, AS_DRAWN, under)
                    nearby = _run(ours, tensors, self._constants, AS_DRAWN, under)
            except Exception:
                return False
            if not _judge_rounding(0.0, truth, rounded, nearby, len(truth) - len(tensors), self._slack).equal:
                return False
        return True

    def everywhere(self, ours: Computation, agreement: Agreement) -> Agreement:
        """Compares the two in float32 on all other inputs, up to the first where they differ, after `compare`."""
        for case in self._inputs:
            if not agreement.equal:
                break
            here = self._in_float32(ours, case)
            agreement = dataclasses.replace(agreement, error=max(agreement.error, here.error)) if here.equal else here
        return agreement

    def prove(self, ours: Computation) -> Agreement:
        """Both."""
        return self.everywhere(ours, self.compare(ours))

    def _in_kernels(self, ours: Computation, agreement: Agreement) -> Agreement:
        """`agreement` if the kernels agree too, or are to be asked later."""
        tensors = [tensor.to(torch.bfloat16) for tensor in self._tensors]

        def run() -> _Results:
            with _same_draws(tensors[0].device):
                return _run(ours, tensors, self._constants, AS_DRAWN)

        if self._later is not None:
            self._later(run, lambda results: self._rounding(agreement.error, results).equal)
            return agreement
        try:
            return self._rounding(agreement.error, run())
        except Exception as error:
            return Agreement(math.inf, reason=_did_not_run(error))

    def _rounding(self, error: float, nearby: _Results) -> Agreement:
        """Whether ours in bfloat16 is as close to float32 as the original, both of which are known."""
        truth, rounded = (self._known[AS_DRAWN, dtype] for dtype in (torch.float32, torch.bfloat16))
        return _judge_rounding(error, truth, rounded, nearby, len(truth) - len(self._tensors), self._slack)

    def _in_float32(self, ours: Computation, case: Case) -> Agreement:
        try:
            truth, exact = self._results(ours, case, torch.float32)
        except _NotTakenError:
            return Agreement(0.0)
        except _CannotCompareError as reason:
            return Agreement(math.inf, reason=f"{reason}{_where(case)}", case=case.name)
        mismatch = _mismatch(truth, exact)
        if mismatch:
            return Agreement(math.inf, reason=f"{mismatch}{_where(case)}", case=case.name)
        alike = case is not AS_DRAWN
        errors = [relative_difference(one, other, alike) for one, other in zip(truth, exact)]
        error, outputs = max(errors), len(truth) - (len(self._tensors) if case.gradients else 0)
        allowed = max(errors[:outputs]) <= FP32_TOLERANCE and error <= self._slack.gradients
        if not allowed and self._differ_by_draws(ours, case):
            return Agreement(error, reason=_DRAWS, case=case.name)
        if not allowed:
            return Agreement(error, reason=_differs("it computes another formula", error, case.name), case=case.name)
        return Agreement(error)

    def _differ_by_draws(self, ours: Computation, case: Case) -> bool:
        """Whether the original draws random numbers, and the two agree where it is in evaluation mode."""
        draws = case.training and (case, torch.float32) in self._drawing
        return draws and self._in_float32(ours, dataclasses.replace(case, training=False)).equal

    def _results(self, ours: Computation, case: Case, dtype: torch.dtype) -> tuple[_Results, _Results]:
        """Outputs and gradients of the original and of ours."""
        changed = case.change([*self._tensors, *self._constants])
        tensors = [tensor.to(dtype) for tensor in changed[: len(self._tensors)]]
        constants = changed[len(tensors) :]
        key = case, dtype
        try:
            if key not in self._known:
                with _same_draws(tensors[0].device) as drawn:
                    self._known[key] = _run(self._original, tensors, constants, case)
                    if drawn():
                        self._drawing.add(key)
        except SideEffectError as effect:
            raise _CannotCompareError(str(effect)) from effect
        except Exception as error:
            failure = _CannotCompareError if case.required else _NotTakenError
            raise failure(f"the probe could not run its forward: {_first_line(error)}") from error
        try:
            with _same_draws(tensors[0].device), plain_torch():
                return self._known[key], _run(ours, tensors, constants, case)
        except Exception as error:
            raise _CannotCompareError(_did_not_run(error)) from error


def runs(computation: Computation, tensors: Sequence[torch.Tensor], constants: Sequence[torch.Tensor]) -> bool:
    """Whether `computation` takes these; see [`Trial`]."""
    try:
        computation(*tensors, *constants)
    except SideEffectError:
        return True
    except Exception:
        return False
    return True


def values_alike(
    original: Computation,
    ours: Computation,
    tensors: Sequence[torch.Tensor],
    constants: Sequence[torch.Tensor] = (),
    gradients: bool = True,
) -> bool:
    """Whether both give the same dtypes, and the same values within bfloat16 rounding, in plain torch; see [`Trial`].

    Without `gradients`, these are values alone, of which an infinity equals itself and NaN equals NaN.
    """
    found = []
    try:
        for computation in (original, ours):
            with _same_draws(tensors[0].device), plain_torch():
                found.append(_run(computation, tensors, constants, AS_DRAWN if gradients else _VALUES))
    except Exception:
        return False
    distance = _rms if gradients else functools.partial(relative_difference, alike=True)
    return not _mismatch(*found) and all(distance(a, b) <= 2**-7 for a, b in zip(*found))


def _run(
    computation: Computation,
    tensors: Sequence[torch.Tensor],
    constants: Sequence[torch.Tensor],
    case: Case,
    under: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> _Results:
    """Outputs and gradients; the forward alone runs `under` a context."""
    leaves = [tensor.detach().clone().requires_grad_(case.gradients) for tensor in tensors]
    with torch.set_grad_enabled(case.gradients), under():
        result = computation(*leaves, *constants, **({} if case.training else {"training": False}))
    outputs = list(result) if isinstance(result, tuple) else [result]
    if not case.gradients:
        return [output.detach() for output in outputs]
    upstream = []
    for output in outputs:
        # A fixed wave, as a wrong formula could cancel a constant gradient.
        wave = torch.arange(output.numel(), device=output.device, dtype=torch.float32).mul(0.7).cos()
        upstream.append(wave.to(torch.bfloat16).to(output.dtype).view(output.shape))
    gradients = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    return [tensor if tensor is None else tensor.detach() for tensor in (*outputs, *gradients)]


@contextlib.contextmanager
def _same_draws(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Every run inside draws the same random numbers, as for a dropout; the result says whether it has drawn any."""

    def state() -> list[torch.Tensor]:
        of_device = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
        return [torch.get_rng_state(), *of_device]

    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        before = state()
        yield lambda: not all(map(torch.equal, before, state()))


def _mismatch(expected: Sequence[torch.Tensor | None], got: Sequence[torch.Tensor | None]) -> str:
    if len(expected) != len(got):
        return "it returns another number of tensors than the kernel"
    for one, other in zip(expected, got):
        if (one is None) != (other is None):
            return "an input has a gradient in one of the two only"
        if one is not None and other is not None and (one.shape != other.shape or one.dtype != other.dtype):
            return f"it gives {tuple(one.shape)} {one.dtype} where the kernel gives {tuple(other.shape)} {other.dtype}"
    return ""


def _judge_rounding(
    error: float, truth: _Results, rounded: _Results, nearby: _Results, outputs: int, slack: Slack
) -> Agreement:
    """Whether ours in bfloat16, `nearby`, is as close to `truth` as the original, `rounded`; `outputs` come first."""
    mismatch = _mismatch(rounded, nearby)
    if mismatch:
        return Agreement(math.inf, reason=mismatch)
    distance = max(_rms(one, other) for one, other in zip(rounded[:outputs], nearby))
    for place, (true, theirs, own) in enumerate(zip(truth, rounded, nearby)):
        count = 0 if true is None else true.numel()
        times = slack.of_sums if place >= outputs and count < _NUMBERS else slack.rounded
        times = max(times, 1 + _DEVIATIONS / math.sqrt(max(count, 1)))
        allowed = max(times * _rms(true, theirs), _BF16_FLOOR_OF_FEW if count < _FEW else _BF16_FLOOR)
        if not _rms(true, own) <= allowed:
            difference = f"relative difference {_rms(theirs, own):.1e}"
            return Agreement(error, distance, f"in bfloat16 it rounds differently ({difference})")
    return Agreement(error, distance)


def _where(case: Case) -> str:
    return f" (with {case.name})" if case.name else ""


def _differs(what: str, error: float, case: str = "") -> str:
    return f"{what} ({'with ' + case + ', ' if case else ''}relative difference {error:.1e})"


def relative_difference(one: torch.Tensor | None, other: torch.Tensor | None, alike: bool = False) -> float:
    """The largest difference, relative to the largest number of `one`.

    With `alike`, NaN equals NaN, and an infinity itself; otherwise the difference is infinite.
    """
    if one is None or other is None or not one.numel():
        return 0.0
    if torch.equal(one, other):
        return 0.0
    one, other = one.double(), other.double()
    difference = (one - other).abs()
    if alike:
        difference = difference.where((one != other) & ~(one.isnan() & other.isnan()), 0.0)
        one = one.where(one.isfinite(), 0.0)
    error = float(difference.max() / one.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    return math.inf if math.isnan(error) else error


def _rms(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None or not one.numel():
        return 0.0
    scale = one.double().norm().clamp_min(torch.finfo(torch.float32).tiny)
    return float((one.double() - other.double()).norm() / scale)


def _did_not_run(error: Exception) -> str:
    return f"the kernel did not run: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120]}" if text else type(error).__name__


class KernelRuns:
    """The runs of kernels that proofs have put off: compiled together, then compared with what proofs found before.

    Args:
        compiler: Compiles the kernels that a run launches as soon as it is put off; None where nothing is compiled.
    """

    def __init__(self, compiler: Compiler | None) -> None:
        self._compiler = compiler
        self._runs: list[tuple[Callable[[], Any], Callable[[Any], bool]]] = []

    def later(self, run: Callable[[], Any], is_right: Callable[[Any], bool]) -> None:
        """Puts `run` off; `is_right` will say whether its result is."""
        self._runs.append((run, is_right))
        if self._compiler is not None:
            # Whatever fails here fails again where it counts.
            with self._compiler.noting(), contextlib.suppress(Exception):
                run()

    def are_right(self) -> bool:
        """Whether every run that was put off has the right result."""
        if self._compiler is not None:
            self._compiler.wait()
        try:
            return all(is_right(run()) for run, is_right in self._runs)
        except Exception:
            return False
