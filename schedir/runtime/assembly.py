"""Makes the parts that run a plan in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import attrs
import torch
from torch import Tensor

from schedir.passes import forward_only
from schedir.runtime.accelerator import Streams
from schedir.runtime.boundaries.described import Messenger
from schedir.runtime.call import Now
from schedir.runtime.gradients.gradients import Gradients, compared
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import Control
from schedir.runtime.program.compiler import Compiler
from schedir.runtime.program.compute import on_two_streams
from schedir.runtime.program.first_call import FirstCall
from schedir.runtime.program.handshake import Handshake
from schedir.runtime.program.program import Programs
from schedir.runtime.program.progress import Progress
from schedir.runtime.recorder import Recorder
from schedir.runtime.session import Session
from schedir.runtime.stage.stage import Stage
from schedir.runtime.stage.weights import StageWeights, readers_of
from schedir.runtime.trace import Trace
from schedir.runtime.transports.in_process import InProcessTransport
from schedir.runtime.transports.transport import Transport, Work


@attrs.frozen(eq=False)
class Parts:
    """The parts that run the calls of one executor, on the stages of this process.

    `described` are the boundaries that some process has marked, and `processors` the
    multiprocessors of the smallest GPU. `under_way` are the sends that may not have arrived by the
    end of a call. `busy[0]` counts the seconds that the host computes; a `clock` has those of a
    device.
    """

    plan: Plan
    control: Control
    messages: InProcessTransport
    gradients: Gradients
    described: Collection[int]
    processors: int
    handshake: Handshake
    transports: Mapping[int, Transport]
    optimizers: Mapping[int, torch.optim.Optimizer]
    stages: Mapping[int, Stage]
    streams: Streams
    progress: Progress
    busy: list[float]
    clock: Recorder | None
    trace: Trace | None
    now: Now
    under_way: list[Work] = attrs.field(factory=list)

    @property
    def queues(self) -> bool:
        """Whether the stages are on a device that queues its work."""
        return self.plan.accelerator.queues

    def programs(self, trains: bool, batch: int | None) -> Programs:
        """The programs of the plan's list, or of its forwards only. With `batch`, a call that
        trains has several batches, of `batch` microbatches each."""
        plan = self.plan
        schedule = plan.schedule if trains else forward_only(plan.schedule)
        trace = self.trace if trains else None
        clock = self.clock if trace is None else trace.recorder
        compiler = Compiler(
            plan.accelerator,
            self.stages,
            self.gradients,
            self._first(trains),
            [*([] if clock is None else [clock]), self.progress],
            self.control.beside() if self.queues and not plan.grid.alone else None,
            trains,
            self.now,
            self.streams,
        )
        return Programs(
            plan,
            schedule,
            compiler,
            self.transports,
            self.control,
            self.handshake,
            self.under_way,
            None if trace is None else trace.observers,
            batch if trains else None,
        )

    def _first(self, trains: bool) -> FirstCall:
        """What described boundaries need; the mark of a boundary counts before an example."""
        described, given = self.described, self.plan.arguments.boundaries or {}
        declared = {stage: given[stage] for stage in given if stage not in described}
        return FirstCall(self._messengers(trains), described, declared)

    def _messengers(self, trains: bool) -> dict[int, Messenger]:
        """The messenger of each rank here, for payloads with their description."""
        found = {}
        for rank, transport in self.transports.items():
            tagged = transport.tagged if transport.early else self.control.described
            if self.plan.grid.alone:  # from host to host too
                tagged = self.messages.of(rank).tagged
            found[rank] = Messenger(tagged(trains), tagged(2 + trains), self.plan.device, self.now)
        return found


def assemble(plan: Plan, session: Session) -> Parts:
    """Compare with the other processes, connect to them, and make the parts.

    The order is the same on all processes, because both sides make a connection. Raises
    ExecutionError if processes differ, WaitError if they don't come in time.
    """
    optimizers = plan.optimizers()
    progress = Progress(
        session.groups.patience,
        session.groups.posted,
        plan.accelerator,
        follows=plan.transport.queues,
    )
    claims = compared(plan, session)
    session.warm_up()
    transports = session.transports()
    gradients = Gradients(plan, session.groups, claims, optimizers, progress.reach)
    busy = [0.0]
    streams = Streams(plan.accelerator)
    stages = _stages(plan, gradients, optimizers, busy, streams)
    return Parts(
        plan,
        session.control,
        session.messages,
        gradients,
        frozenset[int]().union(*(claim.described for claim in claims)),
        min(claim.processors for claim in claims),
        session.handshake,
        transports,
        optimizers,
        stages,
        streams,
        progress,
        busy,
        Recorder(plan.accelerator, traces=False) if plan.accelerator.queues else None,
        Trace(plan, session, stages) if plan.traced else None,
        Now(session.board.words),
    )


def _stages(
    plan: Plan,
    gradients: Gradients,
    optimizers: Mapping[int, torch.optim.Optimizer],
    busy: list[float],
    streams: Streams,
) -> dict[int, Stage]:
    readers = readers_of(plan.schedule, plan.local_ranks) if plan.updates else {}
    apart = _on_several_streams(plan) if plan.accelerator.queues else set()

    def accumulators(stage: int) -> Callable[[Sequence[Tensor]], Sequence[object]] | None:
        if stage not in apart:
            return None
        return partial(plan.accelerator.accumulate_on, streams.of("gradients", stage))

    return {
        stage: Stage(
            plan,
            stage,
            StageWeights(plan.trained[stage], readers.get(stage, {}), accumulators(stage)),
            gradients,
            optimizers.get(stage),
            busy,
        )
        for stage in plan.local_stages
    }


def _on_several_streams(plan: Plan) -> set[int]:
    """The stages here that several streams compute: those of several ranks, or of pairs."""
    held = {stage for stage in plan.local_stages if len(plan.local_holders(stage)) > 1}
    return held.union(*(on_two_streams(plan.schedule.actions[rank]) for rank in plan.local_ranks))
