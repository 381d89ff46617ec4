"""Makes the parts that run a plan in this process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

import attrs
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from schedir.passes import forward_only
from schedir.runtime.accelerator import Streams
from schedir.runtime.boundaries.described import Messenger, Posted, Sent, Within
from schedir.runtime.call import Now
from schedir.runtime.gradients.clipping import Clipping
from schedir.runtime.gradients.nonfinite import NonFinite
from schedir.runtime.gradients.reduction import Accumulated, Barriers, Reduction, Tie
from schedir.runtime.gradients.scaling import Scaling
from schedir.runtime.gradients.shared_parameters import ReplicaCheck, Shared
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import Control
from schedir.runtime.program.compiler import Compiler
from schedir.runtime.program.first_call import FirstCall
from schedir.runtime.program.handshake import Handshake
from schedir.runtime.program.observers import BusyClock, busy_clock
from schedir.runtime.program.program import Programs
from schedir.runtime.program.progress import Progress
from schedir.runtime.program.together import on_two_streams
from schedir.runtime.session import Session
from schedir.runtime.sharded import Sharded
from schedir.runtime.stage.replicas import Replicas
from schedir.runtime.stage.stage import Stage
from schedir.runtime.stage.weights import StageWeights, lives_of
from schedir.runtime.trace import Trace
from schedir.runtime.transports.transport import Transport, Work


@attrs.frozen(eq=False)
class Parts:
    """The parts that run the calls of one executor, on the stages of this process.

    `replicas` are those of the stages that several ranks here hold. `under_way` are the sends that
    may not have arrived by the end of a call.
    """

    plan: Plan
    control: Control
    shared: Shared
    handshake: Handshake
    transports: Mapping[int, Transport]
    reductions: Mapping[int, Reduction]
    accumulated: Accumulated
    ties: Sequence[Tie]
    nonfinite: NonFinite
    clipping: Clipping | None
    barriers: Barriers
    scaling: Scaling
    replica_check: ReplicaCheck
    optimizers: Mapping[int, torch.optim.Optimizer]
    stages: Mapping[int, Stage]
    replicas: Mapping[int, Replicas]
    streams: Streams
    progress: Progress
    clock: BusyClock
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
        compiler = Compiler(
            plan.accelerator,
            self.stages,
            self.replicas,
            self.barriers if plan.updates else None,
            self.scaling,
            self.nonfinite,
            self._first(trains),
            [self.clock if trace is None else trace.recorder, self.progress],
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
        described, given = self.shared.described, self.plan.arguments.boundaries or {}
        declared = {stage: given[stage] for stage in given if stage not in described}
        return FirstCall(self._messengers(trains), described, declared, self._stepped())

    def _messengers(self, trains: bool) -> dict[int, Messenger]:
        """The messenger of each rank here, for payloads with their description."""
        plan, rank = self.plan, self.plan.grid.rank
        if plan.grid.alone:
            sent: dict[Hashable, Sent] = {}
            return {r: Within(r, sent, plan.accelerator, self.now) for r in plan.local_ranks}
        transport = self.transports[rank]
        tagged = transport.tagged if transport.early else self.control.described
        return {rank: Posted(tagged(trains), tagged(2 + trains), plan.device, self.now)}

    def _stepped(self) -> list[Tensor] | None:
        """The parameters that the optimisers step; None if the caller steps."""
        if not self.plan.updates:
            return None
        groups = (group for made in self.optimizers.values() for group in made.param_groups)
        return [parameter for group in groups for parameter in group["params"]]


def assemble(plan: Plan, session: Session, handshake: Handshake | None) -> Parts:
    """Compare with the other processes, connect to them, and make the parts; the `handshake` may be
    there already.

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
    nonfinite = NonFinite(plan, session.control, optimizers, progress.reach)
    shared = Shared(plan, session)
    session.warm_up()
    transports = session.transports()
    reductions = shared.reductions()
    ties = shared.ties()
    clipping = shared.clipping(nonfinite)
    together = nonfinite.agreement if clipping is None else clipping.clip
    barriers = shared.barriers(ties, together)
    scaling = Scaling(plan, session.control, session.groups)
    replica_check = shared.replica_check()
    clock = busy_clock(plan.accelerator)
    streams = Streams(plan.accelerator)
    stages = _stages(plan, reductions, optimizers, nonfinite, clock.busy, streams)
    return Parts(
        plan,
        session.control,
        shared,
        handshake or Handshake(plan, session.control, session.stops),
        transports,
        reductions,
        shared.accumulated(),
        ties,
        nonfinite,
        clipping,
        barriers,
        scaling,
        replica_check,
        optimizers,
        stages,
        _replicas(plan, stages),
        streams,
        progress,
        clock,
        Trace(plan, session.control, stages) if plan.traced else None,
        Now(session.board.words),
    )


def _stages(
    plan: Plan,
    reductions: Mapping[int, Reduction],
    optimizers: Mapping[int, torch.optim.Optimizer],
    nonfinite: NonFinite,
    busy: list[float],
    streams: Streams,
) -> dict[int, Stage]:
    read = lives_of(plan.schedule, plan.local_ranks) if plan.updates else {}
    apart = _on_several_streams(plan) if plan.accelerator.queues else set()

    def accumulators(stage: int) -> Callable[[Sequence[Tensor]], Sequence[object]] | None:
        if stage not in apart:
            return None
        return partial(plan.accelerator.accumulate_on, streams.of("gradients", stage))

    return {
        stage: Stage(
            plan,
            stage,
            StageWeights(plan.trained[stage], read.get(stage), accumulators(stage)),
            reductions.get(stage),
            optimizers.get(stage),
            nonfinite,
            busy,
            _sharded(plan, stage),
        )
        for stage in plan.local_stages
    }


def _sharded(plan: Plan, stage: int) -> Sharded | None:
    module = plan.arguments.stages[stage]
    return Sharded(stage, module, not plan.updates) if isinstance(module, FSDPModule) else None


def _on_several_streams(plan: Plan) -> set[int]:
    """The stages here that several streams compute: those of several ranks, or of pairs."""
    held = {stage for stage in plan.local_stages if len(plan.local_holders(stage)) > 1}
    return held.union(*(on_two_streams(plan.schedule.actions[rank]) for rank in plan.local_ranks))


def _replicas(plan: Plan, stages: Mapping[int, Stage]) -> dict[int, Replicas]:
    held = {number: plan.local_holders(number) for number in stages}
    return {
        number: Replicas(ranks, stages[number].weights, plan.accelerator)
        for number, ranks in held.items()
        if len(ranks) > 1
    }
