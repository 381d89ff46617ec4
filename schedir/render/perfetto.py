"""Chrome's trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A rank is a process. It has a thread for each of its tracks, a thread for the causes of its idle
time, an arrow from each send to its receive, and counters of its memory:

    rank 0   compute      0F0--  0F1--
             to rank 1         0SEND_ACT0-
    rank 1   idle         warmup----------
             compute           │          1F0--
             from rank 0       1RECV_ACT0-
             activations                  1----

A rank works on several tracks at the same time: it computes, sends to and receives from each of
its peers, and copies to its host and back. Slices of one track never overlap. If transfers overlap,
as they may on a link with latency, the track gets another one below:

    to rank 1        0SEND_ACT0--   0SEND_ACT2--
    to rank 1 (2)          0SEND_ACT1--

The format is Google's Trace Event Format. Its times are microseconds, which readers add as floats.
Eighths of a microsecond add up exactly, so that no slice seems to reach into the next one.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, count, islice, pairwise
from typing import Any, NamedTuple

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.graph.compile import graph_of
from schedir.ir import (
    COMPUTE,
    COPIES,
    GROUPS,
    KIND_INDEX,
    KINDS,
    READS_WEIGHTS,
    RECEIVES,
    SENDS,
    Ints,
)
from schedir.render.captions import captions
from schedir.render.lanes import has_copies, lanes_of
from schedir.render.text import Piece
from schedir.simulator import CAUSES, Timeline
from schedir.simulator.values import Numbers

_EVENTS_AT_ONCE = 4096
_MICROSECONDS = {None: 1e6, "s": 1e6, "ms": 1e3, "us": 1.0}
_PER_MICROSECOND = 8
_FRACTIONS = ("", ".125", ".25", ".375", ".5", ".625", ".75", ".875")
_MOST = 2**53 / _PER_MICROSECOND / 1e6  # the seconds that a float holds in eighths of a microsecond

_TRACKS = (
    (COMPUTE, "compute"),
    (GROUPS, "gradient sums"),
    (RECEIVES, "from rank {}"),
    (SENDS, "to rank {}"),
    (COPIES, "copies to the host and back"),
)
"""The tracks of a rank from the top: the kinds on each, and its name."""
_COMPUTE, _RECEIVE, _SEND = 0, 2, 3


def trace_events(timeline: Timeline, against: Timeline | None = None) -> Iterator[Piece]:
    """The trace, piece by piece, without actions whose times are unknown.

    A second timeline has another process for each rank, next to the first one's. A timeline without
    a unit of time is written as seconds.

    Raises SchedirError if a timeline is longer than the format's times can hold.
    """
    both = [timeline] if against is None else [timeline, against]
    labels = captions(both)
    for line in both:
        seconds = line.makespan * _MICROSECONDS[line.unit] / 1e6
        if seconds > _MOST:
            raise SchedirError(
                f"a trace can't hold a makespan of {seconds:.6g} seconds: give the timeline its "
                "unit of time, which is a second if none is given"
            )
    apart = int("1" + "0" * len(str(max(line.schedule.ranks for line in both))))
    views = [_View(*each, turn, apart) for turn, each in enumerate(zip(both, labels, strict=True))]
    return _pieces(views)


def _pieces(views: Sequence[_View]) -> Iterator[Piece]:
    about = {
        view.label or "timeline": {
            "schedule": view.timeline.schedule.name,
            "unit of time": view.timeline.unit or "none, written as seconds",
            **({"channel": view.timeline.channel} if view.timeline.channel else {}),
        }
        for view in views
    }
    yield Piece(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
    # No thread has the number of a process: viewers would take it for the main thread.
    threads = count(1 + max(view.process(view.timeline.schedule.ranks) for view in views))
    events = chain.from_iterable(view.events(threads, len(views)) for view in views)
    some = list(islice(events, _EVENTS_AT_ONCE))
    while some:
        following = list(islice(events, _EVENTS_AT_ONCE))
        yield Piece(",\n".join(some) + (",\n" if following else "\n"))
        some = following
    yield Piece("]}\n")


class _Track(NamedTuple):
    """A track of a rank, whose slices never overlap: their places by time. `doing` is an index
    into `_TRACKS`."""

    rank: int
    doing: int
    name: str
    places: Ints


# Not slotted, because cached properties need a __dict__.
@attrs.frozen(slots=False)
class _View:
    """The `turn`-th timeline of a trace, in ticks, eighths of a microsecond.

    The process numbers of the next timeline are larger by `apart`.
    """

    timeline: Timeline
    label: str
    turn: int
    apart: int

    @cached_property
    def starts(self) -> Ints:
        """The start of each action, 0 if it is unknown."""
        return self._ticks(self.timeline.starts)

    @cached_property
    def ends(self) -> Ints:
        """The end of each action, 0 if it is unknown."""
        return self._ticks(self.timeline.ends)

    def _ticks(self, times: Numbers) -> Ints:
        factor = _MICROSECONDS[self.timeline.unit] * _PER_MICROSECOND
        return np.rint(np.nan_to_num(times) * factor).astype(np.int64)

    def process(self, rank: int) -> int:
        """The number of a rank's process: viewers show it, so its last digits are the rank."""
        return rank + self.turn * self.apart

    def events(self, threads: Iterator[int], views: int) -> Iterator[str]:
        """All events of the timeline; `threads` numbers its tracks."""
        schedule = self.timeline.schedule
        tracks, numbered, idle = self._tracks(), [], []
        for rank in range(schedule.ranks):
            own = [track for track in tracks if track.rank == rank]
            computes = sum(track.doing == _COMPUTE for track in own)
            numbered += list(zip(own[:computes], threads, strict=False))
            idle.append(next(threads))
            numbered += list(zip(own[computes:], threads, strict=False))
            # Some viewers sort by name, and ignore the number.
            digits = len(str(schedule.ranks - 1))
            name = f"rank {rank:0{digits}}" + (f" {self.label}" if self.label else "")
            yield self._about("process", rank, 0, name, rank * views + self.turn)
        for track, thread in numbered:
            yield self._about("thread", track.rank, thread, track.name, thread)
        arrows = self._arrows(views)
        # An arrow begins before it ends, so all senders come first.
        for last in (False, True):
            some = [each for each in numbered if (each[0].doing == _RECEIVE) == last]
            yield from self._slices(some, arrows)
        yield from self._waits(idle)
        yield from self._counters()

    def _about(self, what: str, rank: int, thread: int, name: str, order: int) -> str:
        """The events that name a process or a thread, and set its position."""
        of: dict[str, Any] = {"pid": self.process(rank), "tid": thread}
        return ",\n".join(
            json.dumps({"ph": "M", "name": f"{what}_{key}", **of, "args": {key: value}})
            for key, value in (("name", name), ("sort_index", order))
        )

    def _slices(self, tracks: Iterable[tuple[_Track, int]], arrows: Ints) -> Iterator[str]:
        """The slices with their details, and the end of an arrow after each transfer."""
        columns, dataflow = self.timeline.schedule.columns, graph_of(self.timeline.schedule)
        words = [json.dumps(kind.meaning.word) for kind in KINDS]
        # The weight version that each place reads, -1 if none.
        version = np.full(len(columns), -1)
        reads = columns.where(*READS_WEIGHTS)
        version[reads] = dataflow.reads[columns.stage[reads], columns.microbatch[reads]]
        actions = [*chain.from_iterable(map(columns.of_rank, range(columns.ranks)))]
        index = columns.entry - columns.entry[columns.starts[columns.rank]]
        for track, thread in tracks:
            where = f'"pid":{self.process(track.rank)},"tid":{thread},"ts":'
            arrow = '"ph":"s"' if track.doing == _SEND else '"ph":"f","bp":"e"'
            each = (self.starts, self.ends, index, version, arrows)
            for place, start, end, listed, read, number in zip(
                track.places.tolist(),
                *(column[track.places].tolist() for column in each),
                strict=True,
            ):
                action = actions[place]
                about = f'"index":{listed},"stage":{action.stage}'
                if action.microbatch is not None:
                    about += f',"microbatch":{action.microbatch}'
                if read >= 0:
                    about += f',"version":{read}'
                name = str(action)
                if track.doing == _COMPUTE and columns.shared[place]:
                    other = actions[place + 1]
                    name, about = f"({action};{other})", f'{about},"overlaps":"{other}"'
                yield (
                    f'{{"ph":"X",{where}{_text(start)},"dur":{_text(end - start)},'
                    f'"name":"{name}","cat":{words[KIND_INDEX[action.kind]]},'
                    f'"args":{{{about}}}}}'
                )
                if number >= 0:
                    yield (
                        f'{{{arrow},{where}{_text(start)},"id":{number},"name":"transfer",'
                        '"cat":"transfer"}'
                    )

    def _arrows(self, views: int) -> Ints:
        """The number of the arrow of every send and receive, -1 if there is none.

        An arrow needs both ends, and does not point back in time.
        """
        transfers, known = graph_of(self.timeline.schedule).transfers, self.timeline.known
        numbers = np.flatnonzero(transfers.matched)
        send, receive = transfers.send[numbers], transfers.receive[numbers]
        drawn = known[send] & known[receive] & (self.starts[receive] >= self.starts[send])
        arrows = np.full(len(known), -1)
        for ends in (send, receive):
            arrows[ends[drawn]] = numbers[drawn] * views + self.turn
        return arrows

    def _waits(self, threads: Sequence[int]) -> Iterator[str]:
        """The causes of each rank's idle time, on a separate thread."""
        idle, columns = self.timeline.idle_columns, self.timeline.schedule.columns
        starts, ends = self._ticks(idle.start).tolist(), self._ticks(idle.end).tolist()
        for rank, (first, end) in enumerate(pairwise(idle.bounds.tolist())):
            if first == end:
                continue
            thread = threads[rank]
            yield self._about("thread", rank, thread, "idle", thread)
            where = f'"pid":{self.process(rank)},"tid":{thread},"ts":'
            for number in range(first, end):
                about = []
                for what, places in (
                    ("before", idle.entry),
                    ("waits for", idle.blamed),
                    ("through", idle.transfer),
                    ("slower stage", idle.root),
                ):
                    place = int(places[number])
                    if place >= 0:
                        on, index = columns.position(place)
                        about.append(f'"{what}":"rank {on} #{index} {columns.action(place)}"')
                start = starts[number]
                yield (
                    f'{{"ph":"X",{where}{_text(start)},"dur":{_text(ends[number] - start)},"name":'
                    f'"{CAUSES[idle.cause[number]]}","cat":"idle","args":{{{",".join(about)}}}}}'
                )

    def _counters(self) -> Iterator[str]:
        """The memory of each rank, after every change."""
        timeline = self.timeline
        curves = [("activations", timeline.live)]
        if timeline.sizes is not None:
            curves.append(("bytes", timeline.memory))
            if has_copies(timeline.schedule):
                curves.append(("bytes on the host", timeline.host_memory))
        for rank in range(timeline.schedule.ranks):
            for name, curve in curves:
                times, amounts = curve(rank)
                head = f'{{"ph":"C","pid":{self.process(rank)},"name":"{name}","ts":'
                for time, amount in zip(self._ticks(times).tolist(), amounts.tolist(), strict=True):
                    yield f'{head}{_text(time)},"args":{{"live":{amount}}}}}'

    def _tracks(self) -> list[_Track]:
        """The tracks of all ranks, by rank and kind.

        An overlapped pair is shown at the place of its first part.
        """
        schedule = self.timeline.schedule
        lanes = lanes_of(self.timeline, [kinds for kinds, _ in _TRACKS])
        lanes = lanes.where(~schedule.columns.joined[lanes.place] | (lanes.lane % len(_TRACKS) > 0))
        peers = graph_of(schedule).peers[lanes.place]
        order = np.lexsort((peers, lanes.lane))  # it keeps the order in time
        lanes, peers = lanes.where(order), peers[order]
        new = (np.diff(lanes.lane) > 0) | (np.diff(peers) > 0)
        tracks = []
        for first, end in pairwise((0, *(np.flatnonzero(new) + 1).tolist(), len(lanes))):
            for turn, own in enumerate(self._apart(lanes.place[first:end])):
                rank, doing = divmod(int(lanes.lane[first]), len(_TRACKS))
                name = _TRACKS[doing][1].format(peers[first]) + (f" ({turn + 1})" if turn else "")
                tracks.append(_Track(rank, doing, name, own))
        return tracks

    def _apart(self, places: Ints) -> Sequence[Ints]:
        """The places, which ascend by start, on the fewest tracks without overlaps."""
        starts, ends = self.starts[places], self.ends[places]
        if (starts[1:] >= ends[:-1]).all():
            return [places] if len(places) else []
        lanes: list[list[int]] = []
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        for place, start, end in zip(places.tolist(), starts.tolist(), ends.tolist(), strict=True):
            while busy and busy[0][0] <= start:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free:
                free.append(len(lanes))
                lanes.append([])
            lane = heapq.heappop(free)
            lanes[lane].append(place)
            heapq.heappush(busy, (end, lane))
        return [np.array(lane, np.int64) for lane in lanes]


def _text(ticks: int) -> str:
    """A number of ticks in microseconds."""
    return f"{ticks >> 3}{_FRACTIONS[ticks & 7]}"
