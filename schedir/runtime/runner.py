"""Runs a list again and again: for training, or its forwards for evaluation.

A rank that does not see the step's input takes its shapes to be those of the step before, and posts
its first receives at once. The payload that its first compute waits for says whether they are; if
not, what was posted too early is filled up without meaning, and the ranks agree anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeAlias

import attrs
import torch
from torch.autograd.profiler import record_function

from schedir.errors import ExecutionError
from schedir.ir import Action, Schedule
from schedir.runtime.cells import Cell, wait
from schedir.runtime.control import Control
from schedir.runtime.instructions import Forward, Send, StepState
from schedir.runtime.microbatches import Batch, Microbatch
from schedir.runtime.posting import leading, matching_send
from schedir.runtime.program import Compiler, Instruction
from schedir.runtime.transport import GlooTransport, Transport, Work
from schedir.runtime.wiring import Wirings

_NO_AGREEMENT = -1
_SMALL_CHANGE = 1 << 20
"""Bytes of receive buffers beyond what the list needs: nothing beside a model, and small transfers,
which would wait for a timer tick rather than for data, are all posted ahead."""

Cells: TypeAlias = dict[tuple[int, int], Cell]
"""The cells of the stages here, by stage and microbatch."""


def cells_of(schedule: Schedule, local: tuple[int, ...], first_draw: int) -> Cells:
    """The cells of the stages here; the pipeline's first microbatch draws as `first_draw`."""
    cells = {
        (s, m): Cell(s, m, first_draw + m)
        for s in sorted(local)
        for m in range(schedule.microbatches)
    }
    rank = schedule.dataflow.runs
    for (stage, m), cell in cells.items():
        following = cells.get((stage + 1, m))
        if following is not None and rank[stage, m] == rank[stage + 1, m]:
            cell.following, following.previous = following, cell
    return cells


def learns_from_payloads(schedule: Schedule, transport: Transport | None) -> bool:
    """Whether a rank that does not see the step's input learns its shapes from the first payload.

    On a GPU the host would wait for the payload that it reads; a message costs it nothing. And a
    rank that runs no forward gets no payload to learn from.
    """
    runs = set(schedule.dataflow.runs.ravel().tolist())
    return isinstance(transport, GlooTransport) and len(runs) == schedule.ranks


@attrs.frozen(eq=False)
class _Program:
    """The compiled lists of the ranks here, under one agreement on the boundaries.

    Where ranks learn from payloads, `early` receives are posted before the rank knows whether the
    step is under it, `opening` waits for the payload that says so, and `awaited` are the rank's
    sends that others may have posted such receives for.
    """

    lists: list[list[Instruction]]
    early: int = 0
    opening: Instruction | None = None
    awaited: Sequence[Action] = ()


@attrs.define(eq=False)
class Runner:
    """A list, with what it needs at every run.

    Its programs go by the number of the agreement on the boundaries, of which the current one is
    that of the step before. Most agreements share one: it depends on the shapes only in how far
    receives are posted ahead. `under_way` are the sends that may not have arrived by the end of a
    step; `streams` those of the ranks in one process, on a GPU.
    """

    cells: Cells
    wirings: Wirings
    compiler: Compiler
    transports: Mapping[int, Transport | None]
    control: Control | None
    learns: bool
    state: StepState
    streams: Sequence[torch.cuda.Stream]
    under_way: list[Work]
    _programs: dict[int, _Program] = attrs.field(factory=dict)
    _compiled: dict[tuple[int, ...], _Program] = attrs.field(factory=dict)
    _current: int | None = None

    def run(self, inputs: Batch | None, extras: Mapping[int, Sequence[Microbatch]]) -> None:
        """Run the list on the microbatches in the cells, which were cut from `inputs`; `extras` are
        what stages get beside their input."""
        lists, done = self._ready(inputs, extras)
        self._free()
        if len(lists) == 1:
            _advance(lists[0][done:] if done else lists[0])
        else:
            self._take_turns(lists)
        for cell in self.cells.values():
            self.under_way += cell.outputs_going
            self.under_way += cell.grads_going
            cell.outputs_going.clear()
            cell.grads_going.clear()

    def _free(self) -> None:
        """Let go of what the step before sent last, and had under way at its end.

        Its receivers post their part within that step, whatever happens in this one.
        """
        try:
            wait(self.under_way)
        except RuntimeError as error:
            raise ExecutionError(
                f"what the step before sent has not arrived: {_describe(error)}", cause=error
            ) from error

    def forget(self) -> None:
        """A step has failed: the next one starts anew."""
        self.under_way.clear()
        for cell in self.cells.values():
            cell.drop()
        self._programs.clear()
        self._compiled.clear()
        self._current = None

    def _ready(
        self, inputs: Batch | None, extras: Mapping[int, Sequence[Microbatch]]
    ) -> tuple[list[list[Instruction]], int]:
        """The lists for this step's boundaries, and how far they have been run already.

        Taken to be those of the step before, until the first payload says that they are not.
        """
        seen = number = self.wirings.number(self.cells, inputs, extras)
        if self._current is not None and (self.learns or self.control is None):
            program = self._programs[self._current]
            early = 0
            if number is None:
                early = program.early
                _advance(program.lists[0][:early])
                number = self._opened(program)
            if number == self._current:
                self.state.agreement = number
                return program.lists, early
            self._withdraw(program)
        number = self._current = self.wirings.agree(seen, self.cells, extras)
        self.state.agreement = number
        if number not in self._programs:
            self._programs[number] = self._program()
        return self._programs[number].lists, 0

    def _opened(self, program: _Program) -> int:
        """The number that comes with the payload that the first compute waits for."""
        assert program.opening is not None  # the first stage is not here
        _advance([program.opening])
        action = program.opening.action
        header = self.cells[action.stage, action.microbatch or 0].header
        assert header is not None  # the receive was an opening
        return int(header)

    def _withdraw(self, program: _Program) -> None:
        """End the receives that were posted for a step such as the one before."""
        sends = {x.action: x.run for x in program.lists[0] if isinstance(x.run, Send)}
        self.state.agreement = _NO_AGREEMENT
        for action in program.awaited:
            sends[action].blank()
        for cell in self.cells.values():
            for works in (cell.inputs_coming, cell.grads_coming):
                wait(works)
            for works in (cell.outputs_going, cell.grads_going):
                wait(works)
            cell.withdraw()

    def _program(self) -> _Program:
        """The program for the boundaries that the cells have now."""
        largest = max(cell.wiring.largest() for cell in self.cells.values())
        more = min(_SMALL_CHANGE // max(largest, 1), 2 * len(self.cells))
        rooms = dict.fromkeys(self.transports, more)
        if self.control is not None and self.learns:
            rooms = dict(enumerate(self.control.share(more)))
        key = tuple(rooms.values())
        if key not in self._compiled:
            self._compiled[key] = self._compile(rooms)
        return self._compiled[key]

    def _compile(self, rooms: Mapping[int, int]) -> _Program:
        """A program, by how many buffers a rank's receives may take beyond what its list needs.

        Of the ranks here, and where ranks learn from payloads of all.
        """
        lists = [
            self.compiler.compile(rank, transport, rooms[rank])
            for rank, transport in self.transports.items()
        ]
        if not self.learns:
            return _Program(lists)
        schedule = self.compiler.schedule
        early = {
            rank: leading(schedule, rank, room)
            for rank, room in rooms.items()
            if rank not in schedule.placement[0]
        }
        (own,) = lists
        first = next(x for x in own if isinstance(x.run, Forward))
        opening = attrs.evolve(first, run=partial(wait, first.coming))
        listed = {x.action for x in own}
        sends = [matching_send(receive) for posted in early.values() for receive in posted]
        awaited = [send for send in sends if send in listed]
        return _Program(lists, len(early.get(first.rank, ())), opening, awaited)

    def _take_turns(self, lists: list[list[Instruction]]) -> None:
        """Run the ranks of this process in turn, each as far as it gets until it waits.

        On a GPU each has a stream of its own.
        """
        reached = [0] * len(lists)
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        progress = True
        while progress:
            progress = False
            for turn, instructions in enumerate(lists):
                first = reached[turn]
                with torch.cuda.stream(self.streams[turn]) if self.streams else nullcontext():
                    while (
                        reached[turn] < len(instructions)
                        and not instructions[reached[turn]].waits()
                    ):
                        _advance(instructions[reached[turn] : reached[turn] + 1])
                        reached[turn] += 1
                progress |= reached[turn] > first
        for stream in self.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        for at, instructions in zip(reached, lists, strict=True):
            if at < len(instructions):
                raise ExecutionError(
                    "what it waits for never comes",
                    rank=instructions[at].rank,
                    index=instructions[at].index,
                    action=instructions[at].action,
                )


def _advance(instructions: Sequence[Instruction]) -> None:
    """Run a rank's instructions, or as many as are given."""
    instruction = None
    try:
        if torch.autograd.profiler._is_profiler_enabled:  # a range costs what a send does
            for instruction in instructions:
                with record_function(str(instruction.action)):
                    instruction.run()
        else:
            for instruction in instructions:
                instruction.run()
    except Exception as error:
        if instruction is None:
            raise
        raise ExecutionError(
            str(error) if isinstance(error, ExecutionError) else _describe(error),
            rank=instruction.rank,
            index=instruction.index,
            action=instruction.action,
            cause=error,
        ) from error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
