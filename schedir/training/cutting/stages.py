"""The stages of one process, as the executor takes them, with a summary of all stages."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import attrs
from torch import nn

from schedir.errors import ExecutionError
from schedir.ir import Schedule
from schedir.runtime.arguments import TieOf

Span = tuple[int, int]
"""The layers of one stage: its first, and the one after its last."""


@attrs.frozen
class StageSummary:
    """The layers and parameters that one stage of a model has.

    `layers` are the layers' names in the whole model, and `parameters` how many numbers they hold.
    `cost` is the stage's cost, if the cut went by costs. `kinds` are the layers' classes, or the
    names of functions, if known.
    """

    layers: tuple[str, ...]
    parameters: int
    cost: float | None = None
    kinds: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class Stages(Mapping[int, nn.Module]):
    """The stages that this process holds: the executor's `stages=`.

    >>> from torch import nn
    >>> from schedir.training import partition
    >>> stages = partition([nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)], 2)
    >>> stages.cut
    '0 to 1 | 2 to 2'
    >>> print(stages)
    stage 0: 0 Linear, 1 ReLU; 72 parameters
    stage 1: 2 Linear; 18 parameters

    It is a mapping from a stage to its module. The modules' state dicts have the names of the whole
    model. `ties` are the parameters that stages share: the executor's `ties=`. `summaries` has the
    layers and parameters of all stages, also of other processes; printing shows it.
    """

    modules: Mapping[int, nn.Module]
    ties: tuple[TieOf, ...] = ()
    summaries: tuple[StageSummary, ...] = ()

    @property
    def cut(self) -> str | None:
        """Where the model was cut, which the executor compares between ranks; None if unknown."""
        ends = [(of.layers[0], of.layers[-1]) for of in self.summaries if of.layers]
        return " | ".join(f"{first} to {last}" for first, last in ends) or None

    def __getitem__(self, stage: int) -> nn.Module:
        return self.modules[stage]

    def __iter__(self) -> Iterator[int]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)

    def __str__(self) -> str:
        return "\n".join(map(_line, range(len(self.summaries)), self.summaries))


def _line(stage: int, of: StageSummary) -> str:
    cost = "" if of.cost is None else f", cost {of.cost:g}"
    if of.kinds:
        runs = groupby(zip(of.layers, of.kinds, strict=True), key=itemgetter(1))
        layers = ", ".join(_run([name for name, _ in run], kind) for kind, run in runs)
    else:
        layers = ", ".join(of.layers)
    return f"stage {stage}: {layers}; {of.parameters:,} parameters{cost}"


def _run(names: Sequence[str], kind: str) -> str:
    """Name neighbouring layers of one kind."""
    return f"{names[0]} {kind}" if len(names) == 1 else f"{names[0]} to {names[-1]} {kind}"


def ties_of(held: Iterable[tuple[int, Hashable, str]]) -> tuple[TieOf, ...]:
    """Find the parameters that several stages hold, by stage and name.

    Each entry of `held` is (stage, identity of a parameter, the parameter's name there). If a stage
    has several names for a parameter, the first counts.
    """
    names: dict[Hashable, dict[int, str]] = {}
    for stage, parameter, name in held:
        names.setdefault(parameter, {}).setdefault(stage, name)
    return tuple(sorted(of.items()) for of in names.values() if len(of) > 1)


def held_stages(schedule: Schedule, rank: int | None = None) -> tuple[int, ...]:
    """List the stages that this process holds: those of `rank`.

    By default `rank` is the one that torchrun gave this process. Without torchrun it lists all
    stages, as `Executor(…, in_process=True)` needs them.

    Raises ExecutionError if the number of processes is not the schedule's number of ranks: then
    pass `rank`, which for a mesh is `mesh.get_local_rank("pp")`.
    """
    if rank is None:
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if processes == 1:
            return tuple(range(schedule.stages))
        if processes != schedule.ranks:
            raise ExecutionError(
                f"the schedule has {schedule.ranks} ranks, but {processes} processes run; for "
                'several pipelines pass rank=mesh.get_local_rank("pp")'
            )
        rank = int(os.environ["RANK"])
    if rank not in range(schedule.ranks):
        raise ExecutionError(f"there is no rank {rank!r}, only 0..{schedule.ranks - 1}")
    return tuple(schedule.stages_of(rank))
