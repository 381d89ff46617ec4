"""Who waits for whom under a channel model: the graph whose cycles are the deadlocks.

Merge each send with its receive (and the k-th REDUCE_GRADs of a stage) into one node, add what a
channel model keeps of the lists' order as edges: the schedule deadlocks exactly if there is a
cycle. One pass decides for every interleaving, because each channel has one writer and one reader
and control flow is fixed (Kahn networks; Siegel & Avrunin 2003; Liao et al., arXiv 0709.3693).

An overlapped pair is one node. A batch has two beside those of its transfers: `posted` waits for
what any of its parts waits for, and each transfer of it for that; `over` waits for all of them, and
what is queued behind a part, or needs it, for `over`. So the edges are as many as the parts.

                               0SEND_ACT1
                             ↙            ↖
    the queue before  ←  posted            over  ←  the queue after, compute that needs a part
                             ↖            ↙
                               0RECV_GRAD0

Under `host` a batch is its parts, one after the other; under `async` each is posted for itself.

The k-th OPTIM_STEPs of tied stages are one node too, under every model: none is done before the
gradients of all are there. A rank may hold several tied stages, whose OPTIM_STEPs stand one after
the other. So where there are ties, OPTIM_STEPs with no compute between them (under `host`, with
nothing between them) are reached together, at the first: each waits for the compute before them and
for its own REDUCE_GRADs, not for the other OPTIM_STEPs; and whatever is listed after them waits for
all of them. All else stays in list order: with compute between two tied OPTIM_STEPs of a rank, or a
REDUCE_GRAD of the second one's stage, the first could never be done, and that is a deadlock. To add
up gradients with other ranks is communication too: under `rank` it waits for all that is listed
before on each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from schedir.ir import (
    COMMUNICATION,
    COMPUTE,
    Bools,
    Columns,
    Ints,
    Kind,
    Schedule,
    Ties,
    Time,
    collective_turns,
    queues,
    shared_steps,
    sums_of_steps,
    tied_steps,
)

REASONS = ("comes after", "needs", "queued behind", "runs with")
AFTER, NEEDS, QUEUED, PART, POSTED = range(5)
"""The last two lead from a batch that is over to its parts, and from these to where it is posted:
steps within an entry, which only a PART is a reason for."""


@attrs.frozen(eq=False)
class Waits:
    """What must happen before what: place `later[i]` waits for place `earlier[i]`.

    `why` indexes REASONS. The places stand for the nodes `waiter[i]` and `awaited[i]`, of which
    `node[place]` is the one that a place belongs to, itself a place: the first end of its transfer
    or collective, the first part of its pair, or the first of the OPTIM_STEPs tied to it. Those of
    batches have the numbers after all places, up to `nodes`.
    """

    later: Ints
    earlier: Ints
    why: Ints
    waiter: Ints
    awaited: Ints
    node: Ints
    nodes: int

    @property
    def exists(self) -> Bools:
        """Which numbers are those of a node."""
        own = self.node == np.arange(len(self.node))
        return np.append(own, np.ones(self.nodes - len(own), np.bool_))

    def summed(self, costs: Ints) -> Ints:
        """What the places of each node cost together."""
        return np.bincount(self.node, costs, self.nodes).astype(np.int64)


def waits(schedule: Schedule, channel: str, ties: Ties = ()) -> Waits:
    """Every wait under a channel model. A compute-only schedule has those of its compute."""
    node = _nodes(schedule, ties)
    posted, over = _points(schedule, channel, node)
    edges = [*_order(schedule, channel, ties), *_inputs(schedule)]
    later, earlier, why = (np.concatenate(column) for column in zip(*edges, strict=True))
    waiter, awaited = posted[later], over[earlier]
    if over is not node:
        whole, single = np.flatnonzero(over != node), np.flatnonzero(posted != node)
        inner = np.concatenate((whole, single))
        reasons = np.repeat((PART, POSTED), (len(whole), len(single)))
        later, earlier = np.concatenate((later, inner)), np.concatenate((earlier, inner))
        why = np.concatenate((why, reasons))
        waiter = np.concatenate((waiter, over[whole], node[single]))
        awaited = np.concatenate((awaited, node[whole], posted[single]))
    order = np.lexsort((why, later))
    return Waits(
        later[order],
        earlier[order],
        why[order],
        waiter[order],
        awaited[order],
        node,
        max(int(over.max(initial=-1)) + 1, len(node)),
    )


def _points(schedule: Schedule, channel: str, node: Ints) -> tuple[Ints, Ints]:
    """By place, the nodes that wait for what is before its entry, and that what comes after it
    waits for."""
    columns = schedule.columns
    if channel == "host" or not columns.together:
        return node, node
    batched = columns.is_kind(*COMMUNICATION) & (
        columns.joined | (columns.last > np.arange(len(columns)))
    )
    number = np.cumsum(batched & ~columns.joined)
    over = np.where(batched, len(columns) + 2 * number - 1, node)
    return (node if channel == "async" else np.where(batched, over - 1, node)), over


def host_order(schedule: Schedule) -> bool:
    """Whether every action happens under `host`, the strictest model, and so under each.

    Each rank goes through the transfers and collectives of its list in order, and stands at each
    until all its ends do. Compute holds nobody up, as its receive is listed before it and nothing
    is tied.
    """
    node = _nodes(schedule, ())
    columns = schedule.columns
    meets = np.flatnonzero(~columns.is_kind(*COMPUTE))
    bounds = np.searchsorted(meets, columns.starts).tolist()
    number, meeting = np.unique(node[meets], return_inverse=True)
    queue = meeting.tolist()
    absent = np.bincount(meeting, minlength=len(number)).tolist()  # the ends that nobody stands at
    standing: dict[int, list[int]] = {}
    at = bounds[:-1]
    ready = list(range(columns.ranks))
    while ready:
        rank = ready.pop()
        for index in range(at[rank], bounds[rank + 1]):
            current = queue[index]
            absent[current] -= 1
            if absent[current]:
                at[rank] = index + 1
                standing.setdefault(current, []).append(rank)
                break
            ready += standing.pop(current, ())
    return not any(absent)


def _nodes(schedule: Schedule, ties: Ties) -> Ints:
    columns = schedule.columns
    # The parts of a pair are one node: that of the first.
    pairs = columns.joined & columns.is_kind(*COMPUTE)
    node = np.arange(len(columns)) - pairs
    transfers = schedule.dataflow.transfers
    send, receive = transfers.send[transfers.matched], transfers.receive[transfers.matched]
    node[send] = node[receive] = np.minimum(send, receive)
    for places in (*collective_turns(schedule), *tied_steps(schedule, ties)):
        node[list(places)] = min(places)
    return node


_Edges = tuple[Ints, Ints, Ints]


def _edges(later: Ints, earlier: Ints, why: int) -> _Edges:
    known = earlier >= 0
    return later[known], earlier[known], np.full(int(known.sum()), why)


def _order(schedule: Schedule, channel: str, ties: Ties) -> Iterator[_Edges]:
    """The waits within each list: for the compute before, and for what is queued before."""
    columns, tied = schedule.columns, bool(ties)
    computes = columns.is_kind(*COMPUTE)
    if channel == "host":
        # The whole list is one queue, which says all that compute's order could.
        later, earlier = _holders(columns, np.ones(len(columns), np.bool_), tied)
        after = computes[later] | computes[earlier]
        yield _edges(later[after], earlier[after], AFTER)
        yield _edges(later[~after], earlier[~after], QUEUED)
        return
    yield _edges(*_holders(columns, computes, tied), AFTER)
    yield _edges(np.arange(len(columns)), previous_of_queue(schedule, channel), QUEUED)
    sums = np.array(sums_of_steps(schedule), np.int64).reshape(-1, 2)
    yield _edges(sums[:, 0], sums[:, 1], NEEDS)
    if channel == "rank" and tied:
        steps = np.array(shared_steps(schedule, ties), np.int64)
        yield _edges(steps, _communication_before(columns)[steps], QUEUED)


def _communication_before(columns: Columns) -> Ints:
    """For every place, the last communication or sum before it on its rank; -1 for none."""
    places = np.arange(len(columns))
    own = columns.is_kind(*COMMUNICATION, Kind.REDUCE_GRAD)
    last = np.maximum.accumulate(np.where(own, places, -1)) if len(places) else places
    before = np.concatenate(([-1], last))[:-1]
    return np.where(before >= columns.starts[columns.rank], before, -1)


def _holders(columns: Columns, holds: Bools, tied: bool) -> tuple[Ints, Ints]:
    """Every place, and the last one before it on its rank that `holds`; -1 for none.

    The parts of a pair have the same before them. Where stages are `tied`, OPTIM_STEPs don't hold
    each other, and all since that last one hold what comes after them.
    """
    places = np.arange(len(columns))
    start = columns.starts[columns.rank]
    steps = columns.is_kind(Kind.OPTIM_STEP) & tied
    last = np.maximum.accumulate(np.where(holds & ~steps, places, -1)) if len(places) else places
    begins = places - (columns.joined & columns.is_kind(*COMPUTE))
    before = np.concatenate(([-1], last))[begins]
    before = np.where(before >= start, before, -1)
    if not tied:
        return places, before
    # How many OPTIM_STEPs stand before each place, and how many of those hold it.
    number: Ints = np.cumsum(steps) - steps
    first: Ints = number[np.maximum(before, start)]
    many = np.where(steps, 0, number - first)
    within = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
    held = np.flatnonzero(steps)[np.repeat(first, many) + within]
    free = many == 0
    return (
        np.concatenate((places[free], np.repeat(places, many))),
        np.concatenate((before[free], held)),
    )


def previous_of_queue(schedule: Schedule, channel: str) -> Ints:
    """For every place, the place before in its queue that it waits for, -1 for none: none for the
    parts of a batch but the first, though under `host` each waits for the one before."""
    columns, queue = schedule.columns, queues(channel, schedule)
    order = np.argsort(queue, kind="stable")
    order = order[queue[order] >= 0]
    previous = np.full(len(queue), -1)
    same = queue[order[1:]] == queue[order[:-1]]
    if columns.together and channel != "host":
        same &= columns.entry[order[1:]] != columns.entry[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _inputs(schedule: Schedule) -> Iterator[_Edges]:
    """The waits of compute for its input: for its receive, or for what makes it elsewhere."""
    transfers = schedule.dataflow.transfers
    used = transfers.user >= 0
    source = transfers.receive if schedule.is_complete else transfers.maker
    yield _edges(transfers.user[used], source[used], NEEDS)


def finish(waiting: Waits, durations: Sequence[Time]) -> list[Time]:
    """When each node is done, given how long each takes; -1 for what never happens: for what is on
    a cycle, and what waits for one."""
    later, earlier = waiting.waiter, waiting.awaited
    order = np.argsort(earlier, kind="stable")
    bounds = np.searchsorted(earlier[order], np.arange(waiting.nodes + 1)).tolist()
    waiters = later[order].tolist()
    left = np.bincount(later, minlength=waiting.nodes)
    ready = np.flatnonzero((left == 0) & waiting.exists).tolist()
    missing = left.tolist()
    begin: list[Time] = [0] * waiting.nodes
    done: list[Time] = [-1] * waiting.nodes
    while ready:
        current = ready.pop()
        end = done[current] = begin[current] + durations[current]
        for waiter in waiters[bounds[current] : bounds[current + 1]]:
            if end > begin[waiter]:
                begin[waiter] = end
            missing[waiter] -= 1
            if not missing[waiter]:
                ready.append(waiter)
    return done


def stuck(waiting: Waits) -> Bools:
    """The nodes that never happen."""
    done = np.array(finish(waiting, [0] * waiting.nodes))
    never: Bools = (done < 0) & waiting.exists
    return never
