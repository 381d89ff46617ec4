"""`schedir export`: write a schedule or its timeline to a file.

    schedir export 1f1b -o 1f1b.svg
    schedir export interleaved-1f1b --ranks 2 --format torch-csv

Write a schedule or its timeline to a file, or to stdout. A format leaves out what it cannot hold,
with a warning. sched: schedir's own text; torch-csv: the CSV of torch.distributed.pipelining,
compute only (cannot hold R, OPTIM_STEP and weight versions); torch-csv-comms: that CSV with its
sends, receives and REDUCE_GRADs (cannot hold R, OPTIM_STEP, weight versions and batches); svg: a
picture, for papers and READMEs (cannot hold actions whose times are unknown); png: that picture in
pixels; pdf: that picture as a page; perfetto: a trace for ui.perfetto.dev and chrome://tracing
(cannot hold actions whose times are unknown); html: a page to zoom and click in, in one file that
needs no network.
"""

from __future__ import annotations

import argparse
import inspect
import io
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TextIO

from schedir.cli.arguments import (
    TARGET_OR_RUN,
    add_costs,
    add_flags,
    add_shape,
    costs_given,
    costs_of,
    given_of,
    has_shape,
    is_measured,
    load_target,
    proved,
    spelled,
)
from schedir.cli.terminal import progress, say, writing
from schedir.cli.timelines import add_drawn, drawn, expect_step, read
from schedir.errors import SchedirError
from schedir.files import replacing
from schedir.ir import Schedule, dumps, dumps_torch_csv
from schedir.library import generator_of
from schedir.passes import insert_reductions, strip_communication
from schedir.render.outputs import TIMELINES, Written
from schedir.render.text import Piece, is_terminal, plain

LISTS: dict[str, Callable[[Schedule], tuple[str, Iterable[str]]]] = {
    "sched": lambda schedule: (dumps(schedule), ()),
    "torch-csv": partial(dumps_torch_csv, compute_only=True),
    # Torch divides a stage's gradients by the number of microbatches where it sums them.
    "torch-csv-comms": lambda schedule: dumps_torch_csv(insert_reductions(schedule)),
}
"""The formats of a list of actions by name: its text, and what that leaves out. `TIMELINES` are the
formats of a timeline."""
_EXTENSIONS = {
    ".sched": ("sched",),
    ".csv": ("torch-csv-comms", "torch-csv"),  # the second one with --compute-only
    **{f".{name}": (name,) for name in ("svg", "png", "pdf", "html")},
    ".json": ("perfetto",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("target", metavar="TARGET", help=TARGET_OR_RUN)
    add_shape(parser)
    parser.add_argument(
        "--format",
        choices=[*LISTS, *TIMELINES],
        help="the format (default: the one of FILE's extension, else sched; "
        "for .csv torch-csv-comms, or torch-csv with --compute-only)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write to FILE instead of stdout")
    add_flags(parser, compute_only="leave out sends and receives")
    add_flags(add_drawn(parser), memory="also draw the memory of each rank over time")
    pictures = parser.add_argument_group("pictures (svg, png, pdf)")
    titles = pictures.add_mutually_exclusive_group()
    titles.add_argument("--title", metavar="TEXT", help="the title (default: the name and shape)")
    titles.add_argument(
        "--no-title", dest="title", action="store_const", const="", help="draw no title"
    )
    pictures.add_argument(
        "--width",
        metavar="W",
        help="the width: of a page's column, such as 16cm, or in letters, such as 120 (default: "
        "wide enough for its labels)",
    )
    add_flags(pictures, greyscale="draw in grey, for print")
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Write the schedule or its timeline, or report why it can't be completed."""
    name, given = _format(args), given_of(args)
    for option in given:
        fitting = [each for each in (*LISTS, *TIMELINES) if option in _taken(each)]
        if fitting and name not in fitting:
            args.parser.error(
                f"{spelled(option)} is for {', '.join(fitting)}; {name} does not take it"
            )
    expect_step(args)
    if name in TIMELINES:
        with progress("simulating"):
            timeline, against = drawn(args)
        taken = inspect.signature(TIMELINES[name]).parameters
        looks = {k: v for k, v in {**given, "against": against}.items() if k in taken}
        write_out(TIMELINES[name](timeline, **looks), args.output, name)
        return 0
    with progress("proving"):
        if costs_given(args) and (
            has_shape(args.target) or not generator_of(args.target).sees_costs
        ):
            args.parser.error(
                f"--costs and --cost would change nothing: {name} holds no times, and "
                f"{args.target} does not depend on costs"
            )
        if is_measured(args.target):
            schedule = read(args, args.target).schedule
        else:
            schedule = load_target(args, args.target, costs=costs_of(args))
        if args.compute_only or name == "torch-csv":
            schedule = strip_communication(schedule)
        elif not schedule.is_complete:
            schedule = proved(schedule, args.target)
    write_out(listed(schedule, name), args.output, name)
    return 0


def listed(schedule: Schedule, name: str = "sched") -> Written:
    """A list of actions in a format."""
    text, left_out = LISTS[name](schedule)
    return Written([Piece(text)], left_out)


def _taken(name: str) -> set[str]:
    """The options that a format takes, of those that not every format does."""
    if name in TIMELINES:
        return {*inspect.signature(TIMELINES[name]).parameters, "channel"}
    return set() if name == "torch-csv-comms" else {"compute_only"}


def write_out(written: Written, file: str | None, name: str = "sched") -> None:
    """Write to a file, or to stdout if `file` is None."""
    for sentence in written.left_out:
        say("warning", sentence)
    if file is None:
        if written.data is not None and is_terminal(sys.stdout):
            raise SchedirError(f"{name} is not text: write it to a file, -o x.{name}")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # as in the file that it may become
        _print(written, sys.stdout)
        return
    with writing(file), replacing(file) as opened:
        _print(written, opened)


def _print(written: Written, stream: TextIO) -> None:
    """Write block by block, because all of them may not fit in memory."""
    for block in written.blocks:
        stream.write(plain([block]))
    if written.data is not None:
        stream.buffer.write(written.data)


def _format(args: argparse.Namespace) -> str:
    """The format that the user asks for, by its name or by the file's extension."""
    extension = Path(args.output or "").suffix
    fitting = _EXTENSIONS.get(extension, ())
    if args.format is None and extension and not fitting:
        args.parser.error(
            f"the extension of {args.output} names no format: use {' or '.join(_EXTENSIONS)}, or "
            "add --format"
        )
    if fitting and args.format not in (None, *fitting):
        args.parser.error(
            f"--format {args.format} contradicts {args.output}, whose extension means "
            f"{' or '.join(fitting)}"
        )
    return args.format or (fitting or ("sched",))[-1 if args.compute_only else 0]
