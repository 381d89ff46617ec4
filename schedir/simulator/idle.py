"""Why ranks are idle: every moment in which one does not compute has its cause.

A gap before an entry of compute is taken apart at three points: when the payload that it waits for
was made and posted, when its transfer started, and when that arrived.

    source   ...0F3---|0SEND_ACT3                   posted when 0F3 has ended
    channel           .......|=============>        its channel was busy with the transfer before
    rank     1B0|      data  |communication |over|1F3
                |data |                     |head|

    data            until the payload is posted: another rank still computes
    communication   until it has arrived: first its channel is busy, then it travels
    overhead        until the compute starts: the rank itself is at something that is not listed
                    (in measured timelines alone)

What waits for another rank's compute is named for what that means in the pipeline (see `Cause`). To
tell whether a slower stage is behind it, the wait is followed to its *root*: where the other rank
had itself waited, less than a period ago, to what that wait was for, and so on, up to a rank that
had been busy for a whole period: the time that it takes, in the mean, for one of its forwards and
all that follows from it.

    rank 0   0B0--      0B1--           0B1 waits for 1B1, before which rank 1 waited for 2B1;
    rank 1   1B1--      1B2--           rank 2 never waits: 2B1 is the root of both
    rank 2   2B2--------2B3--------
"""

from __future__ import annotations

from enum import StrEnum

import attrs
import numpy as np

from schedir.ir import BACKWARDS, Ints, Kind, Schedule
from schedir.simulator.gaps import Gaps, gaps_of
from schedir.simulator.needs import Needs
from schedir.simulator.times import Numbers
from schedir.simulator.work import Work


class Cause(StrEnum):
    """Why a rank does not compute.

    The first four are waits for the compute of another rank. The first of the four that fits is it,
    but that the wait for a rank's first compute is always warm-up.
    """

    SLOWER = "slower"
    """The rank at the root of the wait has more to compute than this one, and spread over this
    one's forwards the difference makes up half of the wait or more: a slower stage."""
    WARMUP = "warmup"
    """The pipeline fills: before the rank's first backward (its first compute, where it has
    none)."""
    DRAIN = "drain"
    """The pipeline drains: after the rank's last forward."""
    DATA = "data"
    """The schedule's order: any other wait for the compute of another rank."""
    COMMUNICATION = "communication"
    """What the rank waits for has been made, and is under way or waits for its channel."""
    COLLECTIVE = "collective"
    """All ranks have come to a sum of gradients, which goes on."""
    OVERHEAD = "overhead"
    """All that the rank needs is there, and it does not start yet: measured timelines alone."""
    UNKNOWN = "unknown"
    """The times that would tell are not known."""
    DONE = "done"
    """The rank has nothing left to do."""


CAUSES = tuple(Cause)
_NUMBER = {cause: number for number, cause in enumerate(CAUSES)}


@attrs.frozen
class Idle:
    """A stretch of a rank's time in which it does not compute, and why. All that is named is named
    by its place, None where there is none.

    `entry` is the compute that waits. `blamed` is what it waits for meanwhile: the compute of
    another rank, or, for communication, the send whose transfer is under way (that of the transfer
    before on its channel, where that is busy). `transfer` is the receive, or the REDUCE_GRAD,
    through which it waits; `root` the compute of the slower stage.
    """

    start: float
    end: float
    cause: Cause
    entry: int | None
    blamed: int | None
    transfer: int | None
    root: int | None


@attrs.frozen(eq=False)
class IdleColumns:
    """The same as columns, rank after rank in the order of time; `bounds[rank]` is the rank's
    first, `cause` an index into `CAUSES`, and -1 stands for None. Shape [intervals], `bounds`
    [ranks + 1]."""

    bounds: Ints
    start: Numbers
    end: Numbers
    cause: Ints
    entry: Ints
    blamed: Ints
    transfer: Ints
    root: Ints

    def __len__(self) -> int:
        return len(self.start)

    def at(self, number: int) -> Idle:
        """One of them."""
        places = (self.entry, self.blamed, self.transfer, self.root)
        return Idle(
            self.start[number].item(),
            self.end[number].item(),
            CAUSES[self.cause[number]],
            *(None if column[number] < 0 else int(column[number]) for column in places),
        )

    def of_rank(self, rank: int) -> tuple[Idle, ...]:
        """Those of a rank."""
        return tuple(map(self.at, range(int(self.bounds[rank]), int(self.bounds[rank + 1]))))

    def by_cause(self) -> Numbers:
        """How long each rank is idle for each cause, shape [ranks, causes]."""
        total = np.zeros((len(self.bounds) - 1, len(CAUSES)), self.start.dtype)
        rank = np.repeat(np.arange(len(total)), np.diff(self.bounds))
        np.add.at(total, (rank, self.cause), self.end - self.start)
        return total


def idle_columns(schedule: Schedule, work: Work, needs: Needs, makespan: float) -> IdleColumns:
    """The idle time of every rank, taken apart by its causes.

    The intervals of a rank, together with its compute, are exactly the time from 0 to the makespan.
    Raises UnsoundError where the lists are too wrong to tell what waits for what.
    """
    forwards = np.bincount(
        schedule.columns.rank[schedule.columns.where(Kind.FORWARD)], minlength=schedule.ranks
    )
    gaps = gaps_of(work, needs)
    causes = _data_causes(gaps, work, forwards)
    rows = [*_parts(gaps, causes, work), *_tails(work, needs, makespan)]
    rank, start, end, *rest = map(np.concatenate, zip(*rows, strict=True))
    order = np.lexsort((start, rank))
    order = order[end[order] > start[order]]
    bounds = np.searchsorted(rank[order], np.arange(schedule.ranks + 1))
    times = (times[order].astype(work.start.dtype) for times in (start, end))
    return IdleColumns(bounds, *times, *(column[order] for column in rest))


def _data_causes(gaps: Gaps, work: Work, forwards: Ints) -> tuple[Ints, Ints]:
    """For each gap the cause of its wait for compute, and the place of its root where that is of a
    slower stage."""
    columns, ranks = work.columns, work.columns.ranks
    rank = work.rank[gaps.number]
    root = gaps.post[_roots(gaps, work, forwards)]
    more = np.where(root >= 0, work.busy[columns.rank[root]] - work.busy[rank], 0)
    slower = (more > 0) & (2 * more >= (gaps.posted - gaps.start) * forwards[rank])

    beyond = len(columns)
    first, last = np.full(ranks, beyond), np.full(ranks, beyond)
    backwards = columns.where(*BACKWARDS)
    np.minimum.at(first, columns.rank[backwards], columns.heads[columns.entry[backwards]])
    forward = columns.where(Kind.FORWARD)
    last[columns.rank[forward]] = forward  # ascending: the last one stays
    first[first == beyond] = -1
    is_first = gaps.number == work.bounds[rank]
    cause = np.select(
        [is_first, slower, gaps.entry <= first[rank], gaps.entry > last[rank]],
        [_NUMBER[c] for c in (Cause.WARMUP, Cause.SLOWER, Cause.WARMUP, Cause.DRAIN)],
        _NUMBER[Cause.DATA],
    )
    return cause, np.where(cause == _NUMBER[Cause.SLOWER], root, -1)


def _roots(gaps: Gaps, work: Work, forwards: Ints) -> Ints:
    """For each gap the one at the root of its wait for compute."""
    own = np.arange(len(gaps.number))
    number_of = np.full(len(work.columns), -1)
    number_of[work.place] = np.arange(len(work.place))
    gap_of = np.full(len(work.place), -1)
    gap_of[gaps.number] = own
    latest = np.maximum.accumulate(gap_of)  # gaps are in the order of the compute
    columns = work.columns
    post = np.where(gaps.post >= 0, columns.heads[columns.entry[gaps.post]], -1)
    maker = np.where(post >= 0, number_of[post], -1)
    before = np.where(maker >= 0, latest[maker], -1)
    # That wait has to be of the same rank, for compute, and to end before this one.
    period = (work.busy / forwards.clip(min=1))[work.rank[maker]] if len(maker) else 0
    leads = (before >= 0) & (work.rank[gaps.number[before]] == work.rank[maker])
    leads &= (gaps.posted[before] > gaps.start[before]) & (gaps.end[before] < gaps.end)
    leads &= gaps.posted[before] > gaps.start - period
    root = np.where(leads, before, own)
    while ((further := root[root]) != root).any():
        root = further
    return root


_Row = tuple[Ints, Numbers, Numbers, Ints, Ints, Ints, Ints, Ints]
"""The rank, start, end, cause, entry, blamed, transfer and root of intervals."""


def _parts(gaps: Gaps, data: tuple[Ints, Ints], work: Work) -> list[_Row]:
    """The gaps, each in its parts."""
    rank, entry, none = work.rank[gaps.number], gaps.entry, np.full(len(gaps.entry), -1)
    cause, root = data
    moving = np.where(gaps.summed, _NUMBER[Cause.COLLECTIVE], _NUMBER[Cause.COMMUNICATION])
    rest = np.where(gaps.unknown, _NUMBER[Cause.UNKNOWN], _NUMBER[Cause.OVERHEAD])
    return [
        (rank, gaps.start, gaps.posted, cause, entry, gaps.post, gaps.via, root),
        (rank, gaps.posted, gaps.begins, moving, entry, gaps.busy, gaps.via, none),
        (rank, gaps.begins, gaps.arrives, moving, entry, gaps.sent, gaps.via, none),
        (rank, gaps.arrives, gaps.end, rest, entry, none, none, none),
    ]


def _tails(work: Work, needs: Needs, makespan: float) -> list[_Row]:
    """What is left to each rank after its last compute: a sum that goes on, then nothing."""
    columns, ranks = work.columns, np.arange(work.columns.ranks)
    none = np.full(len(ranks), -1)
    reduce = none.copy()
    places = columns.where(Kind.REDUCE_GRAD)
    reduce[columns.rank[places]] = places  # ascending: the last one stays
    over = np.where(reduce >= 0, needs.ends[reduce], work.last)
    over = np.clip(np.where(np.isnan(over), work.last, over), work.last, makespan)
    known, listed = (
        np.bincount(columns.rank[places], minlength=len(ranks))
        for places in (work.place, work.heads)
    )
    final = np.full(len(ranks), -1)
    final[columns.rank[work.heads]] = work.heads
    reached = final.copy()
    reached[work.rank] = work.place
    unknown = (listed > known) & (reached != final) | (listed > 0) & (known == 0)
    rest = np.where(unknown, _NUMBER[Cause.UNKNOWN], _NUMBER[Cause.DONE])
    summed = np.full(len(ranks), _NUMBER[Cause.COLLECTIVE])
    end = np.full(len(ranks), makespan)
    return [
        (ranks, work.last, over, summed, none, reduce, reduce, none),
        (ranks, over, end, rest, none, none, none, none),
    ]
