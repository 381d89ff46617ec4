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
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, takewhile
from typing import Any, TypeGuard

import attrs
import torch
from torch import Tensor
from torch.autograd import profiler
from torch.utils import _pytree as pytree

from schedir.diagnosis.verdict import END, SENDS, Phase
from schedir.errors import ExecutionError
from schedir.graph.compile import graph_of
from schedir.ir import COMMUNICATION, CONSUMES, RECEIVES, Action, Entry, Kind, Schedule
from schedir.lazy import collector_held_off
from schedir.passes.receives import SPARE_BYTES
from schedir.runtime.accelerator import Accelerator
from schedir.runtime.batch.batches import ends_of_batches
from schedir.runtime.batch.feeding import Feed
from schedir.runtime.batch.microbatches import Batch
from schedir.runtime.boundaries.boundary import crossed, meta_of
from schedir.runtime.boundaries.described import DESCRIBED_TAGS
from schedir.runtime.boundaries.learned import EVERY, Learned, Lessons, mask_gradients
from schedir.runtime.call import Call
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import Control
from schedir.runtime.processes.failure import WaitError, describe, of_the_user
from schedir.runtime.processes.noticeboard import CODE, Words, at_place, code, number_of, numbered
from schedir.runtime.program.compiler import Compiler
from schedir.runtime.program.handshake import UNKNOWN, Announcement, Handshake
from schedir.runtime.program.instruction import Bound, Instruction, nothing
from schedir.runtime.program.observers import Observer, observed, profiler_ranges, unseen
from schedir.runtime.stage.activations import Cells
from schedir.runtime.transports.transport import Transport, Work

_MOST = 64
"""The most signatures that are kept; beyond it all ranks drop the least recently used one."""

_MOST_POSTED = 4
"""So many programs keep receives posted between calls, each of `SPARE_BYTES` at most."""


class Program:
    """The compiled lists of the ranks here, with the cells that hold their tensors.

    It is compiled from `schedule`; `ahead` posts the receives at the beginning of its only list. In
    a call of several batches the lists stop at the end of each batch: `ends` has, for each list,
    the numbers of instructions up to the end of each batch but the last. `at[0]` says where this
    process stands, for errors and for other processes; see `schedir.runtime.processes.noticeboard`.
    """

    def __init__(
        self,
        schedule: Schedule,
        cells: Cells,
        lists: Sequence[Sequence[Instruction]],
        at: Words,
        ahead: Sequence[Bound] = (),
        ends: Sequence[Sequence[int]] = (),
    ) -> None:
        self.schedule, self.cells, self.lists = schedule, cells, lists
        self._ahead, self._ends = ahead, ends or [()] * len(lists)
        self.posts_ahead = bool(ahead)
        self.is_posted = False
        self._at = at
        self._flat = _flat(lists[0])

    def post_ahead(self) -> None:
        """Post the receives that the next call begins with."""
        if self.is_posted:
            return
        if profiler._is_profiler_enabled:
            for post in self._ahead:
                unseen(post)()
        else:
            for post in self._ahead:
                post()
        self.is_posted = self.posts_ahead

    def run(self, observers: Sequence[Observer]) -> Iterator[int]:
        """Run the list of the only rank here; gives the number of each batch but the last once that
        is over.

        Raises ExecutionError, or WaitError for what never comes, with the place in the list.
        """
        instructions = observed(self.lists[0], observers) if observers else self.lists[0]
        calls, codes, places = _flat(instructions) if observers else self._flat
        stops = _stops(instructions, self._ends[0]) if self._ends[0] else ()
        at, start = self._at, 0
        at[0] = codes[0] if codes else at[0]
        try:
            self.post_ahead()
            self.is_posted = False
            for batch, stop in enumerate(stops):
                for at[0], call in zip(codes[start:stop], calls[start:stop], strict=True):
                    call()
                start = stop
                yield batch
            if start:
                calls, codes = calls[start:], codes[start:]
            for at[0], call in zip(codes, calls, strict=True):
                call()
        except WaitError as stalled:
            place = places[number_of(at[0])]
            if stalled.action is None:  # else the place where the device stands is known
                stalled.at(place.rank, place.listed_at, place.action)
            if not stalled.what:
                stalled.what, stalled.peer = _awaited(self.schedule, place.action)
            raise
        except Exception as error:
            raise _placed(error, places[number_of(at[0])]) from None

    def run_in_turn(
        self, observers: Sequence[Observer], accelerator: Accelerator, streams: Sequence[Any]
    ) -> Iterator[int]:
        """Run the ranks of this process in turn, each as far as it gets until it is blocked; gives
        what `run` gives.

        Each has a stream of its own, of `streams`, where the device has any. Raises ExecutionError,
        with the place in the list.
        """
        lists = [observed(instructions, observers) for instructions in self.lists]
        reached = [0] * len(lists)
        for batch, goals in enumerate(zip(*self._ends, strict=True)):
            _go_on(lists, reached, goals, accelerator, streams)
            yield batch
        _go_on(lists, reached, [*map(len, lists)], accelerator, streams)


def _go_on(
    lists: Sequence[Sequence[Instruction]],
    reached: list[int],
    goals: Sequence[int],
    accelerator: Accelerator,
    streams: Sequence[Any],
) -> None:
    """Run ranks in turn from where they have `reached` to their goals, or on where another rank
    needs that to reach its own."""
    begun = accelerator.mark()
    for stream in streams:
        with accelerator.on(stream):
            begun.wait()
    limits, progress = goals, True
    try:
        while any(at < goal for at, goal in zip(reached, goals, strict=True)):
            if not progress:
                if limits is not goals:
                    break
                limits = [*map(len, lists)]
            progress = False
            for turn, instructions in enumerate(lists):
                with accelerator.on(streams[turn]):
                    ran = _run_until_blocked(instructions, reached[turn], limits[turn])
                progress |= ran > reached[turn]
                reached[turn] = ran
    finally:
        # After an error too: what was computed is given up, and its memory given out again.
        for stream in streams:
            with accelerator.on(stream):
                ended = accelerator.mark()
            ended.wait()
    for at, goal, instructions in zip(reached, goals, lists, strict=True):
        if at < goal:
            raise _placed(ExecutionError("what it waits for never comes"), instructions[at])


def listening() -> Sequence[Observer]:
    """The observers of the next call beside the permanent ones: torch's profiler, if it is on."""
    return [profiler_ranges] if profiler._is_profiler_enabled else ()


def _flat(
    instructions: Sequence[Instruction],
) -> tuple[list[Bound], list[int], list[Instruction]]:
    """The calls of some instructions, the code of the place of each, and which one each is of.

    A receive that is posted ahead stands at the entry before which it is posted.
    """
    calls: list[Bound] = []
    codes: list[int] = []
    places: list[Instruction] = []
    index = END
    for instruction in reversed(instructions):
        is_receive = instruction.action.kind in RECEIVES and not instruction.parts
        index = min(index, instruction.listed_at) if is_receive else instruction.listed_at
        # What stands before an action, but a batch, waits for others.
        waits = not instruction.listed and not instruction.parts
        run: Phase = "waiting" if waits else "running"
        phases: tuple[tuple[Bound | None, Phase], ...]
        phases = (instruction.run, run), (instruction.wait, "waiting")
        for call, phase in phases:
            if _is_made(call):
                calls.append(call)
                codes.append(code(index, phase))
                places.append(instruction)
    codes = [found | numbered(number) for number, found in enumerate(reversed(codes))]
    return calls[::-1], codes, places[::-1]


def _is_made(call: Bound | None) -> TypeGuard[Bound]:
    return call is not None and call is not nothing


def _stops(instructions: Sequence[Instruction], ends: Sequence[int]) -> list[int]:
    """How many calls are made up to each of the ends, which are numbers of instructions."""
    made = (_is_made(each.run) + _is_made(each.wait) for each in instructions)
    upto = [*accumulate(made, initial=0)]
    return [upto[end] for end in ends]


def _run_until_blocked(instructions: Sequence[Instruction], at: int, limit: int) -> int:
    """Run instructions from a place up to a limit; returns that of the first that is blocked."""
    for instruction in instructions[at:limit]:
        try:
            if instruction.is_blocked():  # what ranks do together is done by the one that asks last
                break
            if instruction.wait is not None:
                instruction.wait()
            instruction.run()
        except Exception as error:
            raise _placed(error, instruction) from None
        at += 1
    return at


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


@attrs.frozen(eq=False)
class _Known:
    """The facts about an input signature: what its first call has learned, how many receive buffers
    a rank may hold, and whether the caller computes in lower precision."""

    lessons: Lessons
    room: int | None
    autocast: bool


@attrs.frozen(eq=False)
class Opened:
    """A call that has been announced, and the program to run, for these observers.

    `learns` is whether this is the first call of its input signature.
    """

    announcement: Announcement
    program: Program
    observers: Sequence[Observer]
    learns: bool

    @property
    def rows(self) -> int | None:
        """Those of the whole batches, None for ready microbatches."""
        return None if self.announcement.rows == UNKNOWN else self.announcement.rows


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

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        compiler: Compiler,
        transports: Mapping[int, Transport],
        control: Control,
        handshake: Handshake,
        under_way: list[Work],
        newcomers: Callable[[int, bool], Iterable[Observer]] | None = None,
        batch: int | None = None,
    ) -> None:
        self._batch = batch
        self._plan, self._listed, self._control = plan, schedule, control
        self._handshake, self._newcomers = handshake, newcomers
        self.compiler, self._transports, self._under_way = compiler, transports, under_way
        self.schedule = plan.posted(schedule)
        self._lists: dict[int | None, Schedule] = {None: self.schedule}  # by the room for buffers
        self._sees_input = 0 in plan.local_stages
        self._is_alone = len(transports) > 1
        own = transports if self._is_alone else ()
        self._streams = [compiler.streams.of("lists", rank) for rank in own]
        self._numbers: dict[object, int] = {}
        self._next = 0  # the number of a signature that is new
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._programs: dict[int, Program] = {}
        self._posted: set[int] = set()
        self._latest: Program | None = None
        self._signature: object = None

    def open(self, call: Call, inputs: Batch | None, target: Batch | None, feed: Feed) -> Opened:
        """Begin a call on the microbatches of `feed`, which were cut from `inputs` and `target`.

        Raises ExecutionError where other ranks do something else.
        """
        number = UNKNOWN
        if self._sees_input:
            self._signature = _signature_of(feed, inputs, call.precision)
            number = self._numbers.get(self._signature, self._next)
        announcement = self._handshake.open(call, inputs, target, feed.rows, number)
        number = announcement.signature
        learns = number == self._next
        program = self._to_learn(call.precision) if learns else self._of(number)
        observers = listening()
        if program is not self._latest:
            self._latest = program
            self.schedule = program.schedule
            if self._newcomers is not None:
                observers = [*observers, *self._newcomers(number, learns)]
        return Opened(announcement, program, observers, learns)

    def run(self, opened: Opened, call: Call) -> Iterator[int]:
        """Run the list; gives the number of each batch but the last once that is over.

        Raises ExecutionError, or WaitError for what never comes.
        """
        self.compiler.now.call = call
        # What the call before sent last; its receivers have posted their part within that one.
        if self._under_way:
            self.compiler.now.at[CODE] = at_place(SENDS)
            self._wait_for_sends("the call before")
        for pool in self.compiler.pools.values():
            pool.trim()
        for copier in self.compiler.copiers.values():
            copier.trim()
        program = opened.program
        if self._is_alone:
            yield from program.run_in_turn(opened.observers, self._plan.accelerator, self._streams)
        else:
            yield from program.run(opened.observers)
        self._under_way += program.cells.take_sends()
        if opened.learns:  # beside the payloads, where a failure must end all messages
            self._wait_for_sends("this call")

    def learn(self, opened: Opened) -> None:
        """A call has ended well: what the first one of a signature has learned is known.

        After that all ranks of the pipeline come here, as how far ahead receives are posted depends
        on all of them.
        """
        number, lessons = opened.announcement.signature, opened.program.cells.lessons
        mask_gradients(lessons, opened.program.schedule, self._plan.local_ranks)
        room = min(self._control.share(self._room(lessons)))
        autocast = opened.announcement.precision is not None
        self._known[number] = _Known(lessons, room, autocast)
        if self._sees_input:
            self._numbers[self._signature] = number
        self._next += 1
        while len(self._known) > _MOST:
            old, _ = self._known.popitem(last=False)
            self._programs.pop(old, None)
            self._posted.discard(old)
        self._numbers = {key: n for key, n in self._numbers.items() if n in self._known}
        rooms = {None, *(known.room for known in self._known.values())}
        self._lists = {room: schedule for room, schedule in self._lists.items() if room in rooms}
        self.schedule = self._of(number).schedule

    def post_ahead(self, opened: Opened) -> None:
        """A call is over: post the receives that the next one of its signature begins with."""
        number = opened.announcement.signature
        program = self._programs[number]
        if program.posts_ahead and (number in self._posted or len(self._posted) < _MOST_POSTED):
            self._posted.add(number)
            with suppress(WaitError):  # who has made its last call is gone: the next one says so
                program.post_ahead()

    def reset(self) -> None:
        """A call has failed: the next one, where there can be one, starts anew."""
        self._under_way.clear()
        for messenger in self.compiler.first.messengers.values():
            messenger.drop()
        self.compiler.pools.clear()
        for copier in self.compiler.copiers.values():
            copier.end()
        self.compiler.copiers.clear()
        for program in (*self._programs.values(), self._latest):
            if program is not None:
                program.cells.drop()
        self._latest = None
        self._programs.clear()
        self._posted.clear()

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
        return self._compiled(_Known(lessons, None, precision is not None), 0, EVERY)

    def _of(self, number: int) -> Program:
        """The program for a known signature."""
        self._known.move_to_end(number)
        if number not in self._programs:
            described = self.compiler.first.described
            self._programs[number] = self._compiled(self._known[number], number, described)
        return self._programs[number]

    @collector_held_off()
    def _compiled(self, known: _Known, number: int, described: Collection[int]) -> Program:
        if known.room not in self._lists:
            self._lists[known.room] = self._plan.posted(self._listed, known.room)
        schedule = self._lists[known.room]
        cells = Cells(known.lessons, self._plan.last_stage, graph_of(schedule).runs)
        tag = DESCRIBED_TAGS + 2 * number + self.compiler.trains
        lists: list[Sequence[Instruction]] = []
        ahead: list[Bound] = []
        for rank, transport in self._transports.items():
            listed_at = _listed_at(self._listed.actions[rank], schedule.actions[rank])
            instructions = self.compiler.compile(
                schedule,
                rank,
                transport.tagged(tag),
                listed_at,
                cells,
                known.autocast or self._plan.accelerator.queues,
                described,
            )
            if transport.early:
                leading = takewhile(
                    lambda entry: _is_receive(entry) and crossed(entry) not in described,
                    schedule.actions[rank],
                )
                sizes = accumulate(
                    _nbytes(receive, known.lessons)
                    for receive in leading
                    if isinstance(receive, Action)
                )
                first_of = sum(size <= SPARE_BYTES for size in sizes)
                ahead = [one.run for one in instructions[:first_of]]
                posted = (attrs.evolve(one, run=nothing) for one in instructions[:first_of])
                instructions = [*posted, *instructions[first_of:]]
            lists.append(observed(instructions, self.compiler.observers))
        at = self.compiler.now.at
        return Program(schedule, cells, lists, at, ahead, self._ends(schedule, lists))

    def _ends(self, schedule: Schedule, lists: Sequence[Sequence[Instruction]]) -> list[list[int]]:
        """Of each list, how many instructions there are up to the end of each batch."""
        found = []
        for rank, instructions in zip(self._transports, lists, strict=True):
            entries = [one.index for one in instructions]
            ends = ends_of_batches(schedule, rank, self._batch) if self._batch else ()
            found.append([bisect_left(entries, end) for end in ends])
        return found

    def _room(self, lessons: Lessons) -> int:
        """How many receive buffers a rank may hold, as far as the ranks here can tell."""
        largest = max((learned.largest() for learned in lessons.values()), default=0)
        return min(SPARE_BYTES // max(largest, 1), len(graph_of(self._listed).transfers))


def _nbytes(receive: Action, lessons: Lessons) -> int:
    """The bytes of the buffers that a receive takes."""
    assert receive.microbatch is not None  # a transfer has one
    learned = lessons[receive.stage, receive.microbatch]
    if receive.kind is Kind.RECV_ACT:
        return learned.before.nbytes
    return sum(meta.nbytes for meta in learned.grads_in if meta is not None)


def _is_receive(entry: Entry) -> TypeGuard[Action]:
    """Whether it is a receive by itself: one in a batch stays with it."""
    return isinstance(entry, Action) and entry.kind in RECEIVES


def _listed_at(listed: Sequence[Entry], posted: Sequence[Entry]) -> list[int]:
    """For each entry of a list with its receives ahead, its index in the list as it was.

    Receives keep their order, and so does all else.
    """
    indices: dict[bool, list[int]] = {True: [], False: []}
    for index, entry in enumerate(listed):
        indices[_is_receive(entry)].append(index)
    following = {is_receive: iter(found) for is_receive, found in indices.items()}
    return [next(following[_is_receive(entry)]) for entry in posted]


def _signature_of(feed: Feed, inputs: Batch | None, precision: torch.dtype | None) -> object:
    """Equal where a call's microbatches have the same boundaries.

    `inputs` is what they were cut from, `precision` the type that autocast computes in.
    """
    if isinstance(inputs, Tensor) and not feed.extras:  # which says it for all of its pieces
        return inputs.shape, inputs.stride(), inputs.dtype, inputs.requires_grad, precision
    return (*_signatures(feed), precision)


def _signatures(feed: Feed) -> Iterator[object]:
    """One for each microbatch."""
    for m, batch in enumerate(feed.inputs):
        leaves, spec = pytree.tree_flatten(batch)
        extras = [
            (stage, *pytree.tree_flatten(feed.extras[stage][m])) for stage in sorted(feed.extras)
        ]
        yield (
            tuple(_looks(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves),
            spec,
            tuple(
                (stage, structure, *(_looks(x) for x in given if isinstance(x, Tensor)))
                for stage, given, structure in extras
            ),
        )


def _looks(tensor: Tensor) -> object:
    if tensor.layout is torch.strided or tensor.is_nested:
        return meta_of(tensor)
    return tensor.layout, tensor.shape, tensor.dtype, tensor.requires_grad
