"""The plan: the proved list and what runs it here, found to fit before any process group."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

import attrs
import torch
from torch import nn

from schedir.errors import ExecutionError
from schedir.graph.alive import weight_versions
from schedir.ir import Kind, Schedule
from schedir.passes import insert_reductions, recompute
from schedir.runtime.accelerator import Accelerator, accelerator_of
from schedir.runtime.arguments import Arguments, TieOf, check_arguments, timeout_of
from schedir.runtime.fitting import (
    check_modules,
    check_optimizer,
    check_stages,
    check_stepping,
    check_steps_last,
    device_of,
    posted,
    proved,
    recomputed_stages,
    steps_last,
    tied_copies,
)
from schedir.runtime.processes.grid import Grid, grid
from schedir.runtime.transports.choice import Choice, channel_for, check_streams, transport_for


@attrs.frozen(eq=False)
class Plan:
    """The proved list, and what runs it in this process, which runs the ranks `local_ranks`.

    `schedule` is the list as it was given, complete and with what is to be recomputed, and clean
    under the channel model `channel`: that of the `transport`, unless the user wants another.
    `posted` is the one that is carried out.
    `trained` are the stages' modules with all that is trained with them: the last one's holds the
    loss as well, where that is a module. `tied` are the ties with the copies that are here.
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
        """Where the stages here are."""
        return self.accelerator.device

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """Those that the forwards here may draw from; other devices' are left alone."""
        return (torch.default_generator, *self.accelerator.generators())

    def posted(self, schedule: Schedule, room: int | None = None) -> Schedule:
        """A list with its receives as far ahead as `channel` allows, and `room` for buffers."""
        return posted(schedule, self.channel, _stages_of(self.arguments.ties), room)

    @property
    def local_stages(self) -> tuple[int, ...]:
        """The stages of the ranks here, ascending."""
        return _held_by(self.local_ranks, self.schedule)

    def local_holders(self, stage: int) -> tuple[int, ...]:
        """The ranks here that hold a stage."""
        return tuple(rank for rank in self.schedule.placement[stage] if rank in self.local_ranks)

    @property
    def recomputed(self) -> frozenset[int]:
        """The stages that run a forward again."""
        columns = self.schedule.columns
        return frozenset(columns.stage[columns.where(Kind.RECOMPUTE)].tolist())

    @property
    def last_stage(self) -> int:
        """The stage that has the loss."""
        return self.schedule.stages - 1

    @property
    def updates(self) -> bool:
        """Whether OPTIM_STEPs are carried out, rather than by the caller."""
        return self.arguments.optimizer is not None

    @property
    def steps_last(self) -> bool:
        """Whether OPTIM_STEPs stand after all else on each rank."""
        return steps_last(self.schedule)

    @property
    def compared(self) -> dict[str, object]:
        """The arguments that all processes must be given alike, by name."""
        given = self.arguments
        return {
            "optimizer": "given" if self.updates else "None",
            "batch_dim": given.batch_dim,
            "clip_grad_norm": given.clip_grad_norm,
            "nonfinite": given.nonfinite,
            "recompute": [*recomputed_stages(given.recompute, self.schedule.stages)],
            "ties": [[*map(tuple, tie)] for tie in given.ties],
            "mesh": self.grid.processes,
            "seed": given.seed,
            "step": given.step,
            "channel": given.channel,
            "trace": bool(given.trace),
        }

    @property
    def traced(self) -> bool:
        """Whether the times of this pipeline's steps are recorded: of several only the first's."""
        return self.arguments.trace and self.grid.pipeline == 0

    def optimizers(self) -> dict[int, torch.optim.Optimizer]:
        """New optimisers, of the stages here that have parameters."""
        make = self.arguments.optimizer
        if make is None:
            return {}
        held = {stage: list(self.trained[stage].parameters()) for stage in self.local_stages}
        return {stage: check_optimizer(make(own), stage, own) for stage, own in held.items() if own}


def plan_of(given: Arguments) -> Plan:
    """Prove the schedule and see whether all fits; no process group is touched.

    Raises ScheduleError where the schedule is wrong, ExecutionError where something does not fit.
    """
    check_arguments(given)
    timeout = timeout_of(given.timeout)
    ties = _stages_of(given.ties)
    schedule = proved(given.schedule, "async", ties)
    schedule = recompute(schedule, recomputed_stages(given.recompute, schedule.stages))
    ranks = schedule.ranks
    place = Grid(((0,) * ranks,)) if given.in_process else grid(ranks, given.mesh)
    if place.pipelines > 1:
        schedule = insert_reductions(schedule)
    _check_updates(given, schedule)
    local_ranks = tuple(range(ranks)) if given.in_process else (place.rank,)
    local_stages = _held_by(local_ranks, schedule)
    check_stages(given.stages, local_stages, None if given.in_process else place.rank)
    trained = _trained(given, schedule.stages - 1)
    check_modules(trained)
    accelerator = accelerator_of(device_of(trained))
    transport = transport_for(place.alone, accelerator.device)
    channel = channel_for(transport, given.channel, warns=place.rank == place.pipeline == 0)
    complete = proved(schedule, channel, ties, transport.laxest)
    check_streams(complete, transport, channel)
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


def _held_by(ranks: Collection[int], schedule: Schedule) -> tuple[int, ...]:
    placement = enumerate(schedule.placement)
    return tuple(stage for stage, held in placement if not set(held).isdisjoint(ranks))


def _stages_of(ties: Sequence[TieOf]) -> list[list[int]]:
    return [[stage for stage, _ in tie] for tie in ties]


def _check_updates(given: Arguments, schedule: Schedule) -> None:
    versions = [weight_versions(schedule.columns, rank) for rank in range(schedule.ranks)]
    check_stepping(schedule, versions, given.optimizer is not None)
    if given.clip_grad_norm is not None:
        check_steps_last(schedule, "clip_grad_norm")
    if given.nonfinite == "skip":
        if given.optimizer is None:
            raise ExecutionError(
                'nonfinite="skip" leaves OPTIM_STEPs out, so it needs an optimizer'
            )
        if given.ties:
            check_steps_last(schedule, 'nonfinite="skip" with ties=')
    shared = getattr(given.stages, "ties", ())  # of schedir.training's Stages
    for tie in shared:
        if not any(set(tie) <= set(others) for others in given.ties):
            copies = ", ".join(f"{name} of stage {stage}" for stage, name in tie)
            raise ExecutionError(
                f"{copies} are one parameter, and without ties= each copy would be trained by "
                "itself; pass ties=stages.ties"
            )
    if given.optimizer is None and given.clip_grad_norm is not None:
        raise ExecutionError(
            "clip_grad_norm= acts between the gradients and the step, so it needs an optimizer"
        )


def _trained(given: Arguments, last: int) -> dict[int, nn.Module]:
    trained = dict(given.stages)
    if isinstance(given.loss_fn, nn.Module) and last in trained:
        trained[last] = nn.ModuleDict({"stage": trained[last], "loss": given.loss_fn})
    return trained
