"""Round numbers along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence


def span(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest of `values`, kept apart where they are (nearly) the same."""
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    if high - low <= 1e-6 * size or not size:
        room = 0.05 * size or 1.0
        return low - room, high + room
    return low, high


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[tuple[float, str]]:
    """Multiples of 1, 2 or 5 times a power of ten in [low, high], each with its label.

    Args:
        low: The lower end; below `high`.
        high: The upper end.
        most: About how many there may be.
        whole: Whether only integers make sense.
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    step = max(step, 1.0) if whole else step
    slack = 1e-9  # for an end that is a multiple, but for rounding
    first, last = math.ceil(low / step - slack), math.floor(high / step + slack)
    values = [index * step for index in range(first, last + 1)]
    return [(value, label(value, step)) for value in values]


def label(value: float, step: float) -> str:
    """`value` with as many digits as tell it from `value + step`."""
    size = abs(value)
    if size < 0.5 * step or not size:
        return "0"
    last = math.floor(math.log10(step) + 1e-9)
    if 1e-3 <= size < 1e6:
        return f"{value:,.{max(0, -last)}f}"
    mantissa, exponent = f"{value:.{max(0, math.floor(math.log10(size)) - last)}e}".split("e")
    return f"{mantissa}e{int(exponent)}"
