"""`schedir blame`: name the rank that a hung job waits for, from its flight recorder's dumps."""

from __future__ import annotations

import argparse
import sys

from schedir.cli.target import TARGET, add_shape, load_target, proved, subject_of
from schedir.cli.terminal import about
from schedir.diagnosis.blame import blame
from schedir.diagnosis.flight_recorder import read_dumps
from schedir.diagnosis.verdict import load_standing
from schedir.render.hang import hang_blocks, hang_data
from schedir.render.terminal import write
from schedir.render.text import Piece, as_json

EXAMPLES = ("schedir blame dumps", "schedir blame dumps --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command and its description."""
    parser.description = (
        "Name the rank that a hung job waits for, from the dumps of torch's flight recorder. Any "
        "job that uses torch.distributed writes them if TORCH_NCCL_DUMP_ON_TIMEOUT=1 and "
        "TORCH_FR_DUMP_TEMP_FILE=DIR/rank_ are set; an Executor writes where its ranks stood if "
        "SCHEDIR_DUMP_DIR=DIR is set, on gloo too. If the evidence does not decide between "
        "several ranks, the command names all of them and says so. Exit code: 0 ranks are named, "
        "1 no rank is seen to wait, 2 the directory has no dumps."
    )
    parser.add_argument("directory", metavar="DIR", help="the directory of dumps, one per rank")
    parser.add_argument(
        "--schedule",
        metavar="TARGET",
        help=f"name the actions of the schedule that the job ran: {TARGET}",
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    add_shape(parser)


def run(args: argparse.Namespace) -> int:
    """Print the verdict."""
    schedule = None
    if args.schedule is not None:
        found = load_target(args, args.schedule)
        schedule = proved(found, subject_of(args.schedule, found))
    with about("blame-a-hang"):
        if standing := load_standing(args.directory):
            diagnosis = standing.diagnosis()
        else:
            diagnosis = blame(read_dumps(args.directory), schedule)
    shown = [Piece(as_json(hang_data(diagnosis)))] if args.json else hang_blocks(diagnosis)
    write(shown, sys.stdout)
    return 0 if diagnosis.roots else 1
