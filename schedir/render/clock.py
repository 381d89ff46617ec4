"""The unit of time in which one timeline, or two on one axis, are shown."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs

from schedir.render.styled import number
from schedir.simulator import Timeline, Unit, factor, in_unit

_SHOWN: dict[Unit, str] = {"s": "s", "ms": "ms", "us": "µs"}
"""The longest first."""


@attrs.frozen
class Clock:
    """`unit` is empty where a unit may be any; a time of the i-th timeline is `factors[i]` times
    as many of them."""

    unit: str
    factors: tuple[float, ...]

    @property
    def title(self) -> str:
        """The title of a time axis."""
        return f"time ({self.unit})" if self.unit else "time"

    def duration(self, shown: float) -> str:
        """A time in this unit, with it, in four digits, or in whole units where these are more."""
        digits = 3 - math.floor(math.log10(shown)) if shown else 0
        return f"{number(round(shown, max(0, digits)))} {self.unit}".rstrip()


def clock_of(*timelines: Timeline) -> Clock:
    """The largest unit of which the longest of the timelines takes at least one.

    A timeline without a unit is taken to have that of the others.
    """
    units = [timeline.unit for timeline in timelines]
    known = next((unit for unit in units if unit is not None), None)
    if known is None:
        return Clock("", (1.0,) * len(timelines))
    units = [unit or known for unit in units]
    shown = _largest(
        max(line.makespan * factor(unit, "s") for line, unit in zip(timelines, units, strict=True))
    )
    return Clock(_SHOWN[shown], tuple(factor(unit, shown) for unit in units))


def _largest(seconds: float) -> Unit:
    return next((unit for unit in _SHOWN if seconds >= factor(unit, "s")), "us")


def unit_of(times: Iterable[float], unit: Unit) -> tuple[str, float]:
    """The largest unit of which the longest of some times takes at least one, and how many of that
    make one of theirs."""
    shown = _largest(max(times, default=0) * factor(unit, "s"))
    return _SHOWN[shown], factor(unit, shown)


def readable(*timelines: Timeline) -> list[Timeline]:
    """The timelines in that unit, as they are where it may be any."""
    shown = clock_of(*timelines).unit
    unit = next((unit for unit, name in _SHOWN.items() if name == shown), None)
    return list(timelines) if unit is None else [in_unit(line, unit) for line in timelines]


def with_unit(time: float, unit: Unit | None) -> str:
    """A time with its unit, if it has one."""
    return number(time) if unit is None else f"{number(time)} {_SHOWN[unit]}"
