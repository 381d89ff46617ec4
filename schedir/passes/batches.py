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
    ('edge', 'async')
    >>> batched = schedir.batch_communication(schedule)
    >>> str(batched.actions[0][3]), schedir.check(batched).ok
    ('(0SEND_ACT1;0RECV_GRAD0)', True)
    """
    expect_schedule(schedule)
    columns = schedule.columns
    ends = _ends(schedule)
    if not ends:
        return schedule
    lists = _Lists(columns, ends)
    while lists.go_on():
        if not lists.break_circle():
            return schedule
    if not lists.joins:
        return schedule
    joined = columns.joined.copy()
    joined[lists.joins] = True
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
    order, follows = transfers.by_channel
    receives = transfers.receive[order]
    in_order = not len(order) or bool(((receives[1:] > receives[:-1]) | ~follows[1:]).all())
    ends = [*zip(transfers.send[order].tolist(), receives.tolist(), strict=True)]
    listed = len(columns.where(*COMMUNICATION, *GROUPS))
    matched = listed == 2 * len(ends) + sum(map(len, turns))
    return [*ends, *turns] if matched and in_order else []


class _Lists:
    """How far each rank has come in its list: it waits at the places from `at` up to `until`."""

    def __init__(self, columns: Columns, ends: list[tuple[int, ...]]) -> None:
        communicates = columns.is_kind(*COMMUNICATION)
        # Neighbours in one list with nothing but communication between them have the same number.
        apart = ~communicates
        apart[1:] |= ~communicates[:-1]
        apart[columns.starts[:-1][np.diff(columns.starts) > 0]] = True
        self.stretch: list[int] = np.cumsum(apart).tolist()
        self.rank: list[int] = columns.rank.tolist()
        self.last: list[int] = columns.last.tolist()
        self.ends = ends
        self.meeting = {place: turn for turn, places in enumerate(ends) for place in places}
        self.absent = [len(places) for places in ends]  # how many ends nobody stands at
        self.standing: dict[int, list[int]] = {}  # by meeting: the ranks that do
        self.at: list[int] = columns.starts[:-1].tolist()
        self.until = self.at.copy()
        self.looked = self.at.copy()  # nothing from `at` to before there is still waited for
        self.stop: list[int] = columns.starts[1:].tolist()
        self.missing = [0] * columns.ranks  # how many meetings each rank still waits for
        self.ready = [*range(columns.ranks)]
        self.joins: list[int] = []

    def go_on(self) -> bool:
        """Move each rank as far as it gets. True if any rank waits."""
        while self.ready:
            rank = self.ready.pop()
            while not self.missing[rank] and self.until[rank] < self.stop[rank]:
                self.at[rank] = self.until[rank]
                self._stand(rank, self.last[self.at[rank]])
        return any(self.missing)

    def _stand(self, rank: int, last: int) -> None:
        """Post the next places of the rank's list, up to `last`."""
        for place in range(self.until[rank], last + 1):
            meeting = self.meeting.get(place)
            if meeting is None:
                continue  # it computes
            self.absent[meeting] -= 1
            if self.absent[meeting]:
                self.standing.setdefault(meeting, []).append(rank)
                self.missing[rank] += 1
                continue
            for other in self.standing.pop(meeting, ()):
                self.missing[other] -= 1
                self.ready.append(other)
        self.until[rank] = last + 1

    def break_circle(self) -> bool:
        """Join the entries between the places where the ranks of a circle wait and the places that
        they wait for. True if that is possible on any of these ranks."""
        wanted: dict[int, int] = {}  # by rank: the place that it waits for
        rank = next(rank for rank, missing in enumerate(self.missing) if missing)
        while rank not in wanted:
            wanted[rank] = self._wanted(rank)
            rank = self.rank[wanted[rank]]
        circle = [*wanted.values()][[*wanted].index(rank) :]
        found = [place for place in circle if self._reaches(place)]
        for place in found:
            rank = self.rank[place]
            self.joins += range(self.until[rank], self.last[place] + 1)
            self._stand(rank, self.last[place])
        return bool(found)

    def _wanted(self, rank: int) -> int:
        """A place that the waiting rank waits for."""
        place = self.looked[rank] = next(
            place
            for place in range(max(self.looked[rank], self.at[rank]), self.until[rank])
            if self.absent[self.meeting[place]]
        )
        ends = self.ends[self.meeting[place]]
        return next(end for end in ends if end >= self.until[self.rank[end]])

    def _reaches(self, place: int) -> bool:
        """True if only communication lies between the place and where its rank waits."""
        stands_at = self.at[self.rank[place]]
        return self.stretch[stands_at] == self.stretch[place]
