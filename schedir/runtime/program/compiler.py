"""One rank's list, compiled: each action resolved once to operations, in the order they run in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias

import attrs

from schedir.errors import ExecutionError
from schedir.graph.alive import StageVersions, weight_versions
from schedir.graph.compile import graph_of
from schedir.ir import COMPLETES_GRADIENTS, Action, Kind, Schedule, Together
from schedir.runtime.accelerator import Accelerator
from schedir.runtime.boundaries.boundary import empty
from schedir.runtime.boundaries.buffers import FromBuffers
from schedir.runtime.gradients.nonfinite import NonFinite
from schedir.runtime.gradients.reduction import Barriers
from schedir.runtime.gradients.scaling import Scaling
from schedir.runtime.program.abreast import Pair, forwards_aside
from schedir.runtime.program.arrivals import arrivals
from schedir.runtime.program.compute import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Recompute,
)
from schedir.runtime.program.first_call import (
    DescribeActivations,
    Described,
    DescribeGradients,
    FirstBackward,
    FirstBackwardInput,
    FirstCall,
    FirstForward,
    TakeActivations,
    TakeGradients,
)
from schedir.runtime.program.instruction import Instruction, Operation, instruction
from schedir.runtime.program.joined import Batch, communicates, post_of, wait_of
from schedir.runtime.program.observers import Observer, observed
from schedir.runtime.program.transfer import (
    Receive,
    ReceiveActivations,
    ReceiveGradients,
    Send,
    SendActivations,
    SendGradients,
)
from schedir.runtime.program.update import OptimStep, PassBarriers, ReduceGrad, SumReplicas
from schedir.runtime.stage.cells import Cell, Cells
from schedir.runtime.stage.replicas import Replicas
from schedir.runtime.stage.stage import Stage
from schedir.runtime.transports.transport import Poster, Transport, Work


@attrs.frozen
class _Place:
    """An action of a rank's list, what versions the rank reads, and how it reaches others.

    `index` is that of its entry, `turn` its own among the rank's actions.
    """

    schedule: Schedule
    rank: int
    index: int
    turn: int
    action: Action
    versions: Mapping[int, StageVersions]
    poster: Poster
    beside: Poster


@attrs.frozen
class Compiler:
    """What the lists' actions are resolved against.

    `replicas` are of the stages that several ranks of this process hold. `barriers` come before
    OPTIM_STEPs; None where these are left to the caller. `scaling` is for those that apply other
    microbatches than the loss stage's, and `nonfinite` looks at what they apply. `observers` watch
    every run. `beside` takes from rank to rank what hosts have to know; None where the transport of
    the payloads does that as well. `first` is given where programs are for the first call of an
    input signature. `sides` are the streams beside those of the ranks, for the second of two that
    run abreast.
    """

    accelerator: Accelerator
    stages: Mapping[int, Stage]
    replicas: Mapping[int, Replicas]
    cells: Cells
    barriers: Barriers | None
    scaling: Scaling
    nonfinite: NonFinite
    observers: Sequence[Observer]
    beside: Poster | None
    first: FirstCall | None = None
    sides: dict[int, Any] = attrs.field(factory=dict)

    def compile(
        self, schedule: Schedule, rank: int, transport: Transport, listed_at: Sequence[int]
    ) -> Sequence[Instruction]:
        """The instructions of a rank here, in the order of its list in `schedule`.

        `listed_at` has the place of each in the list before its receives were moved.
        """
        learns = self.first is not None
        makers = {**_MAKERS, **_FIRST} if learns else _MAKERS
        pool = self.cells.pool(rank)
        poster = transport if pool is None else FromBuffers(transport, pool)
        actions = schedule.flat[rank]
        arrived = {} if learns else arrivals(schedule, rank)
        versions = weight_versions(schedule.columns, rank)
        beside = self.beside or transport
        program: list[Instruction] = []
        aside = forwards_aside(schedule.actions[rank])
        turn = 0
        for index, entry in enumerate(schedule.actions[rank]):
            parts = entry.actions if isinstance(entry, Together) else (entry,)
            communicating = communicates(parts)
            batch = Batch(poster) if communicating and not learns else None
            made = []
            for action in parts:
                sends = [self._sends(actions[send]) for send in arrived.get(turn, ())]
                place = _Place(
                    schedule, rank, index, turn, action, versions, batch or poster, beside
                )
                for operation in makers[action.kind](self, place):
                    made.append(
                        self._in_turn(
                            instruction(rank, index, listed_at[index], action, operation, sends)
                        )
                    )
                turn += 1
            if batch is not None:
                made.append(post_of(batch, made))
            elif len(parts) > 1 and not communicating:
                wait = wait_of(made[1])
                if self.accelerator.queues:
                    made = self._abreast(made, index in aside)
                made.insert(0, wait)
            program += made
        return observed(program, self.observers)

    def _abreast(self, pair: Sequence[Instruction], forward_aside: bool) -> list[Instruction]:
        """The two of an overlapped pair on two streams."""
        first, second = pair
        if first.rank not in self.sides:
            self.sides[first.rank] = self.accelerator.side()
        (aside,) = (
            one.action.kind for one in pair if (one.action.kind is Kind.FORWARD) == forward_aside
        )
        made = Pair(self.accelerator, self.sides[first.rank], self._cell(first.action))
        return made.abreast(first, second, aside)

    def _in_turn(self, made: Instruction) -> Instruction:
        """One that uses a stage which other ranks here use as well waits for these."""
        replicas, kind = self.replicas.get(made.action.stage), made.action.kind
        if replicas is None or not made.operation.computes:
            return made
        adding = made.rank if kind in COMPLETES_GRADIENTS else None
        return attrs.evolve(made, run=replicas.in_turn(made.run, adding))

    def _sends(self, send: Action) -> list[Work]:
        """Where the works of a send are."""
        cell = self._cell(send)
        return cell.output_sends if send.kind is Kind.SEND_ACT else cell.grad_sends

    def _cell(self, action: Action) -> Cell:
        assert action.microbatch is not None  # asked for those that name one
        return self.cells[action.stage, action.microbatch]

    def _forward(
        self, place: _Place, make: Callable[..., Compute] = Forward
    ) -> Iterator[Operation]:
        again = graph_of(place.schedule).of(Kind.RECOMPUTE)
        replayed = bool(again[place.action.stage, place.action.microbatch] >= 0)
        yield from self._compute(place, partial(make, replayed=replayed))

    def _first_forward(self, place: _Place) -> Iterator[Operation]:
        assert self.first is not None  # asked in first calls
        yield from self._forward(place, partial(FirstForward, first=self.first))

    def _described(self, place: _Place, make: type[Described]) -> Iterator[Operation]:
        assert self.first is not None  # asked in first calls
        yield make(self._cell(place.action), self.first, place.rank, _peer(place))

    def _compute(self, place: _Place, make: Callable[..., Compute]) -> Iterator[Operation]:
        cell = self._cell(place.action)
        versions = place.versions[cell.stage]
        version = versions.reads[cell.microbatch]
        last_read = versions.last_read[version] == place.turn
        yield make(self.stages[cell.stage], cell, version, last_read)

    def _send(self, place: _Place, kind: type[Send]) -> Iterator[Operation]:
        device = self.stages[place.action.stage].device
        yield kind(self._cell(place.action), place.poster, place.beside, _peer(place), device)

    def _receive(self, place: _Place, kind: type[Receive]) -> Iterator[Operation]:
        pool, device = self.cells.pool(place.rank), self.stages[place.action.stage].device
        make = partial(empty, device=device) if pool is None else pool.empty
        cell = self._cell(place.action)
        yield kind(cell, place.poster, place.beside, _peer(place), device, make)

    def _reduce_grad(self, place: _Place) -> Iterator[Operation]:
        stage = place.action.stage
        reduction = self.stages[stage].reduction
        if stage in self.replicas:
            yield SumReplicas(self.replicas[stage], place.rank)
        elif reduction is not None:
            yield ReduceGrad(reduction)

    def _optim_step(self, place: _Place) -> Iterator[Operation]:
        """The step, and before the first of a rank's consecutive ones what they wait for."""
        if self.barriers is None:
            return
        actions, turn = place.schedule.flat[place.rank], place.turn
        if not turn or actions[turn - 1].kind is not Kind.OPTIM_STEP:
            following = takewhile(lambda action: action.kind is Kind.OPTIM_STEP, actions[turn:])
            stages = [action.stage for action in following]
            reductions = [self.stages[stage].reduction for stage in stages]
            steps = [(stage, _step(place, stage, at)) for at, stage in enumerate(stages, turn)]
            yield PassBarriers(
                place.rank,
                [r for r in reductions if r is not None],
                [self.replicas[stage] for stage in stages if stage in self.replicas],
                [self._scale(*step) for step in steps if self.scaling.scales(*step)],
                self.barriers.before(stages),
                partial(self.nonfinite.look, steps) if self.nonfinite.looks_alone else None,
            )
        stage = place.action.stage
        yield OptimStep(self.stages[stage], self.nonfinite, _step(place, stage, turn))

    def _scale(self, stage: int, step: int) -> Callable[[], None]:
        weights = self.stages[stage].weights
        scale = partial(self.scaling.scale, weights.newest, stage, step)
        replicas = self.replicas.get(stage)
        return scale if replicas is None else partial(replicas.scale, step, scale)


def _step(place: _Place, stage: int, turn: int) -> int:
    """Which of its stage's OPTIM_STEPs stands at a turn of the rank."""
    return place.versions[stage].steps.index(turn)


def _peer(place: _Place) -> int:
    peer = graph_of(place.schedule).peer(place.action)
    if peer is None:
        raise ExecutionError(f"{place.action} has no peer", rank=place.rank, index=place.index)
    return peer


_Maker: TypeAlias = Callable[[Compiler, _Place], Iterator[Operation]]

_MAKERS: Mapping[Kind, _Maker] = {
    Kind.FORWARD: Compiler._forward,
    Kind.RECOMPUTE: partial(Compiler._compute, make=Recompute),
    Kind.BACKWARD: partial(Compiler._compute, make=Backward),
    Kind.BACKWARD_INPUT: partial(Compiler._compute, make=BackwardInput),
    Kind.BACKWARD_WEIGHT: partial(Compiler._compute, make=BackwardWeight),
    Kind.SEND_ACT: partial(Compiler._send, kind=SendActivations),
    Kind.SEND_GRAD: partial(Compiler._send, kind=SendGradients),
    Kind.RECV_ACT: partial(Compiler._receive, kind=ReceiveActivations),
    Kind.RECV_GRAD: partial(Compiler._receive, kind=ReceiveGradients),
    Kind.REDUCE_GRAD: Compiler._reduce_grad,
    Kind.OPTIM_STEP: Compiler._optim_step,
}
"""What an action of each kind is compiled to."""

_FIRST: Mapping[Kind, _Maker] = {
    Kind.FORWARD: Compiler._first_forward,
    Kind.BACKWARD: partial(Compiler._compute, make=FirstBackward),
    Kind.BACKWARD_INPUT: partial(Compiler._compute, make=FirstBackwardInput),
    Kind.SEND_ACT: partial(Compiler._described, make=DescribeActivations),
    Kind.SEND_GRAD: partial(Compiler._described, make=DescribeGradients),
    Kind.RECV_ACT: partial(Compiler._described, make=TakeActivations),
    Kind.RECV_GRAD: partial(Compiler._described, make=TakeGradients),
}
"""What it is compiled to instead for the first call of an input signature."""


def expect_carried_out(schedule: Schedule) -> None:
    """Raise ExecutionError, with its place, for an action of a kind that has no operation yet."""
    columns = schedule.columns
    unknown = columns.where(*(kind for kind in Kind if kind not in _MAKERS))
    if len(unknown):
        rank, index = columns.position(int(unknown[0]))
        action = columns.action(int(unknown[0]))
        raise ExecutionError(
            f"the executor does not carry out {action.kind.name} yet: schedules with it can be "
            "proved and simulated",
            rank=rank,
            index=index,
            action=action,
        )
