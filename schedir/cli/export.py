"""`schedir export`: write a schedule, or its timeline, in a format that others read."""

from __future__ import annotations

import argparse
import io
import logging
import sys
from pathlib import Path
from typing import TextIO

from schedir.cli.costs import add_costs, costs_given, costs_of
from schedir.cli.target import TARGET_OR_RUN, add_target, proved, sees_costs, subject_of
from schedir.cli.terminal import fail, progress
from schedir.cli.timelines import add_drawn, drawn, load_schedule
from schedir.files import replacing
from schedir.ir import Schedule
from schedir.passes import strip_communication
from schedir.render import Output, Page, Written, described, outputs_of
from schedir.render.terminal import is_terminal
from schedir.render.text import plain
from schedir.simulator import Timeline

logger = logging.getLogger("schedir")

_FORMATS = outputs_of("export")
_EXTENSIONS = list(dict.fromkeys(output.extension for output in _FORMATS.values()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes, and what it does."""
    parser.description = (
        "Write a schedule, or its timeline, in a format that others read. What the "
        f"format cannot hold is left out with a warning. {described('export')}."
    )
    add_target(parser, TARGET_OR_RUN)
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        help=f"by default what FILE's extension says, else {next(iter(_FORMATS))}; .csv is "
        "torch-csv-comms, or torch-csv with --compute-only",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write to FILE and not to stdout")
    parser.add_argument(
        "--compute-only", action="store_true", help="leave the sends and receives out"
    )
    timelines = add_drawn(parser)
    timelines.add_argument(
        "--memory", action="store_true", help="draw what each rank keeps over time as well"
    )
    pictures = parser.add_argument_group("pictures (svg, png, pdf)")
    titles = pictures.add_mutually_exclusive_group()
    titles.add_argument("--title", metavar="TEXT", help="what stands above (default: its shape)")
    titles.add_argument("--no-title", dest="title", action="store_const", const="")
    pictures.add_argument(
        "--width",
        dest="breadth",
        metavar="W",
        help="as wide as a column of a page, such as 16cm, or as so many letters, such as 120 "
        "(default: what its labels need)",
    )
    pictures.add_argument("--greyscale", action="store_true", help="without colours, for print")
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Write the schedule or its timeline, or say why it can't be completed."""
    output = _output(args)
    given = {args.title, args.breadth, args.end} != {None} or args.start or args.greyscale
    if given and not output.looks:
        args.parser.error(
            "--title, --no-title, --width, --greyscale, --from and --to are for pictures, svg, png "
            f"and pdf: {output.name} takes none of them"
        )
    if output.of == "timeline":
        return _write_timeline(output, args)
    for option, value in (("--memory", args.memory), ("--against", args.against)):
        if value:
            args.parser.error(f"{option} is for timelines: {output.name} holds none")
    if costs_given(args) and not sees_costs(args.target):
        args.parser.error(
            f"--costs and --cost are for timelines, and for schedules that are made for given "
            f"costs: {output.name} holds no times, and {args.target} sees none"
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
        args.parser.error(f"--compute-only is for lists of actions: {output.name} holds a timeline")
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
    """Write to a file, or to stdout where there is none; returns the exit code."""
    written = output.write(content, page)
    for sentence in written.left_out:
        logger.warning("%s", sentence)
    if file is None:
        if written.data is not None and is_terminal(sys.stdout):
            return fail(f"{output.name} is no text: write it to a file, -o x{output.extension}")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # as in the file that it may become
        _print(written, sys.stdout)
        return 0
    try:
        with replacing(file) as opened:
            _print(written, opened)
    except OSError as error:
        return fail(f"{file}: {error.strerror}")
    return 0


def _print(written: Written, stream: TextIO) -> None:
    """Write one after the other: all of them at once may be more than there is memory for."""
    for block in written.blocks:
        stream.write(plain([block]))
    if written.data is not None:
        stream.buffer.write(written.data)


def _output(args: argparse.Namespace) -> Output:
    """The format that is asked for, by its name or by the extension of the file."""
    extension = Path(args.output or "").suffix
    fitting = [output for output in _FORMATS.values() if output.extension == extension]
    if args.format is not None:
        return _named(args, fitting)
    if extension and not fitting:
        args.parser.error(
            f"{args.output} does not tell the format: end it in {' or '.join(_EXTENSIONS)}, "
            "or add --format"
        )
    unfit = "with" if args.compute_only else "without"
    candidates = fitting or list(_FORMATS.values())
    return next(output for output in candidates if output.communication != unfit)


def _named(args: argparse.Namespace, fitting: list[Output]) -> Output:
    """The format of --format, which the file's extension and --compute-only may contradict."""
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
            f"--format {asked.name} contradicts {args.output}, which is to hold {names}"
        )
    return asked
