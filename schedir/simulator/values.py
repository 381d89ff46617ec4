"""What a cost can be: a number for all stages or links, or one for each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import attrs

from schedir.ir import is_number
from schedir.simulator.json_file import clip

PerStage: TypeAlias = float | tuple[float, ...]
"""One number for all stages, or one for each."""
PerLink: TypeAlias = float | Mapping[tuple[int, int], float]
"""One number for all links, or one for each (source rank, target rank)."""
Unit: TypeAlias = Literal["s", "ms", "us"]
"""What one unit of time is: a second, a millisecond, a microsecond."""

MOST = 10**15
"""The largest cost: sums over millions of actions stay far from overflow."""


def expect_number(name: str, value: object) -> None:
    """Raise TypeError for what is no number, ValueError for one that is no cost."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {clip(value)}")
    if not 0 <= value <= MOST:
        raise ValueError(f"{name} must be finite and >= 0 (at most {MOST:.0e}), not {clip(value)}")


def _check_stages(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is None and attribute.default is None:
        return
    if not isinstance(value, tuple):
        expect_number(attribute.name, value)
        return
    if not value:
        raise ValueError(f"{attribute.name} must have one number for each stage, not none")
    of = "boundary" if attribute.name == "boundary_bytes" else "stage"
    for number, one in enumerate(value):
        expect_number(f"{attribute.name} of {of} {number}", one)


def _check_links(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    name = attribute.name
    if not isinstance(value, dict):
        _expect_of_link(name, value, name)
        return
    for link, one in value.items():
        if not (isinstance(link, tuple) and len(link) == 2 and all(map(is_number, link))):
            raise ValueError(f"{name} must be by (source rank, target rank), not by {link!r}")
        _expect_of_link(name, one, f"{name} of link {link}")


def _expect_of_link(name: str, value: Any, called: str) -> None:
    if name.endswith("bandwidth") and value == math.inf:
        return
    expect_number(called, value)
    if name.endswith("bandwidth") and value == 0:
        raise ValueError(f"{called} must be above 0")


def check_bandwidth(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """The validator of a field that is one bandwidth."""
    _expect_of_link(attribute.name, value, attribute.name)


def _check_engines(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    pairs = value.items() if isinstance(value, dict) else ((None, None),)
    if value is not None and not all(map(is_number, sum(pairs, ()))):
        raise ValueError(
            f"{attribute.name} must be {{rank: number of its engine}} or None, not {clip(value)}"
        )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _dict(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def check_unit(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """The validator of a field that is a unit of time."""
    if value not in (None, *get_args(Unit)):
        raise ValueError(f"unit must be {', '.join(get_args(Unit))} or None, not {value!r}")


BY_STAGE: dict[str, Any] = {"validator": _check_stages, "converter": _tuple}
"""The arguments of a field that is by stage."""
BY_LINK: dict[str, Any] = {"validator": _check_links, "converter": _dict, "hash": False}
"""The arguments of a field that is by link."""
ENGINES: dict[str, Any] = {"validator": _check_engines, "converter": _dict, "hash": False}
"""The arguments of a field that says which ranks share an engine."""


@attrs.frozen
class Sizes:
    """What is kept, in bytes: each one number, or one per stage (`boundary`: per boundary).

    `deferred` is what is left of an activation between its I and its W, None where that is not
    known: then it counts as all of it.
    """

    boundary: PerStage = 0
    input: PerStage = 0
    activation: PerStage = 0
    weight: PerStage = 0
    gradient: PerStage = 0
    optimizer: PerStage = 0
    deferred: PerStage | None = None

    @property
    def known(self) -> bool:
        """Whether any is above 0."""
        return any(
            any(v) if isinstance(v, tuple) else v for v in attrs.astuple(self, recurse=False)
        )
