"""The plan: the proved list and what runs it here, found to fit before any process group."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TypeAlias, cast

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedir.checker import clean_channels, prove
from schedir.errors import ExecutionError, ScheduleError
from schedir.graph.compile import graph_of
from schedir.ir import Kind, Schedule, channel_model, enforces, ties_of
from schedir.passes import advance_receives, insert_reductions, recompute
from schedir.runtime.accelerator import Accelerator, accelerator_of
from schedir.runtime.arguments import (
    Arguments,
    TieOf,
    check_arguments,
    check_modules,
    check_stages,
    device_of,
    optimizer_of,
    recomputed_stages,
    tied_copies,
    timeout_of,
    whole_name,
)
from schedir.runtime.processes.failure import describe
from schedir.runtime.processes.grid import Grid, grid
from schedir.runtime.sharded import check_sharded
from schedir.runtime.transports import Endpoint, GlooTransport, NcclTransport

Choice: TypeAlias = type[Endpoint] | type[GlooTransport] | type[NcclTransport]


@attrs.frozen(eq=False)
class Plan:
    """The proved list, and all that this process needs to run its ranks, `local_ranks`.

    `schedule` is the given list, made complete and with its recomputations, and proved under the
    channel model `channel`, the transport's unless the user wants a stricter one. `posted` gives
    the list that runs. `trained` are the stages' modules; the last one holds the loss too, if that
    is a module. `tied` are the ties with their copies on this process.
    """

    arguments: Arguments
    schedule: Schedule
    grid: Grid
    local_ranks: tuple[int, ...]
    trained: Mapping[int, nn.Module]
    accelerator: Accelerator
    tied: Sequence[tuple[TieOf, Mapping[int, nn.Parameter]]]
    timeout: timedelta | None
    transport: Choice
    channel: str

    @property
    def device(self) -> torch.device:
        """The device of the stages here."""
        return self.accelerator.device

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The generators that the forwards here may draw from: the CPU's and the device's."""
        return (torch.default_generator, *self.accelerator.generators())

    def posted(self, schedule: Schedule, room: int | None = None) -> Schedule:
        """A list with its receives as far ahead as `channel`, and `room` for buffers, allow."""
        return posted(schedule, self.channel, stages_of(self.arguments.ties), room)

    @property
    def local_stages(self) -> tuple[int, ...]:
        """The stages of the ranks here, ascending."""
        return _held_by(self.local_ranks, self.schedule)

    def local_holders(self, stage: int) -> tuple[int, ...]:
        """The ranks here that hold a stage."""
        return tuple(rank for rank in self.schedule.placement[stage] if rank in self.local_ranks)

    @property
    def last_stage(self) -> int:
        """The stage that has the loss."""
        return self.schedule.stages - 1

    @property
    def sharded(self) -> frozenset[int]:
        """The stages whose weights the list gathers."""
        return frozenset(np.flatnonzero(graph_of(self.schedule).sharded).tolist())

    @property
    def groups_of_stages(self) -> Sequence[dist.ProcessGroup]:
        """The groups of the mesh in which stages communicate: of its other dimensions, and of those
        over which stages are sharded."""
        given, mesh = self.arguments, self.arguments.mesh
        not_theirs = given.pipeline_dim, *(() if self.sharded else given.data_dims)
        names = () if mesh is None else mesh.mesh_dim_names or ()
        return [mesh.get_group(one) for one in names if mesh is not None and one not in not_theirs]

    @property
    def updates(self) -> bool:
        """Whether OPTIM_STEPs run here, and not the caller's own steps."""
        return self.arguments.optimizer is not None

    @property
    def compared(self) -> dict[str, object]:
        """The arguments that must be equal on all processes, by name."""
        given = self.arguments
        return {
            "optimizer": "given" if self.updates else "None",
            "weigh": given.weigh,
            "gathers": given.gathers,
            "batch_dim": given.batch_dim,
            "clip_grad_norm": given.clip_grad_norm,
            "nonfinite": given.nonfinite,
            "scaler": None if given.scaler is None else given.scaler.state_dict(),
            "recompute": [*recomputed_stages(given.recompute, self.schedule.stages)],
            "ties": [[*map(tuple, tie)] for tie in given.ties],
            "mesh": self.grid.slices,
            "seed_dims": [*given.seed_dims],
            "seed": given.seed,
            "step": given.step,
            "channel": given.channel,
            "trace": bool(given.trace),
        }

    @property
    def described(self) -> frozenset[int]:
        """The boundaries that are marked here, by the stage whose output crosses them."""
        given = (self.arguments.boundaries or {}).items()
        marked = {stage for stage, mark in given if isinstance(mark, str)}
        return frozenset(marked - {self.last_stage})

    @property
    def traced(self) -> bool:
        """Whether this pipeline's steps are recorded: only the first pipeline's are."""
        return self.arguments.trace and self.grid.pipeline == 0

    def optimizers(self) -> dict[int, torch.optim.Optimizer]:
        """Make the optimisers of the stages here that have parameters.

        Raises ExecutionError, with the stage, where the user's function fails. If nothing of the
        stage requires grad, the stage has no optimiser instead: the function may leave such
        parameters out, and an optimiser of none can't be made.
        """
        make = self.arguments.optimizer
        if make is None:
            return {}
        named = {stage: self.named_parameters(stage) for stage in self.local_stages}
        made: dict[int, torch.optim.Optimizer] = {}
        for stage, own in ((stage, own) for stage, own in named.items() if own):
            try:
                found = optimizer_of(make, own, stage)
            except Exception as error:
                if any(parameter.requires_grad for _, parameter in own):
                    what = f"optimizer, called for stage {stage}: {describe(error)}"
                    raise ExecutionError(what, cause=error) from error
            else:
                made[stage] = _check_optimizer(found, stage, [p for _, p in own])
        return made

    def named_parameters(self, stage: int) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are trained with a stage here, by their names in the whole model; a
        parameter of the loss is `loss_fn.…`."""
        own = {p: whole_name(n) for n, p in self.arguments.stages[stage].named_parameters()}
        for name, parameter in self.trained[stage].named_parameters():
            own.setdefault(parameter, f"loss_fn.{name.removeprefix('loss.')}")
        return [(name, parameter) for parameter, name in own.items()]


def plan_of(given: Arguments) -> Plan:
    """Prove the schedule and check the arguments; no process group is touched.

    Raises ScheduleError if the schedule is wrong, ExecutionError if an argument does not fit.
    """
    check_arguments(given)
    timeout = timeout_of(given.timeout)
    ties = stages_of(given.ties)
    schedule = proved(given.schedule, "async", ties)
    stages = recomputed_stages(given.recompute, schedule.stages)
    try:
        schedule = recompute(schedule, stages)
    except ValueError as error:
        raise ExecutionError(f"recompute=: {error}") from None
    ranks = schedule.ranks
    if given.in_process:
        place = Grid((((0,) * ranks,),))
    else:
        place = grid(ranks, given.mesh, given.pipeline_dim, given.data_dims, given.seed_dims)
    if place.pipelines > 1:
        schedule = insert_reductions(schedule)
    _check_steps(given, schedule)
    local_ranks = tuple(range(ranks)) if given.in_process else (place.rank,)
    local_stages = _held_by(local_ranks, schedule)
    check_stages(given.stages, local_stages, None if given.in_process else place.rank)
    trained = dict(given.stages)
    if isinstance(given.loss_fn, nn.Module) and (last := schedule.stages - 1) in trained:
        trained[last] = nn.ModuleDict({"stage": trained[last], "loss": given.loss_fn})
    check_modules(trained)
    check_sharded(given.stages, given.ties, schedule, place)
    accelerator = accelerator_of(device_of(trained))
    transport = transport_for(place.alone, accelerator.device)
    channel = channel_for(transport, given.channel)
    complete = proved(schedule, channel, ties)
    return Plan(
        given,
        complete,
        place,
        local_ranks,
        trained,
        accelerator,
        tied_copies(given.stages, given.ties),
        timeout,
        transport,
        channel,
    )


def transport_for(alone: bool, device: torch.device) -> Choice:
    """The transport of a process that runs all ranks `alone`, or of one among several, with its
    stages on `device`."""
    if alone:
        return Endpoint
    return GlooTransport if device.type == "cpu" else NcclTransport


def channel_for(transport: Choice, wanted: str | None) -> str:
    """The channel model to prove lists under: the transport's, or the one that the user wants.

    Raises ExecutionError for a model that is less strict than the transport's, and for
    `direction`, which no transport has.
    """
    if wanted is None:
        return transport.channel
    try:
        wanted = channel_model(wanted)
    except ValueError as error:
        raise ExecutionError(f"channel: {error}") from None
    if wanted == "direction":
        raise ExecutionError(
            "channel='direction' is for checking only: it is how torch's own pipelines post with "
            "pipeline_per_direction_p2p; leave channel out, and the executor proves the list under "
            f"{transport.channel!r}"
        )
    if not enforces(wanted, transport.channel):
        raise ExecutionError(
            f"channel={wanted!r}: on NCCL a posted receive is a kernel that holds up everything "
            f"posted after it, so the least strict model there is {transport.channel!r}; leave "
            "channel out, and take a list that is clean under it"
        )
    return wanted


def _held_by(ranks: Collection[int], schedule: Schedule) -> tuple[int, ...]:
    placement = enumerate(schedule.placement)
    return tuple(stage for stage, held in placement if not set(held).isdisjoint(ranks))


def stages_of(ties: Sequence[TieOf]) -> list[list[int]]:
    """The stages of the copies of each tie."""
    return [[stage for stage, _ in tie] for tie in ties]


def _check_steps(given: Arguments, schedule: Schedule) -> None:
    """Raise ExecutionError unless the optimiser, the OPTIM_STEPs and what comes before them fit."""
    columns, has_optimizer = schedule.columns, given.optimizer is not None
    places = columns.where(Kind.OPTIM_STEP)
    steps = Counter(zip(columns.stage[places].tolist(), columns.rank[places].tolist(), strict=True))
    if has_optimizer and not steps:
        raise ExecutionError(
            f"{schedule.name} has no OPTIM_STEP, so the optimizer would never step; pass "
            "optimizer=None and step yourself"
        )
    if not has_optimizer:
        for (stage, _), number in sorted(steps.items()):
            if number > 1:
                raise ExecutionError(
                    f"{schedule.name} steps stage {stage} {number} times a call, so it needs an "
                    "optimizer"
                )
        for place in np.flatnonzero(columns.version >= 0).tolist():
            rank, index = columns.position(place)
            raise ExecutionError(
                "an action that names a weight version needs an optimizer; pass optimizer=",
                rank=rank,
                index=index,
                action=columns.action(place),
            )
    if given.clip_grad_norm is not None:
        _check_steps_last(schedule, "clip_grad_norm")
    if given.nonfinite == "skip":
        by = 'nonfinite="skip"' if given.scaler is None else "a scaler"
        if not has_optimizer:
            raise ExecutionError(
                f"{by} leaves OPTIM_STEPs out, so it needs an optimizer; pass optimizer="
            )
        _check_steps_last(schedule, by)
        if given.scaler is not None:
            _check_no_halves(given.stages)
    for tie in getattr(given.stages, "ties", ()):  # of schedir.training's Stages
        if not any(set(tie) <= set(others) for others in given.ties):
            copies = ", ".join(f"{name} of stage {stage}" for stage, name in tie)
            raise ExecutionError(
                f"{copies} are one parameter, and without ties= each copy would be trained on its "
                "own; pass ties=stages.ties"
            )
    if not has_optimizer and given.clip_grad_norm is not None:
        raise ExecutionError(
            "clip_grad_norm= acts between the gradients and the step, so it needs an optimizer; "
            "pass optimizer=, or clip the gradients yourself"
        )


def _check_no_halves(stages: Mapping[int, nn.Module]) -> None:
    """Raise ExecutionError for float16 parameters, and so gradients, as GradScaler does."""
    for stage, module in stages.items():
        for name, parameter in module.named_parameters():
            if parameter.dtype is torch.float16 and parameter.requires_grad:
                raise ExecutionError(
                    f"{name} of stage {stage} is float16, and a scaler needs gradients that are "
                    "not: leave the parameters in float32, and step under torch.autocast"
                )


def _check_steps_last(schedule: Schedule, what: str) -> None:
    """Raise ExecutionError if a rank goes on after its first OPTIM_STEP: `what` needs all gradients
    before the first update."""
    if (found := _goes_on(schedule)) is not None:
        rank, at, index = found
        actions = schedule.flat[rank]
        raise ExecutionError(
            f"{what} needs all gradients before any rank steps, but {schedule.name} goes on after "
            f"rank {rank} #{at} {actions[at]}; list the OPTIM_STEPs last, or leave {what} out",
            rank=rank,
            index=index,
            action=actions[index],
        )


def steps_last(schedule: Schedule) -> bool:
    """Whether the OPTIM_STEPs are the last entries on each rank."""
    return _goes_on(schedule) is None


def _goes_on(schedule: Schedule) -> tuple[int, int, int] | None:
    """A rank that goes on after its first OPTIM_STEP, with the indices of that, and of what comes
    then; None if there is none."""
    for rank, actions in enumerate(schedule.flat):
        steps = [action.kind is Kind.OPTIM_STEP for action in actions]
        if steps != sorted(steps):
            at = steps.index(True)
            return rank, at, steps.index(False, at)
    return None


def _check_optimizer(
    made: object, stage: int, given: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Check the optimiser that the user's function made of a stage's parameters.

    Raises ExecutionError if it is none, needs a closure, or steps other parameters.
    """
    if not hasattr(made, "step"):
        raise ExecutionError(f"optimizer must return an optimizer, not {type(made).__name__}")
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ExecutionError(
            f"optimizer: {type(made).__name__}, of stage {stage}, needs a closure that evaluates "
            "the loss several times a step, but a schedule computes each gradient once; take an "
            "optimizer without a closure"
        )
    own = set(map(id, given))
    groups: Sequence[Mapping[str, Iterable[Tensor]]] = getattr(made, "param_groups", ())
    foreign = [p for group in groups for p in group["params"] if id(p) not in own]
    if foreign:
        kind = f"{str(foreign[0].dtype).removeprefix('torch.')}{list(foreign[0].shape)}"
        raise ExecutionError(
            f"optimizer: {type(made).__name__}, of stage {stage}, steps {len(foreign)} parameters "
            f"that are not the stage's, the first of them {kind}; make it of the function's "
            f"argument: lambda parameters: {type(made).__name__}(parameters, …). To train other "
            "parameters, put them into a module: the last stage, or loss_fn"
        )
    return cast(torch.optim.Optimizer, made)


def proved(schedule: Schedule, channel: str, ties: Iterable[Iterable[int]]) -> Schedule:
    """The complete schedule, proved under a channel model; no process group is touched."""
    try:
        report = prove(schedule, channel, ties=ties)
    except ValueError as error:
        raise ExecutionError(str(error)) from error
    if report.schedule is not None:
        return report.schedule
    if os.environ.get("RANK", "0") != "0":
        # Only rank 0 shows the diagnostics.
        raise ScheduleError("the schedule is wrong; rank 0 says why", report.diagnostics)
    return report.proved()


def posted(
    schedule: Schedule, channel: str, ties: Iterable[Iterable[int]], room: int | None
) -> Schedule:
    """The list that runs: its receives moved ahead, and proved again.

    They go as far ahead as the channel model, and `room` for buffers, allow; see
    `advance_receives`. Raises ExecutionError if the list is no longer clean, which would be a fault
    of the pass.
    """
    tied = ties_of(schedule, ties)
    ahead = advance_receives(schedule, channel, room, ties=tied)
    if channel not in clean_channels(ahead, tied):
        raise ExecutionError(
            f"{schedule.name} runs under {channel} as it is listed, but not with its receives "
            "moved ahead; this is a fault of schedir, please report it"
        )
    return ahead
