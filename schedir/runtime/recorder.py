"""Records the times of every entry of a step, and makes a timeline of the times of all ranks.

The recorder is an observer that replaces the clock of compute. Each instruction has a row of
stamps:

    0F0            BEGAN ─ run ─ ENDED
    1F0            WAITED ─ receives ─ FOUND = BEGAN ─ run ─ ENDED
    0SEND_ACT0     BEGAN ─ run                                     posted then
    0OFFLOAD0      BEGAN ─ run ─ ENDED                             on the CPU; else as a post
    0REDUCE_GRAD   BEGAN ─ run … WAITED ─ sum ─ FOUND              before its OPTIM_STEP

A stamp costs a look at the clock and a place in a list. The timeline is made from the stamps:

    rank 0   0F0 ┊ 0SEND_ACT0                        posted at a
    rank 1   1RECV_ACT0 ┊ waits ────────┐ 1F0        posted at b, waited for from c to d

The transfer starts at max(a, b): over gloo and over NCCL nothing moves before both ends are posted.
It ends at d, if the rank has waited for it. If the data was there already, nobody has seen when it
came, and its end is NaN. Entries that did not run are NaN too, such as an OPTIM_STEP if the caller
steps.
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
    """A moment on the host's clock, in nanoseconds and within `error`, with the device's mark."""

    at: int
    error: float
    mark: Mark


@attrs.frozen(eq=False)
class Taken:
    """The stamps of a step that began at a mark: an array on the CPU, marks on a GPU."""

    began: Mark
    stamps: Any


class Recorder(BusyClock):
    """The times of all instructions that it observes, until they are taken.

    A row belongs to an action at an index of a rank's list, in any program. It keeps the times of
    at most `most` actions over all ranks.
    """

    most: ClassVar[int] = 1 << 18  # of 32 bytes each

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._rows: dict[tuple[int, int, Action], int] = {}
        self._computes: list[int] = []
        self._sums: dict[Reduction, int] = {}
        # Never replaced by another list: the wrapped instructions hold it.
        self._stamps: list[Any] = []
        self.latest: Any = None

    def _clock(self) -> Callable[[], Any]:
        """The function that makes a stamp; 0 means no stamp."""
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
        # A GPU copies beside its compute, and nobody sees when a copy ends.
        copies = instruction.action.kind in COPIES and not self._accelerator.queues
        if not (instruction.computes or copies):
            return attrs.evolve(instruction, run=self._before_run(run, row, instruction.sums))
        run = self._around_run(run, row)
        return attrs.evolve(instruction, wait=wait, run=run)

    def _row(self, instruction: Instruction) -> int:
        """The start of an instruction's row."""
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
        """Stamp a wait. Its end is also the begin of the instruction, which saves a look at the
        clock, on a GPU an event; except for a pair's second part, which waits before the first."""
        stamps, now = self._stamps, self._clock()
        receives = instruction.receives
        waited, found = row + WAITED, row + FOUND
        begin = row + BEGAN if instruction.listed else found

        def timed() -> None:
            stamps[waited] = now()
            wait_for(receives)
            stamps[found] = stamps[begin] = now()
            wait()  # for the sends that have arrived by then, to free their memory

        return timed

    def _before_run(self, run: Bound, row: int, posted: Sequence[Reduction]) -> Bound:
        """Stamp the begin of what is posted; note the order of sums, and their rows."""
        stamps, now, sums = self._stamps, self._clock(), self._sums

        def timed() -> None:
            stamps[row + BEGAN] = now()
            for reduction in posted:
                sums.pop(reduction, None)
                sums[reduction] = row
            run()

        return timed

    def _after_sums(self, reductions: Sequence[Reduction], run: Bound) -> Bound:
        """Wait for one sum after the other, to see the end of each: work on the sums, and barriers,
        take time too."""
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
        """Take the stamps as `latest`; returns a function that gets the seconds in compute."""
        taken = self.latest = np.array(self._stamps, np.int64)
        self._stamps[:] = [0] * len(taken)

        def seconds() -> float:
            rows = np.array(self._computes, np.int64)
            rows = rows[rows < len(taken)]  # later programs have more
            return 1e-9 * float((taken[rows + ENDED] - taken[rows + BEGAN]).sum())

        return seconds

    def of_list(self, schedule: Schedule, rank: int) -> Ints:
        """The starts of the rows of a rank's actions, in the order of its list; -1 for an action
        that does nothing here."""
        rows = (
            self._rows.get((rank, index, action), -1)
            for index, entry in enumerate(schedule.actions[rank])
            for action in (entry.actions if isinstance(entry, Together) else (entry,))
        )
        return np.fromiter(rows, np.int64, len(schedule.flat[rank]))

    def anchor(self) -> Anchor:
        """An anchor at the current time."""
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
    """The recorder for a GPU: it leaves marks, which are read after the step.

    A GPU has its own clock. Its times are placed between two anchors, with an even drift in
    between. The times of a step count from its beginning, because a GPU's times have few digits.
    """

    most: ClassVar[int] = 1 << 15  # a GPU's events take more memory

    def _clock(self) -> Callable[[], Any]:
        mark = self._accelerator.mark
        return lambda: mark(timed=True)

    def take(self) -> Callable[[], float]:
        """Take the stamps as `latest`; returns a function that waits for the device and gets the
        seconds in compute."""
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
        """An anchor at the current time, after the device has finished its queued work."""
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
    """The rounding error of a device's time, in nanoseconds. The device returns a float of 32 bits:
    an hour is rounded by an eighth of a millisecond."""
    return 1e6 * float(np.spacing(np.float32(milliseconds))) / 2


def recorder(accelerator: Accelerator) -> Recorder:
    """The recorder for a device."""
    return (QueuedRecorder if accelerator.queues else Recorder)(accelerator)


_AT_ONCE = 50_000
"""The most nanoseconds that a wait takes if the data is there already; a longer one had to wait."""


def timeline(
    schedule: Schedule, stamps: Nanoseconds, sizes: Sizes | None, measured: Measured
) -> Timeline:
    """The timeline of a step from the stamps of all places, by one clock; shape [places, 4], 0 for
    no stamp."""
    starts, ends = stamps[:, BEGAN].copy(), stamps[:, ENDED].copy()
    # The parts of an overlapped pair run one after the other; each gets the time of both.
    for second in np.flatnonzero(schedule.columns.joined & (ends > 0)).tolist():
        first = second - 1
        starts[second], ends[first] = starts[first], ends[second]
    # The entries that had to wait for their input.
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
    """Place the sums. They start once all ranks have posted them, and end when the first rank that
    had to wait, before its OPTIM_STEPs, finds them there."""
    posted, found = stamps[:, BEGAN], stamps[:, FOUND]
    for turn in graph_of(schedule).collectives:
        places = np.array(turn)
        known = posted[places].min() > 0
        starts[places] = posted[places].max() if known else 0
        seen = found[places[waited[places]]]
        ends[places] = seen.min() if known and len(seen) else 0
