"""Finds the steady state of a timeline: the part in which all ranks repeat themselves.

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

from schedir.ir import COMPUTE, KINDS, Kind
from schedir.simulator import Timeline

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
    """The times of the drawn actions: rows are stages and kinds, columns are microbatches."""

    def __init__(self, timeline: Timeline) -> None:
        columns = timeline.schedule.columns
        self.until = timeline.makespan
        self.slack = _TOLERANCE * timeline.makespan
        kept = columns.where(*(COMPUTE - {Kind.OPTIM_STEP}))
        rows, row = np.unique(
            columns.stage[kept].astype(np.int64) * len(KINDS) + columns.kind[kept],
            return_inverse=True,
        )
        shape = (len(rows), timeline.schedule.microbatches)
        at = (row, columns.microbatch[kept])
        self.start, self.length = np.full(shape, np.nan), np.full(shape, np.nan)
        self.rank = np.full(shape, -1)
        self.start[at] = timeline.starts[kept]
        self.length[at] = timeline.ends[kept] - timeline.starts[kept]
        self.rank[at] = columns.rank[kept]
        # Steps have no microbatch: they have only times, by stage and rank.
        steps = columns.where(Kind.OPTIM_STEP)
        steps = steps[~np.isnan(timeline.starts[steps])]
        lane = columns.stage[steps].astype(np.int64) * columns.ranks + columns.rank[steps]
        self.step_start = timeline.starts[steps].astype(float)
        self.step_lane = lane * 4 * self.until
        self.step_keys = np.sort(self.step_lane + self.step_start)

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
            same &= self.rank[:, microbatches:] == self.rank[:, :-microbatches]
            longer = self.length[:, microbatches:] - self.length[:, :-microbatches]
            same &= np.abs(longer) <= self.slack
            none = np.zeros((len(self.start), microbatches), bool)
            yield _Pattern(
                period,
                microbatches,
                self._unlike(np.hstack([same, none]), period),
                self._unlike(np.hstack([none, same]), -period),
            )

    def _unlike(self, same: NDArray[np.bool_], period: float) -> Floats:
        """The starts of all actions and steps that are not the `same`."""
        others = self.start[~same]
        images = self.step_lane + self.step_start + period
        nearest = np.searchsorted(self.step_keys, images - self.slack)
        nearest = np.minimum(nearest, max(len(self.step_keys) - 1, 0))
        lost = np.abs(self.step_keys[nearest] - images) > self.slack if len(images) else images > 0
        return np.sort(np.concatenate([others[~np.isnan(others)], self.step_start[lost]]))

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
        shortest = np.nanmin(self.length, initial=np.inf, where=self.length > self.slack)

        def begun(start: float) -> int:
            """The actions whose beginning is cut, and so their label."""
            age = start + period - self.start
            return int(((age > self.slack) & (age < shortest - self.slack)).sum())

        return min(starts, key=begun)


def _first_from(times: Floats, since: Floats) -> Floats:
    """The first of `times` that is not before each time."""
    return np.append(times, np.inf)[np.searchsorted(times, since)]
