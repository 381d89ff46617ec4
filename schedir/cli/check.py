"""`schedir check`: prove a schedule right, or list its faults.

    schedir check 1f1b --channel nccl
    schedir export 1f1b -o mine.sched && schedir check mine.sched

Prove that schedules are complete and free of deadlocks, or list their faults. Exit code: 0 no
error, 1 errors, 2 a target could not be loaded. With several targets the worst counts; one that
can't be loaded does not stop the others.

JSON: {ok, channel, diagnostics: [{code, name, severity, message, locations: [{rank, index,
action}]}]}. With several targets: {"targets": [...]}, the report of each, or its "error", with its
"target".
"""

from __future__ import annotations

import argparse
import re
import sys

from schedir.checker import Report, check
from schedir.cli.arguments import (
    TARGET,
    add_channel,
    add_costs,
    add_flags,
    add_format,
    add_held_until,
    add_shape,
    at_least,
    costs_given,
    costs_of,
    load_target,
    subject_of,
)
from schedir.cli.terminal import progress, see, tell
from schedir.errors import SchedirError
from schedir.ir import CHANNELS_IN_WORDS, DEFAULT_CHANNEL, TRANSPORTS, printable, ties_of
from schedir.library import name_of
from schedir.render.diagnostics import FORMATS, report_data
from schedir.render.text import Piece, as_json, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("targets", metavar="TARGET", nargs="+", help=TARGET)
    add_shape(parser)
    add_channel(
        parser,
        "the channel model to prove under, which says what a transport blocks on (default: "
        "%(default)s). The strictest first: "
        + "; ".join(f"{model}, {words}" for model, words in CHANNELS_IN_WORDS.items())
        + ". You can name a transport instead: "
        + ", ".join(f"{transport} is {model}" for transport, model in TRANSPORTS.items()),
        DEFAULT_CHANNEL,
    )
    for option, least, text in (
        (
            "--max-delay",
            0,
            "gradients are applied more than N updates after their weights were read",
        ),
        ("--max-versions", 1, "a stage has more than N weight versions alive at once"),
        (
            "--max-activations",
            1,
            "a rank holds more than N activations, one for each (stage, microbatch)",
        ),
    ):
        parser.add_argument(
            option, type=at_least(least), metavar="N", help=f"report an error if {text}"
        )
    add_held_until(parser)
    parser.add_argument(
        "--tie",
        type=_tie,
        action="append",
        default=[],
        metavar="STAGE,STAGE",
        help="stages that share parameters, and so must step together; repeat for more ties",
    )
    add_format(
        parser,
        FORMATS,
        "the form of the report. text: each finding with its places and how to fix it; "
        "concise: a line for each finding; json: all findings, for a program; github: "
        "annotations for a pull request",
        "--output-format",
        "full",
    )
    add_flags(parser, strict="exit with 1 on warnings and notes too, except on S213")
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report of each target; the worst one decides the exit code."""
    several, form = len(args.targets) > 1, args.format
    codes, content, pages = [], [], []
    for target in args.targets:
        name = name_of(target)
        try:
            report, subject = _checked(args, target)
        except SchedirError as error:
            codes.append(tell(error))
            pages.append(error.page or "check")
            content.append({"target": name, "error": str(error)})
            continue
        wrong = [
            each.code
            for each in report.diagnostics
            if each.severity == "error" or (args.strict and each.rule.strict)
        ]
        codes.append(1 if wrong else 0)
        if form == "text":
            pages += wrong
            if several:
                write([Piece(f"{printable(name)}:\n", "bold")], sys.stdout)
        if several and form == "json":
            content.append({"target": name, **report_data(report)})
        else:
            write(FORMATS[form](report, subject), sys.stdout)
    if several and form == "json":
        print(as_json({"targets": content}), end="")
    if pages:
        see(pages[0])
    return max(codes)


def _checked(args: argparse.Namespace, target: str) -> tuple[Report, str]:
    """The report of a target, and its name in messages. Raises SchedirError if it can't be
    loaded."""
    with progress("checking"):
        costs = costs_of(args) if costs_given(args) else None
        schedule = load_target(args, target, costs=costs)
        if costs is not None and costs.stages is not None:
            from schedir.simulator import recut

            costs = recut(costs, schedule.stages, of=costs.stages)
        try:
            ties = ties_of(schedule, args.tie)
        except ValueError as error:
            raise SchedirError(f"--tie: {error}") from None
        report = check(
            schedule,
            args.channel,
            max_delay=args.max_delay,
            max_versions=args.max_versions,
            max_activations=args.max_activations,
            held_until=args.held_until,
            ties=ties,
            costs=costs,
        )
    return report, subject_of(target, schedule)


def _tie(text: str) -> tuple[int, ...]:
    if not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})+", text):
        raise argparse.ArgumentTypeError(f"{text!r} does not name two or more stages: 0,3")
    return tuple(map(int, text.split(",")))
