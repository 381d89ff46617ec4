"""The shapes in which each target of a comparison is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeAlias

import attrs

from schedir.errors import LoadError
from schedir.ir import Schedule
from schedir.library import (
    DEFAULT_MICROBATCHES,
    DEFAULT_RANKS,
    Costs,
    Generator,
    GeneratorFunction,
    Parameter,
    find,
    is_list,
    load,
)
from schedir.simulator import CostModel, Timeline, load_timelines, median_step, recut

Target: TypeAlias = str | Path | Generator | GeneratorFunction | Schedule | Timeline
"""What names, or is, something to compare."""
SWEPT = ("microbatches", "chunks")
"""What a comparison may go through several values of."""
_RUN = ".json"


@attrs.frozen
class Shapes:
    """The shapes to try: `swept` has several values of what it names, the rest has one or is open.

    Raises ValueError or TypeError for what can't be swept.
    """

    ranks: int | None
    microbatches: int | None
    chunks: int | None
    swept: Mapping[str, Sequence[int]]
    parameters: Mapping[str, Parameter]
    costs: Costs = None

    def __attrs_post_init__(self) -> None:
        for name, values in self.swept.items():
            if name not in SWEPT:
                raise ValueError(f"{name!r} can't be swept; there are {', '.join(SWEPT)}")
            if getattr(self, name) is not None:
                raise ValueError(f"{name} has one value and is swept too: leave one of them out")
            if not values or len(set(values)) < len(values):
                raise ValueError(f"sweep of {name}: give some values, each once, not {values!r}")
            for value in values:
                if type(value) is not int or value < 1:
                    raise ValueError(f"sweep of {name}: {value!r} is no int >= 1")

    def several(self, name: str) -> Sequence[int | None]:
        """The values of `microbatches` or `chunks` to try."""
        return self.swept.get(name, [getattr(self, name)])


@attrs.frozen
class Variant:
    """A target in one shape; `make` makes it, or raises LoadError or ParseError where it can't."""

    name: str
    microbatches: int
    chunks: int | None
    make: Callable[[], Schedule | Timeline]


def variants(targets: Iterable[Target], shapes: Shapes) -> list[Variant]:
    """All targets in all shapes. What has a shape of its own, a list or a timeline, is one alone,
    and gives what is open of the others' shapes, where all such agree.

    Raises LoadError or ParseError where a target can't be found or read, or where no generator has
    one of the parameters; TypeError where `targets` is a single one.
    """
    if isinstance(targets, (str, Path)):
        raise TypeError(f"targets are several: [{str(targets)!r}]")
    found = [(target, _found(target)) for target in targets]
    if not found:
        raise LoadError("there is nothing to compare: name some schedules")
    shapes = _completed(shapes, [_list_of(each) for _, each in found])
    generators = [each for _, each in found if isinstance(each, Generator)]
    for name in shapes.parameters:
        if not any(_has(generator, name) for generator in generators):
            raise LoadError(f"no schedule here has a parameter {name!r}")
    return [variant for target, each in found for variant in _shaped(target, each, shapes)]


def _list_of(found: Generator | Schedule | Timeline) -> Schedule | None:
    """The list that something is or has; None for what has yet to be given a shape."""
    if isinstance(found, Timeline):
        return found.schedule
    return found if isinstance(found, Schedule) else None


def _completed(shapes: Shapes, lists: Iterable[Schedule | None]) -> Shapes:
    fixed = [each for each in lists if each is not None]
    for name in ("ranks", "microbatches"):
        had = {getattr(each, name) for each in fixed}
        if getattr(shapes, name) is None and name not in shapes.swept and len(had) == 1:
            shapes = attrs.evolve(shapes, **{name: had.pop()})
    return shapes


def _found(target: Target) -> Generator | Schedule | Timeline:
    if isinstance(target, (Schedule, Timeline)):
        return target
    if isinstance(target, (str, Path)):
        if str(target).endswith(_RUN):
            timelines = load_timelines(target)
            if not timelines:
                raise LoadError(f"{target} holds no timeline")
            return median_step(timelines)
        if is_list(target):
            return load(target)
    return find(target)


def _shaped(
    target: Target, found: Generator | Schedule | Timeline, shapes: Shapes
) -> Iterator[Variant]:
    named = str(target) if isinstance(target, (str, Path)) else None
    if not isinstance(found, Generator):
        schedule = found.schedule if isinstance(found, Timeline) else found
        name = named or schedule.name
        yield Variant(name, schedule.microbatches, None, partial(_as_it_is, name, found, shapes))
        return
    own = {key: value for key, value in shapes.parameters.items() if _has(found, key)}
    for microbatches, chunks in product(*map(shapes.several, SWEPT)):
        make = partial(
            load,
            found,
            ranks=shapes.ranks,
            microbatches=microbatches,
            chunks=chunks,
            costs=_seen(shapes),
            **own,
        )
        many = DEFAULT_MICROBATCHES if microbatches is None else microbatches
        yield Variant(named or found.name, many, chunks or found.chunks, make)


def _seen(shapes: Shapes) -> Costs:
    """The costs that generators see which are made for given ones: of the same model."""
    if isinstance(shapes.costs, CostModel):
        return partial(recut, shapes.costs, of=shapes.ranks or DEFAULT_RANKS)
    return shapes.costs


def _as_it_is(name: str, found: Schedule | Timeline, shapes: Shapes) -> Schedule | Timeline:
    schedule = found.schedule if isinstance(found, Timeline) else found
    for what, asked, has in (
        ("ranks", shapes.ranks, schedule.ranks),
        ("microbatches", shapes.microbatches, schedule.microbatches),
    ):
        if asked not in (None, has):
            raise LoadError(f"{name} has {has} {what}, not {asked}")
    return found


def _has(generator: Generator, parameter: str) -> bool:
    return generator.takes_any_parameter or parameter in generator.parameters
