"""The options for the costs of actions and transfers: `--costs FILE`, `--cost forward=2`."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

import attrs

from schedir.cli.terminal import about
from schedir.errors import SchedirError
from schedir.ir import Schedule

if TYPE_CHECKING:
    from schedir.simulator import CostModel


_BYTES = re.compile(r"(?i)([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(?:([kmgtp])(i?))?b?")
_OPTIONAL = "PerStage | None"  # as CostModel annotates it


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add `--costs` and `--cost`."""
    group = parser.add_argument_group(
        "costs (by default a forward takes 1, a backward 2, the rest nothing)"
    )
    group.add_argument(
        "--costs",
        metavar="FILE",
        help="a JSON file of costs, as CostModel.save writes it; see `schedir docs costs-file`",
    )
    group.add_argument(
        "--cost",
        type=_Cost(),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one cost, which overrides FILE: one number, or one for each stage, forward=1,1,2; "
        "repeat for more. %(type)s",
    )


def costs_of(args: argparse.Namespace) -> CostModel:
    """The costs that the options name; by default a forward takes 1 and a backward 2.

    Raises LoadError or ParseError for the file, SchedirError for a bad option.
    """
    from schedir.simulator import CostModel

    with about("costs-file"):
        costs = CostModel() if args.costs is None else CostModel.load(args.costs)
        given: dict[str, Any] = {}
        for name, value in args.cost:
            if name in given:
                raise SchedirError(f"--cost names {name} twice")
            given[name] = value
        try:
            return attrs.evolve(costs, **given)
        except (TypeError, ValueError) as error:
            raise SchedirError(f"--cost: {error}") from None


def costs_given(args: argparse.Namespace) -> bool:
    """Whether the user gives any cost."""
    return args.costs is not None or bool(args.cost)


def note_unmeasured(schedule: Schedule, costs: CostModel) -> None:
    """Name on stderr the fitted costs of the schedule that no measured run has shown."""
    from schedir.simulator import how_derived, unmeasured

    names = unmeasured(schedule, costs)
    if names:
        print(f"note: derived, not measured: {how_derived(names)}", file=sys.stderr)


class _Cost:
    """The type of `--cost`. As text it is the part of the help that lists the names."""

    def __call__(self, text: str) -> tuple[str, Any]:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as forward=2")
        if name not in _types():
            raise argparse.ArgumentTypeError(
                f"no cost is named {name!r}; there are {', '.join(_types())}"
            )
        try:
            return name, _value(name, value)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{name}: {error}") from None

    def __str__(self) -> str:
        optional = [name for name, of in _types().items() if of == _OPTIONAL]
        return (
            f"{', '.join(optional)} may be none; bytes take a suffix, 2MiB. "
            f"Names: {', '.join(_types())}"
        )


@cache
def _types() -> dict[str, str]:
    """The names that `--cost` takes, and their types: costs by stage, by link, and the unit.

    CostModel is imported here, so that a command without costs starts faster.
    """
    from schedir.simulator import CostModel

    fields = attrs.fields(CostModel)
    of_stages = [f for f in fields if f.metadata.get("by") in ("stage", "start", "boundary")]
    others = [f for f in fields if f.metadata.get("by") in ("link", "all")]
    return {f.name: str(f.type) for f in (*of_stages, *others, fields.unit)}


def _value(name: str, text: str) -> Any:
    if name == "unit":
        from schedir.simulator import Unit

        if text not in get_args(Unit):
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(get_args(Unit))}")
        return text
    of = _types()[name]
    if text == "none" and of == _OPTIONAL:
        return None
    number: Callable[[str], float] = size if name.endswith("_bytes") else quantity
    if of == "PerLink":
        if "," in text:
            raise argparse.ArgumentTypeError(
                "--cost takes one number for all links; a file takes one for each"
            )
        return number(text)
    numbers = tuple(number(part) for part in text.split(","))
    return numbers if len(numbers) > 1 else numbers[0]


def quantity(text: str) -> float:
    """A number >= 0; a whole number becomes an int. Raises ArgumentTypeError."""
    if re.fullmatch("[0-9]{1,15}", text):
        return int(text)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 0")
    return value


def size(text: str) -> float:
    """A number of bytes: 1500, 40GiB, 16 GB, 1.5e9. Raises ArgumentTypeError."""
    found = _BYTES.fullmatch(text.strip())
    value = math.inf
    if found is not None:
        number, prefix, binary = found.groups()
        value = float(number) * (1024 if binary else 1000) ** " KMGTP".index(
            (prefix or " ").upper()
        )
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 40GiB")
    return int(value) if value == int(value) else value
