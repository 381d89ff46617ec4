"""Why ranks are idle: every moment in which a rank does not compute has a cause.

A gap before an entry of compute is divided at three points: when the payload that it waits for was
made and posted, when its transfer started, and when the payload arrived.

    source   ...0F3---|0SEND_ACT3                   posted when 0F3 has ended
    channel           .......|=============>        its channel was busy with the transfer before
    rank     1B0|      data  |communication |over|1F3
                |data |                     |head|

    data            until the payload is posted: another rank still computes
    communication   until it has arrived: first its channel is busy, then it travels
    overhead        until the compute starts: the rank does something that is not listed
                    (measured timelines only)

A wait for another rank's compute is named for its meaning in the pipeline (see `Cause`). To find a
slower stage behind a wait, the wait is followed to its *root*. If the other rank had itself waited,
less than a period ago, the search continues with that wait, up to a rank that was busy for a whole
period. A period is the mean time of one of that rank's forwards and everything that follows from
it.

    rank 0   0B0--      0B1--           0B1 waits for 1B1, before which rank 1 waited for 2B1;
    rank 1   1B1--      1B2--           rank 2 never waits: 2B1 is the root of both
    rank 2   2B2--------2B3--------
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property

import attrs
import numpy as np

from schedir.graph.paths import QUEUED
from schedir.ir import (
    BACKWARDS,
    COMMUNICATION,
    COMPUTE,
    GROUPS,
    HOMES,
    Bools,
    Columns,
    Ints,
)
from schedir.simulator.moments import Moments
from schedir.simulator.values import Numbers


class Cause(StrEnum):
    """Why a rank does not compute.

    The first four are waits for the compute of another rank. The first of the four that fits is the
    cause, except that a wait for a rank's first compute is always warmup.

    >>> import schedir
    >>> line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))
    >>> [idle.cause.value for idle in line.idle[0]]
    ['warmup', 'drain']
    """

    SLOWER = "slower"
    """A slower stage: the rank at the root of the wait has more to compute than this one, and the
    difference, spread over this rank's forwards, makes up at least half of the wait."""
    WARMUP = "warmup"
    """The pipeline fills: before the rank's first backward, or its first compute if it has none."""
    DRAIN = "drain"
    """The pipeline drains: after the rank's last forward."""
    DATA = "data"
    """The schedule's order: any other wait for the compute of another rank."""
    COMMUNICATION = "communication"
    """The payload is made, and is being transferred or waits for its channel."""
    COLLECTIVE = "collective"
    """All ranks have reached a sum of gradients, and it is not done."""
    OVERHEAD = "overhead"
    """Everything that the rank needs is there, and it does not start yet (measured timelines
    only)."""
    UNKNOWN = "unknown"
    """The times that would show the cause are not known."""
    DONE = "done"
    """The rank has nothing left to do."""


CAUSES = tuple(Cause)
_SLOWER, _WARMUP, _DRAIN, _DATA, _MOVING, _SUMMED, _OVERHEAD, _UNKNOWN, _DONE = range(len(CAUSES))


@attrs.frozen
class Idle:
    """An interval in which a rank does not compute, and why.

    Actions are named by their places, None for none. `entry` is the compute that waits. `blamed` is
    what it waits for: the compute of another rank, or, for communication, the send whose transfer
    is under way (if the channel is busy, the send of the transfer before). `transfer` is the
    receive or the REDUCE_GRAD through which it waits. `root` is the compute of the slower stage.

    >>> import schedir
    >>> line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))
    >>> first = line.idle[1][0]
    >>> first.start, first.end, first.cause.value
    (0, 1, 'warmup')
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
    """All idle intervals as columns, rank after rank in the order of time.

    `bounds[rank]` is the rank's first interval, `cause` is an index into `CAUSES`, and -1 stands
    for None. Shape [intervals]; `bounds` has shape [ranks + 1].

    >>> import schedir
    >>> line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))
    >>> line.idle_columns.bounds.tolist(), line.idle_columns.by_cause().sum().item()
    ([0, 2, 4], 6)
    """

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
        """The interval with this number."""
        places = (self.entry, self.blamed, self.transfer, self.root)
        return Idle(
            self.start[number].item(),
            self.end[number].item(),
            CAUSES[self.cause[number]],
            *(None if column[number] < 0 else int(column[number]) for column in places),
        )

    def of_rank(self, rank: int) -> tuple[Idle, ...]:
        """The intervals of a rank."""
        return tuple(map(self.at, range(int(self.bounds[rank]), int(self.bounds[rank + 1]))))

    def by_cause(self) -> Numbers:
        """How long each rank is idle for each cause, shape [ranks, causes]."""
        total = np.zeros((len(self.bounds) - 1, len(CAUSES)), self.start.dtype)
        rank = np.repeat(np.arange(len(total)), np.diff(self.bounds))
        np.add.at(total, (rank, self.cause), self.end - self.start)
        return total


def idle_columns(work: Work, moments: Moments, makespan: float) -> IdleColumns:
    """The idle time of every rank, taken apart by its causes.

    The intervals of a rank, together with its compute, are exactly the time from 0 to the makespan.
    Raises UnsoundError where the lists are too wrong to tell what waits for what.
    """
    number = np.flatnonzero(work.waits)
    columns, ends, ranks = work.columns, moments.ends, np.arange(work.columns.ranks)
    own, entry = work.rank[number], work.place[number]
    start, end = work.before[number], work.start[number]
    via = _waited_for(moments, entry, end)
    group, compute = ((via >= 0) & columns.is_kind(*kinds)[via] for kinds in (GROUPS, COMPUTE))
    sends, posts = _ways(moments)
    sent, post = sends[via], posts[via]
    # In lists without communication, compute waits for compute itself.
    post = np.where(compute, via, post)
    posted = np.where(post >= 0, ends[post], 0)
    begins = np.where(group | compute, posted, moments.begins[via])
    arrives = np.where(compute, np.nan, ends[via])
    busy, queues = sent, begins > posted
    if queues.any():
        behind = sends[_behind(moments, via)]
        busy = np.where(queues & (behind >= 0) & (ends[behind] >= begins), behind, sent)
    # The rank may have computed meanwhile, in compute of unknown times.
    since = np.where(work.first, columns.starts[work.rank], np.roll(work.place, 1))
    unknown = work.lost[entry] > work.lost[since[number]]
    unknown |= np.isnan(posted) & np.isnan(begins)
    points = (
        np.where(np.isnan(posted), begins, posted),
        np.where(np.isnan(begins), posted, begins),
        np.where(np.isnan(arrives), end, arrives),
    )
    cuts = np.stack((start, *np.where(unknown | (via < 0), start, points), end))
    cuts = np.maximum.accumulate(np.clip(cuts, start, end))
    _, posted, begins, arrives, _ = cuts
    via, sent = np.where(compute, -1, (via, sent))
    data, root = _data_causes(work, number, cuts, post)
    moving = np.where(group, _SUMMED, _MOVING)
    late = np.where(unknown, _UNKNOWN, _OVERHEAD)
    last, over, reduce, done = _at_the_end(work, moments, makespan)
    parts = (
        # rank, start, end, cause, entry, blamed, transfer, root
        (own, start, posted, data, entry, post, via, root),
        (own, posted, begins, moving, entry, busy, via, -1),
        (own, begins, arrives, moving, entry, sent, via, -1),
        (own, arrives, end, late, entry, -1, -1, -1),
        (ranks, last, over, _SUMMED, -1, reduce, reduce, -1),
        (ranks, over, makespan, done, -1, -1, -1, -1),
    )
    each = zip(*(np.broadcast_arrays(*part) for part in parts), strict=True)
    rank, start, end, *rest = map(np.concatenate, each)
    order = np.lexsort((start, rank))
    order = order[end[order] > start[order]]
    bounds = np.searchsorted(rank[order], np.arange(len(ranks) + 1))
    times = (times[order].astype(work.start.dtype) for times in (start, end))
    return IdleColumns(bounds, *times, *(column[order] for column in rest))


def _at_the_end(
    work: Work, moments: Moments, makespan: float
) -> tuple[Numbers, Numbers, Ints, Ints]:
    """For each rank, when its last compute has ended, and when the sum at a place that goes on
    then; this place, -1 for none; and why it is idle afterwards."""
    columns, last = work.columns, np.zeros(work.columns.ranks, work.until.dtype)
    last[work.rank] = work.until  # ascending: the last one stays
    reduce = _last_of_ranks(columns, columns.where(*GROUPS), -1)
    over = moments.ends[reduce]
    over = np.clip(np.where(np.isnan(over), last, over), last, makespan)
    since = _last_of_ranks(columns, work.place, columns.starts[:-1])
    unknown = work.lost[columns.starts[1:]] > work.lost[since]
    return last, over, reduce, np.where(unknown, _UNKNOWN, _DONE)


def _last_of_ranks(columns: Columns, places: Ints, none: int | Ints) -> Ints:
    """The last of the places on each rank, in the order given; `none` where there is none."""
    found = np.full(columns.ranks, none)
    found[columns.rank[places]] = places
    return found


def _data_causes(work: Work, number: Ints, cuts: Numbers, post: Ints) -> tuple[Ints, Ints]:
    """For each gap the cause of its wait for compute, and the place of its root where that is of a
    slower stage.

    `number` is that of the compute behind a gap in the work, `post` is the place of the compute
    that it waits for. `cuts` begin with the start of the gaps and the end of these waits, and end
    with that of the gaps.
    """
    columns, rank, entry = work.columns, work.rank[number], work.place[number]
    start, posted, *_, end = cuts
    homes, backwards = columns.where(*HOMES), columns.where(*BACKWARDS)
    forwards = np.bincount(columns.rank[homes], minlength=columns.ranks)

    number_of = np.full(len(columns) + 1, -1)
    number_of[work.place] = np.arange(len(work.place))
    first_of = np.append(columns.first, -1)
    maker = number_of[first_of[post]]
    # The gap before the maker, or further back. It has to be of the same rank, to be a wait for
    # compute, and to end before this one.
    before = (np.append(np.cumsum(work.waits), 0) - 1)[maker]
    period = (work.busy / forwards.clip(min=1))[work.rank[maker]]
    leads = (before >= 0) & (rank[before] == work.rank[maker])
    leads &= (posted[before] > start[before]) & (end[before] < end)
    leads &= posted[before] > start - period
    at = np.where(leads, before, np.arange(len(before)))
    while ((further := at[at]) != at).any():
        at = further

    root = post[at]
    more = np.where(root >= 0, work.busy[columns.rank[root]] - work.busy[rank], 0)
    slower = (more > 0) & (2 * more >= (posted - start) * forwards[rank])
    last = _last_of_ranks(columns, homes, len(columns))
    first = first_of[_last_of_ranks(columns, backwards[::-1], -1)]
    cause = np.select(
        [work.first[number], slower, entry <= first[rank], entry > last[rank]],
        [_WARMUP, _SLOWER, _WARMUP, _DRAIN],
        _DATA,
    )
    return cause, np.where(cause == _SLOWER, root, -1)


# What the gaps before compute are waits for.


def _ways(moments: Moments) -> tuple[Ints, Ints]:
    """For every place, what is sent there; and after which compute on its source, which makes the
    payload, or stands between that and its send. A copy is what is sent, and a sum comes after the
    last compute before it on all its ranks. -1 for none, and for one place more, which stands for
    -1."""
    columns, transfers, before = moments.columns, moments.graph.transfers, moments.compute_before
    sent, post = np.arange(len(columns) + 1), np.append(before, -1)
    sent[transfers.receive] = transfers.send
    last, maker = before[transfers.send], transfers.maker
    is_makers = (last >= 0) & (maker >= 0) & (columns.entry[last] == columns.entry[maker])
    post[transfers.receive] = np.where((transfers.send < 0) | is_makers, maker, last)
    sent[-1] = post[-1] = -1
    for turn in map(list, moments.graph.collectives):
        over = np.nan_to_num(moments.ends[before[turn]], nan=-1)
        post[turn] = before[turn][over.argmax()] if over.max() >= 0 else -1
    return sent, post


def _behind(moments: Moments, places: Ints) -> Ints:
    """The node that each place stood behind last in a queue, -1 for none and for the place -1."""
    waiting, begins, ends = moments.waits, moments.begins, moments.ends
    queued = np.flatnonzero(waiting.why == QUEUED)
    node, place = waiting.node[waiting.later[queued]], waiting.earlier[queued]
    # What has ended by then, else what was only on its way: of either the last.
    ended = ends[place] <= begins[node]
    order = np.lexsort((np.where(ended, ends[place], begins[place]), ended, node))
    behind = np.full(len(begins), -1)
    behind[node[order]] = waiting.node[place[order]]
    found: Ints = behind[np.append(waiting.node, -1)[places]]
    return found


def _waited_for(moments: Moments, entry: Ints, start: Numbers) -> Ints:
    """What each entry of compute that `start`s then waits for: of the receives, sums and copies
    that it needs the one that is over last, or, where that came in a batch, another part of it that
    is over later, and before the start. -1 for nothing."""
    columns, (user, made) = moments.columns, moments.graph.needs
    if moments.posting is not None and moments.posting.channel == "host":
        # Each call blocks: what is listed before compute holds it up too.
        user, made = np.append(user, entry), np.append(made, entry - 1)
    began = np.full(len(columns), np.nan)
    began[entry] = start
    wanted = (made >= 0) & (began[columns.first[user]] >= 0)
    user, made = user[wanted], made[wanted]
    batched = columns.is_kind(*COMMUNICATION)[made]
    first = np.where(batched, columns.first[made], made)
    many = np.where(batched, columns.last[made] - first, 0) + 1
    via = np.repeat(first - np.cumsum(many) + many, many) + np.arange(many.sum())
    user, made = np.repeat(user, many), np.repeat(made, many)
    head, own = columns.first[user], via == made
    end, latest = moments.ends[via], began[head]
    # What seems late, or is not known, explains all of a gap.
    over = np.where(own, np.fmin(end, latest), np.where(end <= latest, end, -np.inf))
    order = np.lexsort((-np.arange(len(user)), -user, own, np.nan_to_num(over), head))
    shown, found = np.arange(len(columns)), np.full(len(columns), -1)
    listed = moments.graph.transfers.matched
    shown[moments.graph.transfers.send[listed]] = moments.graph.transfers.receive[listed]
    found[head[order]] = shown[via[order]]  # the last one stays
    return found[entry]


# The compute itself.


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(eq=False, slots=False)
class Work:
    """All compute whose times are known, rank after rank, by its start; what is covered twice, as
    where the compute of a rank seems to overlap, counts once.

        time     0    1    2    3    4    5    6
        rank 0   0F0  0F1            0B0------          gaps: 2..4
        rank 1        1F0  1B0------                    gaps: 0..1, and the tail 4..6

    Arrays of shape [compute]: `place` is that of the first action of an entry; `first` says whether
    it is the first of its rank; `start` is when it starts, `before` when all of its rank before it
    has ended (0 for the first), `until` when it and all before it has. `lost[place]` is how much
    compute of unknown times is listed before a place; shape [actions + 1].
    """

    columns: Columns
    lost: Ints
    place: Ints
    rank: Ints
    first: Bools
    start: Numbers
    before: Numbers
    until: Numbers

    @cached_property
    def waits(self) -> Bools:
        """Where there is a gap before."""
        waits: Bools = self.start > self.before
        return waits

    @cached_property
    def busy(self) -> Numbers:
        """How long each rank computes."""
        # What follows without a gap counts as one: a rank that never waits is idle for exactly 0.
        opens = self.waits | self.first
        closes = np.append(opens[1:], True)[: len(opens)]
        busy = np.zeros(self.columns.ranks, self.until.dtype)
        np.add.at(busy, self.rank[opens], self.until[closes] - self.start[opens])
        return busy


def work_of(columns: Columns, starts: Numbers, ends: Numbers) -> Work:
    """The compute of all ranks, given the times of every place."""
    # The parts of a pair take the same time.
    known = ~np.isnan(ends - starts)[columns.computes]
    place, unknown = columns.computes[known], columns.computes[~known]
    rank, until = columns.rank[place], ends[place]
    first = np.diff(rank, prepend=-1) > 0
    if (np.diff((starts[place], until))[:, ~first[1:]] < 0).any():  # measured, in another order
        place = place[np.lexsort((starts[place], rank))]
        until = ends[place]
        for own in np.split(until, np.flatnonzero(first)):
            np.maximum.accumulate(own, out=own)
    before = np.where(first, 0, np.roll(until, 1))
    lost = np.bincount(unknown + 1, minlength=len(columns) + 1).cumsum()
    return Work(columns, lost, place, rank, first, starts[place], before, until)
