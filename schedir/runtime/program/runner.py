"""Runs a list again and again: for training, or its forwards for evaluation.

A rank that does not see the step's input takes its shapes to be those of the step before, and posts
its first receives at once. The call's opening says whether they are; if not, what was posted too
early is filled up without meaning, and the ranks agree anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from schedir.errors import ExecutionError
from schedir.ir import Action
from schedir.runtime.batch.feeding import Feed
from schedir.runtime.batch.microbatches import Batch
from schedir.runtime.boundaries.agreement import Wirings
from schedir.runtime.processes.control import Control
from schedir.runtime.processes.failure import WaitError, describe
from schedir.runtime.program.compiler import Compiler, Instruction
from schedir.runtime.program.opening import UNKNOWN, Opening, Openings
from schedir.runtime.program.posting import awaited, leading, matching_send
from schedir.runtime.program.transfer import Send
from schedir.runtime.stage.cells import Cells, wait
from schedir.runtime.stage.stage import StepState
from schedir.runtime.transports.transport import Transport, Work

_SMALL_CHANGE = 1 << 20
"""Bytes of receive buffers beyond what the list needs: nothing beside a model, and small transfers,
which would wait for a timer tick rather than for data, are all posted ahead."""


@attrs.frozen(eq=False)
class _Program:
    """The compiled lists of the ranks here, under one agreement on the boundaries.

    `early` receives are posted before the rank knows whether the step is under it; `awaited` are
    the rank's sends that others may have posted such receives for.
    """

    lists: list[list[Instruction]]
    early: int = 0
    awaited: Sequence[Action] = ()


@attrs.frozen(eq=False)
class Ready:
    """The lists to run for one call, of which `done` entries have been run; `opening` is what the
    call is, as the first stage's rank says."""

    opening: Opening
    lists: list[list[Instruction]]
    done: int = 0


@attrs.define(eq=False)
class Runner:
    """A list, with what it needs at every run.

    Its programs go by the number of the agreement on the boundaries, of which the current one is
    that of the step before. Most agreements share one: it depends on the shapes only in how far
    receives are posted ahead. `under_way` are the sends that may not have arrived by the end of a
    step.
    """

    cells: Cells
    wirings: Wirings
    compiler: Compiler
    transports: Mapping[int, Transport]
    control: Control
    openings: Openings
    state: StepState
    under_way: list[Work]
    _streams: list[torch.cuda.Stream] = attrs.field(init=False)
    _programs: dict[int, _Program] = attrs.field(factory=dict)
    _compiled: dict[tuple[int, ...], _Program] = attrs.field(factory=dict)
    _current: int | None = None

    @_streams.default
    def _stream_of_each(self) -> list[torch.cuda.Stream]:
        """One for each rank, where this process runs several on a GPU."""
        devices = [stage.device for stage in self.compiler.stages.values()]
        if len(self.transports) == 1 or devices[0].type != "cuda":
            return []
        return [torch.cuda.Stream(devices[0]) for _ in self.transports]

    def fill(self, feed: Feed) -> None:
        """Put a call's microbatches into their cells."""
        for (stage, m), cell in self.cells.items():
            if stage == 0:
                cell.batch = feed.inputs[m]
            cell.extra = feed.extra(stage, m)
            if stage == self.last:
                cell.target = feed.targets[m] if feed.targets else None
                cell.loss_keywords = feed.loss_keywords[m] if feed.loss_keywords else {}

    def weigh(self, shares: Sequence[float]) -> None:
        """Give the last stage's microbatches their shares of the loss."""
        for m, share in enumerate(shares):
            self.cells[self.last, m].weight = share

    def open(self, own: Opening, inputs: Batch | None, feed: Feed) -> Ready:
        """Begin a call on the microbatches of `feed`, which were cut from `inputs`.

        Its boundaries are taken to be those of the call before, until the opening says that they
        are not. Raises ExecutionError where other ranks do something else.
        """
        number = self.wirings.number(feed, inputs, own.autocast)
        own = own.under(UNKNOWN if number is None else number)
        program = None if self._current is None else self._programs[self._current]
        early = 0
        if program is not None and number is None and self.posts_early:
            early = program.early
            _advance(program.lists[0][:early])
        opening = self.openings.exchange(own)
        if program is not None:
            if opening.agreement == self._current:
                return Ready(opening, program.lists, early)
            if self.posts_early:
                self._withdraw(program)
        agreed, forgotten = self.wirings.agree(opening.agreement, feed)
        for key, cell in self.cells.items():
            cell.wiring = agreed[key]
        if forgotten:
            self._programs = {n: p for n, p in self._programs.items() if n not in forgotten}
            kept = list(self._programs.values())
            self._compiled = {key: p for key, p in self._compiled.items() if p in kept}
        self._current = opening.agreement
        if self._current not in self._programs:
            self._programs[self._current] = self._program()
        return Ready(opening, self._programs[self._current].lists)

    @property
    def posts_early(self) -> bool:
        """Whether receives may be posted before the call's opening has come."""
        return all(transport.early for transport in self.transports.values())

    @property
    def last(self) -> int:
        """The last stage."""
        return self.compiler.schedule.stages - 1

    def run(self, ready: Ready) -> None:
        """Run the list."""
        try:
            # What the step before sent last; its receivers have posted their part within that one.
            wait(self.under_way)
        except WaitError as error:
            raise WaitError(error.cause, "what the call before has sent to arrive") from error
        lists, done = ready.lists, ready.done
        try:
            if len(lists) == 1:
                _advance(lists[0][done:] if done else lists[0])
            else:
                self._take_turns(lists)
        except WaitError as stalled:
            if not stalled.what and stalled.action is not None:
                stalled.what = awaited(self.compiler.schedule, stalled.action)
            raise
        for cell in self.cells.values():
            self.under_way += cell.outputs_going
            self.under_way += cell.grads_going
            cell.outputs_going.clear()
            cell.grads_going.clear()

    def losses(self) -> list[Tensor | None]:
        """Those of the microbatches whose last stage ran here, by microbatch."""
        # By microbatch, not by order of arrival.
        return [self.cells[self.last, m].loss for m in range(self.compiler.schedule.microbatches)]

    def results(self, rows: int) -> list[Any] | None:
        """What the last stage has returned, by microbatch, if it is here."""
        if (self.last, 0) not in self.cells:
            return None
        number = self.compiler.schedule.microbatches
        if rows != UNKNOWN:  # of a short batch some microbatches were copies
            number = min(number, rows)
        return [self.cells[self.last, m].result for m in range(number)]

    def forget(self) -> None:
        """A step has failed: the next one, where there can be one, starts anew."""
        self.under_way.clear()
        for cell in self.cells.values():
            cell.drop()
        self._programs.clear()
        self._compiled.clear()
        self._current = None

    def _withdraw(self, program: _Program) -> None:
        """End the receives that were posted for a step such as the one before."""
        sends = {x.action: x.run for x in program.lists[0] if isinstance(x.run, Send)}
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
        largest = max((cell.wiring.largest() for cell in self.cells.values()), default=0)
        more = min(_SMALL_CHANGE // max(largest, 1), 2 * len(self.cells))
        rooms = dict.fromkeys(self.transports, more)
        if self.posts_early:
            rooms = dict(enumerate(self.control.share(more)))
        key = tuple(rooms.values())
        if key not in self._compiled:
            self._compiled[key] = self._compile(rooms)
        return self._compiled[key]

    def _compile(self, rooms: Mapping[int, int]) -> _Program:
        """A program, by how many buffers a rank's receives may take beyond what its list needs.

        Of the ranks here, and where receives are posted early of all.
        """
        lists = [
            self.compiler.compile(rank, transport, rooms[rank])
            for rank, transport in self.transports.items()
        ]
        if not self.posts_early:
            return _Program(lists)
        schedule = self.compiler.schedule
        early = {
            rank: leading(schedule, rank, room)
            for rank, room in rooms.items()
            if rank not in schedule.placement[0]
        }
        (own,) = lists
        (rank,) = self.transports
        listed = {x.action for x in own}
        sends = [matching_send(receive) for posted in early.values() for receive in posted]
        awaited = [send for send in sends if send in listed]
        return _Program(lists, len(early.get(rank, ())), awaited)

    def _take_turns(self, lists: list[list[Instruction]]) -> None:
        """Run the ranks of this process in turn, each as far as it gets until it waits.

        On a GPU each has a stream of its own.
        """
        reached = [0] * len(lists)
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        progress = True
        while progress:
            progress = False
            for turn, instructions in enumerate(lists):
                first = reached[turn]
                with torch.cuda.stream(self._streams[turn]) if self._streams else nullcontext():
                    while (
                        reached[turn] < len(instructions)
                        and not instructions[reached[turn]].waits()
                    ):
                        _advance(instructions[reached[turn] : reached[turn] + 1])
                        reached[turn] += 1
                progress |= reached[turn] > first
        for stream in self._streams:
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
        if torch.autograd.profiler._is_profiler_enabled:
            for instruction in instructions:
                _profiled(instruction)
        else:
            for instruction in instructions:
                if instruction.coming:
                    instruction.wait()
                instruction.run()
    except WaitError as stalled:
        if instruction is not None:
            stalled.at(instruction.rank, instruction.index, instruction.action)
        raise
    except Exception as error:
        if instruction is None:
            raise
        # With the traceback of the cause, which leads to the user's line, and that one alone.
        inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
        raise ExecutionError(
            str(error) if isinstance(error, ExecutionError) else describe(error),
            rank=instruction.rank,
            index=instruction.index,
            action=instruction.action,
            cause=error,
        ).with_traceback(inner) from None


def _profiled(instruction: Instruction) -> None:
    """Run one with ranges, for what it waits for and for what it does: each costs what a send
    does."""
    if instruction.coming:
        with record_function(f"wait for {instruction.action}"):
            instruction.wait()
    name = str(instruction.action)
    with record_function(f"wait for {name}" if instruction.meets else name):
        instruction.run()
