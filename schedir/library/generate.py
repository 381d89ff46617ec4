"""Runs a generator for each rank, and stores the line of Python that yielded each action.

Errors in the author's code are reported in one line, with the author's file and line.
"""

from __future__ import annotations

import importlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import isasyncgenfunction, iscoroutinefunction
from itertools import islice
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType, FunctionType, GeneratorType
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import numpy as np

from schedir.errors import LoadError
from schedir.ir import Action, Columns, Entry, Schedule, Source, Sources, Together, columns_of
from schedir.ir.tokens import clip
from schedir.library.authoring import Generator, Parameter, Pipeline, takes_any, wrapped

if TYPE_CHECKING:
    from schedir.simulator import CostModel

Costs: TypeAlias = "CostModel | Callable[[int], CostModel] | None"
"""Costs, or a function from a number of stages to costs of the model cut into that many; None: the
textbook's."""

_PACKAGE = Path(__file__).resolve().parents[1]


def generate(
    generator: Generator, shape: Pipeline, parameters: dict[str, Parameter], costs: Costs
) -> Schedule:
    """The actions that a generator yields for a shape, unchanged. The generator places the stages
    of the shape anew. A generator with a parameter `costs` gets the costs.

    Raises LoadError if the generator fails, or does not take these parameters.
    """
    if iscoroutinefunction(generator.function) or isasyncgenfunction(generator.function):
        line = blamed_line(None, generator)
        raise LoadError(f"{line}: the generator must yield actions: write def, not async def")
    own = generator.parameters
    for name, value in parameters.items():
        if name not in own and not generator.takes_any_parameter:
            from difflib import get_close_matches  # for who mistypes

            known = ", ".join(own) or "none"
            near = get_close_matches(name, ["ranks", "microbatches", "chunks", "costs", *own], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise LoadError(f"{generator.name} has no parameter {name!r}; it has: {known}{hint}")
        if name in own and isinstance(own[name].default, bool) and not isinstance(value, bool):
            raise LoadError(f"{name} of {generator.name} is true or false, not {value!r}")
    pipe, list_of = _placed(generator, shape, parameters, costs)
    lines = _Lines()

    def entries_of(rank: int) -> list[Entry]:
        try:
            entries = _collect(generator, pipe, rank, list_of(rank), lines)
            if not entries:
                _expect_none_returned(generator, iter(list_of(rank)))
            return entries
        except LoadError:
            raise
        except (Exception, SystemExit) as error:
            line = user_line(error) or blamed_line(None, generator)
            if pipe.chunks != generator.chunks:
                usual = attrs.evolve(pipe, chunks=generator.chunks)
                try:
                    generate(generator, usual, parameters, costs)
                except (Exception, SystemExit):
                    pass  # it has a fault of its own
                else:
                    raise _other_chunks(generator, pipe.chunks, line, error) from error
            raise LoadError(
                f"{line}: {generator.name}, rank {rank}: {describe_error(error)}"
            ) from error

    try:
        columns = columns_of(map(entries_of, range(pipe.ranks)))
        sources = lines.sources(columns)
        return Schedule(generator.name, pipe.microbatches, pipe.placement, columns, sources)
    except ValueError as error:
        raise LoadError(f"{generator.name}: {error}") from error


def _placed(
    generator: Generator, pipe: Pipeline, parameters: dict[str, Parameter], costs: Costs
) -> tuple[Pipeline, Callable[[int], Iterable[Entry]]]:
    """The shape, with its stages placed, and the generator as a function of the rank."""

    def own(function: Callable[..., object]) -> dict[str, Any]:
        """What the function, or the placement, asks for by name."""
        named = generator.asked_by(function)
        found: dict[str, Any] = {
            name: value for name, value in parameters.items() if name in named or takes_any(named)
        }
        if "costs" in named:
            from schedir.simulator import CostModel  # takes a while, and few schedules see any

            found["costs"] = costs(pipe.stages) if callable(costs) else costs or CostModel()
        return found

    pipe = attrs.evolve(pipe, placement=wrapped(pipe))
    place, what = generator.placement, f"the placement of {generator.name}"
    if place is not None:
        arguments = own(place)
        chosen = call_user_code(lambda: [*place(pipe, **arguments)], what)
        try:
            # A Schedule without actions checks the placement as any other would.
            placement = Schedule(generator.name, 1, chosen, [()] * pipe.ranks).placement
        except (TypeError, ValueError) as error:
            raise LoadError(f"{what}: {error}") from error
        pipe = attrs.evolve(pipe, placement=placement)
    return pipe, partial(generator.function, pipe, **own(generator.function))


def _collect(
    generator: Generator, pipe: Pipeline, rank: int, produced: object, lines: _Lines
) -> list[Entry]:
    """A rank's list; `lines` stores where each entry was yielded. Raises LoadError for anything
    else."""
    if not isinstance(produced, Iterable):
        raise LoadError(
            f"{blamed_line(None, generator)}: the generator must yield actions, "
            f"not return {describe_value(produced)}: write `yield forward(stage, microbatch)`"
        )
    # Far more than eight kinds of action for each stage and microbatch.
    limit = 16 * (pipe.stages + 1) * (pipe.microbatches + 1)
    iterator = iter(produced)
    entries: list[Entry] = []
    frame: FrameType | None = None
    numbers: dict[int, int] = {}
    for entry in islice(iterator, limit + 1):
        # A frame that stands at a yield that is known is the one that has yielded.
        number = None if frame is None else numbers.get(frame.f_lasti)
        if number is None:
            frame, numbers, number = lines.yielding(iterator)
        lines.of_entries.append(number)
        if not isinstance(entry, (Action, Together)):
            several = isinstance(entry, Iterable) and not isinstance(entry, str)
            raise LoadError(
                f"{blamed_line(frame, generator)}: rank {rank} yielded {describe_value(entry)}; "
                "a generator yields actions, such as forward(stage, microbatch)"
                f"{', and several with `yield from`' if several else ''}"
            )
        entries.append(entry)
    if len(entries) > limit:
        raise LoadError(
            f"{blamed_line(frame, generator)}: rank {rank} yielded more than {limit} actions, far "
            f"beyond {pipe.microbatches} microbatches; does it end?"
        )
    # In Python 3.12 the frame of a generator that has ended refers to this one: a cycle, with all
    # that the callers hold.
    frame = None
    return entries


def _expect_none_returned(generator: Generator, produced: Iterator[object]) -> None:
    """Raise LoadError if a generator that yields nothing returns a value, which nobody would
    see."""
    try:
        next(produced)
    except StopIteration as end:
        if end.value is not None:
            raise LoadError(
                f"{blamed_line(None, generator)}: the generator must yield actions, not return "
                f"{describe_value(end.value)}: write `yield from`"
            ) from None


class _Lines:
    """The distinct lines that yielded, and the number of each entry's line."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], int] = {}
        self.of_entries = array("q")
        # By instruction, that of a `yield from` negative: what it delegates to may be a generator.
        self.numbers: dict[CodeType, dict[int, int]] = {}

    def yielding(self, iterator: object) -> tuple[FrameType | None, dict[int, int], int]:
        """The frame that yielded, the numbers of its code's lines, and the number of its current
        line."""
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
        return Sources(lines, line_of[columns.entry])


def _other_chunks(generator: Generator, chunks: int, line: str, error: BaseException) -> LoadError:
    """The error to raise for what a generator raised that runs only with its own chunks."""
    stages, instead, cause = f"{generator.chunks} stages", "", f"{line}: {describe_error(error)}"
    if generator.chunks == 1:
        stages, instead = "one stage", ", or take one that `schedir list` has with --chunks"
        if isinstance(error, ValueError) and "too many values to unpack" in str(error):
            cause = line  # where `(stage,) = pipe.stages_of(rank)` says the same
    return LoadError(
        f"{generator.name} runs {stages} per rank, not {chunks}: leave chunks out{instead} "
        f"({cause})"
    )


def call_user_code(call: Callable[[], Any], what: str) -> Any:
    """Run a user's code; `what` names that code.

    Raises LoadError, with the user's line, for anything that the code raises.
    """
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise LoadError(f"{user_line(error) or what}: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """An exception's type and message on one line."""
    # A SyntaxError's text repeats the file and line.
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {' '.join(message.split())}".rstrip(": ")


def describe_value(value: object) -> str:
    """A value and its type, shortened to fit a message."""
    return f"{clip(value)} ({type(value).__name__})"


def user_line(error: BaseException) -> str:
    """The innermost `file:line` of a traceback that is neither schedir's nor the import
    system's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown_path(error.filename)}:{error.lineno}"
    found = ""
    for frame, line in walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename).resolve()
        # The built-in schedules count as an author's.
        own = path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "schedules")
        imports = path.is_relative_to(Path(importlib.__file__).resolve().parent)
        # "<…>" is the import system, or methods that attrs has generated.
        if not (own or imports or frame.f_code.co_filename.startswith("<")):
            found = f"{_shown_path(frame.f_code.co_filename)}:{line}"
    return found


def source_of(file: str, line: int) -> Source:
    """A line of Python as it is shown."""
    return Source(_shown_path(file), line)


def blamed_line(frame: FrameType | None, generator: Generator) -> str:
    """The line that a frame has reached; without a frame, the line that defines the generator."""
    function = generator.function
    if frame is not None:
        code, line = frame.f_code, frame.f_lineno
    elif isinstance(function, FunctionType):
        code = function.__code__
        line = code.co_firstlineno
    else:
        return generator.name
    return str(source_of(code.co_filename, line))


def _shown_path(file: str) -> str:
    """A file's real path, relative to the working directory if that is shorter."""
    path = Path(file).resolve()
    try:
        return min(os.path.relpath(path), str(path), key=len)
    except FileNotFoundError:  # the working directory has been removed
        return str(path)
