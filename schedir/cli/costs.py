"""The options that say what actions and transfers cost: `--costs FILE`, `--cost forward=2`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, get_args

import attrs

from schedir.cli.quantities import quantity, size
from schedir.errors import SchedirError
from schedir.ir import Schedule
from schedir.simulator import CostModel, Unit, how_derived, unmeasured

_UNITS = get_args(Unit)
_TYPES = {field.name: str(field.type) for field in attrs.fields(CostModel)}
_PER_STAGE = [name for name, kind in _TYPES.items() if kind.startswith("PerStage")]
_MAY_BE_NONE = [name for name in _PER_STAGE if _TYPES[name].endswith("None")]
_PER_LINK = [name for name, kind in _TYPES.items() if kind == "PerLink"]
_NAMES = [*_PER_STAGE, *_PER_LINK, "unit"]


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add `--costs` and `--cost`."""
    group = parser.add_argument_group("costs (by default a forward takes 1, a backward 2)")
    group.add_argument(
        "--costs", metavar="FILE", help="a cost model, as CostModel.save writes it: JSON"
    )
    group.add_argument(
        "--cost",
        type=_cost,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a single cost, on top of FILE's; one number, or one for each stage: forward=1,1,2; "
        f"repeat for more. {', '.join(_MAY_BE_NONE)} may be none; bytes may be written 2MiB. "
        f"Names: {', '.join(_NAMES)}",
    )


def costs_of(args: argparse.Namespace) -> CostModel:
    """The costs that the options name, by default the textbook's.

    Raises LoadError or ParseError for the file, SchedirError for a bad option.
    """
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
    """Whether the user has named any cost."""
    return args.costs is not None or bool(args.cost)


def note_unmeasured(schedule: Schedule, costs: CostModel) -> None:
    """Say on stderr which costs of the schedule no run has shown, if they were fitted."""
    names = unmeasured(schedule, costs)
    if names:
        print(f"note: derived, as no run has shown it: {how_derived(names)}", file=sys.stderr)


def _cost(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as forward=2")
    if name not in _NAMES:
        raise argparse.ArgumentTypeError(
            f"no cost is named {name!r}; there are {', '.join(_NAMES)}"
        )
    try:
        return name, _value(name, value)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error}") from None


def _value(name: str, text: str) -> Any:
    if name == "unit":
        if text not in _UNITS:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(_UNITS)}")
        return text
    if text == "none" and name in _MAY_BE_NONE:
        return None
    number: Callable[[str], float] = size if name.endswith("_bytes") else quantity
    if name in _PER_LINK:
        if "," in text:
            raise argparse.ArgumentTypeError("one number for all links; one each takes a file")
        return number(text)
    numbers = tuple(number(part) for part in text.split(","))
    return numbers if len(numbers) > 1 else numbers[0]
