"""The parts of an uncut model, and the stages that are made of them.

layers of a list, or ─▶ parts ─▶ where to cut (cuts) ─▶ stages, ties, summaries
a Hugging Face model    alike on every process          the modules of this process alone
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import attrs
from torch import nn

from schedir.errors import ExecutionError
from schedir.ir import Schedule
from schedir.runtime.arguments import TieOf
from schedir.runtime.memory import shared_memory

Span = tuple[int, int]
"""The parts of one stage: its first, and the one after its last."""


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


@attrs.frozen
class Holding:
    """A parameter in one part: its identity, its name in the whole model, and its shape."""

    identity: Hashable
    name: str
    shape: tuple[int, ...]
    size: int


@attrs.frozen(eq=False)
class Part:
    """What is never cut: a layer of a list, or a block of a Hugging Face model.

    `layers` are the names of its layers, with their classes. Of several, `name` is the one that the
    part is known by. `modules` are the ones that were given, by name; layers that are made later
    are not among them. `statistics` identifies the running statistics that it keeps.
    """

    name: str
    layers: Mapping[str, str]
    holdings: tuple[Holding, ...]
    modules: Mapping[str, nn.Module]
    statistics: frozenset[Hashable] = frozenset()

    @property
    def kind(self) -> str:
        """The class that it is known by."""
        return self.layers[self.name]

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


@attrs.frozen(eq=False)
class Uncut:
    """A model that is not cut yet: its parts in order, and what makes stages of them.

    `make(spans, stages)` yields the numbers and modules of some stages, one after the other.
    """

    parts: Sequence[Part]
    make: Callable[[Sequence[Span], Iterable[int]], Iterator[tuple[int, nn.Module]]]


def holdings_of(
    named: Iterable[tuple[str, nn.Parameter]], prefix: str = "", owner: Hashable | None = None
) -> tuple[Holding, ...]:
    """The parameters of a part, given by name; the whole model's names begin with `prefix`.

    Without an `owner` they may be shared with other parts; with one they are known by it.
    """
    found = []
    first: dict[int, str] = {}
    for name, parameter in named:
        same = first.setdefault(id(parameter), name)
        identity = id(parameter) if owner is None else (owner, same)
        # A lazy parameter has no shape yet; the executor says so.
        lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
        shape = () if lazy else tuple(parameter.shape)
        found.append(Holding(identity, prefix + name, shape, 0 if lazy else parameter.numel()))
    return tuple(found)


def parameters_of(parts: Iterable[Part]) -> int:
    """How many numbers the parameters of some parts hold; shared parameters count once."""
    return sum({h.identity: h.size for part in parts for h in part.holdings}.values())


def ties_across(parts: Sequence[Part], spans: Sequence[Span]) -> tuple[TieOf, ...]:
    """The parameters that several stages hold, by stage and name.

    Raises ExecutionError if stages share running statistics, or memory that is no parameter.
    """
    kept: dict[Hashable, tuple[int, Part]] = {}
    given: dict[int, nn.Module] = {}
    for stage, span in enumerate(spans):
        own = parts[slice(*span)]
        given[stage] = nn.ModuleList(module for part in own for module in part.modules.values())
        for part in own:
            for statistic in part.statistics:
                other, first = kept.setdefault(statistic, (stage, part))
                if other != stage:
                    raise ExecutionError(
                        f"layers {first} and {part} share the running statistics of a "
                        f"normalisation, but lie on stages {other} and {stage}, and each would "
                        "keep its own; put both layers on one stage"
                    )
    held = [
        (stage, one.identity, one.name)
        for stage, span in enumerate(spans)
        for part in parts[slice(*span)]
        for one in part.holdings
    ]
    ties = ties_of(held)
    tied = {(stage, name) for tie in ties for stage, name in tie}
    known = [x for stage, x, name in held if isinstance(x, int) and (stage, name) in tied]
    if found := shared_memory(given, known):
        raise ExecutionError(
            f"stages {found[0].stage} and {found[1].stage} share the memory of a tensor of "
            f"shape {list(found[0].tensor.shape)}, but not as one parameter; let both have the "
            "same nn.Parameter, which becomes a tie, or give each layer its own copy"
        )
    return ties


def ties_of(held: Iterable[tuple[int, Hashable, str]]) -> tuple[TieOf, ...]:
    """Find the parameters that several stages hold, by stage and name.

    Each entry of `held` is (stage, identity of a parameter, the parameter's name there). If a stage
    has several names for a parameter, the first counts.
    """
    names: dict[Hashable, dict[int, str]] = {}
    for stage, parameter, name in held:
        names.setdefault(parameter, {}).setdefault(stage, name)
    return tuple(sorted(of.items()) for of in names.values() if len(of) > 1)


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that a model has under several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def own_modules(
    parts: Sequence[Part], spans: Sequence[Span], stages: Iterable[int]
) -> dict[int, dict[str, nn.Module]]:
    """The given modules of each stage, by name, with parameters of the stage's own.

    If stages share a parameter, the first one keeps the original. The others get equal copies, in
    copied modules whose other tensors are the same.
    """
    owner: dict[int, int] = {}
    found: dict[int, dict[str, nn.Module]] = {}
    for stage in stages:
        memo: dict[int, object] = {}
        found[stage] = {}
        for name, module in _given(parts[slice(*spans[stage])]):
            own = {id(p): owner.setdefault(id(p), stage) == stage for p in module.parameters()}
            if not all(own.values()):
                tensors = (*module.parameters(), *module.buffers())
                memo.update((id(x), x) for x in tensors if own.get(id(x), True))
            found[stage][name] = module if all(own.values()) else copy.deepcopy(module, memo)
    return found


def _given(parts: Iterable[Part]) -> Iterator[tuple[str, nn.Module]]:
    for part in parts:
        yield from part.modules.items()


def held_stages(stages: Schedule | int, rank: int | None = None) -> Sequence[int]:
    """List the stages that this process holds: those of `rank` in a schedule, or all of a number.

    By default `rank` is the one that torchrun gave this process. Without torchrun it lists all
    stages, as `Executor(…, in_process=True)` needs them.

    Raises ExecutionError if the number of processes is not the schedule's number of ranks: then
    pass `rank`, which for a mesh is `mesh.get_local_rank("pp")`.
    """
    if not isinstance(stages, Schedule):
        if rank is not None:
            raise ExecutionError(
                "rank= says which rank's stages of a schedule to make, but a number has no ranks; "
                "pass the schedule in its place"
            )
        return range(stages)
    if rank is None:
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if processes == 1:
            return range(stages.stages)
        if processes != stages.ranks:
            raise ExecutionError(
                f"the schedule has {stages.ranks} ranks, but {processes} processes run; for "
                'several pipelines pass rank=mesh.get_local_rank("pp")'
            )
        rank = int(os.environ["RANK"])
    if rank not in range(stages.ranks):
        raise ExecutionError(f"there is no rank {rank!r}, only 0..{stages.ranks - 1}")
    return stages.stages_of(rank)
