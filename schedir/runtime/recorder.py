"""Records the times of every entry of a step, and makes a timeline of the times of all ranks.

The recorder is an observer. Each instruction has a row of marks, which are read after the step:

    0F0            BEGAN ─ run ─ ENDED
    1F0            WAITED ─ receives ─ FOUND = BEGAN ─ run ─ ENDED
    0SEND_ACT0     BEGAN ─ run                                     posted then
    0OFFLOAD0      BEGAN ─ run ─ ENDED                             on the CPU; else as a post
    0REDUCE_GRAD   BEGAN ─ run … WAITED ─ sum ─ FOUND              before its OPTIM_STEP

A mark is an event of a GPU, and on the CPU a look at the clock. The timeline is made from them:

    rank 0   0F0 ┊ 0SEND_ACT0                        posted at a
    rank 1   1RECV_ACT0 ┊ waits ────────┐ 1F0        posted at b, waited for from c to d

The transfer starts at max(a, b): over gloo and over NCCL nothing moves before both ends are posted.
It ends at d, if the rank has waited for it. If the data was there already, nobody has seen when it
came, and its end is NaN. Entries that did not run are NaN too, such as an OPTIM_STEP if the caller
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from time import perf_counter_ns
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, COPIES, Action, Ints, Schedule, Together
from schedir.runtime.accelerator import Accelerator, Mark
from schedir.runtime.gradients.reduction import Reduction
from schedir.runtime.program.instruction import Bound, Instruction
from schedir.runtime.transports import wait_for
from schedir.simulator import Measured, Sizes, Timeline

now: Callable[[], int] = perf_counter_ns
"""Nanoseconds on the clock of this process; whoever keeps the time of a step reads it here."""

Nanoseconds: TypeAlias = NDArray[np.int64]

BEGAN, ENDED, WAITED, FOUND = range(4)
COLUMNS = 4


@attrs.frozen(eq=False)
class Anchor:
    """A moment on a host's clock, in nanoseconds and within `error`, with the device's mark."""

    at: int
    error: float
    mark: Mark


@attrs.frozen(eq=False)
class Taken:
    """The marks of a call, row after row, None for no mark; the rows of compute start at
    `computes`."""

    marks: Sequence[Mark | None]
    computes: Iterable[int]

    def busy(self) -> float:
        """The seconds in compute; the host waits for the device."""
        total = 0.0
        for row in self.computes:
            began, ended = self.marks[row + BEGAN], self.marks[row + ENDED]
            if began and ended:
                ended.synchronize()
                total += began.elapsed_time(ended)
        return 1e-3 * total


class Recorder:
    """The marks of the instructions that it observes, until they are taken: of all with `traces`,
    otherwise those of compute.

    A row belongs to an action at an index of a rank's list, in any program.
    """

    def __init__(self, accelerator: Accelerator, traces: bool) -> None:
        self._accelerator, self._traces = accelerator, traces
        self._rows: dict[tuple[int, int, Action], int] = {}
        self._computes: list[int] = []
        self._sums: dict[Reduction, int] = {}
        # Never replaced by another list: the wrapped instructions hold it.
        self._marks: list[Mark | None] = []

    def __call__(self, instruction: Instruction) -> Instruction:
        """Observe an instruction."""
        if not (self._traces or instruction.computes):
            return instruction
        run, wait, row = instruction.run, instruction.wait, self._row(instruction)
        if wait is not None and self._traces:
            wait = self._around_wait(instruction, wait, row)
        if instruction.listed:
            # A GPU copies beside its compute, and nobody sees when a copy ends.
            copies = instruction.action.kind in COPIES and not self._accelerator.queues
            ends = instruction.computes or copies
            run = self._around_run(run, row, ends, instruction.sums)
        elif instruction.sums:
            run = self._after_sums(instruction.sums, run)
        return attrs.evolve(instruction, wait=wait, run=run)

    def _row(self, instruction: Instruction) -> int:
        """The start of an instruction's row."""
        key = instruction.rank, instruction.index, instruction.action
        if key not in self._rows:
            self._rows[key] = len(self._marks)
            self._marks += [None] * COLUMNS
            if instruction.action.kind in COMPUTE:
                self._computes.append(self._rows[key])
        return self._rows[key]

    def _around_run(self, run: Bound, row: int, ends: bool, posted: Sequence[Reduction]) -> Bound:
        """Mark a run, and its end where it `ends` with it; note the order of posted sums, and their
        rows."""
        marks, mark, sums = self._marks, self._accelerator.mark, self._sums
        begin, end = row + BEGAN, row + ENDED

        def timed() -> None:
            if not ends or marks[begin] is None:  # else its wait has ended there
                marks[begin] = mark(timed=True)
            for reduction in posted:
                sums.pop(reduction, None)
                sums[reduction] = row
            run()
            if ends:
                marks[end] = mark(timed=True)

        return timed

    def _around_wait(self, instruction: Instruction, wait: Bound, row: int) -> Bound:
        """Mark a wait. Its end is also the begin of the instruction, which saves a mark; except for
        a pair's second part, which waits before the first."""
        marks, mark = self._marks, self._accelerator.mark
        receives = instruction.receives
        waited, found = row + WAITED, row + FOUND
        begin = row + BEGAN if instruction.listed else found

        def timed() -> None:
            marks[waited] = mark(timed=True)
            wait_for(receives)
            marks[found] = marks[begin] = mark(timed=True)
            wait()  # for the sends that have arrived by then, to free their memory

        return timed

    def _after_sums(self, reductions: Sequence[Reduction], run: Bound) -> Bound:
        """Wait for one sum after the other, to see the end of each: work on the sums, and barriers,
        take time too."""
        marks, mark, posted = self._marks, self._accelerator.mark, self._sums

        def timed() -> None:
            for reduction in [reduction for reduction in posted if reduction in reductions]:
                row = posted.pop(reduction)
                marks[row + WAITED] = mark(timed=True)
                reduction.wait()
                marks[row + FOUND] = mark(timed=True)
            run()

        return timed

    def take(self) -> Taken:
        """Take the marks of the call that is over."""
        taken = Taken([*self._marks], [*self._computes])
        self._marks[:] = [None] * len(self._marks)
        self._accelerator.use_again(filter(None, taken.marks), after=taken)
        return taken

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
        """An anchor at the current time, after the device has finished its queued work."""
        self._accelerator.synchronize()

        def attempt() -> Anchor:
            before = now()
            mark = self._accelerator.mark(timed=True)
            mark.synchronize()
            after = now()
            return Anchor((before + after) // 2, (after - before) / 2, mark)

        return min((attempt() for _ in range(8)), key=attrgetter("error"))

    def read(
        self, calls: Iterable[tuple[Mark, Taken]], first: Anchor, last: Anchor
    ) -> tuple[list[Nanoseconds], float]:
        """The marks of calls between two anchors, each with the mark that it began at, as times on
        the anchors' clock, 0 for none; and by how many nanoseconds they may be wrong.

        A device has its own clock, whose drift is taken to be even. The times of a call count from
        its beginning, because a GPU's times have few digits.
        """
        found, began, before, lost = [], 0.0, first.mark, 0.0
        for begun, taken in calls:
            gap = before.elapsed_time(begun)
            began, before, lost = began + gap, begun, lost + self._lost(gap)
            times = [began + before.elapsed_time(mark) if mark else -1 for mark in taken.marks]
            found.append(np.array(times, np.float64))
        gap = before.elapsed_time(last.mark)
        whole, lost = began + gap, lost + self._lost(gap)
        pace = (last.at - first.at) / whole if whole else 0.0
        placed = [
            np.where(times < 0, 0, first.at + np.rint(pace * times).astype(np.int64))
            for times in found
        ]
        return placed, max(first.error, last.error) + lost

    def _lost(self, milliseconds: float) -> float:
        """The rounding error of a device's time, in nanoseconds. A GPU returns a float of 32 bits:
        an hour is rounded by an eighth of a millisecond."""
        if not self._accelerator.queues:
            return 0.0
        return 1e6 * float(np.spacing(np.float32(milliseconds))) / 2


_AT_ONCE = 50_000
"""The most nanoseconds that a wait takes if the data is there already; a longer one had to wait."""


def timeline(
    schedule: Schedule, stamps: Nanoseconds, sizes: Sizes | None, measured: Measured
) -> Timeline:
    """The timeline of a step from the stamps of all places, by one clock; shape [places, 4], 0 for
    no stamp."""
    posted, ended, waits, found = stamps.T
    starts, ends = posted.copy(), ended.copy()
    # The parts of an overlapped pair run one after the other; each gets the time of both.
    for second in np.flatnonzero(schedule.columns.joined & (ends > 0)).tolist():
        first = second - 1
        starts[second], ends[first] = starts[first], ends[second]
    # The entries that had to wait for their input.
    waited = found - waits > _AT_ONCE
    graph = graph_of(schedule)
    transfers = graph.transfers
    send, receive, user = transfers.send, transfers.receive, transfers.user
    known = (posted[send] > 0) & (posted[receive] > 0)
    for side in (send, receive):
        starts[side] = np.where(known, np.maximum(posted[send], posted[receive]), 0)
        ends[side] = np.where(waited[user] & known, found[user], 0)
    # Sums start once all ranks have posted them, and end when the first rank that had to wait,
    # before its OPTIM_STEPs, finds them there.
    for turn in graph.collectives:
        places = np.array(turn)
        seen = found[places[waited[places]]]
        all_there = posted[places].min() > 0
        starts[places] = posted[places].max() if all_there else 0
        ends[places] = seen.min() if all_there and len(seen) else 0
    # Two clocks may differ by more than a transfer takes.
    both = (starts > 0) & (ends > 0)
    starts[both] = np.minimum(starts[both], ends[both])
    begun = starts[starts > 0].min(initial=np.iinfo(np.int64).max)
    from_begin, to_end = (
        np.where(times > 0, 1e-9 * (times - begun), np.nan) for times in (starts, ends)
    )
    return Timeline(schedule, from_begin, to_end, sizes=sizes, unit="s", measured=measured)
