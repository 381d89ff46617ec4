"""The compiled lists of the ranks here, one program for each agreement on the boundaries."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs

from schedir.ir import Action
from schedir.runtime.processes.control import Control
from schedir.runtime.program.compiler import Compiler
from schedir.runtime.program.instruction import Instruction
from schedir.runtime.program.posting import leading, matching_send, posting_order
from schedir.runtime.program.transfer import Send
from schedir.runtime.transports.transport import Transport

_SPARE_BYTES = 1 << 20
"""Of receive buffers beyond what the list needs: nothing beside a model, and small transfers, which
would wait for a timer tick rather than for data, are all posted ahead."""


@attrs.frozen(eq=False)
class Program:
    """The compiled lists of the ranks here.

    What is early (see `opening`): of its only list the first `early` instructions are receives that
    are posted before the rank knows what the call is, and `answers` are its sends that other ranks
    may have posted such receives for.
    """

    lists: Sequence[Sequence[Instruction]]
    early: int = 0
    answers: Sequence[Send] = ()


class Programs:
    """The programs by the number of the agreement.

    Most agreements share one: it depends on the shapes only in how far receives are posted ahead.
    """

    def __init__(
        self, compiler: Compiler, transports: Mapping[int, Transport], control: Control
    ) -> None:
        self._compiler, self._transports, self._control = compiler, transports, control
        self.posts_early = all(transport.early for transport in transports.values())
        self._by_agreement: dict[int, Program] = {}
        self._by_rooms: dict[tuple[int, ...], Program] = {}

    def of(self, agreement: int) -> Program:
        """The program for an agreement, which the cells are wired by."""
        if agreement not in self._by_agreement:
            rooms = self._rooms()
            key = tuple(rooms.values())
            if key not in self._by_rooms:
                self._by_rooms[key] = self._program(rooms)
            self._by_agreement[agreement] = self._by_rooms[key]
        return self._by_agreement[agreement]

    def forget(self, agreements: Collection[int]) -> None:
        """These are not asked for any more."""
        for agreement in agreements:
            self._by_agreement.pop(agreement, None)
        used = list(self._by_agreement.values())
        self._by_rooms = {key: p for key, p in self._by_rooms.items() if p in used}

    def clear(self) -> None:
        """Forget all: a call has failed, and what its instructions know is out of date."""
        self._by_agreement.clear()
        self._by_rooms.clear()

    def _rooms(self) -> dict[int, int]:
        """How many buffers a rank's receives may take beyond what its list needs.

        Of the ranks here, and where receives are posted early of all.
        """
        cells = self._compiler.cells
        largest = max((cell.wiring.largest() for cell in cells), default=0)
        room = min(_SPARE_BYTES // max(largest, 1), 2 * len(cells))
        if self.posts_early:
            return dict(enumerate(self._control.share(room)))
        return dict.fromkeys(self._transports, room)

    def _program(self, rooms: Mapping[int, int]) -> Program:
        schedule = self._compiler.schedule
        # The one place that says in which order lists are carried out.
        orders = {rank: posting_order(schedule, rank, room) for rank, room in rooms.items()}
        lists = [
            self._compiler.compile(rank, transport, orders[rank])
            for rank, transport in self._transports.items()
        ]
        if not self.posts_early:
            return Program(lists)
        # Ranks of the first stage see the input, and so know what the call is.
        early = {
            rank: leading(schedule, rank, order)
            for rank, order in orders.items()
            if rank not in schedule.placement[0]
        }
        (rank,) = self._transports
        answers = self._answers(lists[0], [r for receives in early.values() for r in receives])
        return Program(lists, len(early.get(rank, ())), answers)

    def _answers(
        self, instructions: Sequence[Instruction], receives: Sequence[Action]
    ) -> list[Send]:
        """The rank's sends that these receives wait for."""
        sends = {x.action: x.operation for x in instructions if isinstance(x.operation, Send)}
        wanted = map(matching_send, receives)
        return [sends[send] for send in wanted if send in sends]
