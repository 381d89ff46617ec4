"""From a target and a shape to a schedule: `load` takes it as written, `build` completes it.

A target names a built-in or installed schedule, a file, or a module's function.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from os.path import isdir, isfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

import attrs

from schedir.checker import CHANNELS, prove
from schedir.errors import LoadError
from schedir.ir import Schedule, loads, loads_torch_csv
from schedir.lazy import collector_held_off
from schedir.library.authoring import Generator, GeneratorFunction, Parameter, Pipeline
from schedir.library.generate import Costs, call_user_code, describe_value, generate

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger("schedir")

DEFAULT_RANKS = 4
DEFAULT_MICROBATCHES = 8
_MOST_PAIRS = 10**8  # (stage, microbatch) pairs, far beyond what memory can hold the actions of
Target: TypeAlias = str | Path | Generator | GeneratorFunction
"""A name, a path, `module:function`, or a callable."""

ENTRY_POINT_GROUP = "schedir.schedules"
_LISTS = (".sched", ".csv")  # the extensions of files that list actions
_STDIN = "-"
_CSV = re.compile(rb"[\s,\"(]*[0-9]")  # how torch's CSV begins: an action's stage
_DECLARE = {"schedule", "Generator"}  # what makes a Generator
# Packages that have one of these names for another thing.
_UNRELATED = {"collections", "numpy", "torch", "typing"}


@collector_held_off()
def build(
    target: Target,
    /,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    costs: Costs | Parameter = None,  # wide, so that a dict of parameters may be unpacked
    **parameters: Parameter,
) -> Schedule:
    """The complete schedule that `target` describes, with its communication.

    `target` is a name, a path, `-` for standard input, or a callable. The defaults are 4 ranks (or
    as many as `costs` were measured on), 8 microbatches, and the generator's default number of
    chunks per rank. `parameters` go to the generator. `costs` are for generators that optimise for
    given costs, by default the textbook's.

    Raises LoadError if the target can't be found or its generator fails, ParseError for a malformed
    file, and ScheduleError if the actions can't be completed.

    >>> import schedir
    >>> schedir.build("interleaved-1f1b", ranks=4, microbatches=8, chunks=2)
    <Schedule interleaved-1f1b: 4 ranks, 8 stages, 8 microbatches, 360 actions>
    """
    found = load(
        target, ranks=ranks, microbatches=microbatches, chunks=chunks, costs=costs, **parameters
    )
    if found.is_complete:
        return found
    # What runs anywhere can be completed; on which transports is for `check` to say.
    return prove(found, CHANNELS[-1]).proved()


@collector_held_off()
def load(
    target: Target,
    /,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    costs: Costs | Parameter = None,  # wide, so that a dict of parameters may be unpacked
    **parameters: Parameter,
) -> Schedule:
    """Like `build`, but the actions as written, neither checked nor completed."""
    shape = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
    expect_shape(shape)
    if isinstance(costs, (str, int)):
        raise LoadError(f"costs must be a CostModel, or a function to one, not {costs!r}")
    if isinstance(target, (str, Path)) and is_list(target):
        found, name = read_list(Path(target)), name_of(target)
        taken = [*parameters, *(["chunks"] if chunks is not None else [])]
        if taken:
            raise LoadError(
                f"{name} is a list of actions and takes no parameters: {', '.join(taken)}"
            )
        for what in ("ranks", "microbatches"):
            has = getattr(found, what)
            if shape[what] not in (None, has):
                raise LoadError(f"{name} has {has} {what}, not {shape[what]}; leave {what} out")
        return found
    generator = generator_of(target)
    ranks = ranks or getattr(costs, "ranks", None) or DEFAULT_RANKS
    microbatches = DEFAULT_MICROBATCHES if microbatches is None else microbatches
    chunks = generator.chunks if chunks is None else chunks
    expect_fewer(ranks, chunks, microbatches)
    found = generate(
        generator, Pipeline(ranks, microbatches, chunks, placement=()), parameters, costs
    )

    def rebuild(microbatches: int) -> Schedule:
        return load(
            generator,
            ranks=ranks,
            microbatches=microbatches,
            chunks=chunks,
            costs=costs,
            **parameters,
        )

    return attrs.evolve(found, rebuild=rebuild)


def expect_shape(shape: Mapping[str, object]) -> None:
    """Raise LoadError for a part of a pipeline's shape that is given, and is no number."""
    for what, number in shape.items():
        if number is not None and (type(number) is not int or number < 1):
            raise LoadError(f"{what} must be an int >= 1, not {number!r}")


def expect_fewer(ranks: int, chunks: int, microbatches: int) -> None:
    """Raise LoadError for a shape with more work than memory can hold."""
    if ranks * chunks * microbatches > _MOST_PAIRS:
        raise LoadError(
            f"{ranks} ranks, {chunks} chunks on each and {microbatches} microbatches are too many: "
            f"their product may be at most {_MOST_PAIRS}"
        )


def generator_of(target: Target) -> Generator:
    """The generator that a name, a path, `module:function` or a callable stands for.

    Raises LoadError if there is none.
    """
    if not isinstance(target, (str, Path)):
        return _as_generator(target, repr(target))
    location, colon, function = str(target).rpartition(":")
    if isinstance(target, Path) or target.endswith(".py"):
        return _from_file(Path(target), None)
    if not colon:
        return _named(target)
    if location.endswith(".py"):
        return _from_file(Path(location), function)
    if location.endswith(_LISTS):
        raise LoadError(f"{location} is a list of actions and has no function {function!r}")
    if not all(part.isidentifier() for part in location.split(".")):
        raise LoadError(f"{target}: {location!r} is neither a .py file nor a module's name")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: modules beside the user are found
    module = call_user_code(lambda: importlib.import_module(location), location)
    return _from_module(module, function, location)


def _named(target: str) -> Generator:
    """The built-in or installed generator of a name."""
    wanted = _plain(target)
    for generator in _shipped(wanted):
        if wanted in _names(generator):
            return generator
    entries = {_plain(entry.name): entry for entry in _entry_points()}
    if wanted in entries:
        return _from_entry_point(entries[wanted])
    if isdir(target):
        why = "is a directory; a schedule is a name or a file: path.py[:function]"
        raise LoadError(f"{target} {why}")
    if isfile(target):
        if target.endswith(".json"):
            from schedir.simulator.values import kind_of, read_json  # for who mistakes it

            raise LoadError(f"{target}: no schedule{kind_of(read_json(target))}")
        raise LoadError(f"{target}: the name of a schedule's file ends in .py, .sched or .csv")
    meant = [target + suffix for suffix in (".py", *_LISTS) if isfile(target + suffix)]
    meant = meant or _alike(
        wanted, _built_in_names() | {plain: each.name for plain, each in entries.items()}
    )
    hint = f"did you mean {' or '.join(map(repr, meant))}? " if meant else ""
    raise LoadError(
        f"no schedule is named {target!r}; {hint}"
        "`schedir list` names them all; give a file as path.py[:function]"
    )


def _alike(wanted: str, names: dict[str, str]) -> list[str]:
    """The names that begin with `wanted`, then the names with a word that does; otherwise the
    closest name, if any."""
    from difflib import get_close_matches  # for who mistypes

    if not wanted:
        return []
    found = [name for plain, name in names.items() if plain.startswith(wanted)]
    found += [name for name in names.values() if f"-{wanted}" in name.lower()]
    close = get_close_matches(wanted, names, n=1, cutoff=0.5)
    return [*dict.fromkeys(found or [names[each] for each in close])]


def _no_file(path: Path) -> LoadError:
    """The error to raise for a file that does not exist."""
    why = "not a regular file"  # a FIFO or a device may never end
    try:
        path.stat()
    except (FileNotFoundError, ValueError):  # or a name that no file can have
        why = "no such file"
    except OSError as error:
        why = error.strerror or str(error)
    name = _built_in_names().get(_plain(path.stem))
    return LoadError(f"{path}: {why}{f'; did you mean {name!r}?' if name else ''}")


def built_in() -> list[Generator]:
    """The schedules that come with schedir, by name."""
    return sorted(_shipped(), key=lambda generator: generator.name)


def _shipped(likely: str = "") -> Iterator[Generator]:
    """The schedules that come with schedir. Their modules are imported one by one, the one named
    `likely` first."""
    package = importlib.import_module("schedir.schedules")
    modules = [entry.name for entry in pkgutil.iter_modules(package.__path__)]
    for name in sorted(modules, key=lambda name: _plain(name) != likely):
        yield from _declared(importlib.import_module(f"schedir.schedules.{name}"))


def _names(generator: Generator) -> set[str]:
    return {_plain(name) for name in (generator.name, *generator.aliases)}


def _built_in_names() -> dict[str, str]:
    """The names of the built-in schedules, by every name and alias."""
    return {plain: generator.name for generator in built_in() for plain in _names(generator)}


def installed() -> list[Generator]:
    """The built-in schedules, then the schedules that installed packages declare as entry points.

    An entry point that fails to load is left out, with a warning that names it.
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
    """The generator that an entry point leads to, under the name that the entry point gives."""
    where = f"entry point {entry.name} = {entry.value}"
    return attrs.evolve(_as_generator(call_user_code(entry.load, where), where), name=entry.name)


def _plain(name: str) -> str:
    """A name in the form in which names are compared: case, `-` and `_` do not matter."""
    return name.lower().replace("-", "").replace("_", "")


def _from_file(path: Path, function: str | None) -> Generator:
    if not isfile(path):
        raise _no_file(path)
    if function == "":
        raise LoadError(f"{path}: no function is named after the colon")
    if function is None and not _may_declare(path):
        raise _no_schedule(str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise LoadError(f"{path}: not a Python file")
    module, run = importlib.util.module_from_spec(spec), spec.loader.exec_module
    # Registered while it runs, as dataclasses and attrs look their module up there.
    shadowed = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    try:
        call_user_code(lambda: run(module), str(path))
    finally:
        del sys.modules[path.stem]
        if shadowed is not None:
            sys.modules[path.stem] = shadowed
    return _from_module(module, function, str(path))


def _may_declare(path: Path) -> bool:
    """True if a module's text may declare a schedule, so that the module must be run.

    It may if it imports `schedule` or `Generator`, reads one of them from a module that it imports,
    as in `schedir.schedule`, or uses the bare name after an import with `*`. Imports from packages
    with another object of that name don't count. A text that can't be parsed is run, because the
    run names the error.
    """
    try:
        nodes = [*ast.walk(ast.parse(path.read_bytes()))]
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):
        return True
    imported: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or node.names[0].name
            if module.partition(".")[0] not in _UNRELATED:
                for each in node.names:
                    imported |= {each.name, (each.asname or each.name).partition(".")[0]}
    read = {
        ast.unparse(node).partition(".")[0]
        for node in nodes
        if getattr(node, "attr", getattr(node, "id", None)) in _DECLARE
    }
    return not imported.isdisjoint({*read, *_DECLARE}) or (
        "*" in imported and bool(read & _DECLARE)
    )


def _no_schedule(where: str) -> LoadError:
    return LoadError(
        f"{where} has no @schedule; decorate its function with @schedule(name), or name it: "
        f"{where}:function"
    )


def _from_module(module: ModuleType, function: str | None, where: str) -> Generator:
    """The named generator of a module, or else the only generator that the module declares."""
    names = [name for name, value in vars(module).items() if isinstance(value, Generator)]
    if function is not None:
        found = getattr(module, function, None)
        if found is None:
            hint = f"; it has: {', '.join(names)}" if names else ""
            raise LoadError(f"{where} has no function {function!r}{hint}")
        return _as_generator(found, f"{where}:{function}")
    declared = _declared(module)
    if not declared:
        raise _no_schedule(where)
    if len(declared) > 1:
        choice = ", ".join(f"{where}:{name}" for name in names)
        raise LoadError(f"{where} declares several schedules; choose one: {choice}")
    return declared[0]


def _declared(module: ModuleType) -> list[Generator]:
    """The generators that a module defines, without imported ones."""
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
        raise LoadError(f"{where} is {describe_value(found)}, not a function that yields actions")
    return Generator(found, getattr(found, "__name__", "schedule").strip("<>"))


def is_list(target: str | Path) -> bool:
    """True if a target is a file of actions, by its extension, or standard input."""
    return str(target) == _STDIN or Path(target).suffix in _LISTS


def name_of(target: str | Path) -> str:
    """The name of a target in messages."""
    return "<stdin>" if str(target) == _STDIN else str(target)


def read_list(path: Path) -> Schedule:
    """The schedule in a `.sched` or `.csv` file, or of either form in standard input (`-`).

    Raises LoadError if it can't be read, ParseError if it is malformed.
    """
    piped, name = str(path) == _STDIN, name_of(path)
    if not (piped or isfile(path)):
        raise _no_file(path)
    try:
        with open(0 if piped else path, "rb", closefd=not piped) as file:
            text = file.read()
        is_csv = _CSV.match(text) if piped else path.suffix == ".csv"
        return loads_torch_csv(text, name) if is_csv else loads(text, name)
    except OSError as error:
        raise LoadError(f"{name}: {error.strerror}") from error
    except MemoryError:
        raise LoadError(f"{name}: too large for the memory of this machine") from None
