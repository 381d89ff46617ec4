"""The compiled lists of the ranks here, one program for each agreement on the boundaries."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile

import attrs

from schedir.ir import RECEIVES, Action, Schedule
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import Control
from schedir.runtime.program.compiler import Compiler
from schedir.runtime.program.instruction import Instruction
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
    are its sends that other ranks may have posted such receives for.
    """

    schedule: Schedule
    lists: Sequence[Sequence[Instruction]]
    early: int = 0
    answers: Sequence[Send] = ()


class Programs:
    """The programs of a list by the number of the agreement.

    Most agreements share one: it depends on the shapes only in how far receives are ahead.
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
    ) -> None:
        self._plan, self._listed, self._control = plan, schedule, control
        self._compiler, self._transports = compiler, transports
        self.schedule = plan.posted(schedule)
        self.posts_early = all(transport.early for transport in transports.values())
        self._by_agreement: dict[int, Program] = {}
        self._by_room: dict[int, Program] = {}

    def of(self, agreement: int) -> Program:
        """The program for an agreement, which the cells are wired by."""
        if agreement not in self._by_agreement:
            room = min(self._control.share(self._room()))
            if room not in self._by_room:
                self._by_room[room] = self._program(room)
            self._by_agreement[agreement] = self._by_room[room]
        program = self._by_agreement[agreement]
        self.schedule = program.schedule
        return program

    def forget(self, agreements: Collection[int]) -> None:
        """These are not asked for any more."""
        for agreement in agreements:
            self._by_agreement.pop(agreement, None)
        used = list(self._by_agreement.values())
        self._by_room = {room: p for room, p in self._by_room.items() if p in used}

    def clear(self) -> None:
        """Forget all: a call has failed, and what its instructions know is out of date."""
        self._by_agreement.clear()
        self._by_room.clear()

    def _room(self) -> int:
        """How many receive buffers a rank may hold, as far as the ranks here can tell."""
        largest = max((cell.wiring.largest() for cell in self._compiler.cells), default=0)
        return min(_SPARE_BYTES // max(largest, 1), len(self._listed.dataflow.transfers))

    def _program(self, room: int) -> Program:
        schedule = self._plan.posted(self._listed, room)
        lists = [
            self._compiler.compile(
                schedule,
                rank,
                transport,
                _listed_at(self._listed.flat[rank], schedule.flat[rank]),
            )
            for rank, transport in self._transports.items()
        ]
        if not self.posts_early:
            return Program(schedule, lists)
        # Ranks of the first stage see the input, and so know what the call is.
        early = {
            rank: [*takewhile(lambda a: a.kind in RECEIVES, schedule.flat[rank])]
            for rank in range(schedule.ranks)
            if rank not in schedule.placement[0]
        }
        (rank,) = self._transports
        answers = _answers(lists[0], [r for receives in early.values() for r in receives])
        return Program(schedule, lists, len(early.get(rank, ())), answers)


def _listed_at(listed: Sequence[Action], posted: Sequence[Action]) -> list[int]:
    """For each entry of a list with its receives ahead, its index in the list as it was.

    Receives keep their order, and so does all else.
    """
    indices: dict[bool, list[int]] = {True: [], False: []}
    for index, action in enumerate(listed):
        indices[action.kind in RECEIVES].append(index)
    following = {is_receive: iter(found) for is_receive, found in indices.items()}
    return [next(following[action.kind in RECEIVES]) for action in posted]


def _answers(instructions: Sequence[Instruction], receives: Iterable[Action]) -> list[Send]:
    """The rank's sends that these receives wait for."""
    sends = {x.action: x.operation for x in instructions if isinstance(x.operation, Send)}
    wanted = (receive.counterpart for receive in receives)
    return [sends[send] for send in wanted if send in sends]
