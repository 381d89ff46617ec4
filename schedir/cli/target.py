"""The arguments that name a schedule and its shape, the same for every command."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from schedir.checker import CHANNELS, prove
from schedir.cli.terminal import RefusedError
from schedir.errors import LoadError
from schedir.ir import TRANSPORTS, Schedule
from schedir.library import (
    DEFAULT_MICROBATCHES,
    DEFAULT_RANKS,
    Parameter,
    generator_of,
    is_list,
    load,
    name_of,
)
from schedir.passes import append_steps

if TYPE_CHECKING:
    from schedir.simulator import CostModel

_OWN_OPTIONS = ("ranks", "microbatches", "chunks")


_NAMED = "a name from `schedir list`; path.py[:function] or module:function, which schedir runs"
TARGET = f"a schedule: {_NAMED}; a .sched or .csv file; or -, which reads such a file from stdin"
"""The help of TARGET."""
TARGET_OR_RUN = f"{TARGET}. Or a .json file of measured timelines"
"""The help of TARGET for commands that also read measured timelines."""


def add_targets(parser: argparse.ArgumentParser, text: str) -> argparse._ArgumentGroup:
    """Add TARGETs, with `text` as help, and the options of their shape; returns that group."""
    parser.add_argument("targets", metavar="TARGET", nargs="+", help=text)
    return add_shape(parser)


def add_target(parser: argparse.ArgumentParser, text: str) -> None:
    """Add TARGET, with `text` as help, and the options of its shape."""
    parser.add_argument("target", metavar="TARGET", help=text)
    add_shape(parser)


def add_sizes(parser: argparse.ArgumentParser, chunks: str) -> argparse._ArgumentGroup:
    """Add `--ranks`, `--microbatches` and `--chunks`; returns their group. `chunks` is the default
    in words."""
    shape = parser.add_argument_group("shape of the pipeline")
    default = f"default: {DEFAULT_RANKS}, or the number in measured costs"
    for short, option, letter, text in (
        ("-r", "--ranks", "P", f"number of ranks ({default})"),
        ("-m", "--microbatches", "M", f"number of microbatches (default: {DEFAULT_MICROBATCHES})"),
        ("-v", "--chunks", "V", f"number of model chunks, stages per rank (default: {chunks})"),
    ):
        shape.add_argument(short, option, type=at_least(1), metavar=letter, help=text)
    return shape


def add_shape(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options of a generator's shape; returns their group."""
    shape = add_sizes(parser, "the schedule's own")
    shape.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a parameter of the schedule (`schedir list` names them); repeat for more",
    )
    shape.add_argument(
        "--add-steps",
        action="store_true",
        help="add an OPTIM_STEP for every stage at the end, if the lists have none. torch's CSV "
        "files never have one",
    )
    return shape


def add_channel(parser: argparse._ActionsContainer, text: str, default: str | None = None) -> None:
    """Add `--channel`, with `text` as help."""
    parser.add_argument("--channel", choices=(*CHANNELS, *TRANSPORTS), default=default, help=text)


TIMED = (
    "the channel model or transport to time under (see `schedir check`): transfers wait for each "
    "other as there, without buffers. nccl is rank, a bound from above, shown beside edge; gloo is "
    "async. Without it no order of transfers holds up anything"
)
"""The help of a `--channel` that times."""


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that takes a whole number >= `least`."""

    def number(text: str) -> int:
        if re.fullmatch("0*[1-9][0-9]{9,}", text):
            raise argparse.ArgumentTypeError(f"{text} is too many: at most {10**9 - 1}")
        if not re.fullmatch("[0-9]+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {least}")
        return int(text)

    return number


def load_target(
    args: argparse.Namespace,
    target: str,
    shape: Schedule | None = None,
    costs: CostModel | None = None,
) -> Schedule:
    """The schedule of a `target`, unchanged except for `--add-steps`.

    Without `--ranks` and `--microbatches` it has those of `shape`. Generators that ask for costs
    get `costs`. Raises LoadError or ParseError.
    """
    parameters = parameters_of(args)
    # Text that a user's generator prints must not mix with the result.
    with redirect_stdout(sys.stderr):
        found = load(
            target,
            ranks=shape.ranks if shape and args.ranks is None else args.ranks,
            microbatches=(
                shape.microbatches if shape and args.microbatches is None else args.microbatches
            ),
            chunks=args.chunks,
            costs=costs,
            **parameters,
        )
    return append_steps(found) if args.add_steps else found


def proved(schedule: Schedule, subject: str, channel: str | None = None) -> Schedule:
    """The complete form of a schedule that runs under a channel model, by default the most lenient
    one: on some transport. Raises RefusedError."""
    report = prove(schedule, channel or CHANNELS[-1])
    if report.schedule is None:
        raise RefusedError(report, subject)
    return report.schedule


def sees_costs(target: str) -> bool:
    """Whether a target is a generator that asks for costs. Raises LoadError."""
    if is_list(target) or target.endswith(".json"):
        return False
    with redirect_stdout(sys.stderr):
        return generator_of(target).sees_costs


def parameters_of(args: argparse.Namespace) -> dict[str, Parameter]:
    """The parameters of --set. Raises LoadError for one that has an option, or is set twice."""
    parameters: dict[str, Parameter] = {}
    for key, value in args.set:
        if key in _OWN_OPTIONS:
            raise LoadError(f"{key} is not set with --set: write --{key} {value}")
        if key == "costs":
            raise LoadError("costs are not set with --set: give --costs FILE, or --cost KEY=VALUE")
        if key in parameters:
            raise LoadError(f"--set names {key} twice")
        parameters[key] = value
    return parameters


def subject_of(target: str, schedule: Schedule) -> str:
    """The name of the schedule in messages: its file, or its name."""
    named = is_list(target) or target.endswith(".json")
    return name_of(target) if named else schedule.name


def _setting(text: str) -> tuple[str, Parameter]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    if value.lower() in ("true", "false"):
        return key, value.lower() == "true"
    if re.fullmatch(r"-?[0-9]{1,18}", value):
        return key, int(value)
    return key, value
