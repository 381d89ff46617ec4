"""One rank's list, compiled: each action a bound call, in the order in which it is carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

import attrs
import torch

from schedir.errors import ExecutionError
from schedir.ir import RECEIVES, SENDS, Action, Kind, Schedule, StageVersions
from schedir.runtime.gradients.stepping import Meet, Meetings
from schedir.runtime.program.compute import Backward, Forward
from schedir.runtime.program.posting import arrivals, posting_order
from schedir.runtime.program.transfer import Receive, Send
from schedir.runtime.program.update import OptimStep, ReduceGrad
from schedir.runtime.stage.cells import Cell, wait
from schedir.runtime.stage.stage import Stage
from schedir.runtime.transports.in_process import End
from schedir.runtime.transports.transport import Transport, Work

_SPLIT = {Kind.BACKWARD: None, Kind.BACKWARD_INPUT: "input", Kind.BACKWARD_WEIGHT: "weight"}


@attrs.frozen
class Instruction:
    """An action of the list and what carries it out.

    `coming` holds the receives that it waits for, `arrived` the sends that have arrived once these
    have come.
    """

    rank: int
    index: int
    action: Action
    run: Callable[[], None]
    coming: list[Work] = attrs.field(factory=list)
    arrived: Sequence[list[Work]] = ()

    @property
    def meets(self) -> bool:
        """Whether it is no action of its own, but what comes before some OPTIM_STEPs."""
        return isinstance(self.run, Meet)

    def waits(self) -> bool:
        """Whether it has to wait for another rank; asked where all are in one process."""
        if isinstance(self.run, Meet):
            return self.run.waits()
        return any(not end.done for end in self.coming if isinstance(end, End))

    def wait(self) -> None:
        """Wait for what it needs. Raises WaitError where that can't come any more."""
        wait(self.coming)
        for works in self.arrived:
            wait(works)


@attrs.frozen
class Compiler:
    """What the lists' actions are resolved against; `versions` are those of the stages here."""

    schedule: Schedule
    stages: Mapping[int, Stage]
    cells: Mapping[tuple[int, int], Cell]
    versions: Mapping[int, StageVersions]
    optimizers: Mapping[int, torch.optim.Optimizer]
    updates: bool  # whether OPTIM_STEPs are carried out, also by stages without parameters
    meetings: Meetings

    def compile(self, rank: int, transport: Transport, more_buffers: int) -> list[Instruction]:
        """The instructions of a rank whose stages are here.

        Receives may take `more_buffers` beyond what the list needs.
        """
        program = []
        steps = dict.fromkeys(self.stages, 0)
        actions = self.schedule.actions[rank]
        arrived = arrivals(self.schedule, rank)
        for index in posting_order(self.schedule, rank, more_buffers):
            action = actions[index]
            meet = self._meet(rank, index)
            if meet is not None:
                program.append(Instruction(rank, index, action, meet))
            run = self._resolve(rank, index, action, steps, transport)
            if run is not None:
                sends = [self._going(actions[send]) for send in arrived.get(index, ())]
                program.append(Instruction(rank, index, action, run, self._coming(action), sends))
        return program

    def _coming(self, action: Action) -> list[Work]:
        """Where the works of the receives are that a compute action waits for."""
        if action.kind is Kind.FORWARD:
            return self._cell(action).inputs_coming
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            return self._cell(action).grads_coming
        return []

    def _meet(self, rank: int, index: int) -> Meet | None:
        """What comes before the first of a rank's consecutive OPTIM_STEPs."""
        actions = self.schedule.actions[rank]
        if actions[index].kind is not Kind.OPTIM_STEP or not self.updates:
            return None
        if index and actions[index - 1].kind is Kind.OPTIM_STEP:
            return None
        following = takewhile(lambda action: action.kind is Kind.OPTIM_STEP, actions[index:])
        stages = [action.stage for action in following]
        reductions = [self.stages[s].reduction for s in stages]
        state = self.stages[stages[0]].state
        return Meet(
            lambda: state.request.updates,
            [reduction for reduction in reductions if reduction is not None],
            self.meetings.before(stages),
        )

    def _going(self, send: Action) -> list[Work]:
        """Where the works of a send are."""
        cell = self._cell(send)
        return cell.outputs_going if send.kind is Kind.SEND_ACT else cell.grads_going

    def _cell(self, action: Action) -> Cell:
        assert action.microbatch is not None  # asked for those that name one
        return self.cells[action.stage, action.microbatch]

    def _resolve(
        self,
        rank: int,
        index: int,
        action: Action,
        steps: dict[int, int],
        transport: Transport,
    ) -> Callable[[], None] | None:
        stage = self.stages[action.stage]
        if action.kind is Kind.REDUCE_GRAD:
            return None if stage.reduction is None else ReduceGrad(stage.reduction, stage.state)
        if action.kind is Kind.OPTIM_STEP:
            steps[action.stage] += 1
            if not self.updates:
                return None
            return OptimStep(stage, self.optimizers.get(action.stage), steps[action.stage])
        cell = self._cell(action)
        if action.kind in SENDS or action.kind in RECEIVES:
            peer = self.schedule.dataflow.peer(action)
            if peer is None:
                raise ExecutionError(f"{action} has no peer", rank=rank, index=index)
            grads = action.kind in (Kind.SEND_GRAD, Kind.RECV_GRAD)
            end = Send if action.kind in SENDS else Receive
            return end(cell, transport, peer, grads, stage)
        read = self.versions[action.stage]
        version = read.reads[cell.microbatch]
        last_read = read.last_read[version] == index
        if action.kind is Kind.FORWARD:
            return Forward(stage, cell, version, last_read)
        return Backward(stage, cell, version, last_read, _SPLIT[action.kind])
