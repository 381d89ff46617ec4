"""Cost models and timelines in files: JSON, or an error that says where it is wrong.

A cost model is an object with a key for each field:

    {
      "forward": [1.5, 2],
      "latency": {"0->1": 0.1, "1->0": 0.2},
      "bandwidth": "inf",
      ...
    }

A field is a number, or a list with one for each stage (or boundary). What is by link has one key
`source->target` for each, `copy_engine` one for each rank. What is left out has its default.
`samples` are the columns of what the costs were fitted on.

Timelines have the `.sched` text of each schedule, once, and the times:

    {"schedir timelines": 1,
    "schedules": ["schedir 1\\nname 1f1b\\n..."],
    "timelines": [
    {"schedule": 0, "unit": "s", "measured": {"step": 3, "clock_error": 2e-05}, "sizes": null,
    "starts": [0, 1, null],
    "ends": [1, 2, null]}]}

`schedule` is an index into `schedules`. A timeline simulated under a channel model also has its
`posting` and `edge_makespan`. `starts` and `ends` have one time per action, rank after rank in list
order, null for what is not known. What is written is read back exactly: integers stay integers, and
floats have all their digits.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from schedir.errors import LoadError, ParseError
from schedir.files import replacing, write_text
from schedir.ir import Schedule, decode, dumps, loads
from schedir.simulator.moments import Posting
from schedir.simulator.samples import Samples, of_plain
from schedir.simulator.values import UNITS, Measured, Sizes, clip, expect_number

_FORMAT, _VERSION = "schedir timelines", 1
_BEYOND = 2**63  # what no int64 holds
_KEY = re.compile(r"(\d{1,9})(?:->(\d{1,9}))?", re.ASCII)
_Made = TypeVar("_Made")


def write_costs(fields: Mapping[str, Any], path: str | Path) -> None:
    """Write the fields of a cost model. Raises OSError where the file can't be written."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps(_plain(value), allow_nan=False)}"
        for name, value in fields.items()
        if name != "samples" or value is not None
    ]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Samples):
        return value.plain()
    if isinstance(value, Mapping):
        return {
            "->".join(map(str, key if isinstance(key, tuple) else (key,))): _plain(one)
            for key, one in value.items()
        }
    return "inf" if value == math.inf else value


def read_costs(path: str | Path, known: Collection[str]) -> dict[str, Any]:
    """The fields of a cost model, of those that are `known`, as `write_costs` got them.

    Raises what `read_json` does, and ValueError for other keys.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f'costs must be an object, as in {{"forward": 1}}, not {clip(content)}')
    for name in content:
        if name not in known:
            if other := kind_of(content):
                raise ValueError(f"no costs{other}")
            close = difflib.get_close_matches(name, known, n=1)
            mend = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise ValueError(f"unknown key {clip(name)}; {mend}")
    return {name: _field(name, value) for name, value in content.items()}


def _field(name: str, value: Any) -> Any:
    if name == "samples":
        return None if value is None else of_plain(value)
    if isinstance(value, dict):
        return {_key(name, key): _field(name, one) for key, one in value.items()}
    return math.inf if value == "inf" else value


def _key(name: str, key: str) -> int | tuple[int, int]:
    """A rank, or a link."""
    found, of_rank = _KEY.fullmatch(key), name == "copy_engine"
    if found is None or of_rank != (found[2] is None):
        form = (
            'rank is given as "0"' if of_rank else 'link is given as "0->1", from rank 0 to rank 1'
        )
        raise ValueError(f"{name}: a {form}, not {clip(key)}")
    return int(found[1]) if of_rank else (int(found[1]), int(found[2]))


def write_timelines(timelines: Iterable[Any], path: str | Path) -> None:
    """Write timelines, one or several, to a file.

    Raises OSError if the file can't be written.
    """
    numbers: dict[Schedule, int] = {}
    written = [_written(line, numbers) for line in timelines]
    with replacing(path) as file:
        file.write(f'{{"{_FORMAT}": {_VERSION},\n')
        file.write(f'"schedules": {_json([dumps(schedule) for schedule in numbers])},\n')
        file.write('"timelines": [\n' + ",\n".join(written) + "]}\n")


def _written(line: Any, numbers: dict[Schedule, int]) -> str:
    head = {
        "schedule": numbers.setdefault(line.schedule, len(numbers)),
        "unit": line.unit,
        "measured": line.measured and attrs.asdict(line.measured),
        "sizes": line.sizes and attrs.asdict(line.sizes),
    }
    if line.posting is not None:
        head |= {"posting": attrs.asdict(line.posting), "edge_makespan": line.edge_makespan}
    starts, ends = (
        _json([None if time != time else time for time in times.tolist()])
        for times in (line.starts, line.ends)
    )
    return f'{_json(head)[:-1]},\n"starts": {starts},\n"ends": {ends}}}'


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def read_timelines(path: str | Path, make: Callable[..., _Made]) -> list[_Made]:
    """The timelines in a file; `make` makes each from its fields.

    Raises ParseError, with line and column, for a file that is not JSON, for example because it is
    cut short. Raises LoadError, with the place, for anything but timelines: a malformed schedule, a
    wrong number of times, and times that are negative or not numbers.
    """
    content = read_json(path)
    try:
        return _timelines(content, make)
    except (ValueError, TypeError, ParseError) as error:
        raise LoadError(f"{path}: {error}") from None


def _timelines(content: object, make: Callable[..., _Made]) -> list[_Made]:
    """The timelines of the whole content. Raises ValueError, with the place, for any fault."""
    if not isinstance(content, dict) or _FORMAT not in content:
        what = kind_of(content) or f': it lacks the key "{_FORMAT}"'
        raise ValueError(f"no file of timelines{what}")
    if content[_FORMAT] != _VERSION:
        raise ValueError(f"format {clip(content[_FORMAT])} is unknown; this is format {_VERSION}")
    whole = _keys(content, "the file", (_FORMAT, "schedules", "timelines"))
    schedules = []
    for number, text in enumerate(_list(whole["schedules"], "schedules")):
        if not isinstance(text, str):
            raise ValueError(f"schedule {number} is not text: {clip(text)}")
        schedules.append(loads(text, f"schedule {number}"))
    return [
        _timeline(one, f"timeline {number}", schedules, make)
        for number, one in enumerate(_list(whole["timelines"], "timelines"))
    ]


def _timeline(
    content: object, where: str, schedules: list[Schedule], make: Callable[..., _Made]
) -> _Made:
    fields = ("schedule", "unit", "measured", "sizes", "posting", "edge_makespan", "starts", "ends")
    if isinstance(content, dict):  # only what was timed under a channel model has these
        content = {"posting": None, "edge_makespan": None} | content
    held = dict(_keys(content, where, fields))
    number = held["schedule"]
    if type(number) is not int or not 0 <= number < len(schedules):
        raise ValueError(f"{where}: there is no schedule {clip(number)}")
    schedule = schedules[number]
    if held["unit"] not in (None, *UNITS):
        raise ValueError(f"{where}: unit must be null, s, ms or us, not {clip(held['unit'])}")
    times = {name: _times(held[name], f"{where}: {name}", schedule) for name in fields[-2:]}
    try:
        if held["sizes"] is not None:
            held["sizes"] = _sizes(held["sizes"], schedule.stages)
        if held["measured"] is not None:
            held["measured"] = _measured(held["measured"])
        if held["posting"] is not None:
            held["posting"] = Posting(**_keys(held["posting"], "posting", ("channel", "room")))
        return make(**held | times | {"schedule": schedule})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _times(value: object, where: str, schedule: Schedule) -> list[float]:
    times = _list(value, where)
    columns = schedule.columns
    if len(times) != len(columns):
        raise ValueError(
            f"{where} must hold one time for each of the {len(columns)} actions of {schedule.name}"
            f", not {len(times)}"
        )
    for place, time in enumerate(times):
        # A bool is an int, but no time.
        if time is None or (type(time) in (float, int) and -_BEYOND < time < _BEYOND):
            continue
        rank, index = columns.position(place)
        raise ValueError(
            f"{where}: rank {rank} #{index} {columns.action(place)}: a time is a finite number, "
            f"or null where it is not known, not {clip(time)}"
        )
    return [math.nan if time is None else time for time in times] if None in times else times


def _sizes(value: object, stages: int) -> Sizes:
    if isinstance(value, dict):  # older files don't have these
        value = {"deferred": None, "early_gradient": 0, "shard_ways": 1} | value
    found: dict[str, Any] = {}
    for name, size in _keys(value, "sizes", [field.name for field in attrs.fields(Sizes)]).items():
        several = isinstance(size, list)
        wanted = stages - (name == "boundary")
        if several and len(size) != wanted:
            raise ValueError(f"sizes: {name} must be one number or {wanted}, not {len(size)}")
        for one in size if several else [size]:
            if name != "deferred" or size is not None:
                expect_number(f"sizes: {name}", one)
        found[name] = tuple(size) if several else size
    return Sizes(**found)


def _measured(value: object) -> Measured:
    held = _keys(value, "measured", [field.name for field in attrs.fields(Measured)])
    if type(held["step"]) is not int or held["step"] < 0:
        raise ValueError(f"measured: step must be an int >= 0, not {clip(held['step'])}")
    expect_number("measured: clock_error", held["clock_error"])
    return Measured(**held)


def _keys(value: object, where: str, keys: Collection[str]) -> Mapping[str, Any]:
    """The value as an object that has these keys and no others."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, not {clip(value)}")
    for key in value:
        if key not in keys:
            raise ValueError(f"{where}: unknown key {clip(key)}; known: {', '.join(keys)}")
    for key in keys:
        if key not in value:
            raise ValueError(f"{where} lacks {key!r}")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list, not {clip(value)}")
    return value


def read_json(path: str | Path) -> object:
    """The content of a JSON file.

    Raises ParseError, with line and column, for a file that is not JSON, for example because it is
    cut short. Raises LoadError if it can't be read, or has a key twice.
    """
    file = str(path)
    try:
        return json.loads(decode(Path(path).read_bytes(), file), object_pairs_hook=_once)
    except OSError as error:
        raise LoadError(f"{file}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        why = f"not JSON, or cut short: {error.msg}"
        raise ParseError(why, file, error.lineno, error.colno) from None
    except _TwiceError as error:
        raise LoadError(f"{file}: the key {clip(error.args[0])} is in the file twice") from None
    except (ValueError, RecursionError, MemoryError):
        # A number of thousands of digits, brackets in brackets without end.
        raise LoadError(f"{file}: its JSON is beyond what can be read") from None


_KINDS = {
    "traceEvents": "a Perfetto trace (`schedir export --format perfetto`): give what that is of",
    _FORMAT: "measured timelines: `schedir show` draws them, and CostModel.fit makes costs of them",
    "backward": "costs, for --costs",
    "diagnostics": "what `schedir check` has found",
    "makespan": "what `schedir show --json` prints",
    "rows": "what `schedir compare --json` prints",
}
"""The JSON files that schedir writes, by a key that one of a kind has."""


def kind_of(content: object) -> str:
    """What a JSON file holds instead, as the end of a message; empty if schedir did not write
    it."""
    keys = content if isinstance(content, dict) else {}
    return next((f", but {what}" for key, what in _KINDS.items() if key in keys), "")


class _TwiceError(ValueError):
    """A key that occurs twice in an object, so that only one value would count."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _TwiceError(key)
        found[key] = value
    return found
