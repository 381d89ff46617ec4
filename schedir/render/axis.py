"""Times on an axis: their scale, the columns or pixels at which they stand, and the ticks."""

from __future__ import annotations

import math

_LARGEST = 1e280


def finite(scale: float) -> float:
    """The scale; if actions take almost no time, the largest that times can be multiplied by."""
    return min(scale, _LARGEST)


def nearest(value: float) -> int:
    """The nearest whole number, halves up (`round` rounds every second half down)."""
    return math.floor(value + 0.5)


def ticks(start: float, end: float, step: float) -> list[float]:
    """The multiples of a step between two times."""
    first, last = math.ceil(start / step * (1 - 1e-9)), math.floor(end / step * (1 + 1e-9))
    return [turn * step for turn in range(first, last + 1)]


def round_step(least: float) -> float:
    """The smallest number that is 1, 2 or 5 times a power of ten, and at least `least`."""
    power: float = 10 ** math.floor(math.log10(least))
    step = next(step for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))
    return step * power
