"""The critical path: the chain of compute, transfers and collectives that adds up to the makespan.

It is walked backwards, from the action that ends last to the action that it had waited for, and so
on:

    time     0    1    2    3    4    5    6    7    8    9
    rank 0   0F0                 0B0------ 0B1 ------
    rank 1        1F0  1B0------ 1F1  1B1------

    0B1 < 1SEND_GRAD1 < 1B1 < 1F1 < 1B0 < 1F0 < 0SEND_ACT0 < 0F0

Each action begins when the one before it ends, except behind a transfer on the same channel: the
channel is free one latency before that transfer's payload arrives. So the path of a simulated
timeline goes from 0 to the makespan without a gap. Under a channel model it goes behind what is
queued at either end; what only was on its way as an action began comes after all that ended then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import attrs
import numpy as np

from schedir.graph.paths import AFTER, NEEDS, PART, POSTED, QUEUED, Waits
from schedir.ir import COMPUTE, COPIES, RECEIVES, Bools, Ints
from schedir.simulator.moments import Moments


def critical_path(moments: Moments, clock_error: float) -> tuple[int, ...]:
    """The places on the critical path, in the order of time: a transfer is at its receive, an entry
    of several actions at its first action.

    If the clocks of ranks differ by up to `clock_error`, an action that seems to end that much too
    late may still have been waited for. Raises UnsoundError if the lists are too wrong to tell.
    """
    columns, ends = moments.columns, moments.ends
    if np.isnan(ends).all():
        return ()
    receive, send = moments.graph.transfers.receive, moments.graph.transfers.send
    shown = np.append(columns.heads[columns.entry], -1)
    shown[receive] = shown[send] = np.where(receive >= 0, receive, send)
    waiting = moments.waits
    by_waiter = np.argsort(waiting.waiter, kind="stable")
    bounds = np.searchsorted(waiting.waiter[by_waiter], np.arange(waiting.nodes + 1))
    kinds = columns.is_kind(*RECEIVES), columns.is_kind(*COMPUTE), columns.where(*COPIES)
    walk = _Walk(moments, clock_error, waiting, by_waiter, bounds, *kinds)
    # Of several that end last the one that is listed last, which waits for the others if any.
    place = int(np.flatnonzero(ends == np.fmax.reduce(ends))[-1])
    path: dict[int, None] = {}
    while place >= 0 and (place := int(shown[place])) not in path:
        path[place] = None
        place = walk.before(place)
    return tuple(path)[::-1]


@attrs.frozen
class _Walk:
    """The walk back over the waits: those of node n are `by_waiter[bounds[n] : bounds[n + 1]]`."""

    moments: Moments
    late: float
    waiting: Waits
    by_waiter: Ints
    bounds: Ints
    receives: Bools
    computes: Bools
    copies: Ints

    def before(self, place: int) -> int:
        """The place that a place had waited for until it began, -1 if none is known."""
        begin, found = float(self.moments.begins[place]), []
        waits = self._waits(int(self.waiting.node[place]))
        for why, waiter, awaited in chain(waits, self._on_its_engine(place, begin)):
            if why == AFTER and self.computes[awaited]:
                awaited = self._last_known(awaited, begin)
            until = self._until(why, waiter, awaited, begin)
            if awaited >= 0 and until is not None:
                # Of those that end at once the compute before it, at its send, comes first.
                order = _ORDER.index(why), self.receives[waiter], waiter
                on_its_way = self.waiting.by_ends and self.moments.ends[awaited] > begin
                since = float(self.moments.begins[awaited]) if on_its_way else math.inf
                found.append((-until, -since, *order, awaited))
        return min(found)[-1] if found else -1

    def _waits(self, node: int) -> Iterator[tuple[int, int, int]]:
        """Why a node waits, at which place, and for which; of a whole batch, for each PART."""
        waiting, places = self.waiting, len(self.waiting.node)
        for wait in self.by_waiter[self.bounds[node] : self.bounds[node + 1]].tolist():
            why, later, earlier, awaited = (
                int(column[wait])
                for column in (waiting.why, waiting.later, waiting.earlier, waiting.awaited)
            )
            if why == POSTED:
                yield from self._waits(awaited)
            elif awaited < places:
                yield why, later, earlier
            else:
                for _, part, _ in self._waits(awaited):
                    yield why if (why, part) == (NEEDS, earlier) else PART, later, part

    def _on_its_engine(self, place: int, begin: float) -> Iterator[tuple[int, int, int]]:
        """For a copy, those that end as it begins: ranks may share an engine."""
        if len(self.copies) and place in self.copies:
            begins, ends = self.moments.begins[self.copies], self.moments.ends[self.copies]
            for other in self.copies[(begins < begin) & (ends == begin)].tolist():
                yield QUEUED, place, other

    def _last_known(self, compute: int, begin: float) -> int:
        """Of compute and what is before it on its rank, the last that is known to have ended."""
        ends, latest = self.moments.ends, begin + self.late
        while compute >= 0 and (np.isnan(ends[compute]) or ends[compute] > latest):
            compute = int(self.moments.compute_before[compute])
        return compute

    def _until(self, why: int, waiter: int, awaited: int, begin: float) -> float | None:
        """Until when a place may have been waited for, None if it was not."""
        end, held_since = float(self.moments.ends[awaited]), self.moments.begins[awaited]
        lets_go = why == QUEUED
        if self.waiting.by_ends:  # also a batch of its sends, and under `host` what computes next
            lets_go = why != NEEDS and not self.computes[awaited]
        if lets_go and held_since <= begin <= end:
            return begin
        if why == AFTER and self.receives[waiter]:
            return end if end == begin else None
        if why == NEEDS:  # what seems late, or is not known, explains all of a gap
            until = end if end < begin else begin
            return until if until == until else -math.inf
        return min(end, begin) if why == AFTER or end <= begin else None


_ORDER = (AFTER, NEEDS, PART, QUEUED)
