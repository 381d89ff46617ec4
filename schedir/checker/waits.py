"""Who waits for whom under a channel model: the graph whose cycles are the deadlocks.

Merge each send with its receive (and the k-th REDUCE_GRADs of a stage) into one node, add what a
channel model keeps of the lists' order as edges: the schedule deadlocks exactly if there is a
cycle. One pass decides for every interleaving, because each channel has one writer and one reader
and control flow is fixed (Kahn networks; Siegel & Avrunin 2003; Liao et al., arXiv 0709.3693).

The k-th OPTIM_STEPs of tied stages are one node too, under every model: none is done before the
gradients of all are there. A rank may hold several tied stages, whose OPTIM_STEPs stand one after
the other. So where there are ties, OPTIM_STEPs with no compute between them (under `host`, with
nothing between them) are reached together, at the first: each waits for the compute before them and
for its own REDUCE_GRADs, not for the other OPTIM_STEPs; and whatever is listed after them waits for
all of them. All else stays in list order: with compute between two tied OPTIM_STEPs of a rank, or a
REDUCE_GRAD of the second one's stage, the first could never be done, and that is a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from schedir.ir import (
    COMPUTE,
    RECEIVES,
    Bools,
    Columns,
    Ints,
    Kind,
    Schedule,
    Ties,
    Time,
    collective_turns,
    queues,
    sums_of_steps,
    tied_steps,
)

REASONS = ("comes after", "needs", "queued behind")
AFTER, NEEDS, QUEUED = range(len(REASONS))


@attrs.frozen(eq=False)
class Waits:
    """What must happen before what: place `later[i]` waits for place `earlier[i]`.

    `why` indexes REASONS. `node[place]` is the node that a place belongs to, itself a place: the
    first end of its transfer or collective, or the first of the OPTIM_STEPs tied to it.
    """

    later: Ints
    earlier: Ints
    why: Ints
    node: Ints


def waits(schedule: Schedule, channel: str, ties: Ties = ()) -> Waits:
    """Every wait under a channel model. A compute-only schedule has those of its compute."""
    edges = [*_order(schedule, channel, bool(ties)), *_inputs(schedule)]
    later, earlier, why = (np.concatenate(column) for column in zip(*edges, strict=True))
    in_lists = np.lexsort((why, later))
    return Waits(later[in_lists], earlier[in_lists], why[in_lists], _nodes(schedule, ties))


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
    node = np.arange(len(schedule.columns))
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


def _order(schedule: Schedule, channel: str, tied: bool) -> Iterator[_Edges]:
    """The waits within each list: for the compute before, and for what is queued before."""
    columns = schedule.columns
    computes = columns.is_kind(*COMPUTE)
    if channel == "host":
        # The whole list is one queue, which says all that compute's order could.
        later, earlier = _holders(columns, np.ones(len(columns), np.bool_), tied)
        after = computes[later] | computes[earlier]
        yield _edges(later[after], earlier[after], AFTER)
        yield _edges(later[~after], earlier[~after], QUEUED)
        return
    later, earlier = _holders(columns, computes, tied)
    if channel == "async":
        held = ~columns.is_kind(*RECEIVES)[later]
        later, earlier = later[held], earlier[held]
    yield _edges(later, earlier, AFTER)
    yield _edges(np.arange(len(columns)), previous_of_queue(queues(channel, schedule)), QUEUED)
    sums = np.array(sums_of_steps(schedule), np.int64).reshape(-1, 2)
    yield _edges(sums[:, 0], sums[:, 1], NEEDS)


def _holders(columns: Columns, holds: Bools, tied: bool) -> tuple[Ints, Ints]:
    """Every place, and the last one before it on its rank that `holds`; -1 for none.

    Where stages are `tied`, OPTIM_STEPs don't hold each other, and all since that last one hold
    what comes after them.
    """
    places = np.arange(len(columns))
    start = columns.starts[columns.rank]
    steps = columns.is_kind(Kind.OPTIM_STEP) & tied
    last = np.maximum.accumulate(np.where(holds & ~steps, places, -1)) if len(places) else places
    before = np.concatenate(([-1], last[:-1]))[: len(places)]
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


def previous_of_queue(queue: Ints) -> Ints:
    """For every place, the place before in its queue, -1 for none."""
    order = np.argsort(queue, kind="stable")
    order = order[queue[order] >= 0]
    previous = np.full(len(queue), -1)
    same = queue[order[1:]] == queue[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _inputs(schedule: Schedule) -> Iterator[_Edges]:
    """The waits of compute for its input: for its receive, or for what makes it elsewhere."""
    transfers = schedule.dataflow.transfers
    used = transfers.user >= 0
    source = transfers.receive if schedule.is_complete else transfers.maker
    yield _edges(transfers.user[used], source[used], NEEDS)


def finish(waiting: Waits, durations: Sequence[Time]) -> list[Time]:
    """When each node is done, each place taking its duration; -1 for what never happens: for what
    is on a cycle, and what waits for one."""
    node = waiting.node
    later, earlier = node[waiting.later], node[waiting.earlier]
    order = np.argsort(earlier, kind="stable")
    bounds = np.searchsorted(earlier[order], np.arange(len(node) + 1)).tolist()
    waiters = later[order].tolist()
    left = np.bincount(later, minlength=len(node))
    ready = np.flatnonzero((left == 0) & (node == np.arange(len(node)))).tolist()
    missing = left.tolist()
    begin: list[Time] = [0] * len(node)
    done: list[Time] = [-1] * len(node)
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
    done = np.array(finish(waiting, [0] * len(waiting.node)))
    never: Bools = (done < 0) & (waiting.node == np.arange(len(waiting.node)))
    return never
