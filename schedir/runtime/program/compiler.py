"""One rank's list, compiled: each action resolved once to operations, in the order they run in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile

import attrs

from schedir.errors import ExecutionError
from schedir.ir import Action, Kind, Schedule, StageVersions, weight_versions
from schedir.runtime.gradients.barriers import Barriers
from schedir.runtime.program.arrivals import arrivals
from schedir.runtime.program.compute import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
)
from schedir.runtime.program.instruction import Instruction, Operation, instruction
from schedir.runtime.program.observers import Observer, observed
from schedir.runtime.program.transfer import (
    ReceiveActivations,
    ReceiveGradients,
    SendActivations,
    SendGradients,
    Transfer,
)
from schedir.runtime.program.update import OptimStep, PassBarriers, ReduceGrad
from schedir.runtime.stage.cells import Cell, Cells
from schedir.runtime.stage.stage import Stage
from schedir.runtime.transports.transport import Transport, Work


@attrs.frozen
class _Place:
    """An entry of a rank's list, what versions the rank reads, and how it reaches others."""

    schedule: Schedule
    rank: int
    index: int
    action: Action
    versions: Mapping[int, StageVersions]
    transport: Transport
    beside: Transport


@attrs.frozen
class Compiler:
    """What the lists' actions are resolved against.

    `barriers` come before OPTIM_STEPs; None where these are left to the caller. `observers` watch
    every run. `beside` takes from rank to rank what hosts have to know; None where the transport
    of the payloads does that as well.
    """

    stages: Mapping[int, Stage]
    cells: Cells
    barriers: Barriers | None
    observers: Sequence[Observer]
    beside: Transport | None

    def compile(
        self, schedule: Schedule, rank: int, transport: Transport, listed_at: Sequence[int]
    ) -> Sequence[Instruction]:
        """The instructions of a rank here, in the order of its list in `schedule`.

        `listed_at` has the place of each in the list before its receives were moved.
        """
        actions = schedule.actions[rank]
        arrived = arrivals(schedule, rank)
        versions = weight_versions(schedule.columns, rank)
        program = []
        for index, action in enumerate(actions):
            sends = [self._sends(actions[send]) for send in arrived.get(index, ())]
            beside = self.beside or transport
            place = _Place(schedule, rank, index, action, versions, transport, beside)
            for operation in _MAKERS[action.kind](self, place):
                program.append(instruction(rank, index, listed_at[index], action, operation, sends))
        return observed(program, self.observers)

    def _sends(self, send: Action) -> list[Work]:
        """Where the works of a send are."""
        cell = self._cell(send)
        return cell.output_sends if send.kind is Kind.SEND_ACT else cell.grad_sends

    def _cell(self, action: Action) -> Cell:
        assert action.microbatch is not None  # asked for those that name one
        return self.cells[action.stage, action.microbatch]

    def _compute(self, place: _Place, kind: type[Compute]) -> Iterator[Operation]:
        cell = self._cell(place.action)
        versions = place.versions[cell.stage]
        version = versions.reads[cell.microbatch]
        last_read = versions.last_read[version] == place.index
        yield kind(self.stages[cell.stage], cell, version, last_read)

    def _transfer(self, place: _Place, kind: type[Transfer]) -> Iterator[Operation]:
        peer = place.schedule.dataflow.peer(place.action)
        if peer is None:
            raise ExecutionError(f"{place.action} has no peer", rank=place.rank, index=place.index)
        device = self.stages[place.action.stage].device
        yield kind(self._cell(place.action), place.transport, place.beside, peer, device)

    def _reduce_grad(self, place: _Place) -> Iterator[Operation]:
        reduction = self.stages[place.action.stage].reduction
        if reduction is not None:
            yield ReduceGrad(reduction)

    def _optim_step(self, place: _Place) -> Iterator[Operation]:
        """The step, and before the first of a rank's consecutive ones what they wait for."""
        if self.barriers is None:
            return
        actions, index = place.schedule.actions[place.rank], place.index
        if not index or actions[index - 1].kind is not Kind.OPTIM_STEP:
            following = takewhile(lambda action: action.kind is Kind.OPTIM_STEP, actions[index:])
            stages = [action.stage for action in following]
            reductions = [self.stages[stage].reduction for stage in stages]
            yield PassBarriers(
                [r for r in reductions if r is not None], self.barriers.before(stages)
            )
        stage = place.action.stage
        yield OptimStep(self.stages[stage], makes=place.versions[stage].steps.index(index) + 1)


_MAKERS: Mapping[Kind, Callable[[Compiler, _Place], Iterator[Operation]]] = {
    Kind.FORWARD: partial(Compiler._compute, kind=Forward),
    Kind.BACKWARD: partial(Compiler._compute, kind=Backward),
    Kind.BACKWARD_INPUT: partial(Compiler._compute, kind=BackwardInput),
    Kind.BACKWARD_WEIGHT: partial(Compiler._compute, kind=BackwardWeight),
    Kind.SEND_ACT: partial(Compiler._transfer, kind=SendActivations),
    Kind.SEND_GRAD: partial(Compiler._transfer, kind=SendGradients),
    Kind.RECV_ACT: partial(Compiler._transfer, kind=ReceiveActivations),
    Kind.RECV_GRAD: partial(Compiler._transfer, kind=ReceiveGradients),
    Kind.REDUCE_GRAD: Compiler._reduce_grad,
    Kind.OPTIM_STEP: Compiler._optim_step,
}
"""What an action of each kind is compiled to."""
