"""Who watches a list being run: the clock of the compute, and torch's profiler.

An observer is a function Instruction → Instruction, which puts something of its own around what the
instruction waits for and does:

    observer        around the wait                     around the run
    BusyClock       nothing                             takes the time, of compute
    QueuedClock     nothing                             leaves two marks, of compute
    profiler        a range "wait for 0F1"              a range "0F1"

So an instruction that nobody observes costs nothing, and the loop that runs a list knows of no
observer. Those that always watch are put around when the list is compiled; whether others do is
asked once per call. An instruction has its rank and its index in the list, so that an observer can
record when each entry of each rank has started and ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import ParamSpec, TypeAlias

import attrs
import torch
from torch.autograd.profiler import record_function

from schedir.runtime.accelerator import Accelerator, Mark
from schedir.runtime.call import Call
from schedir.runtime.program.instruction import Instruction

Observer: TypeAlias = Callable[[Instruction], Instruction]
P = ParamSpec("P")


class BusyClock:
    """The time that this process spends in compute."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self, instruction: Instruction) -> Instruction:
        """Observe an instruction."""
        if not instruction.operation.computes:
            return instruction
        return attrs.evolve(instruction, run=self._timed(instruction.run))

    def _timed(self, run: Callable[[Call], None]) -> Callable[[Call], None]:
        def timed(call: Call) -> None:
            started = perf_counter()
            run(call)
            self._seconds += perf_counter() - started

        return timed

    def take(self) -> Callable[[], float]:
        """How to get the seconds since this was asked for last."""
        seconds, self._seconds = self._seconds, 0.0
        return lambda: seconds


class QueuedClock(BusyClock):
    """On a device that queues its work, by marks before and after it, which are read later."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._spans: list[tuple[Mark, Mark]] = []

    def _timed(self, run: Callable[[Call], None]) -> Callable[[Call], None]:
        mark = self._accelerator.mark

        def marked(call: Call) -> None:
            started = mark(timed=True)
            run(call)
            self._spans.append((started, mark(timed=True)))

        return marked

    def take(self) -> Callable[[], float]:
        """How to get the seconds; the host waits for the device then."""
        spans, self._spans = self._spans, []

        def seconds() -> float:
            for _, ended in spans:
                ended.synchronize()
            return sum(started.elapsed_time(ended) for started, ended in spans) / 1e3

        return seconds


def busy_clock(accelerator: Accelerator) -> BusyClock:
    """The clock for a device."""
    return QueuedClock(accelerator) if accelerator.queues else BusyClock()


def profiler_ranges(instruction: Instruction) -> Instruction:
    """Show in a profile what an instruction waits for and what it does: each range costs what a
    send does."""
    name = str(instruction.action)
    waiting = f"wait for {name}"
    return attrs.evolve(
        instruction,
        wait=_in_range(waiting, instruction.wait),
        run=_in_range(name if instruction.operation.listed else waiting, instruction.run),
    )


def _in_range(name: str, function: Callable[P, None]) -> Callable[P, None]:
    def in_range(*args: P.args, **kwargs: P.kwargs) -> None:
        with record_function(name):
            function(*args, **kwargs)

    return in_range


def listening() -> Sequence[Observer]:
    """Who watches the call that begins now, beside those that always do."""
    return [profiler_ranges] if torch.autograd.profiler._is_profiler_enabled else []


def observed(
    instructions: Sequence[Instruction], observers: Iterable[Observer]
) -> Sequence[Instruction]:
    """The instructions with what the observers put around them."""
    for observer in observers:
        instructions = list(map(observer, instructions))
    return instructions
