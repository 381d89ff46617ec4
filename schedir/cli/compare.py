"""`schedir compare`: which of several schedules is best, under the same costs."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from typing import Any

from schedir.cli.costs import add_costs, costs_of, size
from schedir.cli.target import TARGET_OR_RUN, add_channel, add_targets, at_least, parameters_of
from schedir.cli.terminal import fail, progress
from schedir.finder import SWEPT, compare
from schedir.render import described, outputs_of
from schedir.render.terminal import page_for, write

_KEYS = (
    "JSON: {channel, memory_limit, unit, best, rows: [{target, ranks, stages, microbatches, "
    "chunks, makespan, time_per_microbatch, ratio, bubble_fraction, span_bubble_fraction, "
    "peak_activations, peak_bytes, delay, fits, problem: {code, message}, unmeasured, "
    "steady: {period_microbatches, time_per_microbatch, bubble_fraction}}]}; best is the index of "
    "a row; what is not known is null, and so are the problem and the steady state of a schedule "
    "that has none; unmeasured lists the fitted costs of it that no run has shown."
)
_OPTIONS = ("ranks", "microbatches", "chunks", "memory_limit", "channel", "add_steps")
"""Of the command, and of `schedir.compare`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes, and what it does."""
    parser.description = (
        "Compare schedules that train the same model, the quickest first: makespan, "
        "its ratio to the best one's, bubble, the most that a rank keeps, and the delay of "
        "gradients in updates. A cost that is one number is that of one of as many stages as there "
        "are ranks, and less where a schedule has more; costs by stage are summed, or shared out "
        "evenly. Where numbers of microbatches differ, time per microbatch is compared. Of "
        "schedules that go on after their updates it also says what a microbatch costs once full, "
        "while nothing drains the pipeline. Rows are marked: best, the quickest that can be "
        "chosen; over, above the memory limit; a code such as S301, with errors under the channel "
        "model; none, not to be made in this shape; derived, of fitted costs that no run has "
        "shown. "
        "Exit code: 0 one is best, 1 none runs and is within the "
        "limits, 2 a target or option can't be used."
    )
    parser.epilog = _KEYS
    shape = add_targets(parser, TARGET_OR_RUN)
    shape.add_argument(
        "--sweep",
        type=_sweep,
        action="append",
        default=[],
        metavar="NAME=N,N,…",
        help=f"try several values of {' or '.join(SWEPT)}: microbatches=8,16,32; repeat for the "
        "other, and all combinations are tried",
    )
    parser.add_argument(
        "--memory-limit",
        type=size,
        metavar="BYTES",
        help="the most that a rank may keep, such as 40GiB; the costs have to say what is kept",
    )
    text = "the transport that schedules have to run on (default: %(default)s); see `check`"
    add_channel(parser, text)
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--format",
        choices=outputs_of("compare"),
        default="table",
        help=f"how to print it (default: %(default)s). {described('compare')}",
    )
    form.add_argument(
        "--json",
        action="store_const",
        dest="format",
        const="json",
        help="the same as --format json, as told below",
    )
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table; whether one is best is the exit code."""
    sweep: dict[str, list[int]] = {}
    for name, values in args.sweep:
        if name in sweep:
            args.parser.error(f"--sweep names {name} twice")
        sweep[name] = values
    options: dict[str, Any] = {name: getattr(args, name) for name in _OPTIONS}
    options.update(parameters_of(args), costs=costs_of(args), sweep=sweep)
    try:
        # What a user's generator prints is no part of the artefact.
        with redirect_stdout(sys.stderr), progress("comparing") as advance:
            comparison = compare(args.targets, **options, progress=advance)
    except ValueError as error:
        return fail(str(error))
    output = outputs_of("compare")[args.format]
    write(output.write(comparison, page_for(sys.stdout)).blocks, sys.stdout)
    return 0 if comparison.best else 1


def _sweep(text: str) -> tuple[str, list[int]]:
    name, equals, values = text.partition("=")
    if name not in SWEPT or not equals:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {' or '.join(f'{name}=8,16' for name in SWEPT)}"
        )
    return name, [*map(at_least(1), values.split(","))]
