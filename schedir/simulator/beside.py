"""Timelines as they can stand beside each other: in one unit, and one for several steps."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from schedir.simulator.timeline import Timeline
from schedir.simulator.values import Unit

_PER_SECOND: dict[Unit, int] = {"s": 1, "ms": 10**3, "us": 10**6}
UNITS: tuple[Unit, ...] = tuple(_PER_SECOND)
"""The units of time, the longest first."""


def factor(unit: Unit | None, other: Unit) -> float:
    """How many of the `other` unit one is. What has no unit is taken to be in that one already."""
    return 1 if unit in (None, other) else _PER_SECOND[other] / _PER_SECOND[unit]


def in_unit(timeline: Timeline, unit: Unit) -> Timeline:
    """The same in another unit of time. One of no unit is taken to be in that one already."""
    times = factor(timeline.unit, unit)
    if times == 1:
        return attrs.evolve(timeline, unit=unit)
    measured = timeline.measured
    if measured is not None:
        measured = attrs.evolve(measured, clock_error=measured.clock_error * times)
    return attrs.evolve(
        timeline,
        starts=timeline.starts * times,
        ends=timeline.ends * times,
        unit=unit,
        measured=measured,
    )


def median_step(timelines: Sequence[Timeline]) -> Timeline:
    """The one of the median makespan, of an even number the quicker of the two in the middle.

    Raises ValueError where there is none.
    """
    if not timelines:
        raise ValueError("there is no timeline to choose from")
    return sorted(timelines, key=lambda line: line.makespan)[(len(timelines) - 1) // 2]
