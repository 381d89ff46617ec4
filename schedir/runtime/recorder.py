"""Takes the time of every entry of a step, and makes a timeline of what all ranks have taken.

The recorder is an observer, in the place of the clock of compute.

What is taken of each instruction, as the columns of a row of its own:

    0F0            BEGAN ─ run ─ ENDED
    1F0            WAITED ─ receives ─ FOUND = BEGAN ─ run ─ ENDED
    0SEND_ACT0     BEGAN ─ run                                     posted then
    0OFFLOAD0      BEGAN ─ run ─ ENDED                             on the CPU; else as a post
    0REDUCE_GRAD   BEGAN ─ run … WAITED ─ sum ─ FOUND              before its OPTIM_STEP

Each time costs a look at the clock, and its place in a list. Of these times the timeline makes:

    rank 0   0F0 ┊ 0SEND_ACT0                        posted at a
    rank 1   1RECV_ACT0 ┊ waits ────────┐ 1F0        posted at b, waited for from c to d

The transfer starts at max(a, b): over gloo as over NCCL nothing moves before both ends are posted.
It ends at d, if the rank has waited for it. Where it was there already, nobody has seen when it
came: its end is NaN. So is all of what was not carried out: of an OPTIM_STEP that the caller sees
to, say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
from numpy.typing import NDArray

from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, COPIES, Action, Bools, Ints, Schedule, Together
from schedir.runtime.accelerator import Accelerator, Mark
from schedir.runtime.gradients.reduction import Reduction
from schedir.runtime.processes import clocks
from schedir.runtime.processes.clocks import Nanoseconds
from schedir.runtime.program.instruction import Bound, Instruction
from schedir.runtime.program.observers import BusyClock
from schedir.runtime.transports.transport import wait_for
from schedir.simulator import Measured, Sizes, Timeline

BEGAN, ENDED, WAITED, FOUND = range(4)
COLUMNS = 4


@attrs.frozen(eq=False)
class Anchor:
    """A moment on the host's clock, in nanoseconds and within `error`, and on the device's."""

    at: int
    error: float
    mark: Mark


@attrs.frozen(eq=False)
class Taken:
    """The stamps of a step, which began at a mark: an array on the host, marks on a device."""

    began: Mark
    stamps: Any


class Recorder(BusyClock):
    """The times of all instructions that it observes, until they are taken.

    A row belongs to an action at an index of a rank's list, in whatever program that stands. Of
    `most` actions over all ranks the times may be kept.
    """

    most: ClassVar[int] = 1 << 18  # of 32 bytes each

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._rows: dict[tuple[int, int, Action], int] = {}
        self._computes: list[int] = []
        self._sums: dict[Reduction, int] = {}
        # Always this list: what is put around instructions holds it.
        self._stamps: list[Any] = []
        self.latest: Any = None

    def _clock(self) -> Callable[[], Any]:
        """What a stamp is made by; where there is none, 0 stands."""
        return clocks.now

    def __call__(self, instruction: Instruction) -> Instruction:
        """Observe an instruction."""
        run, wait, row = instruction.run, instruction.wait, self._row(instruction)
        if instruction.sums and not instruction.listed:
            return attrs.evolve(instruction, run=self._after_sums(instruction.sums, run))
        if wait is not None:
            wait = self._around_wait(instruction, wait, row)
        if not instruction.listed:
            return attrs.evolve(instruction, wait=wait)
        # A device's copies go on beside its compute, and nobody sees when they end.
        copies = instruction.action.kind in COPIES and not self._accelerator.queues
        if not (instruction.computes or copies):
            return attrs.evolve(instruction, run=self._before_run(run, row, instruction.sums))
        run = self._around_run(run, row)
        return attrs.evolve(instruction, wait=wait, run=run)

    def _row(self, instruction: Instruction) -> int:
        """Where the row of an instruction begins."""
        key = instruction.rank, instruction.index, instruction.action
        if key not in self._rows:
            self._rows[key] = len(self._stamps)
            self._stamps += [0] * COLUMNS
            if instruction.action.kind in COMPUTE:
                self._computes.append(self._rows[key])
        return self._rows[key]

    def _around_run(self, run: Bound, row: int) -> Bound:
        stamps, now = self._stamps, self._clock()
        begin, end = row + BEGAN, row + ENDED

        def timed() -> None:
            if not stamps[begin]:
                stamps[begin] = now()
            run()
            stamps[end] = now()

        return timed

    def _around_wait(self, instruction: Instruction, wait: Bound, row: int) -> Bound:
        """What has waited begins then, but for a pair's second part, which waits before the first:
        a look at the clock saved, which on a device is an event."""
        stamps, now = self._stamps, self._clock()
        receives = instruction.receives
        waited, found = row + WAITED, row + FOUND
        begin = row + BEGAN if instruction.listed else found

        def timed() -> None:
            stamps[waited] = now()
            wait_for(receives)
            stamps[found] = stamps[begin] = now()
            wait()  # for the sends that have arrived by then, whose memory is given back

        return timed

    def _before_run(self, run: Bound, row: int, posted: Sequence[Reduction]) -> Bound:
        """What is posted begins then; of sums their order is noted, and the rows that they have."""
        stamps, now, sums = self._stamps, self._clock(), self._sums

        def timed() -> None:
            stamps[row + BEGAN] = now()
            for reduction in posted:
                sums.pop(reduction, None)
                sums[reduction] = row
            run()

        return timed

    def _after_sums(self, reductions: Sequence[Reduction], run: Bound) -> Bound:
        """Wait for one sum after the other, so that each is seen to end: what is made of them, and
        done at barriers, takes time of its own."""
        stamps, now, posted = self._stamps, self._clock(), self._sums

        def timed() -> None:
            for reduction in [reduction for reduction in posted if reduction in reductions]:
                row = posted.pop(reduction)
                stamps[row + WAITED] = now()
                reduction.wait()
                stamps[row + FOUND] = now()
            run()

        return timed

    def take(self) -> Callable[[], float]:
        """How to get the seconds in compute since this was asked for last; `latest` has all."""
        taken = self.latest = np.array(self._stamps, np.int64)
        self._stamps[:] = [0] * len(taken)

        def seconds() -> float:
            rows = np.array(self._computes, np.int64)
            rows = rows[rows < len(taken)]  # later programs have more
            return 1e-9 * float((taken[rows + ENDED] - taken[rows + BEGAN]).sum())

        return seconds

    def of_list(self, schedule: Schedule, rank: int) -> Ints:
        """Where the rows of a rank's actions begin, in the order of its list; -1 for what does
        nothing here."""
        rows = (
            self._rows.get((rank, index, action), -1)
            for index, entry in enumerate(schedule.actions[rank])
            for action in (entry.actions if isinstance(entry, Together) else (entry,))
        )
        return np.fromiter(rows, np.int64, len(schedule.flat[rank]))

    def anchor(self) -> Anchor:
        """This moment."""
        return Anchor(clocks.now(), 0.0, self._accelerator.mark())

    def read(
        self, steps: Sequence[Taken], first: Anchor, last: Anchor
    ) -> tuple[list[Nanoseconds], float]:
        """The stamps of steps between two anchors as times on the host's clock, 0 for none; and by
        how many nanoseconds they may be wrong."""
        return [step.stamps for step in steps], 0.0


class _Marks(list[Any]):
    """The stamps of a step on a device; 0 for none."""


class QueuedRecorder(Recorder):
    """On a device that queues its work: it leaves marks, which are read after the step.

    The device has a clock of its own. Its times are placed between two anchors, over which it is
    taken to be fast or slow by the same amount; those of a step count from its beginning, as a
    device gives few digits.
    """

    most: ClassVar[int] = 1 << 15  # a device's events take more

    def _clock(self) -> Callable[[], Any]:
        mark = self._accelerator.mark
        return lambda: mark(timed=True)

    def take(self) -> Callable[[], float]:
        """How to get the seconds; the host waits for the device then."""
        taken = self.latest = _Marks(self._stamps)
        self._stamps[:] = [0] * len(taken)
        self._accelerator.use_again(filter(None, taken), after=taken)
        computes = self._computes[:]

        def seconds() -> float:
            spans = ((taken[row + BEGAN], taken[row + ENDED]) for row in computes)
            made = [(began, ended) for began, ended in spans if ended]
            for _, ended in made:
                ended.synchronize()
            return 1e-3 * sum((began.elapsed_time(ended) for began, ended in made), 0.0)

        return seconds

    def anchor(self) -> Anchor:
        """Now, when the device has done all that it was told, as the host takes it."""
        self._accelerator.synchronize()
        return min((self._attempt() for _ in range(8)), key=lambda anchor: anchor.error)

    def _attempt(self) -> Anchor:
        before = clocks.now()
        mark = self._accelerator.mark(timed=True)
        mark.synchronize()
        after = clocks.now()
        return Anchor((before + after) // 2, (after - before) / 2, mark)

    def read(
        self, steps: Sequence[Taken], first: Anchor, last: Anchor
    ) -> tuple[list[Nanoseconds], float]:
        """The stamps of steps between two anchors as times on the host's clock, 0 for none; and by
        how many nanoseconds they may be wrong."""
        found, began, before, lost = [], 0.0, first.mark, 0.0
        for step in steps:
            gap = before.elapsed_time(step.began)
            began, before, lost = began + gap, step.began, lost + _lost(gap)
            times = [began + before.elapsed_time(mark) if mark else -1 for mark in step.stamps]
            found.append(np.array(times, np.float64))
        gap = before.elapsed_time(last.mark)
        whole, lost = began + gap, lost + _lost(gap)
        pace = (last.at - first.at) / whole if whole else 0.0
        placed = [
            np.where(times < 0, 0, first.at + np.rint(pace * times).astype(np.int64))
            for times in found
        ]
        return placed, max(first.error, last.error) + lost


def _lost(milliseconds: float) -> float:
    """By how many nanoseconds a device's time may be rounded, which it tells as a short float: of
    an hour by an eighth of a millisecond."""
    return 1e6 * float(np.spacing(np.float32(milliseconds))) / 2


def recorder(accelerator: Accelerator) -> Recorder:
    """The recorder for a device."""
    return (QueuedRecorder if accelerator.queues else Recorder)(accelerator)


_AT_ONCE = 50_000
"""Nanoseconds that it takes at most to find what is there; who waits for longer has to be woken."""


def timeline(
    schedule: Schedule, stamps: Nanoseconds, sizes: Sizes | None, measured: Measured
) -> Timeline:
    """The timeline of a step from the stamps of all places, by one clock; shape [places, 4], 0 for
    none."""
    starts, ends = stamps[:, BEGAN].copy(), stamps[:, ENDED].copy()
    # The parts of an overlapped pair run one after the other, and take the time of both.
    for second in np.flatnonzero(schedule.columns.joined & (ends > 0)).tolist():
        first = second - 1
        starts[second], ends[first] = starts[first], ends[second]
    # Where an entry had to wait for what it consumes.
    waited = stamps[:, FOUND] - stamps[:, WAITED] > _AT_ONCE
    _transfer(schedule, stamps, waited, starts, ends)
    _reduce(schedule, stamps, waited, starts, ends)
    # Two clocks may differ by more than a transfer takes.
    both = (starts > 0) & (ends > 0)
    starts[both] = np.minimum(starts[both], ends[both])
    begun = starts[starts > 0].min(initial=np.iinfo(np.int64).max)
    return Timeline(
        schedule,
        _seconds(starts, begun),
        _seconds(ends, begun),
        sizes=sizes,
        unit="s",
        measured=measured,
    )


def _seconds(times: Nanoseconds, begun: int) -> NDArray[np.float64]:
    return np.where(times > 0, 1e-9 * (times - begun), np.nan)


def _transfer(
    schedule: Schedule, stamps: Nanoseconds, waited: Bools, starts: Nanoseconds, ends: Nanoseconds
) -> None:
    transfers = graph_of(schedule).transfers
    send, receive, user = transfers.send, transfers.receive, transfers.user
    posted = stamps[:, BEGAN]
    start = np.where(
        (posted[send] > 0) & (posted[receive] > 0), np.maximum(posted[send], posted[receive]), 0
    )
    end = np.where(waited[user] & (start > 0), stamps[user, FOUND], 0)
    for side in (send, receive):
        starts[side], ends[side] = start, end


def _reduce(
    schedule: Schedule, stamps: Nanoseconds, waited: Bools, starts: Nanoseconds, ends: Nanoseconds
) -> None:
    """Sums start once all ranks have posted them, and end when the first rank that has to wait for
    them, before its OPTIM_STEPs, finds them there."""
    posted, found = stamps[:, BEGAN], stamps[:, FOUND]
    for turn in graph_of(schedule).collectives:
        places = np.array(turn)
        known = posted[places].min() > 0
        starts[places] = posted[places].max() if known else 0
        seen = found[places[waited[places]]]
        ends[places] = seen.min() if known and len(seen) else 0
