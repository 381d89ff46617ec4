"""What the author of a schedule imports: the shape to fill, and the decorator that declares."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
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
    """

    def declare(function: GeneratorFunction) -> Generator:
        return Generator(function, name, tuple(aliases), placement, chunks)

    return declare
