"""When every entry of a schedule happens, and what it had waited for.

The critical path is the chain of compute, transfers and collectives that adds up to the makespan.
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
from functools import cached_property

import attrs
import numpy as np

from schedir.graph.compile import Graph, graph_of
from schedir.graph.paths import (
    AFTER,
    NEEDS,
    PART,
    POSTED,
    QUEUED,
    Waits,
    compute_before,
    waits,
)
from schedir.ir import (
    COMMUNICATION,
    COMPUTE,
    COPIES,
    KINDS,
    RECEIVES,
    Columns,
    Ints,
    Schedule,
    channel_model,
    is_number,
)
from schedir.passes import split_batches
from schedir.passes.receives import posted_after
from schedir.simulator.values import Numbers

CHANNEL = "edge"
"""The channel model that schedules are simulated on if none is named."""


@attrs.frozen
class Posting:
    """How the transfers of a run are posted: under which `channel` model, and with `room` for how
    many receive buffers on each rank (see `schedir.advance_receives`). None for receives that stay
    where they are listed."""

    channel: str = attrs.field(converter=channel_model)
    room: int | None = attrs.field()

    @room.validator
    def _check_room(self, attribute: object, value: object) -> None:
        if value is not None and not is_number(value):
            raise ValueError(f"room must be a number of buffers or None, not {value!r}")

    @property
    def stays(self) -> bool:
        """Whether receives are posted where they are listed."""
        return self.room is None or self.channel == "host"

    def after(self, schedule: Schedule) -> Ints:
        """For every place of a complete schedule, the compute after which it is posted, -1 for
        none."""
        if self.room is None or self.stays:
            return compute_before(schedule.columns)
        return posted_after(schedule, self.channel, self.room)

    def waits(self, schedule: Schedule, channel: str | None = None) -> Waits:
        """What waits for what as a complete schedule runs, posted like this, under another
        `channel` model if one is named."""
        after = self.after(schedule)
        return waits(schedule, channel or self.channel, posted=after, by_ends=True)


def as_run(schedule: Schedule) -> Schedule:
    """A complete schedule as it is simulated: with its batches split if they block."""
    columns = schedule.columns
    if not (columns.joined & columns.is_kind(*COMMUNICATION)).any():
        return schedule

    def split() -> Schedule:
        return split_batches(schedule) if waits(schedule, CHANNEL).stuck.any() else schedule

    return schedule.once("as run", split)


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(eq=False, slots=False)
class Moments:
    """When every place begins and ends, as floats; one more NaN stands for no place (-1).

    NaN stands for an unknown time. Both ends of a transfer have the same times. If only the start
    of a transfer or of a sum is known, nobody waited for its end, and it counts as over at once.
    """

    schedule: Schedule
    begins: Numbers
    ends: Numbers
    posting: Posting | None = None

    @property
    def columns(self) -> Columns:
        """The lists."""
        return self.schedule.columns

    @property
    def graph(self) -> Graph:
        """What the lists mean."""
        return graph_of(self.schedule)

    @cached_property
    def compute_before(self) -> Ints:
        """For every place, that of the last compute before its entry on its rank, -1 for none."""
        return compute_before(self.columns)

    @cached_property
    def waits(self) -> Waits:
        """What waits for what. Without a known posting, receives are posted where they are listed,
        or ahead if a transfer begins before that."""
        if self.posting is not None:
            return self.posting.waits(self.schedule)
        receive = self.graph.transfers.receive
        before = np.where(receive >= 0, self.compute_before[receive], -1)
        ahead = bool((self.begins[receive] < self.ends[before]).any())
        return waits(as_run(self.schedule), CHANNEL, ahead=ahead)

    @cached_property
    def by_waiter(self) -> tuple[Ints, Ints]:
        """The numbers of the `waits` in the order of the nodes that wait, and these nodes."""
        order = np.argsort(self.waits.waiter, kind="stable")
        return order, self.waits.waiter[order]


def moments_of(
    schedule: Schedule, starts: Numbers, ends: Numbers, posting: Posting | None = None
) -> Moments:
    """The moments of a timeline. Raises UnsoundError if the lists are too wrong to match
    actions."""
    transfers, computes = graph_of(schedule).transfers, schedule.columns.is_kind(*COMPUTE)
    found = []
    for known in (starts, ends):
        times = np.append(known.astype(np.float64), np.nan)
        sent, received = times[transfers.send], times[transfers.receive]
        times[transfers.send] = times[transfers.receive] = np.where(
            np.isnan(received), sent, received
        )
        times[-1] = np.nan
        found.append(times)
    begins, over = found
    at_once = np.isnan(over) & ~np.append(computes, True)
    return Moments(schedule, begins, np.where(at_once, begins, over), posting)


# The critical path.


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
    shown = np.append(columns.first, -1)
    shown[receive] = shown[send] = np.where(receive >= 0, receive, send)
    # Of several that end last the one that is listed last, which waits for the others if any.
    place = int(np.flatnonzero(ends == np.fmax.reduce(ends))[-1])
    path: dict[int, None] = {}
    while place >= 0 and (place := int(shown[place])) not in path:
        path[place] = None
        place = _waited_for(moments, place, clock_error)
    return tuple(path)[::-1]


def _waited_for(moments: Moments, place: int, clock_error: float) -> int:
    """The place that a place had waited for until it began, -1 if none is known."""
    columns, begins, ends, waiting = moments.columns, moments.begins, moments.ends, moments.waits
    begin, found = float(begins[place]), []
    waits = [*_waits_of(moments, int(waiting.node[place]))]
    if KINDS[columns.kind[place]] in COPIES:
        # Ranks may share an engine: it may have waited for a copy that ends as it begins.
        copies = columns.where(*COPIES)
        before = copies[(begins[copies] < begin) & (ends[copies] == begin)]
        waits += [(QUEUED, place, copy) for copy in before.tolist()]
    for why, waiter, awaited in waits:
        computes = KINDS[columns.kind[awaited]] in COMPUTE
        if why == AFTER and computes:
            # The last compute that is known to have ended.
            latest = begin + clock_error
            while awaited >= 0 and (np.isnan(ends[awaited]) or ends[awaited] > latest):
                awaited = int(moments.compute_before[awaited])
        receives = KINDS[columns.kind[waiter]] in RECEIVES
        since, end = float(begins[awaited]), float(ends[awaited])
        # With ends of their own also a batch of its sends, and under `host` what computes next.
        let_go = why != NEEDS and not computes if waiting.by_ends else why == QUEUED
        let_go = let_go and since <= begin <= end
        ended = why in (AFTER, NEEDS) or end <= begin
        if why == AFTER and receives:
            ended = end == begin
        if awaited >= 0 and (let_go or ended):
            # What seems late, or is not known, explains all of a gap.
            until = begin if why == NEEDS and not end < begin else min(end, begin)
            on_its_way = waiting.by_ends and end > begin
            # Of those that end at once the compute before it, at its send, comes first.
            order = why == QUEUED, why, receives, waiter
            found.append(
                (
                    math.inf if math.isnan(until) else -until,
                    -since if on_its_way else -math.inf,
                    *order,
                    awaited,
                )
            )
    return min(found)[-1] if found else -1


def _waits_of(moments: Moments, node: int) -> Iterator[tuple[int, int, int]]:
    """Why a node waits, at which place, and for which; of a whole batch, for each PART."""
    waiting, (order, waiters) = moments.waits, moments.by_waiter
    begin, end = np.searchsorted(waiters, [node, node + 1])
    for wait in order[begin:end].tolist():
        why, later, earlier, awaited = (
            int(column[wait])
            for column in (waiting.why, waiting.later, waiting.earlier, waiting.awaited)
        )
        if why == POSTED:
            yield from _waits_of(moments, awaited)
        elif awaited < len(waiting.node):
            yield why, later, earlier
        else:
            for _, part, _ in _waits_of(moments, awaited):
                yield why if (why, part) == (NEEDS, earlier) else PART, later, part
