"""Who watches a list being run: the clock of the compute, and torch's profiler.

An observer is a function Instruction → Instruction, which puts something of its own around what the
instruction waits for and does:

    observer        around the wait                     around the run
    BusyClock       nothing                             takes the time, of compute
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

from schedir.runtime.call import Call
from schedir.runtime.program.instruction import Instruction

Observer: TypeAlias = Callable[[Instruction], Instruction]
P = ParamSpec("P")


class BusyClock:
    """The `seconds` that this process has spent in compute so far."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, instruction: Instruction) -> Instruction:
        """Observe an instruction."""
        if not instruction.operation.computes:
            return instruction
        run = instruction.run

        def timed(call: Call) -> None:
            started = perf_counter()
            run(call)
            self.seconds += perf_counter() - started

        return attrs.evolve(instruction, run=timed)


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
