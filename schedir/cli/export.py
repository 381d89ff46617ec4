"""`schedir export`: write a schedule or its timeline to a file."""

from __future__ import annotations

import argparse
import io
import logging
import sys
from pathlib import Path
from typing import TextIO

from schedir.cli.costs import add_costs, costs_given, costs_of
from schedir.cli.target import TARGET_OR_RUN, add_target, proved, sees_costs, subject_of
from schedir.cli.terminal import progress
from schedir.cli.timelines import add_drawn, drawn, load_schedule
from schedir.errors import SchedirError
from schedir.files import replacing
from schedir.ir import Schedule
from schedir.passes import strip_communication
from schedir.render import Output, Page, Written, described, outputs_of
from schedir.render.terminal import is_terminal
from schedir.render.text import plain
from schedir.simulator import Timeline

EXAMPLES = (
    "schedir export 1f1b -o 1f1b.svg",
    "schedir export interleaved-1f1b --ranks 2 --format torch-csv",
)

logger = logging.getLogger("schedir")

_FORMATS = outputs_of("export")
_EXTENSIONS = list(dict.fromkeys(output.extension for output in _FORMATS.values()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command and its description."""
    parser.description = (
        "Write a schedule or its timeline to a file, or to stdout. A format leaves out what it "
        f"cannot hold, with a warning. {described('export')}."
    )
    add_target(parser, TARGET_OR_RUN)
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        help=f"the format (default: the one of FILE's extension, else {next(iter(_FORMATS))}; "
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
        dest="breadth",
        metavar="W",
        help="the width: of a page's column, such as 16cm, or in letters, such as 120 (default: "
        "wide enough for its labels)",
    )
    pictures.add_argument("--greyscale", action="store_true", help="draw in grey, for print")
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Write the schedule or its timeline, or report why it can't be completed."""
    output = _output(args)
    given = {args.title, args.breadth, args.end} != {None} or args.start or args.greyscale
    if given and not output.looks:
        args.parser.error(
            "--title, --no-title, --width, --greyscale, --from and --to are for pictures (svg, "
            f"png, pdf); {output.name} takes none of them"
        )
    if args.memory and output.memory == "always":
        args.parser.error(f"--memory would change nothing: {output.name} holds it in any case")
    if output.of == "timeline":
        return _write_timeline(output, args)
    timed = ("memory", "against", "channel")
    for option, value in ((f"--{name}", getattr(args, name)) for name in timed):
        if value:
            args.parser.error(f"{option} is for timelines; {output.name} holds a list of actions")
    if costs_given(args) and not sees_costs(args.target):
        args.parser.error(
            f"--costs and --cost would change nothing: {output.name} holds no times, and "
            f"{args.target} does not depend on costs"
        )
    with progress("proving"):
        schedule = load_schedule(args, costs_of(args))
        subject = subject_of(args.target, schedule)
        if args.compute_only or output.communication == "without":
            schedule = strip_communication(schedule)
        elif not schedule.is_complete:
            schedule = proved(schedule, subject)
    return write_out(output, schedule, Page(subject), args.output)


def _write_timeline(output: Output, args: argparse.Namespace) -> int:
    if args.compute_only:
        args.parser.error(f"--compute-only is for lists of actions; {output.name} holds a timeline")
    with progress("simulating"):
        timeline, against, subject = drawn(args)
    page = Page(
        subject,
        against=against,
        memory=args.memory,
        start=args.start,
        end=args.end,
        title=args.title,
        breadth=args.breadth,
        greyscale=args.greyscale,
    )
    return write_out(output, timeline, page, args.output)


def write_out(output: Output, content: Schedule | Timeline, page: Page, file: str | None) -> int:
    """Write to a file, or to stdout if `file` is None; returns the exit code."""
    written = output.write(content, page)
    for sentence in written.left_out:
        logger.warning("%s", sentence)
    if file is None:
        if written.data is not None and is_terminal(sys.stdout):
            raise SchedirError(
                f"{output.name} is not text: write it to a file, -o x{output.extension}"
            )
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # as in the file that it may become
        _print(written, sys.stdout)
        return 0
    try:
        with replacing(file) as opened:
            _print(written, opened)
    except OSError as error:
        raise SchedirError(f"{file}: {error.strerror}") from None
    return 0


def _print(written: Written, stream: TextIO) -> None:
    """Write block by block, because all of them may not fit in memory."""
    for block in written.blocks:
        stream.write(plain([block]))
    if written.data is not None:
        stream.buffer.write(written.data)


def _output(args: argparse.Namespace) -> Output:
    """The format that the user asks for, by its name or by the file's extension."""
    extension = Path(args.output or "").suffix
    fitting = [output for output in _FORMATS.values() if output.extension == extension]
    if args.format is not None:
        return _named(args, fitting)
    if extension and not fitting:
        args.parser.error(
            f"the extension of {args.output} names no format: use {' or '.join(_EXTENSIONS)}, "
            "or add --format"
        )
    unfit = "with" if args.compute_only else "without"
    candidates = fitting or list(_FORMATS.values())
    return next(output for output in candidates if output.communication != unfit)


def _named(args: argparse.Namespace, fitting: list[Output]) -> Output:
    """The format of --format. The file's extension and --compute-only must agree with it."""
    asked = _FORMATS[args.format]
    if args.compute_only and asked.communication == "with":
        instead = next(
            output.name
            for output in _FORMATS.values()
            if output.extension == asked.extension and output.communication != "with"
        )
        args.parser.error(f"--compute-only contradicts {asked.name}: use --format {instead}")
    if fitting and asked not in fitting:
        names = " or ".join(output.name for output in fitting)
        args.parser.error(
            f"--format {asked.name} contradicts {args.output}, whose extension means {names}"
        )
    return asked
