"""The arguments that several commands share: a schedule and its shape, the costs of actions and
transfers (`--costs FILE`, `--cost forward=2`), the channel model, and the format."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs

from schedir.checker import CHANNELS, prove
from schedir.cli.terminal import RefusedError, about
from schedir.errors import LoadError, SchedirError
from schedir.graph.alive import HELD_UNTIL
from schedir.ir import TRANSPORTS, Schedule
from schedir.library import (
    DEFAULT_MICROBATCHES,
    DEFAULT_RANKS,
    Parameter,
    is_list,
    load,
    name_of,
)
from schedir.passes import append_steps

if TYPE_CHECKING:
    from schedir.simulator import CostModel

_OWN_OPTIONS = ("ranks", "microbatches", "chunks")
_SPELLED = {"start": "from", "end": "to"}
_BYTES = re.compile(r"(?i)([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(?:([kmgtp])(i?))?b?")

_NAMED = "a name from `schedir list`; path.py[:function] or module:function, which schedir runs"
TARGET = f"a schedule: {_NAMED}; a .sched or .csv file; or -, which reads such a file from stdin"
"""The help of TARGET."""
TARGET_OR_RUN = f"{TARGET}. Or a .json file of measured timelines"
"""The help of TARGET for commands that also read measured timelines."""


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
        action=Once,
        default={},
        metavar="KEY=VALUE",
        help="set a parameter of the schedule (`schedir list` names them); repeat for more",
    )
    add_flags(
        shape,
        add_steps="add an OPTIM_STEP for every stage at the end, if the lists have none. torch's "
        "CSV files never have one",
    )
    return shape


def add_channel(parser: argparse._ActionsContainer, text: str, default: str | None = None) -> None:
    """Add `--channel`, with `text` as help."""
    parser.add_argument("--channel", choices=(*CHANNELS, *TRANSPORTS), default=default, help=text)


def add_memory_limit(parser: argparse._ActionsContainer) -> None:
    """Add `--memory-limit`."""
    parser.add_argument(
        "--memory-limit",
        type=size,
        metavar="BYTES",
        help="the memory of a rank, such as 40GiB. It needs costs in bytes, such as "
        "activation_bytes",
    )


def add_held_until(parser: argparse._ActionsContainer) -> None:
    """Add `--held-until`."""
    parser.add_argument(
        "--held-until",
        choices=HELD_UNTIL,
        default=HELD_UNTIL[0],
        help="how long --max-activations counts an activation of a split backward: until the "
        "weight gradient (W), or only until the input gradient (I) (default: %(default)s)",
    )


def add_flags(parser: argparse._ActionsContainer, **texts: str) -> None:
    """Add options without a value, each with its help."""
    for name, text in texts.items():
        parser.add_argument(spelled(name), action="store_true", help=text)


def given_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options that the user gave, by the names that argparse has for them."""
    return {k: value for k, value in vars(args).items() if value != args.parser.get_default(k)}


def spelled(name: str) -> str:
    """An option as the user writes it: `compute_only` is --compute-only, `start` is --from."""
    return f"--{_SPELLED.get(name, name).replace('_', '-')}"


class Once(argparse._AppendAction):
    """Collects pairs of a name and a value in a dict, and refuses a name that is given twice."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Add a pair."""
        name, value = values
        given = getattr(namespace, self.dest)
        if name in given:
            parser.error(f"{option_string} names {name} twice")
        setattr(namespace, self.dest, {**given, name: value})


def add_format(
    parser: argparse.ArgumentParser,
    names: Iterable[str],
    text: str,
    old: str = "--json",
    word: str | None = None,
) -> None:
    """Add `--format`, with `text` as help, and the `old` option that it replaces: that works, and
    the help leaves it out. So does the old `word` for text."""
    forms = parser.add_mutually_exclusive_group()
    taken: dict[str, Any] = {
        "choices": names,
        "type": lambda name: "text" if name == word else name,
    }
    forms.add_argument("--format", **taken, default="text", help=f"{text} (default: %(default)s)")
    if old == "--json":
        taken = {"action": "store_const", "const": "json"}
    forms.add_argument(old, **taken, dest="format", help=argparse.SUPPRESS)


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
    ranks, microbatches = args.ranks, args.microbatches
    if shape is not None:
        ranks, microbatches = ranks or shape.ranks, microbatches or shape.microbatches
    found = load(
        target,
        ranks=ranks,
        microbatches=microbatches,
        chunks=args.chunks,
        costs=costs,
        **parameters_of(args),
    )
    return append_steps(found) if args.add_steps else found


def proved(schedule: Schedule, target: str, channel: str | None = None) -> Schedule:
    """The complete form of a target's schedule that runs under a channel model, by default the most
    lenient one: on some transport. Raises RefusedError."""
    report = prove(schedule, channel or CHANNELS[-1])
    if report.schedule is None:
        raise RefusedError(report, subject_of(target, schedule), report.errors[0].code)
    return report.schedule


def parameters_of(args: argparse.Namespace) -> dict[str, Parameter]:
    """The parameters of --set. Raises LoadError for one that has an option."""
    for key, value in args.set.items():
        if key in _OWN_OPTIONS:
            raise LoadError(f"{key} is not set with --set: write --{key} {value}")
        if key == "costs":
            raise LoadError("costs are not set with --set: give --costs FILE, or --cost KEY=VALUE")
    parameters: dict[str, Parameter] = args.set
    return parameters


def is_measured(target: str) -> bool:
    """Whether a target is, by its extension, a file of timelines."""
    return target.endswith(".json")


def has_shape(target: str) -> bool:
    """Whether a target is a file of actions or timelines, whose shape no option changes."""
    return is_list(target) or is_measured(target)


def subject_of(target: str, schedule: Schedule) -> str:
    """The name of the schedule in messages: its file, or its name."""
    return name_of(target) if has_shape(target) else schedule.name


def _setting(text: str) -> tuple[str, Parameter]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    if value.lower() in ("true", "false"):
        return key, value.lower() == "true"
    if re.fullmatch(r"-?[0-9]{1,18}", value):
        return key, int(value)
    return key, value


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
        action=Once,
        default={},
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
        try:
            return attrs.evolve(costs, **args.cost)
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
        name, _, value = text.partition("=")
        if not value:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as forward=2")
        if name not in _fields():
            raise argparse.ArgumentTypeError(
                f"no cost is named {name!r}; there are {', '.join(_fields())}"
            )
        try:
            return name, _value(_fields()[name], value)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{name}: {error}") from None

    def __str__(self) -> str:
        optional = [f.name for f in _fields().values() if f.default is None and f.metadata]
        return (
            f"{', '.join(optional)} may be none; bytes take a suffix, 2MiB. "
            f"Names: {', '.join(_fields())}"
        )


@cache
def _fields() -> dict[str, attrs.Attribute[Any]]:
    """The fields of CostModel that `--cost` takes: costs by stage, by link, and the unit.

    CostModel is imported here, so that a command without costs starts faster.
    """
    from schedir.simulator import CostModel

    fields = attrs.fields(CostModel)
    costs = [field for field in fields if field.metadata.get("by", "rank") != "rank"]
    costs.sort(key=lambda field: field.metadata["by"] in ("link", "all"))
    return {field.name: field for field in (*costs, fields.unit)}


def _value(field: attrs.Attribute[Any], text: str) -> Any:
    if field.name == "unit":
        from schedir.simulator import UNITS

        if text not in UNITS:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(UNITS)}")
        return text
    if text == "none" and field.default is None:
        return None
    number = size if field.name.endswith("_bytes") else quantity
    if "," not in text:
        return number(text)
    if field.metadata["by"] == "link":
        raise argparse.ArgumentTypeError(
            "--cost takes one number for all links; a file takes one for each"
        )
    return tuple(map(number, text.split(",")))


def quantity(text: str) -> float:
    """A number >= 0; a whole number becomes an int. Raises ArgumentTypeError."""
    with suppress(ValueError):
        value = float(text)
        if value >= 0:  # which NaN is not
            return int(text) if re.fullmatch("[0-9]{1,15}", text) else value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 0")


def size(text: str) -> float:
    """A number of bytes: 1500, 40GiB, 16 GB, 1.5e9. Raises ArgumentTypeError."""
    if found := _BYTES.fullmatch(text.strip()):
        number, prefix, binary = found.groups("")
        value = float(number) * (1024 if binary else 1000) ** "_KMGTP".index(prefix.upper())
        if math.isfinite(value):
            return int(value) if value.is_integer() else value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 40GiB")
