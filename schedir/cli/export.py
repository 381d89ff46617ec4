"""`schedir export`: write a schedule in a format that others read."""

from __future__ import annotations

import argparse
import io
import logging
import sys
from pathlib import Path

from schedir.checker import CHANNELS, prove
from schedir.cli.target import add_target, load_target, subject_of
from schedir.cli.terminal import fail, refuse
from schedir.passes import strip_communication
from schedir.render import Output, Page, described, outputs_of
from schedir.render.styled import plain
from schedir.simulator import simulate

logger = logging.getLogger("schedir")

_FORMATS = outputs_of("export")
_EXTENSIONS = list(dict.fromkeys(output.extension for output in _FORMATS.values()))


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "export",
        help="write a schedule to a file",
        description="Write a schedule in a format that others read. What the format cannot hold "
        f"is left out with a warning. {described('export')}.",
        allow_abbrev=False,
    )
    add_target(parser)
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
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Write the schedule, or say why it can't be completed."""
    output = _output(args)
    schedule = load_target(args)
    if args.compute_only or output.communication == "without":
        schedule = strip_communication(schedule)
    elif not schedule.is_complete:
        report = prove(schedule, CHANNELS[-1])  # what runs anywhere can be completed
        if report.schedule is None:
            return refuse(report, subject_of(args, schedule))
        schedule = report.schedule
    content = simulate(schedule) if output.of == "timeline" else schedule
    written = output.write(content, Page(subject_of(args, schedule)))
    for sentence in written.left_out:
        logger.warning("%s", sentence)
    return _save(plain(written.blocks), args.output)


def _save(text: str, file: str | None) -> int:
    """Write to a file, or to stdout where there is none; returns the exit code."""
    if file is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # as in the file that it may become
        sys.stdout.write(text)
        return 0
    try:
        Path(file).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        return fail(f"{file}: {error.strerror}")
    return 0


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
