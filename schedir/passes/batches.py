"""Join neighbouring sends and receives into batches, if a list would block without them.

    rank 0   0F0 0SEND_ACT0 0RECV_GRAD9 …        each rank waits at its send, and lists the receive
    rank 1   … 1SEND_GRAD9 1RECV_ACT0 1F0        of the other's send after it: as one batch, both
    rank 0   0F0 (0SEND_ACT0;0RECV_GRAD9) …      transfers happen
    rank 1   … (1SEND_GRAD9;1RECV_ACT0) 1F0

The pass runs the lists under the model `rank`: each rank goes through its transfers and collectives
in order, and waits at each until all its ends are posted. (Compute holds nobody up once its
receives are there.) If every rank that is left waits, some wait for each other in a circle. Such a
circle ends only if a rank reaches the entry that the rank before it waits for, and so only if
nothing but communication lies between: the pass joins those entries. A batch only posts its parts
sooner, so every transfer that happened before still happens.
"""

from __future__ import annotations

import attrs
import numpy as np

from schedir.graph.compile import graph_of
from schedir.ir import COMMUNICATION, GROUPS, Columns, Schedule, expect_schedule


def batch_communication(schedule: Schedule) -> Schedule:
    """Join neighbouring sends and receives into batches, as few as the schedule needs to run to its
    end under the channel model `rank`.

    The schedule stays unchanged if it already runs, or if batches would not help: it is
    compute-only, its communication does not match, or it blocks for another reason. Raises
    TypeError for anything that is not a Schedule, and UnsoundError if the lists are too wrong to
    match communication with compute.

    >>> import schedir
    >>> schedule = schedir.Schedule.of(
    ...     "mine",
    ...     [0, 1],
    ...     [
    ...         "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
    ...         "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1",
    ...     ],
    ... )
    >>> schedir.check(schedule).clean_channels
    ('edge', 'direction', 'async')
    >>> batched = schedir.batch_communication(schedule)
    >>> str(batched.actions[0][3]), schedir.check(batched).ok
    ('(0SEND_ACT1;0RECV_GRAD0)', True)
    """
    expect_schedule(schedule)
    columns = schedule.columns
    joins = _joins(columns, _ends(schedule))
    if not joins:
        return schedule
    joined = columns.joined.copy()
    joined[joins] = True
    return attrs.evolve(schedule, actions=attrs.evolve(columns, joined=joined))


def split_batches(schedule: Schedule) -> Schedule:
    """The schedule with the parts of each batch as separate entries, in their order."""
    columns = schedule.columns
    if not columns.together:
        return schedule
    pairs = columns.joined & ~columns.is_kind(*COMMUNICATION)
    return attrs.evolve(schedule, actions=attrs.evolve(columns, joined=pairs))


def _ends(schedule: Schedule) -> list[tuple[int, ...]]:
    """The places of both ends of every transfer and of every collective.

    Empty if some end lacks another, or if the two ends of a channel list their transfers in
    different orders.
    """
    graph, columns = graph_of(schedule), schedule.columns
    transfers, turns = graph.transfers, graph.collectives
    matched, (behind, ahead) = transfers.matched, transfers.in_turn
    in_order = (transfers.receive[behind] > transfers.receive[ahead]).all()
    both = transfers.send[matched].tolist(), transfers.receive[matched].tolist()
    ends = [*zip(*both, strict=True), *turns]
    listed = len(columns.where(*COMMUNICATION, *GROUPS))
    return ends if in_order and sum(map(len, ends)) == listed else []


def _joins(columns: Columns, ends: list[tuple[int, ...]]) -> list[int]:
    """The places to join to the places before them so that every rank comes to its end; empty if
    all do so without, or if some don't with any."""
    communicates = columns.is_kind(*COMMUNICATION)
    # Neighbours in one list with nothing but communication between them have the same number.
    apart = ~communicates
    apart[1:] |= ~communicates[:-1]
    apart[columns.starts[:-1][np.diff(columns.starts) > 0]] = True
    stretch: list[int] = np.cumsum(apart).tolist()
    rank_of, last = columns.rank.tolist(), columns.last.tolist()
    meeting = {place: turn for turn, places in enumerate(ends) for place in places}
    absent = [len(places) for places in ends]  # how many ends nobody stands at
    # Each rank stands at the places to before `until`, of which `looked` is what it waits for.
    until: list[int] = columns.starts[:-1].tolist()
    looked, stop = until.copy(), columns.starts[1:].tolist()
    ready, joins = [*range(columns.ranks)], list[int]()

    def stand(rank: int, end: int) -> None:
        """Post the next places of the rank's list, to before `end`."""
        for place in range(until[rank], end):
            turn = meeting.get(place)
            if turn is not None:
                absent[turn] -= 1
                if not absent[turn]:
                    ready.extend(rank_of[place] for place in ends[turn])
        until[rank] = end

    while True:
        while ready:  # moves each rank as far as it gets
            rank = ready.pop()
            while looked[rank] < stop[rank]:
                if looked[rank] == until[rank]:
                    stand(rank, last[until[rank]] + 1)
                turn = meeting.get(looked[rank])
                if turn is not None and absent[turn]:
                    break
                looked[rank] += 1
        rank = next((rank for rank, place in enumerate(looked) if place < stop[rank]), -1)
        if rank < 0:
            return joins
        wanted: dict[int, int] = {}  # by rank: the place that it waits for
        while rank not in wanted:
            others = ends[meeting[looked[rank]]]
            wanted[rank] = next(end for end in others if end >= until[rank_of[end]])
            rank = rank_of[wanted[rank]]
        circle = [*wanted.values()][[*wanted].index(rank) :]
        # Only communication lies between the place and where its rank stands.
        reached = [
            place for place in circle if stretch[until[rank_of[place]] - 1] == stretch[place]
        ]
        if not reached:
            return []
        for place in reached:
            joins += range(until[rank_of[place]], last[place] + 1)
            stand(rank_of[place], last[place] + 1)
