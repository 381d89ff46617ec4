"""The steady state of an asynchronous schedule: the cost of a microbatch once the pipeline is full.

    time    0              5              10             15             20
    rank 0  F0 F1       B0---*F2 B1---*F3 B2---*F4 B3---*F5 B4---*   B5---*
    rank 1     F0 B0---*F1 B1---*F2 B2---*F3 B3---*F4 B4---*F5 B5---*
                              └──────── each 3 later, for the next microbatch

Suppose that the lists repeat after some number of microbatches, and that in a long enough stretch
every action ends exactly one period after the same action that many microbatches before. Then all
following actions do too: an action starts when everything that it waits for has ended, and all of
that lies within the stretch.
"""

from __future__ import annotations

from itertools import pairwise

import attrs
import numpy as np

from schedir.ir import (
    COMPLETES_GRADIENTS,
    COMPUTE,
    KINDS,
    Bools,
    Columns,
    Ints,
)
from schedir.simulator.timeline import Timeline
from schedir.simulator.values import Numbers, Unit, factor

_MOST_WORK = 3 * 10**7  # compared pairs of actions, about a second


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


def steady_state_of(timeline: Timeline) -> SteadyState | None:
    """The steady state that a simulated timeline shows, None if it is too short to show one."""
    lists = _lists_of(timeline)
    microbatches = lists.place.shape[1]
    most = min(microbatches // 3, _MOST_WORK // max(lists.place.size, 1))
    for apart in range(1, most + 1):
        found = _stretch(timeline, lists, apart)
        if found is not None:
            return _steady_state(timeline, lists, apart, *found)
    return None


@attrs.frozen(eq=False)
class _Lists:
    """Where actions stand: `place` has a row for each rank, stage and kind, and a column for each
    microbatch; -1 stands for none. An OPTIM_STEP or REDUCE_GRAD is in the column of the last
    gradient accumulated before it. `listed[rank, m]` is how many actions the rank has in the
    columns before m."""

    place: Ints
    rank: Ints  # of each row
    listed: Ints
    lag: int  # the most microbatches that an action is behind one that is listed before it
    after: Ints  # of each place, the compute that it is posted after; -1 for none


def _lists_of(timeline: Timeline) -> _Lists:
    columns, posting = timeline.schedule.columns, timeline.posting
    column, ahead = _column_of(columns), np.zeros(len(columns), np.int64)
    for begin, end in pairwise(columns.starts.tolist()):
        ahead[begin:end] = np.maximum.accumulate(column[begin:end])
    placed = np.flatnonzero(column >= 0)
    stages = int(columns.stage.max(initial=0)) + 1
    keys = (columns.rank * stages + columns.stage) * len(KINDS) + columns.kind
    _, first, row = np.unique(keys[placed], return_index=True, return_inverse=True)
    place = np.full((len(first), int(column.max(initial=0)) + 1), -1)
    place[row, column[placed]] = placed
    rank = columns.rank[placed[first]]
    listed = np.zeros((columns.ranks, place.shape[1] + 1), np.int64)
    np.add.at(listed[:, 1:], rank, place >= 0)
    lag = int((ahead - column)[placed].max(initial=0))
    after = np.full(len(columns), -1) if posting is None else posting.after(timeline.schedule)
    early = np.flatnonzero((after >= 0) & (column >= 0))
    lag = max(lag, int((column[early] - column[after[early]]).max(initial=0)))
    return _Lists(place, rank, listed.cumsum(axis=1), lag, after)


def _column_of(columns: Columns) -> Ints:
    """The microbatch of every place. For an OPTIM_STEP or REDUCE_GRAD it is that of the last
    gradient accumulated before it, -1 before the first."""
    order = np.lexsort((columns.stage, columns.rank))  # is stable: as listed within each stage
    microbatch = columns.microbatch[order]
    known = columns.is_kind(*COMPLETES_GRADIENTS)[order]
    last = np.maximum.accumulate(np.where(known, np.arange(len(order)), -1))
    holding = (columns.rank * (columns.stage.max(initial=0) + 1) + columns.stage)[order]
    before = (last >= 0) & (holding[last] == holding)
    column = np.empty_like(microbatch)
    column[order] = np.where(microbatch >= 0, microbatch, np.where(before, microbatch[last], -1))
    return column


def _stretch(timeline: Timeline, lists: _Lists, apart: int) -> tuple[int, int] | None:
    """The first microbatch of a stretch that shows a period of `apart` microbatches, and the one
    after its last. None if no stretch is long enough."""
    earlier, later = lists.place[:, :-apart], lists.place[:, apart:]
    here = earlier >= 0
    same = (here == (later >= 0)).all(axis=0)
    moved = lists.listed[:, apart:-1] - lists.listed[:, : -1 - apart]
    moved = moved[lists.rank]
    same &= ((later - earlier == moved) | ~here).all(axis=0)
    posted, before = lists.after[later], lists.after[earlier]
    same &= ((posted - before == np.where(before < 0, 0, moved)) | ~here).all(axis=0)
    shifts = [times[later] - times[earlier] for times in (timeline.starts, timeline.ends)]
    least = np.where(here, np.minimum(*shifts), np.inf).min(axis=0)
    period = np.where(here, np.maximum(*shifts), -np.inf).max(axis=0)
    # What an action waits for, in its list or on a channel, is no further behind it.
    least_length = lists.lag + 2 * apart
    slack = _slack(timeline, least_length)
    same &= np.abs(period - least) <= slack
    start, end = _longest_run(same, period, slack)
    enough = end - start >= least_length and np.ptp(period[start:end]) <= slack
    return (start, end) if enough else None


def _slack(timeline: Timeline, microbatches: int) -> float:
    """How far equal times may differ by rounding over this many microbatches: each action in them
    is one more floating-point sum."""
    if timeline.ends.dtype.kind == "i":
        return 0.0
    schedule = timeline.schedule
    sums = len(schedule.columns) / schedule.microbatches * microbatches
    return float(timeline.makespan * np.finfo(np.float64).eps * sums)


def _longest_run(same: Bools, period: Numbers, slack: float) -> tuple[int, int]:
    """The longest run of columns that are the `same`, with one period. A run of one column may be
    none."""
    breaks = np.ones(len(same), bool)
    with np.errstate(invalid="ignore"):  # no action at all: inf - inf
        breaks[1:] = ~(same[1:] & same[:-1] & (np.abs(np.diff(period)) <= slack))
    starts = np.flatnonzero(breaks)
    lengths = np.diff(np.append(starts, len(same)))
    longest = int(lengths.argmax())
    return int(starts[longest]), int(starts[longest] + lengths[longest])


def _steady_state(
    timeline: Timeline, lists: _Lists, apart: int, start: int, end: int
) -> SteadyState:
    columns = timeline.schedule.columns
    whole = lists.place[:, start : end + apart]
    whole = whole[(whole >= 0).any(axis=1)]
    first = np.where(whole >= 0, timeline.starts[whole], np.inf).min(axis=1)
    last = np.where(whole >= 0, timeline.ends[whole], -np.inf).max(axis=1)

    # Over as many periods as there are, so that rounding counts least.
    row, times = int((whole[:, 0] >= 0).argmax()), (end - start - 1) // apart + 1
    began, ended = timeline.ends[whole[row, [0, times * apart]]].tolist()
    period = (ended - began) / times

    places = whole[:, :apart][whole[:, :apart] >= 0]
    computes = places[(columns.is_kind(*COMPUTE) & ~columns.joined)[places]]
    busy = (timeline.ends[computes] - timeline.starts[computes]).sum().item()
    return SteadyState(
        period=period,
        period_microbatches=apart,
        bubble_fraction=max(0.0, 1 - busy / (columns.ranks * period)) if period else 0.0,
        unit=timeline.unit,
        microbatches=timeline.schedule.microbatches,
        start=first.max().item(),
        end=last.min().item(),
    )
