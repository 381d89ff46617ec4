"""The steady state of an asynchronous schedule: the cost of a microbatch once the pipeline is full.

    time    0              5              10             15             20
    rank 0  F0 F1       B0---*F2 B1---*F3 B2---*F4 B3---*F5 B4---*   B5---*
    rank 1     F0 B0---*F1 B1---*F2 B2---*F3 B3---*F4 B4---*F5 B5---*
                              └──────── each 3 later, for the next microbatch

Suppose that the lists repeat after some number of microbatches, and that in a long enough stretch
every action ends exactly one period after the same action that many microbatches before. Then all
following actions do too: an action starts when everything that it waits for has ended, and all of
that lies within the stretch.

A list that is too short to show this is made longer, by the generator that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.ir import COMPLETES_GRADIENTS, KINDS, Bools, Columns, Ints, Kind, Schedule
from schedir.passes import strip_communication
from schedir.simulator.costs import CostModel
from schedir.simulator.simulation import simulate
from schedir.simulator.timeline import Timeline
from schedir.simulator.values import Numbers, Unit, factor

Longer: TypeAlias = Callable[[int], Schedule]
"""Makes the same generator's schedule for another number of microbatches: `Schedule.rebuild`."""

_MOST_WORK = 3 * 10**7  # compared pairs of actions, about a second
_MOST_ACTIONS = 200_000  # of a list, about a second
_MULTIPLES = 8  # tried of each length: where updates come once a batch, it may divide few


@attrs.frozen(kw_only=True)
class SteadyState:
    """What an asynchronous schedule costs while its pipeline is full.

    In every `period` each rank runs `period_microbatches` more, always in the same way. `unit` is
    that of the costs, None for any. `bubble_fraction` is the part of all ranks' time in which they
    do not compute. `microbatches` is the number in the list that shows the steady state, and its
    timeline repeats on all ranks from `start` to `end`.

    >>> import schedir
    >>> steady = schedir.steady_state("pipedream", ranks=2)
    >>> steady.period, steady.period_microbatches, steady.time_per_microbatch
    (3.0, 1, 3.0)
    """

    period: float
    period_microbatches: int
    bubble_fraction: float
    unit: Unit | None
    microbatches: int
    start: float
    end: float

    @property
    def time_per_microbatch(self) -> float:
        """The period divided by its number of microbatches."""
        return self.period / self.period_microbatches


def steady_in_unit(steady: SteadyState, unit: Unit) -> SteadyState:
    """The steady state in another unit of time. Without a unit, its times count as that unit."""
    times = factor(steady.unit, unit)
    return attrs.evolve(
        steady,
        period=steady.period * times,
        start=steady.start * times,
        end=steady.end * times,
        unit=unit,
    )


def full_pipeline(
    line: Timeline, costs: CostModel | None, longer: Longer | None, channel: str | None = None
) -> tuple[Timeline, SteadyState | None]:
    """The timeline of the shortest list tried that shows the steady state of an asynchronous
    schedule, and the steady state; if none shows it, the timeline of the longest list, and None.

    The lists are that of `line`, simulated at the same costs under the same channel model, and
    those that `longer` makes for more microbatches, as long as they continue it. None: only its
    own. A synchronous schedule has no steady state.
    """
    if not line.schedule.is_asynchronous:
        return line, None
    steady = steady_state_of(line)
    lists = iter(()) if longer is None else _lengthened(line.schedule, longer)
    try:
        while steady is None:
            line = simulate(next(lists), costs, channel=channel)
            steady = steady_state_of(line)
    except (StopIteration, SchedirError):  # a longer list that doesn't run: there is no more to see
        pass
    return line, steady


def _lengthened(schedule: Schedule, longer: Longer) -> Iterator[Schedule]:
    """A complete schedule, longer each time, up to the most actions."""
    most = _MOST_ACTIONS // len(schedule.columns)
    multiples = range(2, most + 1)
    while multiples:
        for multiple in multiples[:_MULTIPLES]:
            try:
                made = longer(multiple * schedule.microbatches)
            except SchedirError:  # it can't be made for so many
                continue
            if _continues(made, schedule):
                yield made
                break
        else:
            return
        multiples = range(2 * multiple, most + 1)


def _continues(longer: Schedule, schedule: Schedule) -> bool:
    """True if every rank lists the same in both, up to its last forward in the shorter one, but for
    communication, which may have to be added to the longer one."""
    here = strip_communication(schedule).columns
    there = strip_communication(longer).columns
    if longer.placement != schedule.placement:
        return False
    forwards, last = here.where(Kind.FORWARD), np.full(here.ranks, -1)
    last[here.rank[forwards]] = forwards  # the last one stays
    places = np.flatnonzero(np.arange(len(here)) <= last[here.rank])
    rank = here.rank[places]
    others = (there.starts - here.starts)[rank] + places
    if (others >= there.starts[rank + 1]).any():
        return False
    begun = np.searchsorted(rank, np.arange(here.ranks + 1))
    return here.take(places, begun) == there.take(others, begun)


def steady_state_of(timeline: Timeline) -> SteadyState | None:
    """The steady state that a simulated timeline shows, None if it is too short to show one."""
    columns, ends = timeline.schedule.columns, timeline.ends
    place, first, column = by_microbatch(columns)
    rank = columns.rank[first]
    listed = np.zeros((columns.ranks, place.shape[1]), np.int64)  # up to a microbatch, by rank
    np.add.at(listed, rank, place >= 0)
    listed = listed.cumsum(axis=1)
    after, lag = _posted_after(timeline, column)
    for apart in range(1, min(place.shape[1] // 3, _MOST_WORK // max(place.size, 1)) + 1):
        earlier, later = place[:, :-apart], place[:, apart:]
        here, moved = earlier >= 0, (listed[:, apart:] - listed[:, :-apart])[rank]
        same = (later - earlier == moved) & (after[later] - after[earlier] == moved) | ~here
        took = ends[later] - ends[earlier]
        least = np.where(here, took, np.inf).min(axis=0)
        period = np.where(here, took, -np.inf).max(axis=0)
        # What an action waits for, in its list or on a channel, is no further behind it.
        length = lag + 2 * apart
        slack = _slack(timeline, length)
        alike = (same & (here == (later >= 0))).all(axis=0) & (np.abs(period - least) <= slack)
        start, end = _longest_run(alike, period, slack)
        if end - start >= length and np.ptp(period[start:end]) <= slack:
            return _figures(timeline, place[:, start : end + apart], apart)
    return None


def by_microbatch(columns: Columns) -> tuple[Ints, Ints, Ints]:
    """The places of actions, in a row for each rank, stage and kind, and a column for each
    microbatch, -1 where there is none; the first place of each row; the column of each place.

    An action of a whole stage, such as OPTIM_STEP, is in the column of the last gradient that its
    rank accumulated for the stage before it, and in none (-1) before the first.
    """
    stages = int(columns.stage.max(initial=0)) + 1
    held = columns.rank * stages + columns.stage
    order = np.argsort(held, kind="stable")  # as listed within each stage of a rank
    known = columns.is_kind(*COMPLETES_GRADIENTS)[order]
    last = order[np.maximum.accumulate(np.where(known, np.arange(len(order)), 0))]
    column = columns.microbatch.copy()
    wide = (column < 0)[order] & columns.is_kind(*COMPLETES_GRADIENTS)[last]
    wide &= held[last] == held[order]
    column[order[wide]] = columns.microbatch[last[wide]]
    placed = np.flatnonzero(column >= 0)
    keys = held * len(KINDS) + columns.kind
    _, first, row = np.unique(keys[placed], return_index=True, return_inverse=True)
    place = np.full((len(first), int(column.max(initial=0)) + 1), -1)
    place[row, column[placed]] = placed
    return place, placed[first], column


def _posted_after(timeline: Timeline, column: Ints) -> tuple[Ints, int]:
    """For every action, the compute after which it is posted, or itself; and the most microbatches
    that an action is behind one that is listed or posted before it."""
    columns, posting = timeline.schedule.columns, timeline.posting
    itself = np.arange(len(columns))
    after = itself if posting is None else posting.after(timeline.schedule)
    after = np.where(after < 0, itself, after)
    lift = columns.rank * (int(column.max(initial=0)) + 2)  # so that each rank begins anew
    ahead = np.maximum.accumulate(column + lift) - lift
    behind = np.maximum(ahead - column, column - column[after])
    return after, int(behind[column >= 0].max(initial=0))


def _slack(timeline: Timeline, microbatches: int) -> float:
    """How far equal times may differ by rounding over this many microbatches: each action in them
    is one more floating-point sum."""
    if timeline.ends.dtype.kind == "i":
        return 0.0
    schedule = timeline.schedule
    sums = len(schedule.columns) / schedule.microbatches * microbatches
    return float(timeline.makespan * np.finfo(np.float64).eps * sums)


def _longest_run(alike: Bools, period: Numbers, slack: float) -> tuple[int, int]:
    """The first column, and the one after the last, of the longest run of columns that are `alike`
    and have one period. A run of one column may be neither."""
    with np.errstate(invalid="ignore"):  # no action at all: inf - inf
        same = alike[1:] & alike[:-1] & (np.abs(np.diff(period)) <= slack)
    bounds = np.flatnonzero(~np.concatenate([[False], same, [False]]))
    longest = int(np.diff(bounds).argmax())
    return int(bounds[longest]), int(bounds[longest + 1])


def _figures(timeline: Timeline, stretch: Ints, apart: int) -> SteadyState:
    """The steady state that a stretch of columns shows, which repeat `apart` microbatches later."""
    columns, starts, ends = timeline.schedule.columns, timeline.starts, timeline.ends
    stretch = stretch[(stretch >= 0).any(axis=1)]
    here = stretch >= 0

    # Over as many periods as there are, so that rounding counts least.
    row, times = int(here[:, 0].argmax()), (stretch.shape[1] - 1) // apart
    began, ended = ends[stretch[row, [0, times * apart]]].tolist()
    period = (ended - began) / times

    places = stretch[:, :apart][here[:, :apart]]
    computes = places[np.isin(places, columns.computes)]
    busy = (ends[computes] - starts[computes]).sum().item()
    return SteadyState(
        period=period,
        period_microbatches=apart,
        bubble_fraction=max(0.0, 1 - busy / (columns.ranks * period)) if period else 0.0,
        unit=timeline.unit,
        microbatches=timeline.schedule.microbatches,
        start=np.where(here, starts[stretch], np.inf).min(axis=1).max().item(),
        end=np.where(here, ends[stretch], -np.inf).max(axis=1).min().item(),
    )
