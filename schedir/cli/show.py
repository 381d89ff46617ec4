"""`schedir show`: the timeline of a schedule at the textbook's costs, F = 1 and B = 2."""

from __future__ import annotations

import argparse
import sys

from schedir.checker import prove
from schedir.cli.target import add_target, load_target, subject_of
from schedir.cli.terminal import has_colour, refuse, width_of
from schedir.ir import Schedule
from schedir.passes import strip_communication
from schedir.render import timeline_json, timeline_text
from schedir.simulator import simulate


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "show",
        help="draw the timeline of a schedule",
        description="Draw the timeline of a schedule: rows are ranks, time goes to the right. "
        "A forward takes 1, a backward 2 (1 for the input and 1 for the weights), the rest "
        "nothing. In a pipe each rank is one line, however long.",
        allow_abbrev=False,
    )
    add_target(parser)
    parser.add_argument(
        "--json", action="store_true", help="print the makespan, bubble and peaks as JSON instead"
    )
    parser.add_argument(
        "--actions", action="store_true", help="print each rank's list of actions below"
    )
    parser.add_argument(
        "--compute-only",
        action="store_true",
        help="like --actions, but leave the sends and receives out of the lists",
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Print the timeline of a schedule, or say what is wrong with it."""
    if args.json and (args.actions or args.compute_only):
        args.parser.error("--json prints numbers only: leave out --actions and --compute-only")
    schedule = load_target(args)
    report = prove(schedule)
    if report.schedule is None:
        return refuse(report, subject_of(args, schedule))
    schedule = report.schedule
    timeline = simulate(schedule)
    if args.json:
        print(timeline_json(timeline), end="")
        return 0
    print(timeline_text(timeline, width_of(sys.stdout), has_colour(sys.stdout)), end="")
    if args.actions or args.compute_only:
        print()
        _print_actions(strip_communication(schedule) if args.compute_only else schedule)
    return 0


def _print_actions(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        print(f"rank {rank}:", *actions)
