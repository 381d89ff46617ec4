"""The two of an overlapped pair on two streams of a device that queues its work.

    own stream     … ─ mark ─┬──────── 7B3 ────────┬ wait ─ …       what 7B3 waits for is there
    side stream             wait ─ 0F4 ─ mark ─────┘

A backward runs on the stream of its forward: that is autograd's rule, whoever calls it. So the
forward of a pair goes where the other's has not been, to the side or to the rank's own stream. The
side stream works within pairs alone, from a mark of the rank's own stream to one that this one
waits for; all that follows a pair is thus behind both. Memory is given out again by the stream that
it was made on, which within a pair does not wait for the other one: what the first of the two would
give back is held until they have met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from schedir.ir import Entry, Kind, Together
from schedir.runtime.accelerator import Accelerator
from schedir.runtime.call import Call
from schedir.runtime.program.instruction import Instruction
from schedir.runtime.stage.cells import Cell


def forwards_aside(entries: Iterable[Entry]) -> set[int]:
    """The pairs of a rank's list, by index, whose forward runs on the side stream."""
    aside: set[tuple[int, int | None]] = set()  # the (stage, microbatch) whose graph is there
    found = set()
    for index, entry in enumerate(entries):
        if not isinstance(entry, Together):
            if entry.kind in (Kind.FORWARD, Kind.RECOMPUTE):
                aside.discard((entry.stage, entry.microbatch))
            continue
        for action in entry.actions:
            others = [(a.stage, a.microbatch) for a in entry.actions if a is not action]
            if action.kind is Kind.FORWARD and aside.isdisjoint(others):
                aside.add((action.stage, action.microbatch))
                found.add(index)
    return found


class Pair:
    """One pair; `cell` is that of its first action, `side` the stream beside the rank's own."""

    def __init__(self, accelerator: Accelerator, side: Any, cell: Cell) -> None:
        self._accelerator, self._side, self._cell = accelerator, side, cell
        self._held: object = None

    def abreast(self, first: Instruction, second: Instruction, aside: Kind) -> list[Instruction]:
        """Both, of which the first begins the pair, and the second ends it; that of the kind
        `aside` runs on the side stream."""
        began, ended = (
            self._on_side(one.run) if one.action.kind is aside else one.run
            for one in (first, second)
        )

        def begin(call: Call) -> None:
            self._part()
            try:
                began(call)
            except BaseException:
                self._meet()
                raise

        def end(call: Call) -> None:
            try:
                ended(call)
            finally:
                self._meet()

        return [attrs.evolve(first, run=begin), attrs.evolve(second, run=end)]

    def _on_side(self, run: Callable[[Call], None]) -> Callable[[Call], None]:
        def aside(call: Call) -> None:
            with self._accelerator.on(self._side):
                run(call)

        return aside

    def _part(self) -> None:
        """The side stream is behind all that was before the pair."""
        self._held = _shared(self._cell)
        ready = self._accelerator.mark()
        with self._accelerator.on(self._side):
            ready.wait()

    def _meet(self) -> None:
        """What follows is behind both."""
        with self._accelerator.on(self._side):
            done = self._accelerator.mark()
        done.wait()
        self._held = None


def _shared(cell: Cell) -> object:
    """What a cell has that either stream may have made."""
    return cell.inputs, cell.leaves, cell.outputs, cell.output_grads
