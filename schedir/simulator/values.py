"""Costs, times and sizes: numbers for all stages or links or for each, and units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from schedir.ir import is_number

Numbers: TypeAlias = NDArray[Any]
"""Times: all integers, or all floats."""


def numbers(values: ArrayLike) -> Numbers:
    """The times as a read-only array: int64 if they are integers, else float64."""
    times = np.asarray(values)
    whole = times.size > 0 and times.dtype.kind in "iu"
    times = times.astype(np.int64 if whole else np.float64)
    times.flags.writeable = False
    return times


@attrs.frozen
class Measured:
    """How a timeline was measured: its `step`, and `clock_error`, the most by which the clocks of
    two ranks may differ, in the timeline's unit of time.

    >>> import schedir
    >>> schedir.simulator.Measured(step=3, clock_error=0.02)
    Measured(step=3, clock_error=0.02)
    """

    step: int
    clock_error: float = 0.0


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


def _check_stages(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is None and attribute.default is None:
        return
    if not isinstance(value, tuple):
        expect_number(attribute.name, value)
    elif not value:
        raise ValueError(f"{attribute.name} must have one number for each stage, not none")
    else:
        of = "boundary" if attribute.name == "boundary_bytes" else "stage"
        for number, one in enumerate(value):
            expect_number(f"{attribute.name} of {of} {number}", one)


def _check_links(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    name = attribute.name
    for link, one in (value if isinstance(value, dict) else {None: value}).items():
        if link is None:
            check_bandwidth(instance, attribute, one)
        elif isinstance(link, tuple) and len(link) == 2 and all(map(is_number, link)):
            check_bandwidth(instance, attribute, one, f"{name} of link {link}")
        else:
            raise ValueError(f"{name} must be by (source rank, target rank), not by {link!r}")


def check_bandwidth(
    instance: object, attribute: attrs.Attribute[Any], value: Any, called: str = ""
) -> None:
    """The validator of a field that is one number, above 0 or infinite if it is a bandwidth."""
    called, limited = called or attribute.name, attribute.name.endswith("bandwidth")
    if limited and value == math.inf:
        return
    expect_number(called, value)
    if limited and value == 0:
        raise ValueError(f"{called} must be above 0")


def check_ways(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """The validator of the number of ranks that share weights."""
    expect_number(attribute.name, value)
    if value < 1:
        raise ValueError(f"{attribute.name} must be at least 1, not {value}")


def _check_engines(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not (
        isinstance(value, dict) and all(map(is_number, (*value, *value.values())))
    ):
        raise ValueError(
            f"{attribute.name} must be {{rank: number of its engine}} or None, not {clip(value)}"
        )


def check_unit(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """The validator of a field that is a unit of time."""
    if value not in (None, *UNITS):
        raise ValueError(f"unit must be {', '.join(UNITS)} or None, not {value!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(value) if isinstance(value, list) else value


BY_STAGE: dict[str, Any] = {"validator": _check_stages, "converter": _plain}
"""The arguments of a field that is by stage."""
BY_LINK: dict[str, Any] = {"validator": _check_links, "converter": _plain, "hash": False}
"""The arguments of a field that is by link."""
ENGINES: dict[str, Any] = {"validator": _check_engines, "converter": _plain, "hash": False}
"""The arguments of a field that says which ranks share an engine."""


def factor(unit: Unit | None, other: Unit) -> float:
    """How many of the `other` unit make one `unit`; 1 if `unit` is None.

    >>> import schedir
    >>> schedir.simulator.factor("s", "ms")
    1000.0
    """
    return 1 if unit in (None, other) else _PER_SECOND[other] / _PER_SECOND[unit]


def clip(value: object) -> str:
    """The value in short, for an error message."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


@attrs.frozen
class Sizes:
    """The bytes of what is kept: each one number, or one per stage (`boundary`: one per boundary).

    `deferred` is what is left of an activation between its I and its W. None counts the whole
    activation. `early_gradient` is the part of `gradient` that an I adds. `shard_ways` is the
    number of ranks that share the weights of a sharded stage.

    >>> import schedir
    >>> costs = schedir.CostModel(activation_bytes=(4096, 8192))
    >>> costs.sizes.activation, costs.sizes.known
    ((4096, 8192), True)
    """

    boundary: PerStage = 0
    input: PerStage = 0
    activation: PerStage = 0
    weight: PerStage = 0
    gradient: PerStage = 0
    optimizer: PerStage = 0
    deferred: PerStage | None = None
    early_gradient: PerStage = 0
    shard_ways: float = 1

    @property
    def known(self) -> bool:
        """True if any size is above 0."""
        sizes = attrs.evolve(self, shard_ways=0)
        return any(
            any(v) if isinstance(v, tuple) else v for v in attrs.astuple(sizes, recurse=False)
        )


def field_of(size: str) -> str:
    """The field of CostModel for a field of Sizes."""
    return size if size == "shard_ways" else f"{size}_bytes"
