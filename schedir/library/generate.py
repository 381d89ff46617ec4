"""Runs a generator: asks it for each rank's actions, and keeps the line that yielded each."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from types import CodeType, FrameType, GeneratorType
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import numpy as np

from schedir.errors import LoadError
from schedir.ir import Action, Columns, Entry, Schedule, Sources, Together, columns_of
from schedir.library.authoring import Generator, Parameter, Pipeline, takes_any
from schedir.library.placements import wrapped
from schedir.library.user_errors import (
    blamed_line,
    call_user_code,
    describe_error,
    describe_value,
    source_of,
    user_line,
)

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
    own = generator.parameters
    for name, value in parameters.items():
        if name not in own and not takes_any(own):
            known = ", ".join(own) or "none"
            raise LoadError(f"{generator.name} has no parameter {name!r}; it has: {known}")
        if name in own and isinstance(own[name].default, bool) and not isinstance(value, bool):
            raise LoadError(f"{name} of {generator.name} is true or false, not {value!r}")
    question = _Question(generator, ranks, microbatches, parameters, costs)
    pipe = question.pipeline(chunks)
    ask, lines = question.of(pipe), _Lines()

    def entries_of(rank: int) -> list[Entry]:
        try:
            return _collect(generator, pipe, rank, ask(rank), lines)
        except LoadError:
            raise
        except (Exception, SystemExit) as error:
            raise question.failure(pipe, rank, error) from error

    try:
        columns = columns_of(map(entries_of, range(ranks)))
        sources = lines.sources(columns)
        return Schedule(generator.name, microbatches, pipe.placement, columns, sources)
    except ValueError as error:
        raise LoadError(f"{generator.name}: {error}") from error


def _collect(
    generator: Generator, pipe: Pipeline, rank: int, produced: object, lines: _Lines
) -> list[Entry]:
    """A rank's list, its lines kept. Raises LoadError for what is none."""
    if not isinstance(produced, Iterable):
        raise LoadError(
            f"{blamed_line(None, generator)}: the generator must yield actions, "
            f"not return {describe_value(produced)}"
        )
    limit = _limit(pipe)
    iterator = iter(produced)
    entries: list[Entry] = []
    frame: FrameType | None = None
    numbers: dict[int, int] = {}
    for entry in islice(iterator, limit + 1):
        # A frame that stands at a yield that is known is the one that has yielded.
        number = None if frame is None else numbers.get(frame.f_lasti)
        if number is None:
            frame, numbers, number = lines.find(iterator)
        lines.of_entries.append(number)
        if not isinstance(entry, (Action, Together)):
            raise LoadError(
                f"{blamed_line(frame, generator)}: rank {rank} yielded {describe_value(entry)}; "
                "a generator yields actions, such as forward(stage, microbatch)"
            )
        entries.append(entry)
    if len(entries) > limit:
        raise LoadError(
            f"{blamed_line(frame, generator)}: rank {rank} yielded more than {limit} actions, far "
            f"beyond {pipe.microbatches} microbatches; does it end?"
        )
    return entries


def _limit(pipe: Pipeline) -> int:
    """Nothing sensible is longer: eight kinds of action per (stage, microbatch)."""
    return 16 * (pipe.stages + 1) * (pipe.microbatches + 1)


class _Lines:
    """The lines that yielded: the distinct ones, and for each entry the number of its."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], int] = {}
        self.of_entries = array("q")
        # By instruction, that of a `yield from` negative: what it delegates to may be a generator.
        self.numbers: dict[CodeType, dict[int, int]] = {}

    def find(self, iterator: object) -> tuple[FrameType | None, dict[int, int], int]:
        """The frame that has yielded, the numbers of its code's lines, and that of its line."""
        frame: FrameType | None = None
        while isinstance(iterator, GeneratorType):
            frame, iterator = iterator.gi_frame, iterator.gi_yieldfrom
        if frame is None:
            return None, {}, -1
        numbers = self.numbers.setdefault(frame.f_code, {})
        at = frame.f_lasti if iterator is None else -frame.f_lasti
        if at not in numbers:
            line = frame.f_code.co_filename, frame.f_lineno
            numbers[at] = self.known.setdefault(line, len(self.known))
        return frame, numbers, numbers[at]

    def sources(self, columns: Columns) -> Sources:
        """The source of every place."""
        line_of = np.array(self.of_entries, np.int64)
        lines = tuple(source_of(file, line) for file, line in self.known)
        return Sources(lines, line_of[columns.entry] if columns.together else line_of)


@attrs.frozen
class _Question:
    """What is asked of a generator, which may run other numbers of chunks than it is asked to."""

    generator: Generator
    ranks: int
    microbatches: int
    parameters: dict[str, Parameter]
    costs: Costs

    def pipeline(self, chunks: int) -> Pipeline:
        """The shape that is asked for, its stages placed as the generator says."""
        shape = Pipeline(self.ranks, self.microbatches, chunks, placement=())
        shape = attrs.evolve(shape, placement=wrapped(shape))
        name, place = self.generator.name, self.generator.placement
        if place is None:
            return shape
        own = self.arguments(place, shape)
        chosen = call_user_code(lambda: [*place(shape, **own)], f"the placement of {name}")
        try:
            # A Schedule without actions checks the placement as any other would.
            placement = Schedule(name, 1, chosen, [()] * self.ranks).placement
        except (TypeError, ValueError) as error:
            raise LoadError(f"the placement of {name}: {error}") from error
        return attrs.evolve(shape, placement=placement)

    def arguments(self, function: Callable[..., object], pipe: Pipeline) -> dict[str, Any]:
        """What the function, or the placement, asks for by name."""
        asked = self.generator.asked_by(function)
        found: dict[str, Any] = {
            name: value
            for name, value in self.parameters.items()
            if name in asked or takes_any(asked)
        }
        if "costs" in asked:
            found["costs"] = self.costs(pipe.stages) if callable(self.costs) else self.costs
            if found["costs"] is None:
                from schedir.simulator import CostModel  # most schedules ask for none

                found["costs"] = CostModel()
        return found

    def of(self, pipe: Pipeline) -> Callable[[int], Iterable[Entry]]:
        """The generator as a function of the rank."""
        function = self.generator.function
        return partial(function, pipe, **self.arguments(function, pipe))

    def failure(self, pipe: Pipeline, rank: int, error: BaseException) -> LoadError:
        """What to raise where the generator raised `error`: it may just have no such chunks."""
        generator, chunks = self.generator, self.generator.chunks
        line = user_line(error) or blamed_line(None, generator)
        if pipe.chunks == chunks or not self._runs_with_own_chunks(rank):
            return LoadError(f"{line}: {generator.name}, rank {rank}: {describe_error(error)}")
        stages, instead, cause = f"{chunks} stages", "", f"{line}: {describe_error(error)}"
        if chunks == 1:
            stages, instead = "one stage", ", or take one that `schedir list` has with --chunks"
            if isinstance(error, ValueError) and "too many values to unpack" in str(error):
                cause = line  # where `(stage,) = pipe.stages_of(rank)` says the same
        return LoadError(
            f"{generator.name} runs {stages} per rank, not {pipe.chunks}: leave chunks out"
            f"{instead} ({cause})"
        )

    def _runs_with_own_chunks(self, rank: int) -> bool:
        """Whether the generator gets through such a pipeline of its own number of chunks."""
        try:
            own = self.pipeline(self.generator.chunks)
            deque(islice(self.of(own)(rank), _limit(own)), maxlen=0)
        except (Exception, SystemExit):
            return False
        return True
