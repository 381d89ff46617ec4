"""Runs a list again and again: for training, or its forwards for evaluation."""

from __future__ import annotations

from typing import Any

import attrs

from schedir.graph.compile import graph_of
from schedir.ir import COMMUNICATION, CONSUMES, RECEIVES, Action, Schedule
from schedir.runtime.call import Call
from schedir.runtime.plan import Plan
from schedir.runtime.processes.failure import WaitError
from schedir.runtime.program.observers import BusyClock
from schedir.runtime.program.opening import Opened, Opening
from schedir.runtime.program.running import advance, take_turns
from schedir.runtime.stage.cells import Cells
from schedir.runtime.transports.transport import Work, wait_for


class Runner:
    """A list, with the cells that its tensors lie in and how its calls open; `clock` takes the time
    of its compute.

    `under_way` are the sends that may not have arrived by the end of a call.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        cells: Cells,
        opening: Opening,
        clock: BusyClock,
        under_way: list[Work],
    ) -> None:
        self.cells, self.opening, self.clock = cells, opening, clock
        self._schedule, self._under_way = schedule, under_way
        self._accelerator = plan.accelerator
        self._streams = _streams(plan)

    def run(self, opened: Opened, call: Call) -> None:
        """Run the list, from where its opening has come to.

        Raises ExecutionError, or WaitError for what never comes, with the place in the list.
        """
        # What the call before sent last; its receivers have posted their part within that one.
        self._wait_for_sends("the call before")
        self.cells.trim_pools()
        lists, done = opened.lists, opened.done
        try:
            if len(lists) == 1:
                advance(lists[0][done:] if done else lists[0], call)
            else:
                take_turns(lists, call, self._accelerator, self._streams)
        except WaitError as stalled:
            if not stalled.what and stalled.action is not None:
                stalled.what = _awaited(self._schedule, stalled.action)
            raise
        self._under_way += self.cells.take_sends()
        if opened.learns is not None:  # beside the payloads, where a failure must end all messages
            self._wait_for_sends("this call")

    def _wait_for_sends(self, whose: str) -> None:
        try:
            wait_for(self._under_way)
        except WaitError as error:
            raise WaitError(error.cause, f"what {whose} has sent to arrive") from error

    def reset(self) -> None:
        """A call has failed: the next one, where there can be one, starts anew."""
        self._under_way.clear()
        self.cells.drop_works()
        self.opening.reset()


def _awaited(schedule: Schedule, action: Action) -> str:
    """What an action waits for of another rank, in words."""
    kind = CONSUMES.get(action.kind, action.kind)
    transfer = attrs.evolve(action, kind=kind, version=None)
    if kind not in COMMUNICATION:
        return str(action)
    peer = graph_of(schedule).peer(transfer)
    return f"{transfer} {'from' if kind in RECEIVES else 'to'} rank {peer}"


def _streams(plan: Plan) -> list[Any]:
    """One for each rank, where this process runs several."""
    if len(plan.local_ranks) == 1:
        return []
    return [plan.accelerator.stream() for _ in plan.local_ranks]
