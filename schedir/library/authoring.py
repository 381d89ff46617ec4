"""What the author of a schedule imports: the shape to fill, and the decorator that declares."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from schedir.errors import LoadError
from schedir.ir import Entry, Placement, stages_by_rank

if TYPE_CHECKING:
    from schedir.simulator import CostModel

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


_COSTS = "costs"

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
        own = {**self._asked_by_placement, **self._asked_by_function}
        return {name: parameter for name, parameter in own.items() if name != _COSTS}

    @property
    def sees_costs(self) -> bool:
        """Whether the function or its placement has a parameter `costs`, for the CostModel that the
        schedule is made for."""
        return _COSTS in self._asked_by_function or _COSTS in self._asked_by_placement

    @property
    def _asked_by_function(self) -> dict[str, inspect.Parameter]:
        return self._asked_by(self.function, 2)

    @property
    def _asked_by_placement(self) -> dict[str, inspect.Parameter]:
        return {} if self.placement is None else self._asked_by(self.placement, 1)

    def _asked_by(self, function: Callable[..., Any], given: int) -> dict[str, inspect.Parameter]:
        """The parameters of a function after those that it is given anyway."""
        try:
            signature = inspect.signature(function)
        except ValueError as error:  # some built-in functions have none
            raise LoadError(f"{self.name} is no function that yields actions: {error}") from error
        return dict([*signature.parameters.items()][given:])

    def for_function(
        self, costs: Callable[[], CostModel], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What the function asks for by name, of the costs and of what the user has given."""
        return _chosen(self._asked_by_function, costs, given)

    def for_placement(
        self, costs: Callable[[], CostModel], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What the placement asks for by name."""
        return _chosen(self._asked_by_placement, costs, given)

    @property
    def takes_any_parameter(self) -> bool:
        """Whether the function ends in `**parameters`."""
        kinds = {parameter.kind for parameter in self.parameters.values()}
        return inspect.Parameter.VAR_KEYWORD in kinds


def _chosen(
    asked: Mapping[str, inspect.Parameter], costs: Callable[[], CostModel], given: Mapping[str, Any]
) -> dict[str, Any]:
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in asked.values())
    found = {name: value for name, value in given.items() if takes_any or name in asked}
    return {**found, _COSTS: costs()} if _COSTS in asked else found


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
