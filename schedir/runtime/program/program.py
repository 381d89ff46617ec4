"""A program: a rank's list, compiled for one input signature to a flat list of bound calls.

    list      1RECV_ACT0           1F0                    1B0          1SEND_GRAD0
    calls     post the receive     wait for it; forward   backward     post the send

The first call of a signature runs the same list over described messages; the program for later
calls is compiled with what it learns. A boundary that the user has marked stays described. The
receives at the beginning of a list are posted at the end of the program's previous call, if the
transport takes them so early:

    call 7    0F0 … 0B3  ┃ 0RECV_GRAD0            posted for call 8
    call 8               ┃ 0F0 0SEND_ACT0 0B0 …   the handshake comes first, and 0B0 waits for it

A payload's tag is its program's number, so transfers for one signature never meet those for
another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from itertools import pairwise, takewhile
from typing import Any, TypeAlias, TypeGuard

import attrs
import torch
from torch import Tensor
from torch.autograd import profiler
from torch.utils import _pytree as pytree

from schedir.diagnosis.verdict import END, SENDS, Phase
from schedir.errors import ExecutionError
from schedir.graph.compile import graph_of
from schedir.ir import COMMUNICATION, CONSUMES, RECEIVES, Action, Entry, Schedule
from schedir.lazy import collector_held_off
from schedir.passes.receives import SPARE_BYTES
from schedir.runtime.accelerator import Accelerator
from schedir.runtime.boundary import EVERY, Learned, Lessons, crossed, mask_gradients, meta_of
from schedir.runtime.call import Call
from schedir.runtime.feeding import Feed, ends_of_batches
from schedir.runtime.microbatches import Batch, is_opaque
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import Control
from schedir.runtime.processes.failure import WaitError, describe, of_the_user
from schedir.runtime.processes.noticeboard import CODE, Words, code, number_of
from schedir.runtime.program.compiler import Parts, RankList
from schedir.runtime.program.handshake import Handshake
from schedir.runtime.program.instruction import (
    Bound,
    Instruction,
    Observer,
    nothing,
    observed,
    profiler_ranges,
)
from schedir.runtime.program.transfers import DESCRIBED_TAGS
from schedir.runtime.stage.stage import Cells
from schedir.runtime.transports import Transport, Work

_MOST = 64
"""The most signatures that are kept; beyond it all ranks drop the least recently used one."""

_MOST_POSTED = 4
"""So many programs keep receives posted between calls, each of `SPARE_BYTES` at most."""


@attrs.define(eq=False)
class Program:
    """The compiled lists of the ranks here, as one, with the cells that hold their tensors.

    It is compiled from `schedule`; `ahead` posts the receives at the beginning of a rank that is
    alone here. In a call of several batches, `ends` are the numbers of instructions up to the end
    of each batch but the last. `streams` are those of several ranks. It `learns` in the first call
    of its input signature. `observers` watch its next call. `at[0]` says where this process stands,
    for errors and for other processes; see `schedir.runtime.processes.noticeboard`.
    """

    schedule: Schedule
    cells: Cells
    instructions: Sequence[Instruction]
    _at: Words
    _streams: RankStreams
    learns: bool
    _ahead: Sequence[Bound]
    _ends: Sequence[int]
    observers: Sequence[Observer] = ()
    is_posted: bool = False
    _flat: Flat = attrs.field(init=False)

    @_flat.default
    def _of_instructions(self) -> Flat:
        return _flat(self.instructions, self._streams)

    def post_ahead(self) -> None:
        """Post the receives that the next call begins with."""
        if not self.is_posted:
            for post in self._ahead:
                post()
        self.is_posted = bool(self._ahead)

    def run(self) -> Iterator[int]:
        """Run the calls; gives the number of each batch but the last once that is over.

        Raises ExecutionError, or WaitError for what never comes, with the place in the list.
        """
        calls, codes, places = self._flat
        if self.observers:
            instructions = observed(self.instructions, self.observers)
            calls, codes, places = _flat(instructions, self._streams)
        at, ends = self._at, [bisect_left(places, end) for end in self._ends]
        at[0] = codes[0] if codes else at[0]
        try:
            self.post_ahead()
            self.is_posted = False
            for batch, (start, end) in enumerate(pairwise((0, *ends, len(calls)))):
                if batch:
                    yield batch - 1
                self._streams.part()
                try:
                    for at[0], call in zip(codes[start:end], calls[start:end], strict=True):
                        call()
                finally:
                    self._streams.meet()
        except WaitError as stalled:
            place = self.instructions[places[number_of(at[0])]]
            if stalled.action is None:  # else the place where the device stands is known
                stalled.at(place.rank, place.listed_at, place.action)
            if not stalled.what:
                stalled.what, stalled.peer = _awaited(self.schedule, place.action)
            raise
        except Exception as error:
            raise _placed(error, self.instructions[places[number_of(at[0])]]) from None


class RankStreams:
    """The streams of several ranks of this process, on a device that has any: the one of the rank
    whose calls run is current.

        caller's stream   … ─ part ─┐                    ┌─ meet ─ …
        rank 0's stream             ├─ 0F0 0F1      0B0 ─┤
        rank 1's stream             └─         1F0       ┘
    """

    def __init__(self, accelerator: Accelerator, streams: Mapping[int, Any]) -> None:
        self._accelerator, self._streams = accelerator, streams
        self._current = ExitStack()

    def part(self) -> None:
        """Have all ranks' streams come after the caller's."""
        if self._streams:
            begun = self._accelerator.mark()
            for stream in self._streams.values():
                with self._accelerator.on(stream):
                    begun.wait()

    def enters(self, rank: int) -> Bound | None:
        """The call that makes a rank's stream the current one; None where it has none."""
        return partial(self._enter, self._streams[rank]) if self._streams else None

    def _enter(self, stream: Any) -> None:
        self._current.close()
        self._current.enter_context(self._accelerator.on(stream))

    def meet(self) -> None:
        """Have the caller's stream come after those of all ranks; after an error too, as what was
        computed is given up then, and its memory given out again."""
        if not self._streams:
            return
        self._current.close()
        for stream in self._streams.values():
            with self._accelerator.on(stream):
                ended = self._accelerator.mark()
            ended.wait()


def in_one_list(
    lists: Sequence[Sequence[Instruction]], ends: Sequence[Sequence[int]]
) -> tuple[list[Instruction], list[int]]:
    """The instructions of all ranks, in an order in which none has to wait, and the numbers of
    instructions up to the end of each batch but the last; `ends` are those of each list.

        rank 0    0F0 0SEND_ACT0 0F1 0SEND_ACT1               0RECV_GRAD0 0B0 …
        rank 1                                  1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 …

    Each rank goes on until it would wait for another one. Past the end of a batch it goes only
    where another rank needs that to come to its own end. A list that was proved never stops here.
    """
    happened: defaultdict[object, int] = defaultdict(int)
    reached = [0] * len(lists)
    found: list[Instruction] = []
    stops = []
    whole = [*map(len, lists)]
    for goals in (*zip(*ends, strict=True), whole):
        limits: Sequence[int] = goals
        while any(at < goal for at, goal in zip(reached, goals, strict=True)):
            before = len(found)
            for number, instructions in enumerate(lists):
                for at in range(reached[number], limits[number]):
                    instruction = instructions[at]
                    after = instruction.after
                    if after and any(happened[event] < times for event, times in after):
                        break
                    for event in instruction.does:
                        happened[event] += 1
                    found.append(instruction)
                    reached[number] += 1
            if len(found) == before:
                if limits is whole:
                    stuck = next(
                        own[at] for own, at in zip(lists, reached, strict=True) if own[at:]
                    )
                    raise _placed(ExecutionError("what it waits for never comes"), stuck)
                limits = whole
        stops.append(len(found))
    return found, stops[:-1]


def listening() -> Sequence[Observer]:
    """The observers of the next call beside the permanent ones: torch's profiler, if it is on."""
    return [profiler_ranges] if profiler._is_profiler_enabled else ()


Flat: TypeAlias = tuple[Sequence[Bound], Sequence[int], Sequence[int]]
"""The calls of some instructions, the code of the place of each, and the number of the instruction
that each is of."""


def _flat(instructions: Sequence[Instruction], streams: RankStreams) -> Flat:
    """The calls of some instructions. A receive that is posted ahead stands at the entry before
    which it is posted."""
    found: list[tuple[Bound, int, Phase, int]] = []
    standing: dict[int, int] = {}  # by rank
    for place in reversed(range(len(instructions))):
        instruction = instructions[place]
        rank, index = instruction.rank, instruction.listed_at
        if instruction.action.kind in RECEIVES and not instruction.parts:
            index = min(index, standing.get(rank, END))
        standing[rank] = index
        # What stands before an action, but a batch, waits for others.
        waits = not instruction.listed and not instruction.parts
        run: Phase = "waiting" if waits else "running"
        comes = not place or instructions[place - 1].rank != rank
        phases: tuple[tuple[Bound | None, Phase], ...] = (
            (instruction.run, run),
            (instruction.wait, "waiting"),
            (streams.enters(rank) if comes else None, "running"),
        )
        for call, phase in phases:
            if call is not None and call is not nothing:
                found.append((call, index, phase, place))
    found.reverse()
    codes = [code(index, phase, number) for number, (_, index, phase, _) in enumerate(found)]
    return [each[0] for each in found], codes, [each[-1] for each in found]


def _placed(error: Exception, instruction: Instruction) -> ExecutionError:
    """What has failed an instruction, with its place."""
    # With the traceback of the cause, which leads to the user's line, and that one alone.
    return ExecutionError(
        str(error) if isinstance(error, ExecutionError) else describe(error),
        rank=instruction.rank,
        index=instruction.listed_at,
        action=instruction.action,
        cause=error,
    ).with_traceback(of_the_user(error.__traceback__))


def _awaited(schedule: Schedule, action: Action) -> tuple[str, int | None]:
    """What an action waits for of another rank, in words, and that rank."""
    kind = CONSUMES.get(action.kind, action.kind)
    transfer = attrs.evolve(action, kind=kind, version=None)
    if kind not in COMMUNICATION:
        return str(action), None
    peer = graph_of(schedule).peer(transfer)
    return f"{transfer} {'from' if kind in RECEIVES else 'to'} rank {peer}", peer


@attrs.define(eq=False, slots=False)
class Programs:
    """The programs of a list, by the number of the input signature.

    One object is for calls that train, another for those that don't. Only the first stage's first
    rank sees the input. It gives a new signature its number, and sends the number in the handshake
    of each call. A signature is known once a call with it has succeeded. `newcomers` makes the
    observers of a call whose signature differs from the call before, from its number and whether it
    is to be learned. `under_way` are the sends that may not have arrived by the end of a call.
    `schedule` is the list of the latest program; before there is one, the list with no more receive
    buffers than it needs. With `batch` a call has several batches, of `batch` microbatches each.
    """

    _plan: Plan
    _listed: Schedule
    parts: Parts
    _transports: Mapping[int, Transport]
    _control: Control
    _handshake: Handshake
    _under_way: list[Work]
    _newcomers: Callable[[int, bool], Iterable[Observer]] | None
    _batch: int | None
    _next: int = 0  # the number of a signature that is new
    _latest: Program | None = None
    _signature: object = None

    def __attrs_post_init__(self) -> None:
        plan, transports = self._plan, self._transports
        self._posted_list = lru_cache(_MOST)(partial(plan.posted, self._listed))  # by its room
        self.schedule: Schedule = self._posted_list(None)
        apart = transports if plan.accelerator.queues and len(transports) > 1 else ()
        streams = {rank: self.parts.streams("lists", rank) for rank in apart}
        self._streams = RankStreams(plan.accelerator, streams)
        self._known: OrderedDict[int, Program] = OrderedDict()
        self._numbers: dict[object, int] = {}
        self._sees_input = 0 in plan.local_stages

    def open(self, call: Call, inputs: Batch | None, target: Batch | None, feed: Feed) -> Program:
        """Begin a call on the microbatches of `feed`, which were cut from `inputs` and `target`;
        returns the program to run.

        Raises ExecutionError where other ranks do something else.
        """
        call.rows = feed.rows
        if self._sees_input:
            self._signature = _signature_of(feed, inputs, call.precision)
            call.signature = self._numbers.get(self._signature, self._next)
        self._handshake.open(call, inputs, target)
        number = call.signature
        assert number is not None  # the first stage's rank has said it
        program = self._to_learn(call.precision) if number == self._next else self._known[number]
        program.observers = listening()
        if program is not self._latest:
            self._latest = program
            self.schedule = program.schedule
            if self._newcomers is not None:
                of_program = self._newcomers(number, program.learns)
                program.observers = [*program.observers, *of_program]
        return program

    def run(self, program: Program, call: Call) -> Iterator[int]:
        """Run the list; gives the number of each batch but the last once that is over.

        Raises ExecutionError, or WaitError for what never comes.
        """
        self.parts.now.call = call
        # What the call before sent last; its receivers have posted their part within that one.
        if self._under_way:
            self.parts.now.at[CODE] = code(SENDS)
            self._wait_for_sends("the call before")
        for pool in self.parts.pools.values():
            pool.trim()
        for copier in self.parts.copiers.values():
            copier.trim()
        yield from program.run()
        self._under_way += program.cells.take_sends()
        if program.learns:  # beside the payloads, where a failure must end all messages
            self._wait_for_sends("this call")

    def learn(self, program: Program, call: Call) -> None:
        """The first call of a signature has ended well: what it has learned is known.

        After that all ranks of the pipeline come here, as how far ahead receives are posted depends
        on all of them.
        """
        cells = program.cells
        mask_gradients(cells.lessons, program.schedule, self._plan.local_ranks)
        own, pipeline = self._room(cells.lessons), self._control.pipeline
        room = min(self._control.gather(own, numbers=pipeline, what="the buffers"))
        number, self._next = self._next, self._next + 1
        described = self.parts.described
        self._known[number] = self._compiled(cells, call.precision, described, number, room)
        if self._sees_input:
            self._numbers[self._signature] = number
        while len(self._known) > _MOST:
            self._known.popitem(last=False)
        self._numbers = {key: n for key, n in self._numbers.items() if n in self._known}
        self.schedule = self._known[number].schedule

    def post_ahead(self, call: Call) -> None:
        """A call is over: post the receives that the next one of its signature begins with."""
        number = call.signature
        assert number is not None  # it was made
        program = self._known[number]
        self._known.move_to_end(number)
        if sum(each.is_posted for each in self._known.values()) < _MOST_POSTED:
            with suppress(WaitError):  # who has made its last call is gone: the next one says so
                program.post_ahead()

    def reset(self) -> None:
        """A call has failed: the next one, where there can be one, starts anew."""
        self._under_way.clear()
        for messenger in self.parts.messengers.values():
            messenger.drop()
        self.parts.pools.clear()
        for copier in self.parts.copiers.values():
            copier.end()
        self.parts.copiers.clear()
        for program in (*self._known.values(), self._latest):
            if program is not None:
                program.cells.drop()
        self._latest = None
        self._known.clear()
        self._numbers.clear()

    def _wait_for_sends(self, whose: str) -> None:
        try:
            for work in self._under_way:
                work.wait()
        except RuntimeError as error:
            raise WaitError(error, f"what {whose} has sent to arrive") from error
        self._under_way.clear()

    def _to_learn(self, precision: torch.dtype | None) -> Program:
        """The program for the first call of a signature."""
        stages, microbatches = self._plan.local_stages, range(self._listed.microbatches)
        lessons = {(stage, m): Learned() for stage in stages for m in microbatches}
        cells = Cells(lessons, self._plan.last_stage, graph_of(self._listed).runs)
        return self._compiled(cells, precision, EVERY)

    @collector_held_off()
    def _compiled(
        self,
        cells: Cells,
        precision: torch.dtype | None,
        described: Collection[int],
        number: int = 0,
        room: int | None = None,
    ) -> Program:
        """The program of a signature by its number, with `room` for so many receive buffers on a
        rank; without that, for its first call."""
        schedule = self._posted_list(room)
        tag = DESCRIBED_TAGS + 2 * number + self.parts.trains
        lists: list[Sequence[Instruction]] = []
        of_each: list[Sequence[int]] = []
        ahead: list[Bound] = []
        for rank, transport in self._transports.items():
            listed_at = _listed_at(self._listed.actions[rank], schedule.actions[rank])
            instructions = RankList(
                self.parts,
                schedule,
                rank,
                transport.tagged(tag),
                listed_at,
                cells,
                precision is not None or self._plan.accelerator.queues,
                described,
            ).instructions()
            if transport.early:
                leading = takewhile(
                    lambda entry: _is_receive(entry) and crossed(entry) not in described,
                    schedule.actions[rank],
                )
                # They take no more memory than there is room for.
                posted = instructions[: min(len([*leading]), room or 0)]
                ahead = [one.run for one in posted]
                instructions = [
                    *(attrs.evolve(one, run=nothing) for one in posted),
                    *instructions[len(posted) :],
                ]
            lists.append(observed(instructions, self.parts.observers))
            over = ends_of_batches(schedule, rank, self._batch) if self._batch else ()
            indices = [one.index for one in instructions]
            of_each.append([bisect_left(indices, end) for end in over])
        listed, ends = in_one_list(lists, of_each) if len(lists) > 1 else (lists[0], of_each[0])
        at = self.parts.now.at
        return Program(schedule, cells, listed, at, self._streams, room is None, ahead, ends)

    def _room(self, lessons: Lessons) -> int:
        """How many receive buffers a rank may hold, as far as the ranks here can tell."""
        boundaries = (each for own in lessons.values() for each in (own.before, own.after))
        largest = max((boundary.nbytes for boundary in boundaries), default=0)
        return min(SPARE_BYTES // max(largest, 1), len(graph_of(self._listed).transfers))


def _is_receive(entry: Entry) -> TypeGuard[Action]:
    """Whether it is a receive by itself: one in a batch stays with it."""
    return isinstance(entry, Action) and entry.kind in RECEIVES


def _listed_at(listed: Sequence[Entry], posted: Sequence[Entry]) -> list[int]:
    """For each entry of a list with its receives ahead, its index in the list as it was.

    Receives keep their order, and so does all else.
    """

    def apart(entries: Sequence[Entry]) -> list[int]:
        return sorted(range(len(entries)), key=lambda index: _is_receive(entries[index]))

    before = dict(zip(apart(posted), apart(listed), strict=True))
    return [before[index] for index in range(len(posted))]


def _signature_of(feed: Feed, inputs: Batch | None, precision: torch.dtype | None) -> object:
    """Equal where a call's microbatches have the same boundaries.

    `inputs` is what they were cut from, `precision` the type that autocast computes in.
    """
    if isinstance(inputs, Tensor) and not feed.extras:  # which says it for all of its pieces
        return inputs.shape, inputs.stride(), inputs.dtype, inputs.requires_grad, precision
    given, form = pytree.tree_flatten(feed.inputs)
    beside, around = pytree.tree_flatten(dict(sorted(feed.extras.items())))
    looks = (_looks(leaf) for leaf in given)
    of_extras = (_looks(leaf) for leaf in beside if isinstance(leaf, Tensor))
    return tuple(looks), form, tuple(of_extras), around, precision


def _looks(leaf: object) -> object:
    if not isinstance(leaf, Tensor):
        return type(leaf) if is_opaque(leaf) else repr(leaf)
    if leaf.layout is torch.strided or leaf.is_nested:
        return meta_of(leaf)
    return leaf.layout, leaf.shape, leaf.dtype, leaf.requires_grad
