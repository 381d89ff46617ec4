"""`schedir export`: write a schedule in a format that others read."""

from __future__ import annotations

import argparse
import io
import logging
import sys
from pathlib import Path

from schedir.checker import prove
from schedir.cli.target import add_target, load_target, subject_of
from schedir.cli.terminal import fail, refuse
from schedir.ir import dumps, dumps_torch_csv
from schedir.passes import strip_communication

logger = logging.getLogger("schedir")

_FORMATS = ("sched", "torch-csv", "torch-csv-comms")
# What the files of an extension hold, for `schedir` reads them by it.
_BY_EXTENSION = {".sched": ("sched",), ".csv": ("torch-csv", "torch-csv-comms")}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "export",
        help="write a schedule to a file",
        description="Write a schedule: as schedir's own text (sched), or as the CSV of "
        "torch.distributed.pipelining, compute only (torch-csv) or with its communication "
        "(torch-csv-comms). What the format can't hold is dropped with a warning.",
        allow_abbrev=False,
    )
    add_target(parser)
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        help="default: sched; for FILE.csv torch-csv-comms, which holds the whole list, or "
        "torch-csv with --compute-only",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write to FILE and not to stdout")
    parser.add_argument(
        "--compute-only", action="store_true", help="leave the sends and receives out"
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Write the schedule, or say why it can't be completed."""
    form = _format(args)
    schedule = load_target(args)
    if args.compute_only or form == "torch-csv":
        schedule = strip_communication(schedule)
    elif not schedule.is_complete:
        report = prove(schedule)
        if report.schedule is None:
            return refuse(report, subject_of(args, schedule))
        schedule = report.schedule
    if form == "sched":
        text = dumps(schedule)
    else:
        text, lost = dumps_torch_csv(schedule)
        for loss in lost:
            logger.warning("%s", loss)
    if args.output is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # as in the file that it may become
        sys.stdout.write(text)
        return 0
    try:
        Path(args.output).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        return fail(f"{args.output}: {error.strerror}")
    return 0


def _format(args: argparse.Namespace) -> str:
    """The format that is asked for, by its name or by the extension of the file."""
    asked: str | None = args.format
    if args.compute_only and asked == "torch-csv-comms":
        args.parser.error("--compute-only contradicts torch-csv-comms: use --format torch-csv")
    extension = Path(args.output or "").suffix
    fitting = _BY_EXTENSION.get(extension)
    if asked is None:
        if extension and fitting is None:
            args.parser.error(
                f"{args.output} does not tell the format: end it in {' or '.join(_BY_EXTENSION)}, "
                "or add --format"
            )
        if extension == ".csv":
            return "torch-csv" if args.compute_only else "torch-csv-comms"
        return "sched"
    if fitting is not None and asked not in fitting:
        args.parser.error(
            f"--format {asked} contradicts {args.output}, which is to hold {' or '.join(fitting)}"
        )
    return asked
