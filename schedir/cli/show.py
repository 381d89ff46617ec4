"""`schedir show`: the timeline of a schedule.

    schedir show 1f1b
    schedir show zb-h1 --ranks 2 --microbatches 4 --why

Draw the timeline of a schedule: rows are ranks, and time goes to the right. By default a forward
takes 1, a backward 2 (input gradient 1, weight gradient 1), and everything else nothing. A file of
measured timelines (.json) is drawn as it ran. On a terminal the drawing fits the screen, and
repeated parts are drawn once. A pipe gets the whole drawing, one line for each rank, in COLUMNS
columns if that variable is set.

JSON: {makespan, bubble_fraction, ranks: [{rank, busy, idle, span, peak_activations,
weight_versions}]}. With --channel it also has channel and edge_makespan, with --steady steady:
{period_microbatches, time_per_microbatch, bubble_fraction}.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from schedir.cli.arguments import (
    TARGET_OR_RUN,
    add_costs,
    add_flags,
    add_format,
    add_shape,
    at_least,
    given_of,
    is_measured,
    spelled,
)
from schedir.cli.terminal import progress
from schedir.cli.timelines import add_drawn, drawn, expect_step, full_pipeline_of
from schedir.passes import strip_communication
from schedir.render.outputs import drawn as drawing
from schedir.render.terminal_timeline import steady_blocks, timeline_json
from schedir.render.text import Block, Piece, Screen, screen_of, write

_LISTS, _WINDOW = ("full", "actions", "compute_only"), ("start", "end")
_ALONE = (
    (
        "format",
        "--format json prints numbers only",
        (*_LISTS, *_WINDOW, "why", "against", "width"),
    ),
    ("why", "--why draws nothing", (*_LISTS, *_WINDOW)),
    ("against", "--against draws two timelines", ("actions", "compute_only")),
    ("steady", "--steady draws two periods", (*_LISTS, *_WINDOW, "why", "against")),
)
"""An option, what it does alone, and the options that do not go with it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("target", metavar="TARGET", help=TARGET_OR_RUN)
    add_shape(parser)
    add_flags(parser, full="draw every action, even if that takes several screens")
    add_format(
        parser,
        ("text", "json"),
        "a drawing, or makespan, bubble and peaks as JSON, with the keys below",
    )
    add_flags(
        parser,
        why="print why ranks are idle instead: causes, the longest waits, and the critical path",
        steady="draw an asynchronous schedule with a full pipeline instead: two periods of its "
        "steady state, and the time per microbatch. schedir gives a generator enough "
        "microbatches to reach it. Exit code 2 if there is no steady state",
        actions="as --full, with each rank's list of actions below",
        compute_only="as --actions, without sends and receives in the lists",
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
    given = given_of(args)
    for option, why, others in _ALONE:
        wrong = [spelled(name) for name in others if name in given]
        if option in given and wrong:
            args.parser.error(f"{why}: leave out {' and '.join(wrong)}")
    if args.steady and is_measured(args.target):
        args.parser.error("--steady is for schedules: measured calls fill and drain the pipeline")
    expect_step(args)
    with progress("simulating"):
        timeline, against = drawn(args)
        full, steady = full_pipeline_of(args, timeline) if args.steady else (None, None)
    lists = args.actions or args.compute_only
    screen = screen_of(sys.stdout)
    if args.width is not None:
        screen = Screen(args.width, fit=True)
    elif args.full or lists:
        screen = Screen(screen.width)
    if args.format == "json":
        blocks: Iterable[Block] = [Piece(timeline_json(timeline, steady))]
    elif full is not None and steady is not None:
        blocks = steady_blocks(timeline, full, steady, screen.width)
    elif args.why:
        from schedir.render.why import why_blocks

        blocks = why_blocks(timeline, screen.width, against)
    else:
        blocks = drawing(timeline, screen, against=against, start=args.start, end=args.end)
    write(blocks, sys.stdout)
    if lists:
        print()
        shown = timeline.schedule
        if args.compute_only:
            shown = strip_communication(shown)
        for rank, entries in enumerate(shown.actions):
            print(f"rank {rank}:", *entries)
    return 0
