"""`schedir search`: find a schedule for given work, costs and limits."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import attrs

from schedir.cli.costs import add_costs, costs_of, note_unmeasured, quantity, size
from schedir.cli.export import write_out
from schedir.cli.target import add_channel, add_sizes, at_least
from schedir.cli.terminal import fail, progress
from schedir.files import check_writable
from schedir.finder import (
    DEFAULT_SECONDS,
    EXACT_SECONDS,
    OBJECTIVES,
    PLACEMENT_NAMES,
    exactly,
    find,
)
from schedir.finder.terms import Terms
from schedir.graph.alive import HELD_UNTIL
from schedir.library import DEFAULT_MICROBATCHES, DEFAULT_RANKS
from schedir.render import Page, outputs_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes, and what it does."""
    parser.description = (
        "Find a quick schedule of a synchronous step for given costs, within what a "
        "rank may keep: which order each rank works in, where stages live, which backwards are "
        "split, and under a limit in bytes which forwards are run again. It is written as a "
        ".sched, which all commands take, and executors; what it is like, and how far above a "
        "lower bound of all schedules, is said on stderr. The same seed finds the same "
        "schedule on any machine. Ctrl-C ends the search with the best so far. Exit code: 0 "
        "written, 2 an option can't be used, or nothing is within the limit."
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write to FILE and not to stdout")
    shape = add_sizes(parser, "1")
    shape.add_argument(
        "--placement",
        choices=PLACEMENT_NAMES,
        help="where stages live: stage s on rank s mod P, or there and back (by default both are "
        "tried)",
    )
    limits = parser.add_argument_group("limits for each rank")
    one = limits.add_mutually_exclusive_group()
    one.add_argument(
        "--memory-limit",
        type=size,
        metavar="BYTES",
        help="the most that a rank may keep, such as 40GiB; the costs have to say what is kept",
    )
    one.add_argument(
        "--max-activations",
        type=at_least(0),
        metavar="N",
        help="the most (stage, microbatch) activations that a rank may hold",
    )
    limits.add_argument(
        "--held-until",
        choices=HELD_UNTIL,
        default=HELD_UNTIL[0],
        help="with --max-activations: whether an activation counts until its W or only until its I "
        "(default %(default)s)",
    )
    limits.add_argument(
        "--recompute",
        action=argparse.BooleanOptionalAction,
        help="whether forwards may be run again (by default under --memory-limit alone)",
    )
    limits.add_argument(
        "--split",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether backwards may be split (default: they may)",
    )
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default=OBJECTIVES[0],
        help="what is to be least: the makespan, or the longest span of a rank, which is what a "
        "step costs where steps follow each other (default %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=quantity,
        metavar="N",
        help="how long to search: the work that a slow core does in so many seconds (default "
        f"{DEFAULT_SECONDS:g}), ended after so many of this one's, which may come before the work "
        "is done, and then the same seed may find another schedule; by default no clock ends it. "
        f"With --exact the most that it may take on a placement (default {EXACT_SECONDS:g})",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="find the best there is, which takes small work, 40 actions or so, and OR-Tools: "
        "pip install 'schedir[exact]'",
    )
    parser.add_argument(
        "--seed", type=at_least(0), default=0, metavar="N", help="another one finds another way"
    )
    text = "the transport that it has to run on (default: %(default)s); see `check`"
    add_channel(parser, text)
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Write the schedule that is found, and say what it is like."""
    terms: dict[str, Any] = {field.name: getattr(args, field.name) for field in attrs.fields(Terms)}
    costs = costs_of(args)
    terms.update(
        costs=costs,
        ranks=args.ranks or costs.ranks or DEFAULT_RANKS,
        microbatches=args.microbatches or DEFAULT_MICROBATCHES,
        chunks=args.chunks or 1,
    )
    try:
        if args.output is not None:
            check_writable(args.output)
    except OSError as error:
        why = f"can't be written, so what is found would be lost: {error.strerror}"
        return fail(f"{args.output} {why}")
    try:
        if args.exact:
            seconds = EXACT_SECONDS if args.seconds is None else args.seconds
            found = exactly(Terms(**terms), seconds, args.seed)
        else:
            with _interruptible() as stop, progress("searching") as advance:
                found = find(
                    **terms, seconds=args.seconds, seed=args.seed, progress=advance, stop=stop
                )
    except ValueError as error:
        return fail(str(error))
    code = write_out(outputs_of("export")["sched"], found.schedule, Page(), args.output)
    if code == 0:
        print(found, file=sys.stderr)
        note_unmeasured(found.schedule, costs)
    return code


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C be asked for; a second one ends the command as everywhere."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
