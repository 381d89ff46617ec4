"""`schedir export`: write a schedule or its timeline to a file."""

from __future__ import annotations

import argparse
import inspect
import io
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TextIO

from schedir.cli.arguments import (
    TARGET_OR_RUN,
    add_costs,
    add_target,
    costs_given,
    costs_of,
    given_of,
    proved,
    sees_costs,
    spelled,
    subject_of,
)
from schedir.cli.terminal import progress
from schedir.cli.timelines import add_drawn, drawn, load_schedule
from schedir.errors import SchedirError
from schedir.files import replacing
from schedir.ir import Schedule, dumps, dumps_torch_csv
from schedir.passes import insert_reductions, strip_communication
from schedir.render.outputs import TIMELINES, Written
from schedir.render.text import Piece, is_terminal, plain

EXAMPLES = (
    "schedir export 1f1b -o 1f1b.svg",
    "schedir export interleaved-1f1b --ranks 2 --format torch-csv",
)

logger = logging.getLogger("schedir")


LISTS: Mapping[str, Callable[[Schedule], tuple[str, Iterable[str]]]] = {
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
    """Add the arguments of the command and its description."""
    parser.description = (
        "Write a schedule or its timeline to a file, or to stdout. A format leaves out what it "
        "cannot hold, with a warning. sched: schedir's own text; torch-csv: the CSV of "
        "torch.distributed.pipelining, compute only (cannot hold R, OPTIM_STEP and weight "
        "versions); torch-csv-comms: that CSV with its sends, receives and REDUCE_GRADs (cannot "
        "hold R, OPTIM_STEP, weight versions and batches); svg: a picture, for papers and READMEs "
        "(cannot hold actions whose times are unknown); png: that picture in pixels; pdf: that "
        "picture as a page; perfetto: a trace for ui.perfetto.dev and chrome://tracing (cannot "
        "hold actions whose times are unknown); html: a page to zoom and click in, in one file "
        "that needs no network."
    )
    add_target(parser, TARGET_OR_RUN)
    parser.add_argument(
        "--format",
        choices=[*LISTS, *TIMELINES],
        help="the format (default: the one of FILE's extension, else sched; "
        "for .csv torch-csv-comms, or torch-csv with --compute-only)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write to FILE instead of stdout")
    parser.add_argument("--compute-only", action="store_true", help="leave out sends and receives")
    timelines = add_drawn(parser)
    timelines.add_argument(
        "--memory", action="store_true", help="also draw the memory of each rank over time"
    )
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
    pictures.add_argument("--greyscale", action="store_true", help="draw in grey, for print")
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Write the schedule or its timeline, or report why it can't be completed."""
    name = _format(args)
    given = given_of(args)
    for option in given:
        fitting = [each for each in (*LISTS, *TIMELINES) if option in _taken(each)]
        if fitting and name not in fitting:
            args.parser.error(
                f"{spelled(option)} is for {', '.join(fitting)}; {name} does not take it"
            )
    if name in TIMELINES:
        with progress("simulating"):
            timeline, against = drawn(args)
        options = {option: given[option] for option in given if option in _taken(name)}
        options.pop("channel", None)
        if against is not None:
            options["against"] = against
        write_out(TIMELINES[name](timeline, **options), args.output, name)
        return 0
    if costs_given(args) and not sees_costs(args.target):
        args.parser.error(
            f"--costs and --cost would change nothing: {name} holds no times, and {args.target} "
            "does not depend on costs"
        )
    with progress("proving"):
        schedule = load_schedule(args, costs_of(args))
        if args.compute_only or name == "torch-csv":
            schedule = strip_communication(schedule)
        elif not schedule.is_complete:
            schedule = proved(schedule, subject_of(args.target, schedule))
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
        logger.warning("%s", sentence)
    if file is None:
        if written.data is not None and is_terminal(sys.stdout):
            raise SchedirError(f"{name} is not text: write it to a file, -o x.{name}")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # as in the file that it may become
        _print(written, sys.stdout)
        return
    try:
        with replacing(file) as opened:
            _print(written, opened)
    except OSError as error:
        raise SchedirError(f"{file}: {error.strerror}") from None


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
    if args.format is None:
        if extension and not fitting:
            args.parser.error(
                f"the extension of {args.output} names no format: use "
                f"{' or '.join(_EXTENSIONS)}, or add --format"
            )
        return (fitting or ("sched",))[-1 if args.compute_only else 0]
    if fitting and args.format not in fitting:
        args.parser.error(
            f"--format {args.format} contradicts {args.output}, whose extension means "
            f"{' or '.join(fitting)}"
        )
    name: str = args.format
    return name
