"""`schedir search`: find a schedule for a shape, costs and limits."""

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

from schedir.cli.arguments import (
    TIMED,
    add_channel,
    add_costs,
    add_sizes,
    at_least,
    costs_given,
    costs_of,
    note_unmeasured,
    quantity,
    size,
)
from schedir.cli.export import listed, write_out
from schedir.cli.terminal import about, progress
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
from schedir.graph.alive import HELD_UNTIL
from schedir.library import DEFAULT_MICROBATCHES, DEFAULT_RANKS
from schedir.simulator import CostModel

EXAMPLES = (
    "schedir search --ranks 2 --microbatches 4 -o found.sched",
    "schedir search -r 3 -m 6 --max-activations 3 | schedir show -",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command and its description."""
    parser.description = (
        "Find a quick schedule of a synchronous step for your costs and memory limit. The search "
        "chooses the order of each rank's actions, the placement of the stages, which backwards to "
        "split, and, with a limit in bytes, which forwards to recompute. The result is a .sched "
        "file, which every command and the executor take. stderr says how long a step takes, and "
        "how far that is above a lower bound for every schedule. The same seed finds the same "
        "schedule on any machine. Ctrl-C ends the search with the best schedule so far. Exit code: "
        "0 written, 2 an option can't be used, or no schedule fits the limit."
    )
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
    one.add_argument(
        "--memory-limit",
        type=size,
        metavar="BYTES",
        help="the memory of a rank, such as 40GiB. It needs costs in bytes, such as "
        "activation_bytes",
    )
    one.add_argument(
        "--max-activations",
        type=at_least(0),
        metavar="N",
        help="the most activations that a rank may hold, one for each (stage, microbatch)",
    )
    limits.add_argument(
        "--held-until",
        choices=HELD_UNTIL,
        default=HELD_UNTIL[0],
        help="how long --max-activations counts an activation of a split backward: until the "
        "weight gradient (W), or only until the input gradient (I) (default: %(default)s)",
    )
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
    parser.add_argument(
        "--exact",
        action="store_true",
        help="find the best possible schedule. It works for about 40 actions, and needs "
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
    by_layer.add_argument(
        "--cut", action="store_true", help="search where the layers are best cut, too"
    )
    by_layer.add_argument(
        "--stage-costs", metavar="FILE", help="write the costs of the stages to FILE, for --costs"
    )


def run(args: argparse.Namespace) -> int:
    """Write the schedule that the search finds, and its figures to stderr."""
    names = attrs.fields_dict(Terms)
    terms: dict[str, Any] = {name: value for name, value in vars(args).items() if name in names}
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
    terms.update(
        costs=layers or costs,
        seed=args.seed,
        ranks=args.ranks or costs.ranks or DEFAULT_RANKS,
        microbatches=args.microbatches or DEFAULT_MICROBATCHES,
        chunks=args.chunks or 1,
    )
    if args.stage_costs is not None and args.stage_costs == args.output:
        raise SchedirError(f"-o and --stage-costs name one file, {args.output}: name two")
    for file in filter(None, (args.output, args.stage_costs)):
        try:
            check_writable(file)
        except OSError as error:
            why = f"can't be written, so the result would be lost: {error.strerror}"
            raise SchedirError(f"{file} {why}") from None
    try:
        if args.exact:
            seconds = EXACT_SECONDS if args.seconds is None else args.seconds
            if layers is not None:
                cuts = Cuts(Terms(**{name: terms[name] for name in names if name in terms}))
                of_stages = cuts.terms_of(cuts.balanced)
                terms.update(costs=of_stages.costs, boundaries=of_stages.boundaries)
            found = exactly(**terms, seconds=seconds)
        else:
            if layers is not None:
                terms.update(costs=None, layers=layers, cut=args.cut)
            with _interruptible() as stop, progress("searching") as advance:
                found = find(**terms, seconds=args.seconds, progress=advance, stop=stop)
    except ValueError as error:
        raise SchedirError(str(error)) from None
    write_out(listed(found.schedule), args.output)
    if args.stage_costs is not None:
        try:
            found.costs.save(args.stage_costs)
        except OSError as error:
            raise SchedirError(f"{args.stage_costs} can't be written: {error.strerror}") from None
    print(found, file=sys.stderr)
    note_unmeasured(found.schedule, found.costs)
    return 0


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed; a second Ctrl-C ends the command."""
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
