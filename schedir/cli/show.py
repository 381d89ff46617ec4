"""`schedir show`: the timeline of a schedule at the textbook's costs, F = 1 and B = 2."""

from __future__ import annotations

import argparse
import sys

from schedir.cli.proving import proved
from schedir.cli.target import add_target, load_target
from schedir.cli.terminal import is_terminal, page_for, write
from schedir.ir import Schedule
from schedir.passes import strip_communication
from schedir.render import outputs_of
from schedir.simulator import simulate


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "show",
        help="draw the timeline of a schedule",
        description="Draw the timeline of a schedule: rows are ranks, time goes to the right. "
        "A forward takes 1, a backward 2 (1 for the gradient of the input, 1 for that of the "
        "weights), everything else nothing. On a terminal the drawing fits the screen, and what "
        "all ranks repeat is drawn once. In a pipe it is complete, with one line for each rank.",
        allow_abbrev=False,
    )
    add_target(parser)
    parser.add_argument(
        "--full", action="store_true", help="draw every action, on as many screens as it takes"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the makespan, bubble and peaks as JSON instead"
    )
    parser.add_argument(
        "--actions",
        action="store_true",
        help="like --full, and print each rank's list of actions below",
    )
    parser.add_argument(
        "--compute-only",
        action="store_true",
        help="like --actions, but leave the sends and receives out of the lists",
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Print the timeline of a schedule, or say what is wrong with it."""
    lists = args.actions or args.compute_only
    if args.json and (lists or args.full):
        args.parser.error(
            "--json prints numbers only: leave out --full, --actions and --compute-only"
        )
    schedule = proved(args, load_target(args))
    output = outputs_of("show")[_form(args.json, args.full or lists)]
    written = output.write(simulate(schedule), page_for(sys.stdout))
    write(written.blocks, sys.stdout)
    if lists:
        print()
        _print_actions(strip_communication(schedule) if args.compute_only else schedule)
    return 0


def _form(json: bool, full: bool) -> str:
    """The output to write, by its name in the table."""
    if json:
        return "json"
    return "overview" if is_terminal(sys.stdout) and not full else "full"


def _print_actions(schedule: Schedule) -> None:
    for rank, entries in enumerate(schedule.actions):
        print(f"rank {rank}:", *entries)
