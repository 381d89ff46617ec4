"""Captions that tell timelines apart, their figures in a few words, and the unit and the window of
time in which one timeline, or two on one axis, are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from schedir.display import rounded
from schedir.errors import SchedirError
from schedir.ir import Schedule
from schedir.render.text import count, number

if TYPE_CHECKING:
    from schedir.simulator import Timeline, Unit
    from schedir.simulator.steady_state import SteadyState

_STEADY = ("period_microbatches", "time_per_microbatch", "bubble_fraction")
UNIT_NAMES: dict[Unit | None, str] = {None: "", "s": "s", "ms": "ms", "us": "µs"}


def title(schedule: Schedule) -> str:
    """The name of a schedule, and its shape."""
    return (
        f"{schedule.name}: {count(schedule.ranks, 'rank')}, {count(schedule.stages, 'stage')}, "
        f"{count(schedule.microbatches, 'microbatch', 'es')}"
    )


def caption(timeline: Timeline) -> str:
    """`predicted`, or `measured, step 3`."""
    measured = timeline.measured
    return "predicted" if measured is None else f"measured, step {measured.step}"


def captions(lines: Sequence[Timeline]) -> list[str]:
    """Captions that tell several timelines apart: predicted or measured, or else the schedule, with
    a number if that is the same; empty for a single timeline."""
    if len(lines) == 1:
        return [""]
    measured = any(line.measured for line in lines)
    found = [caption(line) if measured else line.schedule.name for line in lines]
    if len(set(found)) < len(found):
        found = [f"{name} ({turn})" for turn, name in enumerate(found, 1)]
    return found


def bubble(timeline: Timeline) -> str:
    """The bubble of the makespan, and the bubble of the longest span if it differs."""
    whole, span = f"{timeline.bubble_fraction:.1%}", f"{timeline.span_bubble_fraction:.1%}"
    return whole if whole == span else f"{whole} ({span} of the longest span)"


def steady_figures(steady: SteadyState | None) -> dict[str, Any] | None:
    """The steady state of a schedule as JSON. Its keys are a contract."""
    return None if steady is None else {name: getattr(steady, name) for name in _STEADY}


def with_unit(time: float, unit: Unit | None) -> str:
    """A time with its unit, if it has one."""
    return f"{number(time)} {UNIT_NAMES[unit]}".rstrip()


def makespan(timeline: Timeline, write: Callable[[float], str] | None = None) -> str:
    """The makespan in words, with the channel model that it was simulated under. `write` writes a
    time; by default with its unit."""
    write = write or partial(with_unit, unit=timeline.unit)
    found, least = write(timeline.makespan), timeline.edge_makespan
    if timeline.channel is not None:
        found += f" under {timeline.channel}"
    return found if least is None else f"{found} ({write(least)} under edge)"


def costs(timeline: Timeline, write: Callable[[float], str] | None = None) -> str:
    """The makespan and the bubble of a timeline."""
    return f"makespan {makespan(timeline, write)}, bubble {bubble(timeline)}"


def named_costs(timeline: Timeline, name: str, write: Callable[[float], str] | None = None) -> str:
    """The makespan and the bubble after the name of a timeline, or after the caption of a measured
    one without a name."""
    name = name or (caption(timeline) if timeline.measured else "")
    return f"{name}: {costs(timeline, write)}" if name else costs(timeline, write)


def verdict(timeline: Timeline) -> str:
    """The makespan and the bubble, and the step of a measured timeline."""
    measured = timeline.measured
    return costs(timeline) + (f", measured at step {measured.step}" if measured else "")


def axis_title(timeline: Timeline) -> str:
    """The title of a time axis."""
    return f"time ({UNIT_NAMES[timeline.unit]})" if timeline.unit else "time"


def readable(timeline: Timeline, against: Timeline | None = None) -> list[Timeline]:
    """The one or two timelines in the unit that suits the longer; unchanged if none has a unit.

    A timeline without a unit counts as one in the unit of the others.
    """
    from schedir.simulator import factor, in_unit  # not for a schedule, which has a title alone

    lines = [timeline] if against is None else [timeline, against]
    known = next((line.unit for line in lines if line.unit), None)
    if known is None:
        return lines
    lines = [line if line.unit else in_unit(line, known) for line in lines]
    shown = unit_for(max(line.makespan * factor(line.unit, "s") for line in lines))
    return [line if line.unit == shown else in_unit(line, shown) for line in lines]


def unit_for(seconds: float) -> Unit:
    """The largest unit that a time is not shorter than."""
    from schedir.simulator.values import UNITS, factor

    return next((unit for unit in UNITS if seconds >= factor(unit, "s")), "us")


def window_of(
    lines: Sequence[Timeline], start: float = 0, end: float | None = None
) -> tuple[float, float]:
    """The window of time from `start` to `end`, or to the end of the last timeline.

    Raises SchedirError if the window is empty.
    """
    last = max(line.makespan for line in lines)
    until = last if end is None else min(end, last)
    if not 0 <= start < until and last:
        said = "the end" if end is None else rounded(end)
        raise SchedirError(
            f"there is nothing to draw from {rounded(start)} to {said}: the timeline goes "
            f"from 0 to {rounded(last)}"
        )
    return start, until
