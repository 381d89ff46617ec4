"""Costs, times and sizes: numbers for all stages or links or for each, and units."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from schedir.errors import LoadError, ParseError, SchedirError
from schedir.ir import Schedule, decode, is_number
from schedir.ir.kinds import Size
from schedir.ir.tokens import clip

Numbers: TypeAlias = NDArray[Any]
"""Times: all integers, or all floats."""


def numbers(values: ArrayLike) -> Numbers:
    """The times as a read-only array: int64 if they are integers, else float64."""
    times = np.asarray(values)
    whole = times.size > 0 and times.dtype.kind in "iu"
    times = times.astype(np.int64 if whole else np.float64)
    times.flags.writeable = False
    return times


PerStage: TypeAlias = float | tuple[float, ...]
"""One number for all stages, or one for each."""
PerLink: TypeAlias = float | Mapping[tuple[int, int], float]
"""One number for all links, or one for each (source rank, target rank)."""
Unit: TypeAlias = Literal["s", "ms", "us"]
"""One unit of time: a second, a millisecond or a microsecond."""
_PER_SECOND: dict[Unit, int] = {"s": 1, "ms": 10**3, "us": 10**6}
UNITS: tuple[Unit, ...] = tuple(_PER_SECOND)
"""The units of time, the longest first."""

MOST = 10**15
"""The largest cost: sums over millions of actions stay far from overflow."""


def expect_number(name: str, value: object) -> None:
    """Raise TypeError for anything but a number, ValueError for a number that can't be a cost."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {clip(value)}")
    if not 0 <= value <= MOST:
        raise ValueError(f"{name} must be finite and >= 0 (at most {MOST:.0e}), not {clip(value)}")


def check_number(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """The validator of a field that is a number as a cost is."""
    expect_number(attribute.name, value)


By: TypeAlias = Literal["stage", "start", "boundary", "link", "rank", "all"]
"""What a field has one number for: each stage, of parts of which it is the sum; the start of each
stage; the boundary after each stage but the last; a link; a rank; or all at once. The first four
may be one number for all as well."""


def by(what: By, default: float | None = 0) -> Any:
    """A field that has one number for each of these, or one for all."""
    return attrs.field(
        default=default,
        converter=None if what == "all" else _plain,
        validator=check_field,
        hash=False if what in ("link", "rank") else None,
        metadata={"by": what},
    )


def check_field(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Raise TypeError or ValueError, with the field's name, for anything else than it may have."""
    name, what = attribute.name, attribute.metadata["by"]
    if value is None and attribute.default is None:
        return
    each = {name: value}
    if what in ("stage", "start", "boundary") and isinstance(value, tuple):
        if not value:
            raise ValueError(f"{name} must have one number for each stage, not none")
        of = "boundary" if what == "boundary" else "stage"
        each = {f"{name} of {of} {number}": one for number, one in enumerate(value)}
    elif what == "link" and isinstance(value, dict):
        for link in value:
            if not (isinstance(link, tuple) and len(link) == 2 and all(map(is_number, link))):
                raise ValueError(f"{name} must be by (source rank, target rank), not by {link!r}")
        each = {f"{name} of link {link}": one for link, one in value.items()}
    elif what == "rank":
        if isinstance(value, dict) and all(map(is_number, (*value, *value.values()))):
            return
        raise ValueError(
            f"{name} must be {{rank: number of its engine}} or None, not {clip(value)}"
        )
    limited = name.endswith("bandwidth")
    for called, one in each.items():
        if limited and one == math.inf:
            continue
        expect_number(called, one)
        if limited and one == 0:
            raise ValueError(f"{called} must be above 0")
        if name == "shard_ways" and one < 1:
            raise ValueError(f"{name} must be at least 1, not {one}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(value) if isinstance(value, list) else value


def one_each(name: str, value: PerStage, many: int, needed: str = "") -> tuple[float, ...]:
    """One number for each of so `many` stages or boundaries. Raises SchedirError, which says what
    is `needed`, for another number of them."""
    if not isinstance(value, tuple):
        return (value,) * many
    if len(value) != many:
        count = "1 is" if many == 1 else f"{many} are"
        raise SchedirError(
            f"{name} has {len(value)} numbers, but {needed or f'{count} needed'}: give one for "
            "each, or one number for all"
        )
    return value


def expect_stages(fields: Any, schedule: Schedule) -> None:
    """Raise SchedirError for a field of a CostModel or of Sizes that belongs to another number of
    stages than the schedule has."""
    for field in attrs.fields(type(fields)):
        edge = field.metadata.get("by") == "boundary"
        needed, what = schedule.stages - edge, "boundaries" if edge else "stages"
        value = getattr(fields, field.name)
        if isinstance(value, tuple):
            one_each(field.name, value, needed, f"{schedule.name} has {needed} {what}")


def check_unit(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """The validator of a field that is a unit of time."""
    if value not in (None, *UNITS):
        raise ValueError(f"unit must be {', '.join(UNITS)} or None, not {clip(value)}")


def factor(unit: Unit | None, other: Unit) -> float:
    """How many of the `other` unit make one `unit`; 1 if `unit` is None.

    >>> import schedir
    >>> schedir.simulator.factor("s", "ms")
    1000.0
    """
    return 1 if unit in (None, other) else _PER_SECOND[other] / _PER_SECOND[unit]


@attrs.frozen
class Sizes:
    """The bytes of what is kept: each one number, or one per stage (`boundary`: one per boundary).

    `deferred` is what is left of an activation between its I and its W. None counts the whole
    activation. `early_gradient` is the part of `gradient` that an I adds. `shard_ways` is the
    number of ranks that share the weights of a sharded stage.

    Raises TypeError or ValueError, with the name of the field, for anything but a finite number >=
    0.

    >>> import schedir
    >>> costs = schedir.CostModel(activation_bytes=(4096, 8192))
    >>> costs.sizes.activation, costs.sizes.known
    ((4096, 8192), True)
    """

    boundary: PerStage = by("boundary")
    input: PerStage = by("start")
    activation: PerStage = by("stage")
    weight: PerStage = by("stage")
    gradient: PerStage = by("stage")
    optimizer: PerStage = by("stage")
    deferred: PerStage | None = by("stage", None)
    early_gradient: PerStage = by("stage")
    shard_ways: float = by("all", 1)

    @property
    def known(self) -> bool:
        """True if any size is above 0."""
        sizes = attrs.astuple(
            self, recurse=False, filter=lambda field, _: field.name != "shard_ways"
        )
        return any(any(size) if isinstance(size, tuple) else size for size in sizes)

    def of(self, size: Size, stages: int) -> tuple[float, ...]:
        """The bytes of a value of this size in the table of values, at each of so many stages."""
        if size in ("boundary before", "boundary after"):
            every = one_each("boundary", self.boundary, stages - 1)
            return (0, *every) if size == "boundary before" else (*every, 0)
        whole = size == "deferred" and self.deferred is None
        return one_each(size, self.activation if whole else getattr(self, size), stages)


@attrs.frozen
class Measured:
    """How a timeline was measured: its `step`, and `clock_error`, the most by which the clocks of
    two ranks may differ, in the timeline's unit of time.

    Raises ValueError or TypeError for a step that is no int >= 0, and for anything but a finite
    number >= 0.

    >>> import schedir
    >>> schedir.simulator.Measured(step=3, clock_error=0.02)
    Measured(step=3, clock_error=0.02)
    """

    step: int = attrs.field()
    clock_error: float = attrs.field(default=0.0, validator=check_number)

    @step.validator
    def _check_step(self, attribute: object, value: object) -> None:
        if type(value) is not int or value < 0:
            raise ValueError(f"step must be an int >= 0, not {clip(value)}")


def field_of(size: str) -> str:
    """The field of CostModel for a field of Sizes."""
    return size if size == "shard_ways" else f"{size}_bytes"


# JSON.


def read_json(path: str | Path) -> object:
    """The content of a JSON file.

    Raises ParseError, with line and column, for a file that is not JSON, for example because it is
    cut short. Raises LoadError if it can't be read, or has a key twice.
    """
    file = str(path)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:  # only one value would count
                raise LoadError(f"{file}: the key {clip(key)} is in the file twice")
            found[key] = value
        return found

    try:
        return json.loads(decode(Path(path).read_bytes(), file), object_pairs_hook=once)
    except OSError as error:
        raise LoadError(f"{file}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        why = f"not JSON, or cut short: {error.msg}"
        raise ParseError(why, file, error.lineno, error.colno) from None
    except (ValueError, RecursionError, MemoryError):
        # A number of thousands of digits, brackets in brackets without end.
        raise LoadError(f"{file}: its JSON is beyond what can be read") from None


TIMELINES = "schedir timelines"
"""The key that a file of timelines begins with; its value is the format's version."""
_KINDS = {
    "traceEvents": "a Perfetto trace (`schedir export --format perfetto`): give what that is of",
    TIMELINES: "measured timelines: `schedir show` draws them, CostModel.fit makes costs of them",
    "backward": "costs, for --costs",
    "diagnostics": "what `schedir check` has found",
    "makespan": "what `schedir show --format json` prints",
    "rows": "what `schedir compare --format json` prints",
}
"""The JSON files that schedir writes, by a key that one of a kind has."""


def kind_of(content: object) -> str:
    """What a JSON file holds instead, as the end of a message; empty if schedir did not write
    it."""
    keys = content if isinstance(content, dict) else {}
    return next((f", but {what}" for key, what in _KINDS.items() if key in keys), "")
