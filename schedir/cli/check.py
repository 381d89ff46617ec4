"""`schedir check`: prove a schedule right, or say everything that is wrong with it."""

from __future__ import annotations

import argparse
import sys

from schedir.check import CHANNELS, check
from schedir.cli.target import add_target, load_target, subject_of
from schedir.cli.terminal import has_colour
from schedir.render import OUTPUT_FORMATS
from schedir.render.diagnostics import full


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "check",
        help="prove that a schedule is right",
        description="Prove that a schedule is complete, matched and free of deadlocks, or print "
        "everything that is wrong with it. Exit code: 0 no error, 1 errors, 2 the target could "
        "not be loaded.",
        allow_abbrev=False,
    )
    add_target(parser)
    parser.add_argument(
        "--channel",
        choices=CHANNELS,
        default="edge",
        help="the transport that errors are judged under, strictest first (default: %(default)s)",
    )
    parser.add_argument(
        "--output-format",
        choices=OUTPUT_FORMATS,
        default="full",
        help="how to print what is found (default: %(default)s)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 on warnings and notes as well"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    schedule = load_target(args)
    report = check(schedule, args.channel)
    subject = subject_of(args, schedule)
    if args.output_format == "full":
        text = full(report, subject, has_colour(sys.stdout))
    else:
        text = OUTPUT_FORMATS[args.output_format](report, subject)
    print(text, end="")
    return int(bool(report.diagnostics if args.strict else report.errors))
