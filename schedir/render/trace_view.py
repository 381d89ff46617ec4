"""One timeline in a trace: its processes and threads, and all events on them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.graph.compile import graph_of
from schedir.ir import KIND_INDEX, KINDS, READS_WEIGHTS, Bools, Ints
from schedir.render.lanes import has_copies
from schedir.render.tracks import Doing, Track, tracks_of
from schedir.simulator import CAUSES, Timeline
from schedir.simulator.values import Numbers

_MICROSECONDS = {None: 1e6, "s": 1e6, "ms": 1e3, "us": 1.0}
_PER_MICROSECOND = 8
_FRACTIONS = ("", ".125", ".25", ".375", ".5", ".625", ".75", ".875")
_MOST = 2**53 / _PER_MICROSECOND / 1e6  # seconds that a float holds in these


@attrs.frozen
class TraceView:
    """A timeline in ticks, eighths of a microsecond: the `turn`-th of so many `views`.

    Its processes are numbered from `first_process` on.
    """

    timeline: Timeline
    caption: str
    turn: int
    views: int
    first_process: int
    starts: Ints
    ends: Ints
    known: Bools

    @classmethod
    def of(
        cls, timeline: Timeline, caption: str, turn: int, views: int, first_process: int
    ) -> TraceView:
        """What is known of a timeline."""
        seconds = timeline.makespan * _MICROSECONDS[timeline.unit] / 1e6
        if seconds > _MOST:
            raise SchedirError(
                f"a trace can't hold a makespan of {seconds:.6g} seconds: give the timeline its "
                "unit of time, which counts as a second where none is given"
            )
        known = ~np.isnan(timeline.starts) & ~np.isnan(timeline.ends)
        starts, ends = (
            _ticks(timeline, np.where(known, times, 0))
            for times in (timeline.starts, timeline.ends)
        )
        return cls(timeline, caption, turn, views, first_process, starts, ends, known)

    def process(self, rank: int) -> int:
        """The number of a rank's process: viewers show it, so its last digits are the rank."""
        return rank + self.first_process

    def name(self, rank: int) -> str:
        """What it is called: some viewers have the names in order, and no number."""
        digits = len(str(self.timeline.schedule.ranks - 1))
        return f"rank {rank:0{digits}}" + (f" {self.caption}" if self.caption else "")

    def events(self, threads: Iterator[int]) -> Iterator[str]:
        """Everything that is said of the timeline; `threads` numbers its tracks."""
        numbered, idle = self._numbered(threads)
        yield from self._names(numbered)
        # An arrow begins before it ends: all that sends comes first.
        yield from self._slices(numbered, set(Doing) - {Doing.RECEIVE})
        yield from self._slices(numbered, {Doing.RECEIVE})
        yield from self._waits(idle)
        yield from self._counters()

    def _numbered(self, threads: Iterator[int]) -> tuple[list[tuple[Track, int]], list[int]]:
        """The tracks with their threads, and each rank's thread for its idle time, which comes
        after the one for its compute."""
        tracks = tracks_of(
            self.timeline.schedule, self.starts, self.ends, np.flatnonzero(self.known)
        )
        numbered, idle = [], []
        for rank in range(self.timeline.schedule.ranks):
            own = [track for track in tracks if track.rank == rank]
            computes = sum(track.doing is Doing.COMPUTE for track in own)
            numbered += list(zip(own[:computes], threads, strict=False))
            idle.append(next(threads))
            numbered += list(zip(own[computes:], threads, strict=False))
        return numbered, idle

    def _names(self, tracks: Iterable[tuple[Track, int]]) -> Iterator[str]:
        """The names of processes and threads, and their order."""
        for rank in range(self.timeline.schedule.ranks):
            process = self.process(rank)
            yield _about("process_name", process, 0, "name", self.name(rank))
            # Those of one rank follow each other.
            turn = rank * self.views + self.turn
            yield _about("process_sort_index", process, 0, "sort_index", turn)
        for track, thread in tracks:
            yield from self._thread(track.rank, thread, track.name)

    def _thread(self, rank: int, thread: int, name: str) -> Iterator[str]:
        yield _about("thread_name", self.process(rank), thread, "name", name)
        yield _about("thread_sort_index", self.process(rank), thread, "sort_index", thread)

    def _slices(self, tracks: Iterable[tuple[Track, int]], kinds: set[Doing]) -> Iterator[str]:
        """What runs when, with all that is known of it, and an arrow's end after each transfer."""
        columns = self.timeline.schedule.columns
        words = [json.dumps(kind.meaning.word) for kind in KINDS]
        version, arrow = self._versions(), self._arrows()
        for rank, own in groupby(tracks, lambda numbered: numbered[0].rank):
            first = int(columns.starts[rank])
            actions = list(columns.of_rank(rank))
            indices = (columns.entry[first:] - columns.entry[first]).tolist()
            for track, thread in own:
                if track.doing not in kinds:
                    continue
                where = f'"pid":{self.process(rank)},"tid":{thread},"ts":'
                ends = '"ph":"s"' if track.doing is Doing.SEND else '"ph":"f","bp":"e"'
                for place, start, end, read, number in zip(
                    track.places.tolist(),
                    self.starts[track.places].tolist(),
                    self.ends[track.places].tolist(),
                    version[track.places].tolist(),
                    arrow[track.places].tolist(),
                    strict=True,
                ):
                    action = actions[place - first]
                    about = f'"index":{indices[place - first]},"stage":{action.stage}'
                    if action.microbatch is not None:
                        about += f',"microbatch":{action.microbatch}'
                    if read >= 0:
                        about += f',"version":{read}'
                    name = str(action)
                    if track.doing is Doing.COMPUTE and columns.shared[place]:
                        other = actions[place - first + 1]
                        name, about = f"({action};{other})", f'{about},"overlaps":"{other}"'
                    yield (
                        f'{{"ph":"X",{where}{_text(start)},"dur":{_text(end - start)},'
                        f'"name":"{name}","cat":{words[KIND_INDEX[action.kind]]},'
                        f'"args":{{{about}}}}}'
                    )
                    if number >= 0:
                        yield (
                            f'{{{ends},{where}{_text(start)},"id":{number},"name":"transfer",'
                            '"cat":"transfer"}'
                        )

    def _waits(self, threads: Sequence[int]) -> Iterator[str]:
        """Why each rank is idle, on a thread of its own."""
        idle = self.timeline.idle_columns
        starts, ends = (_ticks(self.timeline, times) for times in (idle.start, idle.end))
        for rank, (first, end) in enumerate(pairwise(idle.bounds.tolist())):
            if first == end:
                continue
            thread = threads[rank]
            yield from self._thread(rank, thread, "idle")
            where = f'"pid":{self.process(rank)},"tid":{thread},"ts":'
            for number in range(first, end):
                cause = CAUSES[idle.cause[number]]
                about = ",".join(
                    f'"{what}":"{self._entry(int(place))}"'
                    for what, place in (
                        ("before", idle.entry[number]),
                        ("waits for", idle.blamed[number]),
                        ("through", idle.transfer[number]),
                        ("slower stage", idle.root[number]),
                    )
                    if place >= 0
                )
                start = int(starts[number])
                yield (
                    f'{{"ph":"X",{where}{_text(start)},"dur":{_text(int(ends[number]) - start)},'
                    f'"name":"{cause}","cat":"idle","args":{{{about}}}}}'
                )

    def _entry(self, place: int) -> str:
        columns = self.timeline.schedule.columns
        rank, index = columns.position(place)
        return f"rank {rank} #{index} {columns.action(place)}"

    def _counters(self) -> Iterator[str]:
        """What each rank holds, from every change on."""
        curves = [("activations", self.timeline.live)]
        if self.timeline.sizes is not None:
            curves.append(("bytes", self.timeline.memory))
            if has_copies(self.timeline.schedule):
                curves.append(("bytes on the host", self.timeline.host_memory))
        for rank in range(self.timeline.schedule.ranks):
            for name, curve in curves:
                times, amounts = curve(rank)
                head = f'{{"ph":"C","pid":{self.process(rank)},"name":"{name}","ts":'
                ticks = _ticks(self.timeline, times).tolist()
                for time, amount in zip(ticks, amounts.tolist(), strict=True):
                    yield f'{head}{_text(time)},"args":{{"live":{amount}}}}}'

    def _versions(self) -> Ints:
        """For every place the weight version that it reads, -1 where it reads none."""
        columns, dataflow = self.timeline.schedule.columns, graph_of(self.timeline.schedule)
        version = np.full(len(columns), -1)
        reads = columns.where(*READS_WEIGHTS)
        version[reads] = dataflow.reads[columns.stage[reads], columns.microbatch[reads]]
        return version

    def _arrows(self) -> Ints:
        """For every send and receive the number of its arrow, -1 where there is none.

        An arrow needs both ends, and does not point back in time.
        """
        transfers = graph_of(self.timeline.schedule).transfers
        numbers = np.flatnonzero(transfers.matched)
        send, receive = transfers.send[numbers], transfers.receive[numbers]
        drawn = self.known[send] & self.known[receive] & (self.starts[receive] >= self.starts[send])
        arrow = np.full(len(self.known), -1)
        for ends in (send, receive):
            arrow[ends[drawn]] = numbers[drawn] * self.views + self.turn
        return arrow


def _about(what: str, process: int, thread: int, key: str, value: str | int) -> str:
    """An event about a process or a thread."""
    return json.dumps(
        {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {key: value}}
    )


def _ticks(timeline: Timeline, times: Numbers) -> Ints:
    """Times of a timeline in ticks."""
    factor = _MICROSECONDS[timeline.unit] * _PER_MICROSECOND
    return np.rint(times * factor).astype(np.int64)


def _text(ticks: int) -> str:
    """A number of ticks in microseconds."""
    return f"{ticks >> 3}{_FRACTIONS[ticks & 7]}"
