"""`schedir check`: prove a schedule right, or say everything that is wrong with it."""

from __future__ import annotations

import argparse
import re
import sys

from schedir.checker import Report, check
from schedir.cli.costs import add_costs, costs_given, costs_of
from schedir.cli.target import TARGET, add_channel, add_targets, at_least, load_target, subject_of
from schedir.cli.terminal import progress, tell
from schedir.errors import SchedirError
from schedir.graph.alive import HELD_UNTIL
from schedir.ir import CHANNELS_IN_WORDS, TRANSPORTS, printable, ties_of
from schedir.library import name_of
from schedir.render import described, outputs_of
from schedir.render.diagnostics import report_data
from schedir.render.terminal import page_for, write
from schedir.render.text import Piece, as_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes, and what it does."""
    parser.description = (
        "Prove that schedules are complete, matched and free of deadlocks, or print "
        "everything that is wrong with them. Exit code: 0 no error, 1 errors, 2 a target could "
        "not be loaded; of several targets the worst, as one that can't be loaded stops no other. "
        'The JSON of several is {"targets": [...]}: what is said of each, or its "error", behind '
        'its "target".'
    )
    add_targets(parser, TARGET)
    add_channel(
        parser,
        "the transport that errors are judged under (default: %(default)s). Strictest first, "
        + "; ".join(f"{model}: {words}" for model, words in CHANNELS_IN_WORDS.items())
        + ". A transport stands for its model: "
        + ", ".join(f"{transport} for {model}" for transport, model in TRANSPORTS.items()),
    )
    for option, least, text in (
        ("--max-delay", 0, "a gradient is applied more than N updates after its weights were read"),
        ("--max-versions", 1, "more than N weight versions of a stage are alive at once"),
        (
            "--max-activations",
            1,
            "a rank holds more than N activations, one per (stage, microbatch)",
        ),
    ):
        parser.add_argument(
            option, type=at_least(least), metavar="N", help=f"an error where {text}"
        )
    parser.add_argument(
        "--held-until",
        choices=HELD_UNTIL,
        default="W",
        help="whether --max-activations counts an activation until its W, or until its I, after "
        "which only what W needs is left (default: %(default)s)",
    )
    parser.add_argument(
        "--tie",
        type=_tie,
        action="append",
        default=[],
        metavar="STAGE,STAGE",
        help="stages that share parameters, so that they step together; repeat for more ties",
    )
    parser.add_argument(
        "--output-format",
        choices=outputs_of("check"),
        default="full",
        help=f"how to print what is found (default: %(default)s). {described('check')}",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 on warnings and notes as well, except for S213",
    )
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report of each target; the worst of them is the exit code."""
    several, form = len(args.targets) > 1, args.output_format
    codes, content = [], []
    for target in args.targets:
        named = {"target": name_of(target)}
        try:
            report, subject = _checked(args, target)
        except SchedirError as error:
            codes.append(tell(error))
            content.append({**named, "error": str(error)})
            continue
        strict = any(each.rule.strict for each in report.diagnostics)
        codes.append(int(strict if args.strict else not report.ok))
        content.append({**named, **report_data(report)})
        if several and form == "full":
            write([Piece(f"{printable(subject)}:\n", "bold")], sys.stdout)
        if not several or form != "json":
            page = page_for(sys.stdout, subject)
            write(outputs_of("check")[form].write(report, page).blocks, sys.stdout)
    if several and form == "json":
        write([Piece(as_json({"targets": content}))], sys.stdout)
    return max(codes)


def _checked(args: argparse.Namespace, target: str) -> tuple[Report, str]:
    """The report of a target, and what to call it. Raises SchedirError where there is none."""
    with progress("checking"):
        schedule = load_target(args, target, costs=costs_of(args) if costs_given(args) else None)
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
        )
    return report, subject_of(target, schedule)


def _tie(text: str) -> tuple[int, ...]:
    if not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})+", text):
        raise argparse.ArgumentTypeError(f"{text!r} does not name two or more stages: 0,3")
    return tuple(map(int, text.split(",")))
