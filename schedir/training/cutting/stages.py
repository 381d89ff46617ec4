"""The parts of an uncut model, and the stages that are made of them.

layers of a list, or ─▶ parts ─▶ where to cut (cuts) ─▶ stages, ties, summaries
a Hugging Face model    alike on every process          the modules of this process alone
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import attrs
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

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
    if any(of.kinds):
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
    """A tensor in one part: its identity, its name in the whole model, and its shape."""

    identity: Hashable
    name: str
    shape: tuple[int, ...]


@attrs.frozen(eq=False)
class Part:
    """What is never cut: a layer of a list, or a block of a Hugging Face model.

    `layers` are the names of its layers, with their classes. Of several, `name` is the one that the
    part is known by. `holdings` are its parameters, and `statistics` its running statistics.
    `modules` are the ones that were given, by name; layers that are made later are not among them.
    """

    name: str
    layers: Mapping[str, str]
    holdings: tuple[Holding, ...]
    modules: Mapping[str, nn.Module]
    statistics: tuple[Holding, ...] = ()

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
    named: Iterable[tuple[str, Tensor]], prefix: str = "", owner: Hashable | None = None
) -> tuple[Holding, ...]:
    """The tensors of a part, given by name; the whole model's names begin with `prefix`.

    Without an `owner` they may be shared with other parts; with one they are known by it.
    """
    found = []
    first: dict[int, str] = {}
    for name, tensor in named:
        same = first.setdefault(id(tensor), name)
        identity = id(tensor) if owner is None else (owner, same)
        # A lazy parameter has no shape yet; the executor says so.
        shape = (0,) if is_lazy(tensor) else tuple(tensor.shape)
        found.append(Holding(identity, prefix + name, shape))
    return tuple(found)


def summary_of(parts: Sequence[Part], costs: Sequence[float] | None = None) -> StageSummary:
    """The summary of a stage, if these are its parts."""
    layers = {name: kind for part in parts for name, kind in part.layers.items()}
    cost = None if costs is None else sum(costs)
    return StageSummary(tuple(layers), parameters_of(parts), cost, tuple(layers.values()))


def parameters_of(parts: Iterable[Part]) -> int:
    """How many numbers the parameters of some parts hold; shared parameters count once."""
    shapes = {held.identity: held.shape for part in parts for held in part.holdings}
    return sum(map(math.prod, shapes.values()))


def ties_across(parts: Sequence[Part], spans: Sequence[Span]) -> tuple[TieOf, ...]:
    """The parameters that several stages hold, by stage and name.

    Raises ExecutionError if stages share running statistics, or memory that is no parameter.
    """
    placed = [(stage, part) for stage, span in enumerate(spans) for part in parts[slice(*span)]]
    for copies in _shared((stage, part.statistics) for stage, part in placed).values():
        (one, first), (other, second) = copies[:2]
        raise ExecutionError(
            f"stages {one} and {other} share the running statistics of a normalisation, {first} "
            f"and {second}, and each would keep its own; put both on one stage"
        )
    ties = _shared((stage, part.holdings) for stage, part in placed)
    given = {
        stage: nn.ModuleList(
            module for part in parts[slice(*span)] for module in part.modules.values()
        )
        for stage, span in enumerate(spans)
    }
    if found := shared_memory(given, [tied for tied in ties if isinstance(tied, int)]):
        raise ExecutionError(
            f"stages {found[0].stage} and {found[1].stage} share the memory of a tensor of "
            f"shape {list(found[0].tensor.shape)}, but not as one parameter; let both have the "
            "same nn.Parameter, which becomes a tie, or give each layer its own copy"
        )
    return tuple(ties.values())


def _shared(held: Iterable[tuple[int, Iterable[Holding]]]) -> dict[Hashable, TieOf]:
    """The tensors that several stages hold, by identity: the stages, and the first name in each."""
    names: dict[Hashable, dict[int, str]] = {}
    for stage, holdings in held:
        for one in holdings:
            names.setdefault(one.identity, {}).setdefault(stage, one.name)
    return {tensor: sorted(of.items()) for tensor, of in names.items() if len(of) > 1}


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
        for part in parts[slice(*spans[stage])]:
            for name, module in part.modules.items():
                own = {id(p): owner.setdefault(id(p), stage) == stage for p in module.parameters()}
                if not all(own.values()):
                    tensors = (*module.parameters(), *module.buffers())
                    memo.update((id(x), x) for x in tensors if own.get(id(x), True))
                    module = copy.deepcopy(module, memo)
                found[stage][name] = module
    return found


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
