"""Timelines in few bytes, for a page that opens them in a browser.

All numbers of all timelines are one stream of integers of variable length (LEB128, zigzag),
deflated and in base64. Only differences are written: an action is compared with the last one of its
kind on its rank, the start of a compute action with the end of the one before it, the start of a
send with the end of the action that makes its payload, and the start of a receive with its send.

    rank 0   0F0   0F1   0F2             a simulated rank that does not wait:
    gap      0     0     0               zeros alone
    longer   10    0     0               than the last of its kind

Times are whole ticks. A tick is the finest power of ten of which the longest timeline has at most
2^31, or a coarser one that loses nothing. `page/data.js` reads the stream.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence

import attrs
import numpy as np

from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, RECEIVES, VALUES, Bools, Ints, Kind, Schedule
from schedir.simulator import IdleColumns, Timeline
from schedir.simulator.values import Numbers

_NOTHING = 1e-290  # shorter times have no ticks
MOST_TICKS = 2**31 - 1
"""The largest signed integer of 32 bits."""


class Stream:
    """A stream of integers, written column by column."""

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def put(self, values: Ints | Bools) -> None:
        """Write a column of integers."""
        self._written.append(varints(values))

    def text(self) -> str:
        """The whole stream, deflated and in base64."""
        deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
        raw = b"".join(map(deflate.compress, self._written)) + deflate.flush()
        return base64.b64encode(raw).decode("ascii")


def varints(values: Ints | Bools) -> bytes:
    """Encode integers with 7 bits in a byte, the lowest bits first and the sign in the lowest bit;
    the top bit of a byte says that another byte follows."""
    whole = np.asarray(values, np.int64)
    rest = ((whole << 1) ^ (whole >> 63)).view(np.uint64)
    groups = np.ones(len(rest), np.int64)
    for bits in range(7, 64, 7):
        groups += rest >> np.uint64(bits) > 0
    most = int(groups.max(initial=1))
    table = np.empty((len(rest), most), np.uint8)
    for group in range(most):
        more = np.where(groups > group + 1, 0x80, 0).astype(np.uint64)
        table[:, group] = (rest & np.uint64(0x7F)) | more
        rest = rest >> np.uint64(7)
    written: bytes = table[np.arange(most) < groups[:, None]].tobytes()
    return written


@attrs.frozen
class Ticks:
    """Times as whole numbers, `size` units of time each."""

    size: float

    def of(self, times: Numbers) -> Ints:
        """The ticks of known times."""
        return np.rint(times / self.size).astype(np.int64)


def ticks_for(timelines: Sequence[Timeline]) -> Ticks:
    """The size of a tick that suits all timelines."""
    times = np.concatenate([times for line in timelines for times in (line.starts, line.ends)])
    times = times[~np.isnan(times)].astype(np.float64)
    longest = float(times.max(initial=0))
    if longest < _NOTHING or (longest <= MOST_TICKS and (times == np.rint(times)).all()):
        return Ticks(1)
    exponent = math.ceil(math.log10(longest / MOST_TICKS))
    if longest / 10.0**exponent > MOST_TICKS:
        exponent += 1  # log10 was a hair too low
    # Floats are inexact: 0.1 + 0.2 counts as 0.3.
    while _whole(times / 10.0 ** (exponent + 1), 1e-15 * longest / 10.0 ** (exponent + 1)):
        exponent += 1
    return Ticks(10.0**exponent)


def _whole(times: Numbers, error: float) -> bool:
    return bool((np.abs(times - np.rint(times)) <= max(error, 1e-15)).all())


def put_timeline(stream: Stream, timeline: Timeline, ticks: Ticks) -> None:
    """Write the actions of a timeline with their times and what each waits for."""
    columns = timeline.schedule.columns
    kinds = columns.rank * len(Kind) + columns.kind
    places = np.arange(len(columns))
    before = data_before(timeline.schedule)
    known = timeline.known
    for column in (
        columns.kind,
        columns.joined,
        against_last(columns.stage, kinds),
        against_last(columns.microbatch, kinds),
        columns.version + 1,
        against_last(np.where(before < 0, 0, places - before), kinds),
        known,
    ):
        stream.put(column)
    starts, ends = (
        ticks.of(np.where(known, times, 0)) for times in (timeline.starts, timeline.ends)
    )
    _put_times(stream, starts, ends - starts, before, known, timeline.schedule)
    sources = timeline.schedule.sources
    stream.put(against_last(sources.line_of + 1, kinds) if sources else np.zeros(0, np.int64))


def put_idle(stream: Stream, idle: IdleColumns, ticks: Ticks) -> None:
    """Write the idle times of ranks, and their causes."""
    start, end = ticks.of(idle.start), ticks.of(idle.end)
    for column in (start, idle.entry, idle.transfer, idle.blamed):
        stream.put(np.diff(column, prepend=0))
    stream.put(end - start)
    stream.put(idle.cause)


def put_curve(stream: Stream, times: Numbers, amounts: Numbers, ticks: Ticks) -> None:
    """Write the memory curves."""
    for column in (ticks.of(times), np.rint(amounts).astype(np.int64)):
        stream.put(np.diff(column, prepend=0))


def _put_times(
    stream: Stream, starts: Ints, durations: Ints, before: Ints, known: Bools, schedule: Schedule
) -> None:
    """Write the durations and then the starts of known actions; receives come last, because each is
    compared with its send."""
    columns = schedule.columns
    receives = columns.is_kind(*RECEIVES)
    computes = columns.is_kind(*COMPUTE)
    own, receiving = np.flatnonzero(known & ~receives), np.flatnonzero(known & receives)
    kinds = columns.rank[own] * len(Kind) + columns.kind[own]
    stream.put(against_last(durations[own], kinds))
    stream.put(durations[receiving] - _at(durations, before[receiving]))
    ends = starts + durations
    computing, sending = own[computes[own]], own[~computes[own]]
    # The end of the previous compute on the rank; 0 for the first.
    previous = np.zeros(len(computing), np.int64)
    same = columns.rank[computing[1:]] == columns.rank[computing[:-1]]
    previous[1:][same] = ends[computing[:-1]][same]
    stream.put(starts[computing] - previous)
    stream.put(starts[sending] - _at(ends, before[sending]))
    stream.put(starts[receiving] - _at(starts, before[receiving]))


def _at(values: Ints, places: Ints) -> Ints:
    """The values at places, 0 for a place of -1."""
    return np.where(places < 0, 0, values[places])


def against_last(values: Ints, groups: Ints) -> Ints:
    """The difference of each value from the previous one in its group, from 0 for the first."""
    order = np.argsort(groups, kind="stable")
    listed, of = values[order], groups[order]
    change = np.diff(listed, prepend=0)
    change[1:] = np.where(of[1:] == of[:-1], change[1:], listed[1:])
    found = np.empty_like(change)
    found[order] = change
    return found


def data_before(schedule: Schedule) -> Ints:
    """The place that hands its data over to each place: the receive for its consumer, the send for
    a receive, the maker of the payload for a send; -1 if only the list's order matters."""
    columns, flow = schedule.columns, graph_of(schedule)
    before = np.full(len(columns), -1)

    def follows(users: Ints, makers: Ints) -> None:
        there = (users >= 0) & (makers >= 0)
        before[users[there]] = makers[there]

    forward, gradient = flow.of(Kind.FORWARD), flow.where("end", "output gradient")
    follows(forward[1:], forward[:-1])
    follows(gradient[-1], forward[-1])
    follows(gradient[:-1], gradient[1:])
    transfers = flow.transfers
    follows(transfers.user, transfers.receive)
    follows(transfers.receive, transfers.send)
    follows(transfers.send, transfers.maker)
    # What is left takes what it ends, or else what it reads, from the first that makes it.
    touches = [*flow.touches(*(name for name, v in VALUES.items() if v.per == "microbatch"))]
    maker = np.full(flow.base[""], -1)
    for does in ("make", "end", "read"):
        for touch in touches:
            of, at = (maker, touch.values) if does == "make" else (before, touch.places)
            if touch.use.does == does:
                new = of[at] < 0
                of[at[new]] = (touch.places if does == "make" else maker[touch.values])[new]
    return before
