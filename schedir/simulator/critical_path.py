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

from collections.abc import Iterator

import numpy as np

from schedir.ir import COMPUTE, KIND_INDEX, Kind
from schedir.simulator.needs import Needs

_REDUCE = KIND_INDEX[Kind.REDUCE_GRAD]
_COMPUTE = frozenset(KIND_INDEX[kind] for kind in COMPUTE)


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
            found = list(self._before_compute(place))
        elif kind == _REDUCE:
            turn = self.needs.turns.get(place, (place,))
            found = [(self._end(p), p) for p in map(self._compute_before, turn) if p >= 0]
        else:
            found = list(self._before_transfer(int(self.transfer_of[place])))
        # Of those that end at once the first one: the rank's own compute.
        return self._node(max(found, key=lambda one: one[0])[1]) if found else -1
