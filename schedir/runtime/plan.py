"""What an executor is made of: its arguments, found to fit before any process group is touched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from schedir.errors import ExecutionError
from schedir.ir import Schedule, StageVersions, weight_versions
from schedir.passes import insert_reductions
from schedir.runtime.boundaries.boundary import Declared
from schedir.runtime.fitting import (
    TieOf,
    check_arguments,
    check_clipping,
    check_modules,
    check_optimizer,
    check_stages,
    check_stepping,
    device_of,
    proved,
    recomputed_stages,
    tied_copies,
    timeout_of,
)
from schedir.runtime.processes.grid import Grid, grid

LossFunction = Callable[..., Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@attrs.frozen(eq=False)
class Arguments:
    """Those of the executor, as they were given."""

    schedule: Schedule
    stages: Mapping[int, nn.Module]
    loss_fn: LossFunction
    optimizer: OptimizerFactory | None
    boundaries: Mapping[int, Declared] = attrs.field(kw_only=True)
    recompute: bool | Collection[int] = attrs.field(kw_only=True)
    count: Callable[[Any], float | Tensor] = attrs.field(kw_only=True)
    clip_grad_norm: float | None = attrs.field(kw_only=True)
    ties: Sequence[TieOf] = attrs.field(kw_only=True)
    mesh: DeviceMesh | None = attrs.field(kw_only=True)
    seed: int = attrs.field(kw_only=True)
    step: int = attrs.field(kw_only=True)
    timeout: float | timedelta | None = attrs.field(kw_only=True)
    in_process: bool = attrs.field(kw_only=True)


@attrs.frozen(eq=False)
class Plan:
    """The proved list, and what runs it in this process: the ranks `here`, their stages `local`.

    `holders` have the parameters of each stage: the loss's are trained with the last one. `tied`
    are the ties with the copies that are here. `alike` is what all processes must be given alike.
    """

    asked: Arguments
    schedule: Schedule
    grid: Grid
    here: tuple[int, ...]
    holders: Mapping[int, nn.Module]
    device: torch.device
    recomputed: Collection[int]
    tied: Sequence[tuple[TieOf, Mapping[int, nn.Parameter]]]
    timeout: timedelta | None

    @property
    def local(self) -> tuple[int, ...]:
        """The stages of the ranks here."""
        return tuple(stage for rank in self.here for stage in self.schedule.stages_of(rank))

    @property
    def alike(self) -> dict[str, object]:
        """What all processes must be given alike, by the argument's name."""
        return {
            "optimizer": "None" if self.asked.optimizer is None else "given",
            "clip_grad_norm": self.asked.clip_grad_norm,
            "ties": [[*map(tuple, tie)] for tie in self.asked.ties],
            "mesh": self.grid.processes,
            "seed": self.asked.seed,
            "step": self.asked.step,
        }

    def versions(self, schedule: Schedule) -> dict[int, StageVersions]:
        """Which weight versions a list reads, of the stages here."""
        return {
            stage: versions
            for rank in self.here
            for stage, versions in weight_versions(schedule.columns, rank).items()
        }


def planned(asked: Arguments) -> Plan:
    """Prove the schedule and see whether all fits; no process group is touched.

    Raises ScheduleError where the schedule is wrong, ExecutionError where something does not fit.
    """
    check_arguments(
        asked.schedule,
        asked.stages,
        asked.loss_fn,
        asked.optimizer,
        asked.boundaries,
        asked.clip_grad_norm,
        asked.ties,
        asked.seed,
        asked.step,
    )
    timeout = timeout_of(asked.timeout)
    schedule = proved(asked.schedule, [[stage for stage, _ in tie] for tie in asked.ties])
    ranks = schedule.ranks
    place = Grid(((0,) * ranks,)) if asked.in_process else grid(ranks, asked.mesh)
    if place.pipelines > 1:
        schedule = insert_reductions(schedule)
    _check_updates(asked, schedule)
    here = tuple(range(ranks)) if asked.in_process else (place.rank,)
    local = tuple(stage for rank in here for stage in schedule.stages_of(rank))
    check_stages(schedule, asked.stages, local, None if asked.in_process else place.rank)
    holders = _holders(asked, schedule.stages - 1)
    check_modules(holders)
    return Plan(
        asked,
        schedule,
        place,
        here,
        holders,
        device_of(holders),
        recomputed_stages(asked.recompute, schedule.stages),
        tied_copies(schedule, asked.stages, asked.ties),
        timeout,
    )


def optimizers_of(plan: Plan) -> dict[int, torch.optim.Optimizer]:
    """The optimisers of the stages here that have parameters."""
    make = plan.asked.optimizer
    if make is None:
        return {}
    held = {stage: list(plan.holders[stage].parameters()) for stage in plan.local}
    return {s: check_optimizer(make(parameters), s) for s, parameters in held.items() if parameters}


def _check_updates(asked: Arguments, schedule: Schedule) -> None:
    versions = [weight_versions(schedule.columns, rank) for rank in range(schedule.ranks)]
    check_stepping(schedule, versions, asked.optimizer is not None)
    if asked.clip_grad_norm is not None:
        check_clipping(schedule)
    if asked.optimizer is None and (asked.ties or asked.clip_grad_norm is not None):
        raise ExecutionError(
            "ties= and clip_grad_norm= act between the gradients and the step, so they need an "
            "optimizer"
        )


def _holders(asked: Arguments, last: int) -> dict[int, nn.Module]:
    holders = dict(asked.stages)
    if isinstance(asked.loss_fn, nn.Module) and last in holders:
        holders[last] = nn.ModuleDict({"stage": holders[last], "loss": asked.loss_fn})
    return holders
