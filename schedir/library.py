"""Finds and loads generators, and builds schedules from them.

A target is a built-in or installed name, `path.py[:function]`, `module:function`, or a `.sched`
or `.csv` file. The built-in ones are loaded exactly as a user's file is.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import logging
import pkgutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import islice
from os.path import isdir, isfile
from pathlib import Path
from types import FrameType, FunctionType, GeneratorType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import numpy as np

from schedir.errors import LoadError
from schedir.ir import (
    Action,
    Placement,
    Schedule,
    Source,
    Sources,
    columns_of,
    loads,
    loads_torch_csv,
    stages_by_rank,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger("schedir")

DEFAULT_RANKS = 4
DEFAULT_MICROBATCHES = 8
ENTRY_POINT_GROUP = "schedir.schedules"
_LISTS = (".sched", ".csv")  # the extensions of files that list actions
_MOST_PAIRS = 10**8  # (stage, microbatch) pairs, far beyond what memory can hold the actions of

Parameter: TypeAlias = str | int | bool | None


GeneratorFunction: TypeAlias = Callable[..., Iterable[Action]]
"""What an author writes: `(pipe, rank, **parameters)` → the actions of one rank."""


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


PlacementFunction: TypeAlias = Callable[[Pipeline], Sequence[int | Sequence[int]]]


@attrs.frozen
class Generator:
    """A generator function and what `@schedule` says of it. Calling it calls the function."""

    function: GeneratorFunction
    name: str
    aliases: tuple[str, ...] = ()
    placement: PlacementFunction | None = None
    chunks: int = 1

    def __call__(self, pipe: Pipeline, rank: int, /, **parameters: Any) -> Iterable[Action]:
        """The actions of `rank`."""
        return self.function(pipe, rank, **parameters)

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters of its own, beyond the pipeline and the rank."""
        try:
            signature = inspect.signature(self.function)
        except ValueError as error:  # some built-in functions have none
            raise LoadError(f"{self.name} is no function that yields actions: {error}") from error
        return {parameter.name: parameter for parameter in [*signature.parameters.values()][2:]}


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
    user names none.
    """

    def declare(function: GeneratorFunction) -> Generator:
        return Generator(function, name, tuple(aliases), placement, chunks)

    return declare


def build(
    target: str | Path | Generator | GeneratorFunction,
    /,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    **parameters: Parameter,
) -> Schedule:
    """The complete schedule that `target` describes, communication inserted.

    `target` is a name, a path or a callable. Defaults: 4 ranks, 8 microbatches, and the
    generator's own number of chunks per rank; `parameters` are the generator's own.

    Raises LoadError where the target can't be found or its generator fails, ParseError for a
    malformed file, ScheduleError where the actions can't be completed.
    """
    from schedir.checker import prove

    found = load(target, ranks=ranks, microbatches=microbatches, chunks=chunks, **parameters)
    if found.is_complete:
        return found
    return prove(found).proved()


def load(
    target: str | Path | Generator | GeneratorFunction,
    /,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    **parameters: Parameter,
) -> Schedule:
    """Like `build`, but the actions as they were written, neither checked nor completed."""
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if number is not None and (type(number) is not int or number < 1):
            raise LoadError(f"{what} must be an int >= 1, not {number!r}")
    if isinstance(target, (str, Path)) and Path(target).suffix in _LISTS:
        found = _read(Path(target))
        if parameters or chunks is not None:
            given = ", ".join([*parameters, *(["chunks"] if chunks is not None else [])])
            raise LoadError(f"{target} is a list of actions and takes no parameters: {given}")
        for what, asked, has in (
            ("ranks", ranks, found.ranks),
            ("microbatches", microbatches, found.microbatches),
        ):
            if asked is not None and asked != has:
                raise LoadError(f"{target} has {has} {what}, not {asked}; leave {what} out")
        return found
    generator = find(target)
    ranks = DEFAULT_RANKS if ranks is None else ranks
    microbatches = DEFAULT_MICROBATCHES if microbatches is None else microbatches
    chunks = generator.chunks if chunks is None else chunks
    if ranks * chunks * microbatches > _MOST_PAIRS:
        raise LoadError(
            f"{ranks} ranks, {chunks} chunks on each and {microbatches} microbatches are too many: "
            f"their product may be at most {_MOST_PAIRS}"
        )
    return _generate(generator, _pipeline(generator, ranks, microbatches, chunks), parameters)


def find(target: str | Path | Generator | GeneratorFunction) -> Generator:
    """The generator that a name, a path, `module:function` or a callable stands for.

    Raises LoadError where there is none.
    """
    if isinstance(target, Path):
        return _from_file(target, None)
    if not isinstance(target, str):
        return _as_generator(target, repr(target))
    location, colon, function = target.rpartition(":")
    if target.endswith(".py"):
        return _from_file(Path(target), None)
    if colon and location.endswith(".py"):
        return _from_file(Path(location), function)
    if colon and location.endswith(_LISTS):
        raise LoadError(f"{location} is a list of actions and has no function {function!r}")
    if colon:
        return _from_module(location, function)
    wanted = _plain(target)
    known = {_plain(name): g for g in built_in() for name in (g.name, *g.aliases)}
    if wanted in known:
        return known[wanted]
    entries = {_plain(entry.name): entry for entry in _entry_points()}
    if wanted in entries:
        return _from_entry_point(entries[wanted])
    names = {plain: g.name for plain, g in known.items()} | {p: e.name for p, e in entries.items()}
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    raise LoadError(_not_found(target, names[close[0]] if close else None))


def _not_found(target: str, close: str | None) -> str:
    """What to say of a target that no schedule is named like, but perhaps one that is `close`."""
    if isdir(target):
        return f"{target} is a directory; a schedule is a name or a file: path.py[:function]"
    if isfile(target):
        return f"{target}: the name of a schedule's file ends in .py, .sched or .csv"
    beside = [target + suffix for suffix in (".py", *_LISTS) if isfile(target + suffix)]
    meant = [*beside, close][0]
    return (
        f"no schedule is named {target!r}; {f'did you mean {meant!r}? ' if meant else ''}"
        "`schedir list` names them all; a file is given as path.py[:function]"
    )


def _no_file(path: Path) -> LoadError:
    """What to raise where a file is to be read and there is none."""
    why = "not a regular file"  # a FIFO or a device may never end
    try:
        path.stat()
    except (FileNotFoundError, ValueError):  # or a name that no file can have
        why = "no such file"
    except OSError as error:
        why = error.strerror or str(error)
    named = {_plain(name): g.name for g in built_in() for name in (g.name, *g.aliases)}
    name = named.get(_plain(path.stem))
    return LoadError(f"{path}: {why}{f'; did you mean {name!r}?' if name else ''}")


def built_in() -> list[Generator]:
    """The schedules that come with schedir, by name."""
    package = importlib.import_module("schedir.schedules")
    found: list[Generator] = []
    for entry in pkgutil.iter_modules(package.__path__):
        found += _declared(importlib.import_module(f"schedir.schedules.{entry.name}"))
    return sorted(found, key=lambda generator: generator.name)


def installed() -> list[Generator]:
    """The built-in schedules, then those that installed packages declare as entry points.

    An entry point that fails to load is named in a warning, and left out.
    """
    found = built_in()
    for entry in _entry_points():
        try:
            found.append(_from_entry_point(entry))
        except LoadError as error:
            logger.warning("%s", error)
    return found


def _entry_points() -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points  # takes a while, and built-in names need none

    return entry_points(group=ENTRY_POINT_GROUP)


def _from_entry_point(entry: EntryPoint) -> Generator:
    """The generator behind an entry point, under the name that the entry point gives it."""
    where = f"entry point {entry.name} = {entry.value}"
    return attrs.evolve(_as_generator(_guard(entry.load, where), where), name=entry.name)


def _plain(name: str) -> str:
    """A name as it is compared: case, `-` and `_` do not matter."""
    return name.lower().replace("-", "").replace("_", "")


def _from_file(path: Path, function: str | None) -> Generator:
    if not isfile(path):
        raise _no_file(path)
    if function == "":
        raise LoadError(f"{path}: no function is named behind the colon")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise LoadError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    # Registered while it runs, as dataclasses and attrs look their module up there.
    shadowed = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        _guard(lambda: loader.exec_module(module), str(path))
    finally:
        if shadowed is None:
            del sys.modules[module.__name__]
        else:
            sys.modules[module.__name__] = shadowed
    return _pick(module, function, str(path))


def _from_module(name: str, function: str) -> Generator:
    if not name or not all(part.isidentifier() for part in name.split(".")):
        raise LoadError(f"{name}:{function}: {name!r} is neither a .py file nor a module's name")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: modules beside the user are found
    return _pick(_guard(lambda: importlib.import_module(name), name), function, name)


def _pick(module: ModuleType, function: str | None, where: str) -> Generator:
    names = [key for key, value in vars(module).items() if isinstance(value, Generator)]
    if function is not None:
        found = getattr(module, function, None)
        if found is None:
            hint = f"; it has: {', '.join(names)}" if names else ""
            raise LoadError(f"{where} has no function {function!r}{hint}")
        return _as_generator(found, f"{where}:{function}")
    declared = _declared(module)
    if len(declared) == 1:
        return declared[0]
    if declared:
        raise LoadError(
            f"{where} declares several schedules; choose one: "
            + ", ".join(f"{where}:{name}" for name in names)
        )
    raise LoadError(
        f"{where} declares no schedule; decorate its function with @schedule(name), "
        f"or name it: {where}:function"
    )


def _declared(module: ModuleType) -> list[Generator]:
    """The generators that a module defines itself, imported ones left out."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, Generator)
        and getattr(value.function, "__module__", None) == module.__name__
    ]


def _as_generator(found: object, where: str) -> Generator:
    if isinstance(found, Generator):
        return found
    if not callable(found):
        raise LoadError(f"{where} is {_a(found)}, not a function that yields actions")
    name = getattr(found, "__name__", "schedule").strip("<>")
    return Generator(found, name)


def _guard(call: Callable[[], Any], what: str) -> Any:
    """Run a user's code; what it raises becomes a LoadError that names the user's line."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise LoadError(f"{_user_line(error) or what}: {_said(error)}") from error


def _said(error: BaseException) -> str:
    """An exception's type and message on one line."""
    # A SyntaxError's text repeats the file and line.
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {' '.join(message.split())}".rstrip(": ")


def _user_line(error: BaseException) -> str:
    """The innermost `file:line` of a traceback that is not schedir's own or the import system's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}"
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if _is_users(file):
            place = f"{_shown(file)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


_PACKAGE = Path(__file__).resolve().parent


def _is_users(file: str) -> bool:
    """Whether a line of `file` is the author's; those of the built-in schedules count as such."""
    if file.startswith("<"):
        return False  # the import system, or methods that attrs has generated
    path = Path(file).resolve()
    own = path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "schedules")
    return not own and not path.is_relative_to(Path(importlib.__file__).resolve().parent)


def _shown(file: str) -> str:
    """A file's real path, relative to the working directory where it lies below it."""
    path = Path(file).resolve()
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _pipeline(generator: Generator, ranks: int, microbatches: int, chunks: int) -> Pipeline:
    shape = Pipeline(
        ranks, microbatches, chunks, tuple((stage % ranks,) for stage in range(ranks * chunks))
    )
    place = generator.placement
    if place is None:
        return shape
    chosen = _guard(lambda: list(place(shape)), f"the placement of {generator.name}")
    try:
        # A Schedule without actions checks the placement as any other would.
        placement = Schedule(generator.name, 1, chosen, [()] * ranks).placement
    except (TypeError, ValueError) as error:
        raise LoadError(f"the placement of {generator.name}: {error}") from error
    return attrs.evolve(shape, placement=placement)


def _generate(generator: Generator, pipe: Pipeline, parameters: dict[str, Parameter]) -> Schedule:
    own = generator.parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in own.values())
    for name, value in parameters.items():
        if name not in own and not takes_any:
            known = ", ".join(own) or "none"
            raise LoadError(f"{generator.name} has no parameter {name!r}; it has: {known}")
        if name in own and isinstance(own[name].default, bool) and not isinstance(value, bool):
            raise LoadError(f"{name} of {generator.name} is true or false, not {value!r}")
    lines = _Lines()
    lists = (_collect(generator, pipe, rank, parameters, lines) for rank in range(pipe.ranks))
    try:
        columns = columns_of(lists)
        return Schedule(generator.name, pipe.microbatches, pipe.placement, columns, lines.sources())
    except ValueError as error:
        raise LoadError(f"{generator.name}: {error}") from error


@attrs.frozen
class _Lines:
    """The lines that yielded actions: the distinct ones, and for each action the number of its."""

    known: dict[Source, int] = attrs.field(factory=dict)
    line_of: list[int] = attrs.field(factory=list)

    def number(self, source: Source | None) -> int:
        return -1 if source is None else self.known.setdefault(source, len(self.known))

    def sources(self) -> Sources:
        return Sources(tuple(self.known), np.array(self.line_of, np.int64))


def _collect(
    generator: Generator,
    pipe: Pipeline,
    rank: int,
    parameters: dict[str, Parameter],
    lines: _Lines,
) -> list[Action]:
    """One rank's actions; the line that yielded each is added to `lines`."""
    # Nothing sensible is longer: eight kinds of action per (stage, microbatch).
    limit = 16 * (pipe.stages + 1) * (pipe.microbatches + 1)
    actions: list[Action] = []
    try:
        produced = generator(pipe, rank, **parameters)
        if not isinstance(produced, Iterable):
            raise LoadError(
                f"{_where(generator)}: the generator must yield actions, not return {_a(produced)}"
            )
        iterator = iter(produced)
        # By code and instruction, which are cheaper to tell than the line.
        numbers: dict[tuple[int, int] | None, int] = {}
        for action in iterator:
            frame = _frame(iterator)
            key = None if frame is None else (id(frame.f_code), frame.f_lasti)
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = lines.number(_source(frame))
            lines.line_of.append(number)
            if not isinstance(action, Action):
                raise LoadError(
                    f"{_place(_source(frame)) or _where(generator)}: rank {rank} yielded "
                    f"{_a(action)}; a generator yields actions, such as forward(stage, microbatch)"
                )
            actions.append(action)
            if len(actions) > limit:
                raise LoadError(
                    f"{_place(_source(frame)) or _where(generator)}: rank {rank} yielded more than "
                    f"{limit} actions, far beyond {pipe.microbatches} microbatches; does it end?"
                )
        return actions
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        line = _user_line(error) or _where(generator)
        own = generator.chunks
        if pipe.chunks != own and _has_actions(generator, pipe, rank, parameters, limit):
            stages = "one stage" if own == 1 else f"{own} stages"
            raise LoadError(
                f"{generator.name} runs {stages} per rank, not {pipe.chunks}: leave chunks out "
                f"({line}: {_said(error)})"
            ) from error
        raise LoadError(f"{line}: {generator.name}, rank {rank}: {_said(error)}") from error


def _has_actions(
    generator: Generator, pipe: Pipeline, rank: int, parameters: dict[str, Parameter], limit: int
) -> bool:
    """Whether the generator gets through such a pipeline of its own number of chunks."""
    try:
        own = _pipeline(generator, pipe.ranks, pipe.microbatches, generator.chunks)
        deque(islice(generator(own, rank, **parameters), limit), maxlen=0)
    except (Exception, SystemExit):
        return False
    return True


def _frame(iterator: object) -> FrameType | None:
    """The frame of a generator, or of the one that it delegates to, that has just yielded."""
    if not isinstance(iterator, GeneratorType):
        return None
    while isinstance(iterator.gi_yieldfrom, GeneratorType):
        iterator = iterator.gi_yieldfrom
    frame: FrameType | None = iterator.gi_frame  # None: it has ended
    return frame


def _source(frame: FrameType | None) -> Source | None:
    """The line that a frame stands at."""
    return None if frame is None else Source(_shown(frame.f_code.co_filename), frame.f_lineno)


def _place(source: Source | None) -> str:
    return f"{source.file}:{source.line}" if source else ""


def _where(generator: Generator) -> str:
    function = generator.function
    if isinstance(function, FunctionType):
        code = function.__code__
        return f"{_shown(code.co_filename)}:{code.co_firstlineno}"
    return generator.name


def _a(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _read(path: Path) -> Schedule:
    parse = loads_torch_csv if path.suffix == ".csv" else loads
    try:
        if not isfile(path):
            raise _no_file(path)
        return parse(path.read_bytes(), str(path))
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror}") from error
    except MemoryError:
        raise LoadError(f"{path}: too large for the memory of this machine") from None
