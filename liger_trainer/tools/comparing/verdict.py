"""Whether ours agrees with stock, and by which rule."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from liger_trainer.errors import UserError
from liger_trainer.tools.comparing.side import AGAIN, OURS, STOCK, Measured

FACTOR = 10
ROUNDING = 2.0**-23
"""The distance of neighbours in fp32, relative to their size, in which losses and norms are computed."""
RULE = (
    f"Ours agrees if its losses and gradient norms, at every step, and its gradients at the first step differ from "
    f"stock's by at most {FACTOR} times what the two stock runs differ by. That is their largest difference at any "
    "step; for the gradient of a part of the model, that of the same part, or of the median part if that is larger. "
    "It counts as at least one rounding in fp32 (1.2e-07). All runs must start from the same weights and see as many "
    "tokens in every step."
)


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far two runs are from stock."""

    name: str  # ``"loss"``, ``"gradient norm"``, or a part of the model for its gradient at the first step
    ours: float  # our largest difference from stock: of the loss as it is, of all else relative to stock's norm
    noise: float  # the same distance of the second stock run
    yardstick: float  # the measure of ours: the noise, with the least that `RULE` says
    step: int = 1  # the step of our largest difference, from 1

    @property
    def ratio(self) -> float:
        """How many times the yardstick ours differs; NaN if it is not finite."""
        return self.ours / self.yardstick

    @property
    def agrees(self) -> bool:
        """Whether that is within `FACTOR`."""
        return self.ratio <= FACTOR


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a comparison."""

    curves: tuple[Difference, ...]  # the differences of loss and gradient norm
    parts: tuple[Difference, ...]  # comparisons of the gradients at the first step, the largest ratio first
    reasons: tuple[str, ...]  # why ours differs, as sentences; empty if it agrees

    @property
    def agrees(self) -> bool:
        """Whether ours agrees with stock."""
        return not self.reasons

    @property
    def word(self) -> str:
        """``"agrees"`` or ``"differs"``."""
        return "agrees" if self.agrees else "differs"


def judge(runs: Mapping[str, Measured]) -> Verdict:
    """Compares the runs, the measurements of each of `SIDES`.

    Raises:
        UserError: if stock's gradients are all 0 or its losses are not finite, so that nothing can be compared.
    """
    stock, again, ours = runs[STOCK], runs[AGAIN], runs[OURS]
    _check_stock(stock, again)
    reasons = list(_not_the_same(stock, again, ours))
    if len(ours.loss) != len(stock.loss):
        reasons.append(f"Ours trained {len(ours.loss)} steps, and stock {len(stock.loss)}.")
        return Verdict((), (), tuple(reasons))
    curves = (_loss(stock, again, ours), _norm(stock, again, ours))
    parts = sorted(_parts(again, ours), key=lambda part: (part.agrees, -part.ratio))
    for one in (*curves, *(part for part in parts if not part.agrees)):
        if not one.agrees:
            what = one.name if one in curves else f"gradient of {one.name}"
            reasons.append(
                f"At step {one.step}, the {what} differs by {one.ours:.1e}, {one.ratio:.3g} times {one.yardstick:.1e}."
            )
    return Verdict(curves, tuple(parts), tuple(reasons))


def _check_stock(stock: Measured, again: Measured) -> None:
    if not stock.loss:
        raise UserError("The data does not fill one batch, so nothing was trained; give more rows or a smaller batch.")
    if not any(stock.grad_norm):
        raise UserError(
            "Every gradient of the stock run is 0, so there is nothing to compare: rewards that are all alike, or no "
            "labels. Give other data or rewards."
        )
    for name, run in ((STOCK, stock), (AGAIN, again)):
        if not all(map(math.isfinite, (*run.loss, *run.grad_norm))):
            raise UserError(
                f"The run `{name}` has losses or gradients that are not finite; lower `learning_rate`, or use bf16."
            )


def _not_the_same(*runs: Measured) -> list[str]:
    reasons = []
    if len({run.weights for run in runs}) > 1:
        reasons.append("The runs started from different weights.")
    if any(run.tokens != runs[0].tokens for run in runs):
        reasons.append("The runs saw different numbers of tokens.")
    return reasons


def _loss(stock: Measured, again: Measured, ours: Measured) -> Difference:
    found, step = largest([abs(own - right) for own, right in zip(ours.loss, stock.loss)])
    noise, _ = largest([abs(own - right) for own, right in zip(again.loss, stock.loss)])
    least = ROUNDING * max(1.0, *map(abs, stock.loss))
    return Difference("loss", found, noise, max(noise, least), step)


def _norm(stock: Measured, again: Measured, ours: Measured) -> Difference:
    found, step = largest(relative_norms(ours, stock))
    noise, _ = largest(relative_norms(again, stock))
    return Difference("gradient norm", found, noise, max(noise, ROUNDING), step)


def relative_norms(run: Measured, stock: Measured) -> list[float]:
    """How far the gradient norms of a run are from stock's, relative to those."""
    return [_relative(abs(own - right), right) for own, right in zip(run.grad_norm, stock.grad_norm)]


def _parts(again: Measured, ours: Measured) -> list[Difference]:
    noises = {name: _relative(part["difference"], part["norm"]) for name, part in again.gradients.items()}
    typical = statistics.median(noises.values())
    found = []
    for name, part in ours.gradients.items():
        noise = noises.get(name, 0.0)  # a part that stock has no gradient of
        own = _relative(part["difference"], part["norm"])
        found.append(Difference(name, own, noise, max(noise if math.isfinite(noise) else 0.0, typical, ROUNDING)))
    return found


def _relative(difference: float, norm: float) -> float:
    if difference == 0:
        return 0.0
    return difference / norm if norm else math.inf


def largest(values: Sequence[float]) -> tuple[float, int]:
    """The largest of the values with its step, from 1; NaN is larger than any."""
    at = max(range(len(values)), key=lambda step: (math.isnan(values[step]), values[step]))
    return values[at], at + 1
