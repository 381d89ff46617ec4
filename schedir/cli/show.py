"""`schedir show`: the timeline of a schedule."""

from __future__ import annotations

import argparse
import sys

import attrs

from schedir.cli.costs import add_costs
from schedir.cli.target import TARGET_OR_RUN, add_target, at_least
from schedir.cli.terminal import progress
from schedir.cli.timelines import add_drawn, drawn, drawn_full
from schedir.passes import strip_communication
from schedir.render import outputs_of
from schedir.render.terminal import page_for, write

EXAMPLES = (
    "schedir show 1f1b",
    "schedir show zb-h1 --ranks 2 --microbatches 4 --why",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command and its description."""
    parser.description = (
        "Draw the timeline of a schedule: rows are ranks, and time goes to the right. By default a "
        "forward takes 1, a backward 2 (input gradient 1, weight gradient 1), and everything else "
        "nothing. A file of measured timelines (.json) is drawn as it ran. On a terminal the "
        "drawing fits the screen, and repeated parts are drawn once. A pipe gets the whole "
        "drawing, one line for each rank, in COLUMNS columns if that variable is set."
    )
    parser.epilog = (
        "JSON: {makespan, bubble_fraction, ranks: [{rank, busy, idle, span, peak_activations, "
        "weight_versions}]}. With --channel it also has channel and edge_makespan, with --steady "
        "steady: {period_microbatches, time_per_microbatch, bubble_fraction}."
    )
    add_target(parser, TARGET_OR_RUN)
    parser.add_argument(
        "--full", action="store_true", help="draw every action, even if that takes several screens"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print makespan, bubble and peaks as JSON instead; the keys are below",
    )
    parser.add_argument(
        "--why",
        action="store_true",
        help="print why ranks are idle instead: causes, the longest waits, and the critical path",
    )
    parser.add_argument(
        "--steady",
        action="store_true",
        help="draw an asynchronous schedule with a full pipeline instead: two periods of its "
        "steady state, and the time per microbatch. schedir gives a generator enough "
        "microbatches to reach it. Exit code 2 if there is no steady state",
    )
    parser.add_argument(
        "--actions",
        action="store_true",
        help="as --full, with each rank's list of actions below",
    )
    parser.add_argument(
        "--compute-only",
        action="store_true",
        help="as --actions, without sends and receives in the lists",
    )
    parser.add_argument(
        "--width",
        type=at_least(40),
        metavar="N",
        help="draw in at most N columns, with less detail if labels need more (default: the width "
        "of the terminal, or COLUMNS in a pipe; without either, and with --full, as wide as the "
        "labels need)",
    )
    add_drawn(parser)
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Print the timeline of a schedule, or report what is wrong with it."""
    lists = args.actions or args.compute_only
    if args.json and (lists or args.full or args.width):
        args.parser.error(
            "--json prints numbers only: leave out --full, --width, --actions and --compute-only"
        )
    if args.why and (lists or args.full or args.json):
        args.parser.error(
            "--why draws nothing: leave out --full, --json, --actions and --compute-only"
        )
    if args.against is not None and (lists or args.json):
        args.parser.error("--against draws: leave out --json, --actions and --compute-only")
    windowed = bool(args.start) or args.end is not None
    if windowed and (args.json or args.why or args.steady):
        args.parser.error("--from and --to draw: leave out --json, --why and --steady")
    if args.steady and (lists or args.full or args.why or args.against is not None):
        args.parser.error(
            "--steady goes with --json and --width: leave out --full, --why, --actions and "
            "--against"
        )
    with progress("simulating"):
        if args.steady:
            timeline, full, steady = drawn_full(args)
            page = attrs.evolve(page_for(sys.stdout), full=full, steady=steady)
        else:
            timeline, against, subject = drawn(args)
            page = page_for(sys.stdout, subject)
            page = attrs.evolve(page, against=against, start=args.start, end=args.end)
    output = outputs_of("show")[_form(args, page.screen, args.full or lists or windowed)]
    if args.width is not None:
        page = attrs.evolve(page, width=args.width, fit=True)
    elif args.full or lists:
        page = attrs.evolve(page, fit=False)
    write(output.write(timeline, page).blocks, sys.stdout)
    if lists:
        schedule = timeline.schedule
        print()
        shown = strip_communication(schedule) if args.compute_only else schedule
        for rank, entries in enumerate(shown.actions):
            print(f"rank {rank}:", *entries)
    return 0


def _form(args: argparse.Namespace, screen: bool, full: bool) -> str:
    """The name of the output to write."""
    for name in ("json", "why", "steady"):
        if getattr(args, name):
            return name
    return "overview" if screen and not full else "full"
