"""The parts of a timeline in which all ranks repeat themselves, which pictures draw once.

A pattern is a period of time and a number of microbatches. An action at time t runs again at
t + period, on the same rank and for the same duration, for the microbatch that many later. A
stretch of time in which that holds for every action on all ranks can be drawn once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from schedir.ir import COMPUTE, STEPS
from schedir.simulator import Timeline
from schedir.simulator.steady_state import by_microbatch

_MOST_MICROBATCHES = 64  # of a pattern
_MOST_WORK = 3 * 10**7  # pairs of actions to compare, about a second of work
_FEWEST_TIMES = 3
_TOLERANCE = 1e-9  # of the makespan

Floats: TypeAlias = NDArray[Any]


@attrs.frozen
class Repeat:
    """From `start` on, all ranks do the same `times` times, each time `microbatches` later."""

    start: float
    period: float
    times: int
    microbatches: int

    @property
    def end(self) -> float:
        """The end of the last repetition."""
        return self.start + self.period * self.times


def repeats(timeline: Timeline) -> list[Repeat]:
    """The longest stretches of a timeline in which all ranks repeat themselves, by time."""
    if not timeline.makespan:
        return []
    runs = _Runs(timeline)
    patterns: list[_Pattern] = []
    work = 0
    for microbatches in range(1, min(_MOST_MICROBATCHES, runs.start.shape[1] // 2) + 1):
        found = list(runs.patterns(microbatches))
        patterns += found
        lengths = [repeat.end - repeat.start for p in found if (repeat := runs.longest([p]))]
        work += runs.start.size
        # Multiples of this pattern add nothing.
        if max(lengths, default=0) > timeline.makespan / 2 or work > _MOST_WORK:
            break
    return list(_split(runs, patterns, 0.0, timeline.makespan))


def _split(runs: _Runs, patterns: list[_Pattern], since: float, until: float) -> Iterator[Repeat]:
    """The longest repeat of a stretch, and those before and after it."""
    repeat = runs.longest(patterns, since, until)
    if repeat is not None:
        yield from _split(runs, patterns, since, repeat.start)
        yield repeat
        yield from _split(runs, patterns, repeat.end, until)


@attrs.frozen(eq=False)
class _Pattern:
    """A period, and where it breaks: the starts of actions without a repetition a period later, and
    of actions that repeat nothing from a period before; both ascending."""

    period: float
    microbatches: int
    without_next: Floats
    without_last: Floats


class _Runs:
    """The times of the drawn actions: rows are ranks, stages and kinds, columns microbatches."""

    def __init__(self, timeline: Timeline) -> None:
        columns = timeline.schedule.columns
        place, first, _ = by_microbatch(columns)
        drawn = columns.is_kind(*COMPUTE)[first]
        place, labelled = place[drawn], ~columns.is_kind(*STEPS)[first[drawn]]
        self.until = timeline.makespan
        self.slack = _TOLERANCE * timeline.makespan
        self.start = np.where(place < 0, np.nan, timeline.starts[place])
        self.length = np.where(place < 0, np.nan, timeline.ends[place]) - self.start
        lengths = self.length[labelled]  # an update may take next to no time
        self.shortest = np.nanmin(lengths, initial=np.inf, where=lengths > self.slack)

    @cached_property
    def starts(self) -> Floats:
        """The starts of all actions, ascending."""
        return np.unique(self.start[~np.isnan(self.start)])

    def patterns(self, microbatches: int) -> Iterator[_Pattern]:
        """The patterns of a number of microbatches, with the two most frequent periods."""
        apart = self.start[:, microbatches:] - self.start[:, :-microbatches]
        known = apart[apart > self.slack]  # NaN is not
        periods, many = np.unique(known.round(9), return_counts=True)
        for period in periods[np.argsort(-many, kind="stable")][:2].tolist():
            same = np.abs(apart - period) <= self.slack
            longer = self.length[:, microbatches:] - self.length[:, :-microbatches]
            same &= np.abs(longer) <= self.slack
            none = np.zeros((len(self.start), microbatches), bool)
            without = (~np.hstack(each) for each in ([same, none], [none, same]))
            breaks = (np.sort(self.start[lacking & ~np.isnan(self.start)]) for lacking in without)
            yield _Pattern(period, microbatches, *breaks)

    def longest(
        self, patterns: list[_Pattern], since: float = 0.0, until: float | None = None
    ) -> Repeat | None:
        """The longest repeat between two times, None if there is none of a useful length."""
        until = self.until if until is None else until
        starts = self.starts[(self.starts >= since - self.slack) & (self.starts < until)]
        best: Repeat | None = None
        for pattern in patterns:
            period = pattern.period
            ends = np.minimum(
                _first_from(pattern.without_next, starts - self.slack) + period,
                _first_from(pattern.without_last, starts + period - self.slack),
            ).clip(max=until)
            times = ((ends - starts + self.slack) // period).astype(np.int64)
            if not len(times) or (most := int(times.max())) < _FEWEST_TIMES:
                continue
            if best is None or period * most > best.end - best.start + self.slack:
                start = self._clear(starts[times == most].tolist(), period)
                best = Repeat(start, period, most, pattern.microbatches)
        return best

    def _clear(self, starts: list[float], period: float) -> float:
        """The first start from which a period ends right before an action, or cuts few actions."""
        starts = [start for start in starts if start < starts[0] + period - self.slack]

        def begun(start: float) -> int:
            """The actions whose beginning is cut, and so their label."""
            age = start + period - self.start
            return int(((age > self.slack) & (age < self.shortest - self.slack)).sum())

        return min(starts, key=begun)


def _first_from(times: Floats, since: Floats) -> Floats:
    """The first of `times` that is not before each time."""
    return np.append(times, np.inf)[np.searchsorted(times, since)]
