"""What each rank does when: its compute in the order of time, and the gaps between.

    time     0    1    2    3    4    5    6
    rank 0   0F0  0F1            0B0------          gaps: 2..4
    rank 1        1F0  1B0------                    gaps: 0..1, and the tail 4..6

What is not known counts as nothing. Should the compute of a rank seem to overlap, what is covered
is counted once.
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np

from schedir.ir import COMPUTE, Bools, Columns, Ints
from schedir.simulator.times import Numbers


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(eq=False, slots=False)
class Work:
    """All compute whose times are known, rank after rank, by its start.

    Arrays of shape [compute]: `place` is that of the first action of an entry; `start` is when it
    starts, `before` when all of its rank before it has ended (0 for the first), `until` when it and
    all before it has. `heads` are the places of all compute, known or not, in list order.
    """

    columns: Columns
    heads: Ints
    place: Ints
    rank: Ints
    start: Numbers
    before: Numbers
    until: Numbers

    @cached_property
    def waits(self) -> Bools:
        """Where there is a gap before."""
        waits: Bools = self.start > self.before
        return waits

    @cached_property
    def bounds(self) -> Ints:
        """`bounds[rank]` is the number of the rank's first compute; shape [ranks + 1]."""
        return np.searchsorted(self.rank, np.arange(self.columns.ranks + 1))

    @cached_property
    def last(self) -> Numbers:
        """When each rank's last compute ends, 0 where it has none."""
        last = np.zeros(self.columns.ranks, self.until.dtype)
        some = np.diff(self.bounds) > 0
        last[some] = self.until[self.bounds[1:][some] - 1]
        return last

    @cached_property
    def busy(self) -> Numbers:
        """How long each rank computes."""
        # What follows without a gap counts as one: a rank that never waits is idle for exactly 0.
        opens = self.waits.copy()
        opens[self.bounds[:-1][np.diff(self.bounds) > 0]] = True
        closes = np.append(opens[1:], True)[: len(opens)]
        busy = np.zeros(self.columns.ranks, self.until.dtype)
        np.add.at(busy, self.rank[opens], self.until[closes] - self.start[opens])
        return busy


def work_of(columns: Columns, starts: Numbers, ends: Numbers) -> Work:
    """The compute of all ranks, given the times of every place."""
    # The parts of a pair take the same time.
    heads = np.flatnonzero(columns.is_kind(*COMPUTE) & ~columns.joined)
    place = heads[~np.isnan(ends[heads] - starts[heads])]
    rank, start = columns.rank[place], starts[place]
    follows = np.zeros(len(place), np.bool_)
    follows[1:] = rank[1:] == rank[:-1]
    if (follows[1:] & (start[1:] < start[:-1])).any():
        order = np.lexsort((start, rank))
        place, start = place[order], start[order]
    until = ends[place]
    if (follows[1:] & (until[1:] < until[:-1])).any():
        for own in np.split(until, np.flatnonzero(~follows)[1:]):
            np.maximum.accumulate(own, out=own)
    before = np.zeros_like(until)
    before[1:] = np.where(follows[1:], until[:-1], 0)
    return Work(columns, heads, place, rank, start, before, until)
