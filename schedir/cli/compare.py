"""`schedir compare`: which of several schedules is best for the same costs.

    schedir compare 1f1b interleaved-1f1b zb-h1
    schedir compare fill-drain 1f1b --sweep microbatches=8,16 --cost latency=0.1

Compare schedules that train the same model, the quickest first: makespan, its ratio to the best,
bubble, peak memory of a rank, and the delay of gradients in updates. One number as a cost is the
cost of each stage that the costs by stage are for, or, without any, of one stage when there are as
many stages as ranks; a schedule with more stages has smaller ones. Costs by stage are added up or
divided evenly to fit the stages of each schedule. If the numbers of microbatches differ, the time
per microbatch decides. An asynchronous schedule also shows its time per microbatch with a full
pipeline. Marks: best, the quickest that can run; over, above the memory limit; a code such as S301,
an error under the channel model; none, the schedule does not run in this shape; derived, some of
its costs are not measured. Exit code: 0 one schedule is best, 1 no schedule runs within the limits,
2 a target or option can't be used.

JSON: {channel, memory_limit, unit, best, rows: [{target, ranks, stages, microbatches, chunks,
makespan, time_per_microbatch, ratio, bubble_fraction, span_bubble_fraction, peak_activations,
peak_bytes, delay, fits, problem: {code, message}, unmeasured, steady: {period_microbatches,
time_per_microbatch, bubble_fraction}}]}. best is the index of a row. Unknown values are null; so
are problem and steady for a schedule without a problem or a steady state. unmeasured lists the
costs of the schedule that no measured run has shown. With --channel nccl rows also have
edge_makespan.
"""

from __future__ import annotations

import argparse
import sys

from schedir.cli.arguments import (
    TARGET_OR_RUN,
    TIMED,
    Once,
    add_channel,
    add_costs,
    add_format,
    add_memory_limit,
    add_shape,
    at_least,
    costs_of,
    parameters_of,
)
from schedir.cli.terminal import progress
from schedir.errors import SchedirError
from schedir.finder import SWEPT, compare
from schedir.render.tables import FORMATS, comparison_blocks
from schedir.render.text import Piece, screen_of, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("targets", metavar="TARGET", nargs="+", help=TARGET_OR_RUN)
    shape = add_shape(parser)
    shape.add_argument(
        "--sweep",
        type=_sweep,
        action=Once,
        default={},
        metavar="NAME=N,N,…",
        help=f"try several values of {' or '.join(SWEPT)}: microbatches=8,16,32. Give both to try "
        "all combinations",
    )
    add_memory_limit(parser)
    add_channel(parser, f"{TIMED}, and what does not run under rank is not chosen")
    add_format(
        parser,
        FORMATS,
        "the form of the table. text: a row for each schedule, the quickest first; json: the same "
        "for a program, with the keys below; markdown: the table for a README or an issue; latex: "
        "a tabular for a paper; csv: the numbers for a spreadsheet",
        word="table",
    )
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table. The exit code is 0 if one schedule is best, else 1."""
    try:
        with progress("comparing") as advance:
            comparison = compare(
                args.targets,
                ranks=args.ranks,
                microbatches=args.microbatches,
                chunks=args.chunks,
                costs=costs_of(args),
                memory_limit=args.memory_limit,
                channel=args.channel,
                sweep=args.sweep,
                add_steps=args.add_steps,
                progress=advance,
                **parameters_of(args),
            )
    except ValueError as error:
        raise SchedirError(str(error)) from None
    if args.format == "text":
        write(comparison_blocks(comparison, screen_of(sys.stdout).width), sys.stdout)
    else:
        write([Piece(FORMATS[args.format](comparison))], sys.stdout)
    return 0 if comparison.best else 1


def _sweep(text: str) -> tuple[str, list[int]]:
    name, equals, values = text.partition("=")
    if name not in SWEPT or not equals:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {' or '.join(f'{name}=8,16' for name in SWEPT)}"
        )
    return name, [*map(at_least(1), values.split(","))]
