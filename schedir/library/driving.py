"""Drives a generator: asks it for each rank's actions, and keeps the line that yielded each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import numpy as np

from schedir.errors import LoadError
from schedir.ir import Action, Entry, Schedule, Source, Sources, Together, columns_of
from schedir.library.authoring import Generator, Parameter, Pipeline
from schedir.library.blame import (
    blamed_line,
    call_user_code,
    describe_error,
    describe_value,
    source_of,
    user_line,
    yielding_frame,
)
from schedir.library.placements import wrapped

if TYPE_CHECKING:
    from schedir.simulator import CostModel

Costs: TypeAlias = "CostModel | Callable[[int], CostModel] | None"
"""Costs, or a function from a number of stages to those of the model cut into so many; None: the
textbook's."""


def generate(
    generator: Generator,
    ranks: int,
    microbatches: int,
    chunks: int,
    parameters: dict[str, Parameter],
    costs: Costs,
) -> Schedule:
    """The actions that a generator yields for a shape, as it yields them; one that asks for
    `costs` sees them.

    Raises LoadError where it fails, or takes no such parameters.
    """
    _check_parameters(generator, parameters)
    cut = partial(_pipeline, generator, ranks, microbatches, parameters, costs)
    pipe = cut(chunks)
    lines = _Lines()
    seen = generator.for_function(partial(costs_for, costs, pipe.stages), parameters)
    drive = _Drive(generator, pipe, cut, seen, lines)
    try:
        columns = columns_of(drive.entries_of(rank) for rank in range(pipe.ranks))
        return Schedule(generator.name, pipe.microbatches, pipe.placement, columns, lines.sources())
    except ValueError as error:
        raise LoadError(f"{generator.name}: {error}") from error


def costs_for(costs: Costs, stages: int) -> CostModel:
    """The costs of a schedule of so many stages."""
    from schedir.simulator import CostModel  # takes a while, and most generators ask for none

    if costs is None:
        return CostModel()
    return costs if isinstance(costs, CostModel) else costs(stages)


def _pipeline(
    generator: Generator,
    ranks: int,
    microbatches: int,
    parameters: dict[str, Parameter],
    costs: Costs,
    chunks: int,
) -> Pipeline:
    """The shape that is asked for, its stages placed as the generator says."""
    shape = Pipeline(ranks, microbatches, chunks, placement=())
    shape = attrs.evolve(shape, placement=wrapped(shape))
    place = generator.placement
    if place is None:
        return shape
    given = generator.for_placement(partial(costs_for, costs, shape.stages), parameters)
    chosen = call_user_code(
        lambda: list(place(shape, **given)), f"the placement of {generator.name}"
    )
    try:
        # A Schedule without actions checks the placement as any other would.
        placement = Schedule(generator.name, 1, chosen, [()] * ranks).placement
    except (TypeError, ValueError) as error:
        raise LoadError(f"the placement of {generator.name}: {error}") from error
    return attrs.evolve(shape, placement=placement)


def _check_parameters(generator: Generator, parameters: dict[str, Parameter]) -> None:
    """Raise LoadError for a parameter that the generator does not have, or of the wrong type."""
    own = generator.parameters
    for name, value in parameters.items():
        if name not in own and not generator.takes_any_parameter:
            known = ", ".join(own) or "none"
            raise LoadError(f"{generator.name} has no parameter {name!r}; it has: {known}")
        if name in own and isinstance(own[name].default, bool) and not isinstance(value, bool):
            raise LoadError(f"{name} of {generator.name} is true or false, not {value!r}")


@attrs.frozen
class _Lines:
    """The lines that yielded actions: the distinct ones, and for each action the number of its."""

    known: dict[Source, int] = attrs.field(factory=dict)
    line_of: list[int] = attrs.field(factory=list)

    def number(self, source: Source | None) -> int:
        return -1 if source is None else self.known.setdefault(source, len(self.known))

    def sources(self) -> Sources:
        return Sources(tuple(self.known), np.array(self.line_of, np.int64))


@attrs.frozen
class _Drive:
    """A generator at work on a shape, which could be `cut` into other chunks; the lines of its
    actions are added to `lines`."""

    generator: Generator
    pipe: Pipeline
    cut: Callable[[int], Pipeline]
    parameters: dict[str, Any]
    lines: _Lines

    @property
    def limit(self) -> int:
        """Nothing sensible is longer: eight kinds of action per (stage, microbatch)."""
        return 16 * (self.pipe.stages + 1) * (self.pipe.microbatches + 1)

    def entries_of(self, rank: int) -> list[Entry]:
        """One rank's list. Raises LoadError, with the line, for whatever goes wrong."""
        try:
            return self._collect(rank)
        except LoadError:
            raise
        except (Exception, SystemExit) as error:
            raise self._failure(rank, error) from error

    def _collect(self, rank: int) -> list[Entry]:
        generator, lines, limit = self.generator, self.lines, self.limit
        produced = generator(self.pipe, rank, **self.parameters)
        if not isinstance(produced, Iterable):
            raise LoadError(
                f"{blamed_line(None, generator)}: the generator must yield actions, "
                f"not return {describe_value(produced)}"
            )
        entries: list[Entry] = []
        yielded = 0
        iterator = iter(produced)
        # By code and instruction, which are cheaper to tell than the line.
        numbers: dict[tuple[int, int] | None, int] = {}
        for entry in iterator:
            frame = yielding_frame(iterator)
            key = None if frame is None else (id(frame.f_code), frame.f_lasti)
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = lines.number(source_of(frame))
            if isinstance(entry, Action):
                yielded += 1
                lines.line_of.append(number)
            elif isinstance(entry, Together):
                yielded += len(entry.actions)
                lines.line_of.extend([number] * len(entry.actions))
            else:
                raise LoadError(
                    f"{blamed_line(source_of(frame), generator)}: rank {rank} yielded "
                    f"{describe_value(entry)}; a generator yields actions, such as "
                    "forward(stage, microbatch)"
                )
            entries.append(entry)
            if yielded > limit:
                raise LoadError(
                    f"{blamed_line(source_of(frame), generator)}: rank {rank} yielded more than "
                    f"{limit} actions, far beyond {self.pipe.microbatches} microbatches; "
                    "does it end?"
                )
        return entries

    def _failure(self, rank: int, error: BaseException) -> LoadError:
        """What to raise where the generator raised `error`: it may just have no such chunks."""
        generator, chunks = self.generator, self.generator.chunks
        line = user_line(error) or blamed_line(None, generator)
        if self.pipe.chunks != chunks and self._runs_with_own_chunks(rank):
            stages, instead, cause = f"{chunks} stages", "", f"{line}: {describe_error(error)}"
            if chunks == 1:
                stages, instead = "one stage", ", or take one that `schedir list` has with --chunks"
                if isinstance(error, ValueError) and "too many values to unpack" in str(error):
                    cause = line  # where `(stage,) = pipe.stages_of(rank)` says the same
            return LoadError(
                f"{generator.name} runs {stages} per rank, not {self.pipe.chunks}: leave chunks "
                f"out{instead} ({cause})"
            )
        return LoadError(f"{line}: {generator.name}, rank {rank}: {describe_error(error)}")

    def _runs_with_own_chunks(self, rank: int) -> bool:
        """Whether the generator gets through such a pipeline of its own number of chunks."""
        generator = self.generator
        try:
            own = self.cut(generator.chunks)
            deque(islice(generator(own, rank, **self.parameters), self.limit), maxlen=0)
        except (Exception, SystemExit):
            return False
        return True
