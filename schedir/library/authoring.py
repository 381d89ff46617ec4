"""What the author of a schedule imports: the shape to fill, the placements that have a name, groups
of microbatches, and the decorator that declares."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from math import gcd
from typing import Any, TypeAlias

import attrs

from schedir.errors import LoadError
from schedir.ir import Entry, Placement, stages_by_rank

Parameter: TypeAlias = str | int | bool | None

GeneratorFunction: TypeAlias = Callable[..., Iterable[Entry]]
"""What an author writes: `(pipe, rank, **parameters)` → the list of one rank."""


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(slots=False)
class Pipeline:
    """The shape that a generator fills: `ranks` × `chunks` stages and `microbatches`."""

    ranks: int
    microbatches: int
    chunks: int
    placement: Placement

    @property
    def stages(self) -> int:
        """The number of stages, over all ranks."""
        return len(self.placement)

    @cached_property
    def _stages_by_rank(self) -> dict[int, tuple[int, ...]]:
        return stages_by_rank(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending: its model chunks."""
        return self._stages_by_rank.get(rank, ())


# Stages by rank, 2 chunks on 4 ranks (mirrored: one stage for each rank):
#
#              wrapped    wave     mirrored
#     rank 0   0  4       0  7     0  3
#     rank 1   1  5       1  6     1  2
#     rank 2   2  6       2  5     2  1
#     rank 3   3  7       3  4     3  0


def wrapped(pipe: Pipeline) -> Placement:
    """Stage s on rank s mod P: after the last rank comes the first one again (the default)."""
    return tuple((stage % pipe.ranks,) for stage in range(pipe.ranks * pipe.chunks))


def wave(pipe: Pipeline) -> Placement:
    """Down the ranks, and up again, and down: the last rank hands to itself.

    Two chunks are the V of zero bubble's ZBV (Qi et al. 2024, arXiv 2405.15362), more
    the wave of Hanayo (Liu et al., SC 2023, arXiv 2308.15762).
    """
    turned = range(pipe.ranks - 1, -1, -1)
    return tuple(
        (rank,)
        for chunk in range(pipe.chunks)
        for rank in (turned if chunk % 2 else range(pipe.ranks))
    )


def mirrored(pipe: Pipeline) -> Placement:
    """Stage s on rank s and on rank P - 1 - s: one pipeline down the ranks, one up (Chimera, Li and
    Hoefler 2021, arXiv 2107.06925; DualPipe). Every rank has two stages; the middle one of an odd
    number of ranks has a single one."""
    last = pipe.ranks - 1
    return tuple(tuple(sorted({rank, last - rank})) for rank in range(pipe.ranks))


def equal_groups(pipe: Pipeline) -> int:
    """The microbatches of a group where nobody says: of max(1, microbatches // ranks) equal groups;
    where that does not divide, as many as ranks, the last group being shorter."""
    rounds = max(1, pipe.microbatches // pipe.ranks)
    return pipe.ranks if pipe.microbatches % rounds else pipe.microbatches // rounds


def slots_in_groups(pipe: Pipeline, group_size: int, apart: int = 1) -> Callable[[int, int], int]:
    """The slot of (chunk, microbatch), both from 0, on a rank that takes groups of `group_size`
    microbatches one after the other, within a group chunk by chunk.

    From chunk to chunk of a microbatch it is `apart` slots at least. That may take several groups:
    then a chunk's slots are moved on after every cycle, lest they be those of an earlier one. The
    slots of what a short last group lacks stay empty.

    Raises ValueError where `group_size` is no int >= 1.
    """
    if type(group_size) is not int or group_size < 1:
        raise ValueError(f"group_size must be an int >= 1, not {group_size!r}")
    size = min(group_size, pipe.microbatches)  # beyond, all stays the same
    stride = -(-apart // size) * size
    cycle = pipe.chunks // gcd(pipe.chunks, stride // size)

    def slot(chunk: int, microbatch: int) -> int:
        group, member = divmod(microbatch, size)
        return (group * pipe.chunks + chunk // cycle) * size + chunk * stride + member

    return slot


PlacementFunction: TypeAlias = Callable[..., Sequence[int | Sequence[int]]]
"""`(pipe, **parameters)` → the rank, or ranks, of every stage of a pipeline of that shape."""


@attrs.frozen
class Generator:
    """A generator function and what `@schedule` says of it. Calling it calls the function."""

    function: GeneratorFunction
    name: str
    aliases: tuple[str, ...] = ()
    placement: PlacementFunction | None = None
    chunks: int = 1

    def __call__(self, pipe: Pipeline, rank: int, /, **parameters: Any) -> Iterable[Entry]:
        """The list of `rank`."""
        return self.function(pipe, rank, **parameters)

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters of its own and of its placement, beyond the pipeline, the rank and the
        costs.

        Raises LoadError for a function that does not tell its parameters.
        """
        return {name: asked for name, asked in self._asked.items() if name != "costs"}

    @property
    def sees_costs(self) -> bool:
        """Whether the function or its placement has a parameter `costs`, for the CostModel that the
        schedule is made for."""
        return "costs" in self._asked

    @property
    def takes_any_parameter(self) -> bool:
        """Whether the function ends in `**parameters`."""
        return takes_any(self._asked)

    @property
    def _asked(self) -> dict[str, inspect.Parameter]:
        return {**self.asked_by(self.placement), **self.asked_by(self.function)}

    def asked_by(self, function: Callable[..., Any] | None) -> dict[str, inspect.Parameter]:
        """The parameters of the function, or of the placement, after those that each is given."""
        if function is None:
            return {}
        try:
            signature = inspect.signature(function)
        except ValueError as error:  # some built-in functions have none
            raise LoadError(f"{self.name} is no function that yields actions: {error}") from error
        given = 2 if function is self.function else 1
        return dict([*signature.parameters.items()][given:])


def takes_any(parameters: dict[str, inspect.Parameter]) -> bool:
    """Whether parameters end in `**parameters`."""
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def schedule(
    name: str,
    *,
    aliases: Sequence[str] = (),
    placement: PlacementFunction | None = None,
    chunks: int = 1,
) -> Callable[[GeneratorFunction], Generator]:
    """Declare a function `(pipe, rank, **parameters)` that yields one rank's actions.

    `placement` maps a Pipeline of the asked-for shape to the rank (or ranks) of every stage; by
    default stage s lives on rank s mod P. `chunks` is the number of stages per rank where the
    user names none. A function with a parameter `costs` is given the CostModel that the schedule
    is to be good under, by default the textbook's. A placement may ask for those as well, of as
    many stages as it would have by default, and for parameters that the user sets by name:
    `(pipe, *, costs, replicas=None)`.

    Raises TypeError where the name is left out, as in a bare `@schedule`.
    """
    given: object = name
    if not isinstance(given, str):
        function = getattr(given, "__name__", "mine")
        raise TypeError(f'@schedule needs the name of the schedule: @schedule("{function}")')
    return partial(Generator, name=name, aliases=tuple(aliases), placement=placement, chunks=chunks)
