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

    `layers` are their names in the whole model, `parameters` how many numbers they hold, and `cost`
    what the cut went by, where that was something else. `kinds` are the layers' classes, or what
    functions are called, where that is told.
    """

    layers: tuple[str, ...]
    parameters: int
    cost: float | None = None
    kinds: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class Stages(Mapping[int, nn.Module]):
    """The stages that this process holds: `stages=` of an executor.

    Their state dicts have the names of the whole model. `ties` are the parameters that its stages
    share: `ties=` of the executor. `summaries` says what each of all stages got; printed, it is a
    table.
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

    `held` are a stage, which parameter it holds, and the parameter's name there; of several names
    of one parameter in a stage, the first counts.
    """
    names: dict[Hashable, dict[int, str]] = {}
    for stage, parameter, name in held:
        names.setdefault(parameter, {}).setdefault(stage, name)
    return tuple(sorted(of.items()) for of in names.values() if len(of) > 1)


def held_stages(schedule: Schedule, rank: int | None = None) -> tuple[int, ...]:
    """List the stages that this process holds.

    They are those of `rank`, by default the rank that torchrun gave it, and all where nobody did,
    as for `Executor(…, in_process=True)`.

    Raises ExecutionError where the number of processes is not that of the schedule's ranks, so that
    only the caller can know the rank: that of a mesh is `mesh.get_local_rank("pp")`.
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
