"""What the author of a schedule imports: the shape to fill, named placements, groups of
microbatches, and the decorator that declares a schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import gcd
from typing import Any, TypeAlias

import attrs

from schedir.errors import LoadError
from schedir.ir import Entry, Placed, Placement

Parameter: TypeAlias = str | int | bool | None

GeneratorFunction: TypeAlias = Callable[..., Iterable[Entry]]
"""What an author writes: `(pipe, rank, **parameters)` → the list of one rank."""


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(slots=False)
class Pipeline(Placed):
    """The shape that a generator fills: `ranks` × `chunks` stages and `microbatches`.

    `placement[stage]` names the ranks that hold the stage.

    >>> import schedir
    >>> placement = ((0,), (1,), (0,), (1,))
    >>> pipe = schedir.Pipeline(ranks=2, microbatches=8, chunks=2, placement=placement)
    >>> pipe.stages, pipe.stages_of(1)
    (4, (1, 3))
    """

    ranks: int
    microbatches: int
    chunks: int
    placement: Placement


# Stages by rank, 2 chunks on 4 ranks (mirrored: one stage for each rank):
#
#              wrapped    wave     mirrored
#     rank 0   0  4       0  7     0  3
#     rank 1   1  5       1  6     1  2
#     rank 2   2  6       2  5     2  1
#     rank 3   3  7       3  4     3  0


def wrapped(pipe: Pipeline) -> Placement:
    """Stage s on rank s mod P: after the last rank comes the first one again (the default).

    >>> import schedir
    >>> schedir.wrapped(schedir.Pipeline(ranks=2, microbatches=8, chunks=2, placement=()))
    ((0,), (1,), (0,), (1,))
    """
    return tuple((stage % pipe.ranks,) for stage in range(pipe.ranks * pipe.chunks))


def wave(pipe: Pipeline) -> Placement:
    """Down the ranks, then up again, then down: the last rank hands its output to itself.

    Two chunks give the V of zero bubble's ZBV (Qi et al. 2024, arXiv 2405.15362), more chunks the
    wave of Hanayo (Liu et al., SC 2023, arXiv 2308.15762).

    >>> import schedir
    >>> schedir.wave(schedir.Pipeline(ranks=2, microbatches=8, chunks=2, placement=()))
    ((0,), (1,), (1,), (0,))
    """
    turned = range(pipe.ranks - 1, -1, -1)
    return tuple(
        (rank,)
        for chunk in range(pipe.chunks)
        for rank in (turned if chunk % 2 else range(pipe.ranks))
    )


def mirrored(pipe: Pipeline) -> Placement:
    """Stage s on ranks s and P - 1 - s: one pipeline runs down the ranks, one up.

    Every rank has two stages; the middle one of an odd number of ranks has one. Chimera (Li and
    Hoefler 2021, arXiv 2107.06925) and DualPipe use this placement.

    >>> import schedir
    >>> schedir.mirrored(schedir.Pipeline(ranks=3, microbatches=8, chunks=1, placement=()))
    ((0, 2), (1,), (0, 2))
    """
    last = pipe.ranks - 1
    return tuple(tuple(sorted({rank, last - rank})) for rank in range(pipe.ranks))


def equal_groups(pipe: Pipeline) -> int:
    """The default number of microbatches in a group: max(1, microbatches // ranks) equal groups.

    If the microbatches don't divide into so many groups, a group has as many microbatches as there
    are ranks, and the last group is shorter.

    >>> import schedir
    >>> schedir.equal_groups(schedir.Pipeline(ranks=4, microbatches=10, chunks=2, placement=()))
    5
    """
    rounds = max(1, pipe.microbatches // pipe.ranks)
    return pipe.ranks if pipe.microbatches % rounds else pipe.microbatches // rounds


def slots_in_groups(pipe: Pipeline, group_size: int, apart: int = 1) -> Callable[[int, int], int]:
    """The slot of each (chunk, microbatch) on a rank that runs the microbatches in groups.

    A rank takes groups of `group_size` microbatches one after the other, and within a group one
    chunk after the other. The function that this returns takes a chunk and a microbatch, both from
    0. A microbatch's slots in two consecutive chunks are at least `apart` slots apart. That may
    take several groups; then a chunk's slots move on after every cycle, so that no two are the
    same. A short last group leaves slots empty.

    Raises ValueError if `group_size` is not an int >= 1.

    >>> import schedir
    >>> pipe = schedir.Pipeline(ranks=2, microbatches=4, chunks=2, placement=())
    >>> slot = schedir.slots_in_groups(pipe, group_size=2)
    >>> [[slot(chunk, m) for m in range(4)] for chunk in range(2)]
    [[0, 1, 4, 5], [2, 3, 6, 7]]
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
    """A generator function and what `@schedule` declares about it. Calling it calls the function.

    >>> import schedir
    >>> @schedir.schedule("one-by-one")
    ... def one_by_one(pipe, rank):
    ...     "One microbatch after the other."
    ...     for m in range(pipe.microbatches):
    ...         yield schedir.forward(rank, m)
    ...         yield schedir.backward(rank, m)
    >>> isinstance(one_by_one, schedir.Generator), one_by_one.name, one_by_one.summary
    (True, 'one-by-one', 'One microbatch after the other.')
    """

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
        """The parameters of the function and of its placement, beyond the pipeline, the rank and
        the costs.

        Raises LoadError for a function whose parameters can't be read.
        """
        return {name: asked for name, asked in self._asked.items() if name != "costs"}

    @property
    def sees_costs(self) -> bool:
        """True if the function or its placement has a parameter `costs`, which gets the
        CostModel."""
        return "costs" in self._asked

    @property
    def takes_any_parameter(self) -> bool:
        """True if the function or its placement ends in `**parameters`."""
        return takes_any(self._asked)

    @property
    def _asked(self) -> dict[str, inspect.Parameter]:
        return {**self.asked_by(self.placement), **self.asked_by(self.function)}

    def asked_by(self, function: Callable[..., Any] | None) -> dict[str, inspect.Parameter]:
        """The parameters of the function, or of the placement, after the positional ones."""
        if function is None:
            return {}
        try:
            signature = inspect.signature(function)
        except ValueError as error:  # some built-in functions have none
            raise LoadError(
                f"{self.name} is not a function that yields actions: {error}"
            ) from error
        given = 2 if function is self.function else 1
        return dict([*signature.parameters.items()][given:])


def takes_any(parameters: dict[str, inspect.Parameter]) -> bool:
    """True if the parameters end in `**parameters`."""
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def schedule(
    name: str,
    *,
    aliases: Sequence[str] = (),
    placement: PlacementFunction | None = None,
    chunks: int = 1,
) -> Callable[[GeneratorFunction], Generator]:
    """Declare a function `(pipe, rank, **parameters)` that yields one rank's actions.

    `placement` maps a Pipeline of the requested shape to the rank (or ranks) of every stage; by
    default stage s lives on rank s mod P. `chunks` is the default number of stages per rank. A
    function with a parameter `costs` gets the CostModel that the schedule is made for, by default
    the textbook's. A placement may take `costs` too (of as many stages as the default placement
    has), and parameters that the user sets by name: `(pipe, *, costs, replicas=None)`.

    Raises TypeError if the name is left out, as in a bare `@schedule`, or for another argument of
    the wrong type.

    >>> import schedir
    >>> @schedir.schedule("one-by-one")
    ... def one_by_one(pipe, rank):
    ...     for m in range(pipe.microbatches):
    ...         yield schedir.forward(rank, m)
    ...         yield schedir.backward(rank, m)
    >>> schedir.build(one_by_one, ranks=2, microbatches=4)
    <Schedule one-by-one: 2 ranks, 2 stages, 4 microbatches, 32 actions>
    """
    given: object = name
    if not isinstance(given, str):
        function = getattr(given, "__name__", "mine")
        raise TypeError(f'@schedule needs the name of the schedule: @schedule("{function}")')
    if placement is not None and not callable(placement):
        raise TypeError(
            f"placement must be a function, as in placement=schedir.wave, not {placement!r}"
        )
    if type(chunks) is not int or chunks < 1:
        raise TypeError(f"chunks must be an int >= 1, not {chunks!r}")
    if isinstance(aliases, str):
        raise TypeError(f"aliases must be a list of names: aliases=[{aliases!r}]")
    return partial(Generator, name=name, aliases=tuple(aliases), placement=placement, chunks=chunks)
