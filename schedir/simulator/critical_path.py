"""The critical path: the chain of compute, transfers and collectives that the makespan consists of.

It is walked backwards, from what ends last to what that had waited for, and so on:

    time     0    1    2    3    4    5    6    7    8    9
    rank 0   0F0                 0B0------ 0B1 ------
    rank 1        1F0  1B0------ 1F1  1B1------

    0B1 < 1SEND_GRAD1 < 1B1 < 1F1 < 1B0 < 1F0 < 0SEND_ACT0 < 0F0

Each begins when the one before ends. But for what waits behind a transfer on its channel: that is
there when the channel is free, which a latency before its payload has arrived.
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeAlias

import numpy as np

from schedir.ir import COMPUTE, KIND_INDEX, Kind
from schedir.simulator.needs import Needs

_REDUCE = KIND_INDEX[Kind.REDUCE_GRAD]
_COMPUTE = frozenset(KIND_INDEX[kind] for kind in COMPUTE)
_Ending: TypeAlias = tuple[float, int]
"""When what was waited for ends, and its place."""


def critical_path(needs: Needs, clock_error: float) -> tuple[int, ...]:
    """The places on the critical path, in the order of time: for a transfer that of its receive,
    for an entry of several actions that of the first.

    Where the clocks of ranks differ by up to `clock_error`, what seems to end so much too late may
    have been waited for. Raises UnsoundError where the lists are too wrong to tell.
    """
    return tuple(_Walk(needs, clock_error).places())


class _Walk:
    """One walk back over the timeline."""

    def __init__(self, needs: Needs, clock_error: float) -> None:
        self.needs = needs
        self.late = clock_error
        self.columns = needs.columns
        transfers = needs.transfers
        self.transfer_of = np.full(len(self.columns), -1)  # of a send or receive
        for side in (transfers.send, transfers.receive):
            listed = np.flatnonzero(side >= 0)
            self.transfer_of[side[listed]] = listed

    def places(self) -> list[int]:
        """The path, in the order of time."""
        ends = self.needs.ends
        if np.isnan(ends).all():
            return []
        # Of several that end last the one that is listed last, which waits for the others if any.
        latest = np.flatnonzero(ends == np.fmax.reduce(ends))
        place = self._node(int(latest[-1]))
        path, seen = [place], {place}
        while (before := self._before(place)) >= 0 and before not in seen:
            place = before
            path.append(place)
            seen.add(place)
        return path[::-1]

    def _node(self, place: int) -> int:
        """What stands for a place on the path."""
        transfer = int(self.transfer_of[place])
        if transfer >= 0:
            receive = int(self.needs.transfers.receive[transfer])
            return receive if receive >= 0 else place
        return int(self.columns.heads[self.columns.entry[place]])

    def _before(self, place: int) -> int:
        """What a place had waited for, -1 for nothing that is known."""
        kind = int(self.columns.kind[place])
        if kind in _COMPUTE:
            found = self._before_compute(place)
        elif kind == _REDUCE:
            found = self._before_collective(place)
        else:
            found = self._before_transfer(int(self.transfer_of[place]))
        # Of those that end at once the first one.
        return self._node(max(found, key=lambda one: one[0])[1]) if found else -1

    def _before_compute(self, place: int) -> list[_Ending]:
        """Its rank's compute before it, what brought its input, and the sum that it applies."""
        needs, start = self.needs, float(self.needs.starts[place])
        found = self._compute_before(place)
        # An arrival that is not known, or that seems late, explains all of a gap.
        for part in range(place, int(self.columns.last[place]) + 1):
            transfer = int(needs.schedule.dataflow.arrivals[part])
            if transfer < 0:
                continue
            receive = int(needs.transfers.receive[transfer])
            if receive < 0:  # not listed: as if it took no time
                found += self._ending(int(needs.transfers.maker[transfer]), start)
                continue
            arrival = float(needs.arrives[transfer])
            found.append((arrival if arrival < start else start, receive))
            for mate in needs.batch_mates.get(int(self.columns.entry[receive]), ()):
                arrival = float(needs.arrives[mate])
                if arrival <= start:
                    found.append((arrival, int(needs.transfers.receive[mate])))
        if place in needs.sums:
            over = needs.summed(needs.sums[place])
            found.append((over if over < start else start, needs.sums[place]))
        return found

    def _before_transfer(self, transfer: int) -> list[_Ending]:
        """The compute before its send, what its channel carried before it, and what only some wait
        for: the compute before its receive, and what is queued before the rest of its batch."""
        needs, start = self.needs, float(self.needs.begins[transfer])
        send, receive = (
            int(side[transfer]) for side in (needs.transfers.send, needs.transfers.receive)
        )
        found = self._compute_before(send, start) if send >= 0 else []
        if found and (found[0][0] == start or start != start):
            return found
        if receive >= 0 and (self.as_listed or self._batched(receive)):
            posted = self._compute_before(receive, start)
            if posted and posted[0][0] == start:
                return posted
        for before in self._queued_before(transfer, send, receive):
            arrival = float(needs.arrives[before])
            if needs.begins[before] <= start <= arrival:  # it held the channel until now
                found.append((start, int(needs.transfers.receive[before])))
            elif arrival < start:
                found.append((arrival, int(needs.transfers.receive[before])))
        return found

    @cached_property
    def as_listed(self) -> bool:
        """Whether no transfer starts before the compute that is listed before its receive ends."""
        needs = self.needs
        receive = needs.transfers.receive
        before = np.where(receive >= 0, needs.compute_before[receive], -1)
        posted = np.where(before >= 0, needs.ends[before], 0)
        return not (needs.begins < posted).any()

    def _batched(self, place: int) -> bool:
        return int(self.columns.entry[place]) in self.needs.batch_mates

    def _queued_before(self, transfer: int, send: int, receive: int) -> list[int]:
        """The transfer before it on its channel; of batches, those before any part, whole."""
        needs, entry = self.needs, self.columns.entry
        found = []
        for place in (send, receive):
            mates = needs.batch_mates.get(int(entry[place]), [transfer]) if place >= 0 else []
            for before in (int(needs.queued_behind[mate]) for mate in mates):
                if before < 0:
                    continue
                found.append(before)
                for side in (needs.transfers.send, needs.transfers.receive):
                    found += needs.batch_mates.get(int(entry[side[before]]), ())
        return found

    def _before_collective(self, place: int) -> list[_Ending]:
        """The compute before it on all its ranks, and the collective of the stage before it."""
        start = float(self.needs.starts[place])
        turn = self.needs.turns.get(place, (place,))
        found = [one for each in turn for one in self._compute_before(each, start)]
        columns = self.columns
        own = slice(int(columns.starts[columns.rank[place]]), place)
        same = (columns.kind[own] == _REDUCE) & (columns.stage[own] == columns.stage[place])
        earlier = np.flatnonzero(same)
        if len(earlier):
            found += self._ending(own.start + int(earlier[-1]), start)
        return found

    def _compute_before(self, place: int, start: float = np.inf) -> list[_Ending]:
        """The last compute of its rank before a place whose times are known."""
        before = int(self.needs.compute_before[place])
        while before >= 0 and not self._ending(before, start):
            before = int(self.needs.compute_before[before])
        return self._ending(before, start) if before >= 0 else []

    def _ending(self, place: int, start: float) -> list[_Ending]:
        """When a place ends, where that is known and may have been waited for until `start`."""
        end = float(self.needs.ends[place]) if place >= 0 else np.nan
        if end != end or end > start + self.late:
            return []
        return [(min(end, start), place)]
