"""`schedir check`: prove a schedule right, or say everything that is wrong with it."""

from __future__ import annotations

import argparse
import re
import sys

from schedir.checker import check
from schedir.cli.costs import add_costs, costs_given, costs_of
from schedir.cli.target import add_channel, add_target, at_least, load_target, subject_of
from schedir.cli.terminal import progress
from schedir.errors import SchedirError
from schedir.graph.alive import HELD_UNTIL
from schedir.ir import CHANNELS_IN_WORDS, ties_of
from schedir.render import described, outputs_of
from schedir.render.terminal import page_for, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes, and what it does."""
    parser.description = (
        "Prove that a schedule is complete, matched and free of deadlocks, or print "
        "everything that is wrong with it. Exit code: 0 no error, 1 errors, 2 the target could "
        "not be loaded."
    )
    add_target(parser)
    add_channel(
        parser,
        "the transport that errors are judged under (default: %(default)s). Strictest first, "
        + "; ".join(f"{model}: {words}" for model, words in CHANNELS_IN_WORDS.items()),
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
    """Print the report."""
    with progress("checking"):
        schedule = load_target(args, costs=costs_of(args) if costs_given(args) else None)
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
    output = outputs_of("check")[args.output_format]
    page = page_for(sys.stdout, subject_of(args.target, schedule))
    write(output.write(report, page).blocks, sys.stdout)
    strict = any(each.rule.strict for each in report.diagnostics)
    return int(strict if args.strict else not report.ok)


def _tie(text: str) -> tuple[int, ...]:
    if not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})+", text):
        raise argparse.ArgumentTypeError(f"{text!r} does not name two or more stages: 0,3")
    return tuple(map(int, text.split(",")))
