"""Join neighbouring sends and receives into batches, where a list would block without them.

    rank 0   0F0 0SEND_ACT0 0RECV_GRAD9 …        each stands at its send, whose receive the other
    rank 1   … 1SEND_GRAD9 1RECV_ACT0 1F0        lists after its own: posted as one, both happen
    rank 0   0F0 (0SEND_ACT0;0RECV_GRAD9) …
    rank 1   … (1SEND_GRAD9;1RECV_ACT0) 1F0

Each rank goes through the transfers and collectives of its list in order, and stands at each until
all its ends do: the model `rank`, as compute holds nobody up once its receives are there. Where all
that are left stand, some wait for each other in a circle. Such a wait ends only if a rank reaches
what the one before it stands at, and so only if no more than communication lies between: that is
joined. A batch only has its parts posted sooner, so nothing that happened without it is lost.
"""

from __future__ import annotations

import attrs
import numpy as np

from schedir.graph.compile import graph_of
from schedir.ir import COMMUNICATION, GROUPS, Columns, Schedule, expect_schedule


def batch_communication(schedule: Schedule) -> Schedule:
    """The schedule with as few neighbouring sends and receives joined into batches as it takes to
    run to its end under the channel model `rank`.

    Unchanged where it does so already, and where no batches would help: it is compute-only, its
    communication does not match, or blocks for another reason. Raises TypeError for what is no
    Schedule, UnsoundError for one that is too wrong to say what its communication belongs to.
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
    """The schedule with the parts of each batch as entries of their own, in their order."""
    columns = schedule.columns
    if not columns.together:
        return schedule
    pairs = columns.joined & ~columns.is_kind(*COMMUNICATION)
    return attrs.evolve(schedule, actions=attrs.evolve(columns, joined=pairs))


def _ends(schedule: Schedule) -> list[tuple[int, ...]]:
    """The places that happen together, of each transfer and collective; none where some place has
    no others, or those of a channel stand in another order at its other end."""
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
    """How far each rank has come in its list: it stands at the places `at` to before `until`."""

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
        """Each rank as far as it gets; whether any of them stands."""
        while self.ready:
            rank = self.ready.pop()
            while not self.missing[rank] and self.until[rank] < self.stop[rank]:
                self.at[rank] = self.until[rank]
                self._stand(rank, self.last[self.at[rank]])
        return any(self.missing)

    def _stand(self, rank: int, last: int) -> None:
        """The rank posts what comes next in its list, up to `last`."""
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
        """Join what lies between where the ranks of a circle stand and what is waited for there;
        whether that is possible on any of them."""
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
        """A place that the rank, which stands, waits for."""
        place = self.looked[rank] = next(
            place
            for place in range(max(self.looked[rank], self.at[rank]), self.until[rank])
            if self.absent[self.meeting[place]]
        )
        ends = self.ends[self.meeting[place]]
        return next(end for end in ends if end >= self.until[self.rank[end]])

    def _reaches(self, place: int) -> bool:
        """Whether its rank could stand there too, as nothing but communication is between."""
        stands_at = self.at[self.rank[place]]
        return self.stretch[stands_at] == self.stretch[place]
