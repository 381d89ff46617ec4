"""`schedir search`: find a schedule for a shape, costs and limits.

    schedir search --ranks 2 --microbatches 4 -o found.sched
    schedir search -r 3 -m 6 --max-activations 3 | schedir show -

Find a quick schedule of a synchronous step for your costs and memory limit. The search chooses the
order of each rank's actions, the placement of the stages, which backwards to split, and, with a
limit in bytes, which forwards to recompute. The result is a .sched file, which every command and
the executor take. stderr says how long a step takes, and how far that is above a lower bound for
every schedule with as many stages per rank. The same seed finds the same schedule on any machine.
Ctrl-C ends the search with the best schedule so far. Exit code: 0 written, 2 an option can't be
used, or no schedule fits the limit.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

from schedir.cli.arguments import (
    TIMED,
    add_channel,
    add_costs,
    add_flags,
    add_held_until,
    add_memory_limit,
    add_sizes,
    at_least,
    costs_given,
    costs_of,
    note_unmeasured,
    quantity,
)
from schedir.cli.export import listed, write_out
from schedir.cli.terminal import about, progress, writing
from schedir.errors import SchedirError
from schedir.files import check_writable
from schedir.finder import (
    DEFAULT_SECONDS,
    EXACT_SECONDS,
    OBJECTIVES,
    PLACEMENT_NAMES,
    exactly,
    find,
)
from schedir.finder.planning import Cuts
from schedir.finder.terms import STEPS, Terms
from schedir.library import DEFAULT_MICROBATCHES, DEFAULT_RANKS
from schedir.simulator import CostModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("-o", "--output", metavar="FILE", help="write to FILE instead of stdout")
    shape = add_sizes(parser, "1")
    shape.add_argument(
        "--placement",
        choices=PLACEMENT_NAMES,
        help="the rank of each stage: wrapped is stage s on rank s mod P; wave, or v for two "
        "chunks, goes down the ranks and back up (default: the better one)",
    )
    limits = parser.add_argument_group("limits for each rank")
    one = limits.add_mutually_exclusive_group()
    add_memory_limit(one)
    one.add_argument(
        "--max-activations",
        type=at_least(0),
        metavar="N",
        help="the most activations that a rank may hold, one for each (stage, microbatch)",
    )
    add_held_until(limits)
    limits.add_argument(
        "--recompute",
        action=argparse.BooleanOptionalAction,
        help="whether forwards may be recomputed (default: only with --memory-limit)",
    )
    limits.add_argument(
        "--split",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether backwards may be split into I and W (default: yes)",
    )
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default=OBJECTIVES[0],
        help="what to minimise: the makespan, or the span, the longest time from the first to the "
        "last action of a rank, which is the time of a step if steps follow each other without a "
        "flush (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        choices=STEPS,
        default=STEPS[0],
        help="where a rank updates its stages: last, at the end of its list, or anywhere, where it "
        "would wait (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=quantity,
        metavar="N",
        help="how long to search. The amount of work is fixed: what a slow core does in N seconds "
        f"on each placement (default {DEFAULT_SECONDS:g}). If you give N, the search also stops "
        "after N seconds on each placement on this machine; the same seed may then find another "
        f"schedule. With --exact: the most seconds for each placement (default {EXACT_SECONDS:g})",
    )
    add_flags(
        parser,
        exact="find the best possible schedule. It works for about 40 actions, and needs "
        "OR-Tools: pip install 'schedir[exact]'",
    )
    parser.add_argument(
        "--seed",
        type=at_least(0),
        default=0,
        metavar="N",
        help="another seed may find another schedule (default: %(default)s)",
    )
    add_channel(
        parser,
        f"{TIMED}, and the result runs under rank. Orders are made as without it, and of the best "
        "ones the one is taken that is quickest under it",
    )
    add_costs(parser)
    by_layer = parser.add_argument_group("costs of layers, in place of --costs")
    by_layer.add_argument(
        "--layers",
        metavar="FILE",
        help="a file of costs with a number for each layer in place of each stage. The layers are "
        "cut into stages, so that the slowest stage takes the least time; the .sched file has the "
        "boundaries",
    )
    add_flags(by_layer, cut="search where the layers are best cut, too")
    by_layer.add_argument(
        "--stage-costs", metavar="FILE", help="write the costs of the stages to FILE, for --costs"
    )


def run(args: argparse.Namespace) -> int:
    """Write the schedule that the search finds, and its figures to stderr."""
    costs, layers = costs_of(args), None
    if args.layers is not None:
        if costs_given(args):
            raise SchedirError("--layers has all costs, layer by layer: leave out --costs, --cost")
        with about("costs-file"):
            layers = CostModel.load(args.layers)
    elif args.cut:
        raise SchedirError("--cut needs the costs of each layer: --layers FILE")
    if args.exact and args.cut:
        raise SchedirError("--exact takes the balanced cut of the layers: leave out --cut")
    if args.stage_costs is not None and args.stage_costs == args.output:
        raise SchedirError(f"-o and --stage-costs name one file, {args.output}: name two")
    for file in filter(None, (args.output, args.stage_costs)):
        with writing(f"{file} can't be written, so the result would be lost"):
            check_writable(file)
    args.ranks = args.ranks or costs.ranks or DEFAULT_RANKS
    args.microbatches = args.microbatches or DEFAULT_MICROBATCHES
    args.chunks = args.chunks or 1
    args.costs = layers or costs
    terms = {name: getattr(args, name) for name in attrs.fields_dict(Terms) if name in args}
    options = {"seed": args.seed}
    if args.seconds is not None:
        options["seconds"] = args.seconds
    try:
        if args.exact:
            if layers is not None:
                cuts = Cuts(Terms(**terms))
                of_stages = cuts.terms_of(cuts.balanced)
                terms.update(costs=of_stages.costs, boundaries=of_stages.boundaries)
            found = exactly(**terms, **options)
        else:
            if layers is not None:
                terms.update(costs=None, layers=layers, cut=args.cut)
            with _interruptible() as stop, progress("searching") as advance:
                found = find(**terms, **options, progress=advance, stop=stop)
    except ValueError as error:
        raise SchedirError(str(error)) from None
    write_out(listed(found.schedule), args.output)
    if args.stage_costs is not None:
        with writing(f"{args.stage_costs} can't be written"):
            found.costs.save(args.stage_costs)
    print(found, file=sys.stderr)
    note_unmeasured(found.schedule, found.costs)
    return 0


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed; a second Ctrl-C ends the command."""
    asked = threading.Event()

    def ask(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
