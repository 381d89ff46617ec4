"""The compiled lists of the ranks here: for first calls of input signatures, and for later ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TypeGuard

import attrs

from schedir.graph.compile import graph_of
from schedir.ir import RECEIVES, Action, Entry, Schedule
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import Control
from schedir.runtime.program.compiler import Compiler
from schedir.runtime.program.first_call import FirstCall
from schedir.runtime.program.instruction import Instruction
from schedir.runtime.program.joined import Batch
from schedir.runtime.program.transfer import Send
from schedir.runtime.transports.transport import Transport

_SPARE_BYTES = 1 << 20
"""Of receive buffers where the list needs fewer: nothing beside a model, and small transfers, which
would wait for a timer tick rather than for data, are all posted ahead."""


@attrs.frozen(eq=False)
class Program:
    """The compiled lists of the ranks here.

    Compiled from `schedule`. What is early (see `opening`): of its only list the first `early`
    instructions are receives that are posted before the rank knows what the call is, and `answers`
    send placeholders to those that other ranks may have posted so.
    """

    schedule: Schedule
    lists: Sequence[Sequence[Instruction]]
    early: int = 0
    answers: Sequence[Callable[[], None]] = ()


class Programs:
    """The programs of a list by the number of the input signature.

    Most signatures share one: it depends on the shapes only in how far receives are ahead.
    `schedule` is the list of the program that was asked for last, or would be where receives take
    no more buffers than the list needs.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        compiler: Compiler,
        transports: Mapping[int, Transport],
        control: Control,
        first: FirstCall,
    ) -> None:
        self._plan, self._listed, self._control, self._first = plan, schedule, control, first
        self._compiler, self._transports = compiler, transports
        self.schedule = plan.posted(schedule)
        self.posts_early = all(transport.early for transport in transports.values())
        self._by_signature: dict[int, Program] = {}
        self._by_room: dict[int, Program] = {}

    @cached_property
    def first(self) -> Program:
        """The program for the first call of an input signature."""
        schedule = self._plan.posted(self._listed)
        return Program(schedule, self._compiled(schedule, self._first))

    def of(self, signature: int) -> Program:
        """The program for a signature, whose boundaries the cells know."""
        if signature not in self._by_signature:
            room = min(self._control.share(self._room()))
            if room not in self._by_room:
                self._by_room[room] = self._program(room)
            self._by_signature[signature] = self._by_room[room]
        program = self._by_signature[signature]
        self.schedule = program.schedule
        return program

    def forget(self, signatures: Collection[int]) -> None:
        """These are not asked for any more."""
        for signature in signatures:
            self._by_signature.pop(signature, None)
        used = list(self._by_signature.values())
        self._by_room = {room: p for room, p in self._by_room.items() if p in used}

    def clear(self) -> None:
        """Forget all: a call has failed, and what its instructions know is out of date."""
        self._by_signature.clear()
        self._by_room.clear()

    def _room(self) -> int:
        """How many receive buffers a rank may hold, as far as the ranks here can tell."""
        largest = max((cell.learned.largest() for cell in self._compiler.cells), default=0)
        return min(_SPARE_BYTES // max(largest, 1), len(graph_of(self._listed).transfers))

    def _compiled(
        self, schedule: Schedule, first: FirstCall | None = None
    ) -> list[Sequence[Instruction]]:
        compiler = attrs.evolve(self._compiler, first=first)
        return [
            compiler.compile(
                schedule,
                rank,
                transport,
                _listed_at(self._listed.actions[rank], schedule.actions[rank]),
            )
            for rank, transport in self._transports.items()
        ]

    def _program(self, room: int) -> Program:
        schedule = self._plan.posted(self._listed, room)
        lists = self._compiled(schedule)
        if not self.posts_early:
            return Program(schedule, lists)
        # Ranks of the first stage see the input, and so know what the call is.
        early = {
            rank: [*_leading_receives(schedule.actions[rank])]
            for rank in range(schedule.ranks)
            if rank not in schedule.placement[0]
        }
        (rank,) = self._transports
        answers = _answers(lists[0], [r for receives in early.values() for r in receives])
        return Program(schedule, lists, len(early.get(rank, ())), answers)


def _is_receive(entry: Entry) -> TypeGuard[Action]:
    """Whether it is a receive by itself: one in a batch stays with it."""
    return isinstance(entry, Action) and entry.kind in RECEIVES


def _leading_receives(entries: Iterable[Entry]) -> Iterator[Action]:
    for entry in entries:
        if not _is_receive(entry):
            return
        yield entry


def _listed_at(listed: Sequence[Entry], posted: Sequence[Entry]) -> list[int]:
    """For each entry of a list with its receives ahead, its index in the list as it was.

    Receives keep their order, and so does all else.
    """
    indices: dict[bool, list[int]] = {True: [], False: []}
    for index, entry in enumerate(listed):
        indices[_is_receive(entry)].append(index)
    following = {is_receive: iter(found) for is_receive, found in indices.items()}
    return [next(following[_is_receive(entry)]) for entry in posted]


def _answers(
    instructions: Sequence[Instruction], receives: Iterable[Action]
) -> list[Callable[[], None]]:
    """How to send placeholders to these receives, in the place of the rank's own sends."""
    sends = {x.action: x.operation for x in instructions if isinstance(x.operation, Send)}
    wanted = (receive.counterpart for receive in receives)
    return [partial(_send_placeholders, sends[send]) for send in wanted if send in sends]


def _send_placeholders(send: Send) -> None:
    send.send_placeholders()
    if isinstance(send.poster, Batch):
        send.poster.post()
