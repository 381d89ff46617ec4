"""Timelines in a file: JSON with the `.sched` text of each schedule, once, and the times.

    {"schedir timelines": 1,
    "schedules": ["schedir 1\\nname 1f1b\\n..."],
    "timelines": [
    {"schedule": 0, "unit": "s", "measured": {"step": 3, "clock_error": 2e-05}, "sizes": null,
    "starts": [0, 1, null],
    "ends": [1, 2, null]}]}

`schedule` is an index into `schedules`. `starts` and `ends` have one time per action, rank after
rank in list order, null for what is not known. What is written is read back exactly: integers stay
integers, and floats have all their digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import attrs

from schedir.errors import LoadError, ParseError
from schedir.files import replacing
from schedir.ir import Schedule, dumps, loads
from schedir.simulator.json_file import clip, read_json
from schedir.simulator.times import Measured, Numbers
from schedir.simulator.values import Sizes, Unit, expect_number

_FORMAT, _VERSION = "schedir timelines", 1
_UNITS = (None, *get_args(Unit))
_BEYOND = 2**63  # what no int64 holds
_Made = TypeVar("_Made")


def write(timelines: Iterable[Any], path: str | Path) -> None:
    """Write what has the fields of a Timeline, one or several, to a file.

    Raises OSError where the file can't be written.
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
        "measured": None if line.measured is None else attrs.asdict(line.measured),
        "sizes": None if line.sizes is None else attrs.asdict(line.sizes),
    }
    starts, ends = (_json(_known(times)) for times in (line.starts, line.ends))
    return f'{_json(head)[:-1]},\n"starts": {starts},\n"ends": {ends}}}'


def _known(times: Numbers) -> list[float | None]:
    return [None if time != time else time for time in times.tolist()]


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def read(path: str | Path, make: Callable[..., _Made]) -> list[_Made]:
    """What `make` makes of the fields of each timeline in a file.

    Raises ParseError, with line and column, for what is no JSON, as where the file is cut short,
    and LoadError, with the place, for what is no timeline: a schedule that is malformed, times that
    are not one for each of its actions, that are negative, or no numbers.
    """
    content = read_json(path)
    try:
        return _timelines(content, make)
    except (ValueError, TypeError, ParseError) as error:
        raise LoadError(f"{path}: {error}") from None


def _timelines(content: object, make: Callable[..., _Made]) -> list[_Made]:
    """What is made of the whole content. Raises ValueError, with the place, for what is wrong."""
    if not isinstance(content, dict) or _FORMAT not in content:
        raise ValueError(f'no file of timelines: it lacks the key "{_FORMAT}"')
    if content[_FORMAT] != _VERSION:
        raise ValueError(f"format {clip(content[_FORMAT])} is unknown; this is format {_VERSION}")
    whole = _keys(content, "the file", (_FORMAT, "schedules", "timelines"))
    schedules = []
    for number, text in enumerate(_list(whole["schedules"], "schedules")):
        if not isinstance(text, str):
            raise ValueError(f"schedule {number} is no text but {clip(text)}")
        schedules.append(loads(text, f"schedule {number}"))
    return [
        _timeline(one, f"timeline {number}", schedules, make)
        for number, one in enumerate(_list(whole["timelines"], "timelines"))
    ]


def _timeline(
    content: object, where: str, schedules: list[Schedule], make: Callable[..., _Made]
) -> _Made:
    fields = ("schedule", "unit", "measured", "sizes", "starts", "ends")
    held = _keys(content, where, fields)
    number = held["schedule"]
    if type(number) is not int or not 0 <= number < len(schedules):
        raise ValueError(f"{where}: there is no schedule {clip(number)}")
    schedule = schedules[number]
    if held["unit"] not in _UNITS:
        raise ValueError(f"{where}: unit must be null, s, ms or us, not {clip(held['unit'])}")
    starts = _times(held["starts"], f"{where}: starts", schedule)
    ends = _times(held["ends"], f"{where}: ends", schedule)
    sizes, measured = held["sizes"], held["measured"]
    try:
        return make(
            schedule=schedule,
            starts=starts,
            ends=ends,
            sizes=None if sizes is None else _sizes(sizes, schedule.stages),
            unit=held["unit"],
            measured=None if measured is None else _measured(measured),
        )
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
    names = [field.name for field in attrs.fields(Sizes)]
    found: dict[str, Any] = {}
    if isinstance(value, dict):  # older files don't have it
        value = {"deferred": None} | value
    for name, size in _keys(value, "sizes", names).items():
        if name == "deferred" and size is None:
            continue
        several = size if isinstance(size, list) else [size]
        wanted = stages - 1 if name == "boundary" else stages
        if isinstance(size, list) and len(size) != wanted:
            raise ValueError(f"sizes: {name} must be one number or {wanted}, not {len(size)}")
        for one in several:
            expect_number(f"sizes: {name}", one)
        found[name] = tuple(size) if isinstance(size, list) else size
    return Sizes(**found)


def _measured(value: object) -> Measured:
    held = _keys(value, "measured", [field.name for field in attrs.fields(Measured)])
    if type(held["step"]) is not int or held["step"] < 0:
        raise ValueError(f"measured: step must be an int >= 0, not {clip(held['step'])}")
    expect_number("measured: clock_error", held["clock_error"])
    return Measured(**held)


def _keys(value: object, where: str, keys: Iterable[str]) -> Mapping[str, Any]:
    """The value as an object that has these keys and no others."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, not {clip(value)}")
    known = list(keys)
    for key in value:
        if key not in known:
            raise ValueError(f"{where}: unknown key {clip(key)}; known: {', '.join(known)}")
    for key in known:
        if key not in value:
            raise ValueError(f"{where} lacks {key!r}")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list, not {clip(value)}")
    return value
