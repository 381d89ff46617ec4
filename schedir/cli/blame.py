"""`schedir blame`: name the rank that a hung job waits for, from its flight recorder's dumps.

    schedir blame dumps
    schedir blame dumps --format json

Name the rank that a hung job waits for, from the dumps of torch's flight recorder. Any job that
uses torch.distributed writes them if TORCH_NCCL_DUMP_ON_TIMEOUT=1 and
TORCH_FR_DUMP_TEMP_FILE=DIR/rank_ are set; an Executor writes where its ranks stood if
SCHEDIR_DUMP_DIR=DIR is set, on gloo too. If the evidence does not decide between several ranks, the
command names all of them and says so. Exit code: 0 ranks are named, 1 no rank is seen to wait, 2
the directory has no dumps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from schedir.cli.arguments import TARGET, add_format, add_shape, load_target, proved
from schedir.cli.terminal import about, progress
from schedir.diagnosis import Diagnosis, Root, in_words, waiting_for
from schedir.diagnosis.blame import REASONS, blame
from schedir.diagnosis.flight_recorder import Operation, read_dumps
from schedir.diagnosis.verdict import load_standing
from schedir.ir import printable
from schedir.render.text import Block, Piece, as_json, count, write

_MOST_ROOTS = 3
_MOST_WAITS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("directory", metavar="DIR", help="the directory of dumps, one per rank")
    parser.add_argument(
        "--schedule",
        metavar="TARGET",
        help=f"name the actions of the schedule that the job ran: {TARGET}",
    )
    add_format(parser, ("text", "json"), "the verdict in ten lines, or as JSON")
    add_shape(parser)


def run(args: argparse.Namespace) -> int:
    """Print the verdict."""
    schedule = None
    if args.schedule is not None:
        with progress("proving"):
            found = load_target(args, args.schedule)
        schedule = proved(found, args.schedule)
    with about("blame-a-hang"):
        if standing := load_standing(args.directory):
            diagnosis = standing.diagnosis()
        else:
            diagnosis = blame(read_dumps(args.directory), schedule)
    if args.format == "json":
        print(as_json(diagnosis_data(diagnosis)), end="")
    else:
        write(diagnosis_blocks(diagnosis), sys.stdout)
    return 0 if diagnosis.roots else 1


def diagnosis_blocks(found: Diagnosis) -> Iterator[Block]:
    """At most ten lines: the roots, why, where the others stand, and what was read."""
    for root in found.roots[:_MOST_ROOTS]:
        named = f"rank {root.rank}"
        yield Piece(f"root: {named}", "bold red")
        yield Piece(f"{printable(str(root).removeprefix(named))}{_evidence(root, found)}\n")
    yield from (Piece(f"{printable(line)}\n") for line in _lines(found))


def _evidence(root: Root, found: Diagnosis) -> str:
    """What the dumps show of a root."""
    operation = found.stands[root.rank].operation
    said = f": {REASONS[root.cause]}" if root.call is None else ""
    if operation is None:
        return said
    waits = len(waiting_for(found.waits_for).get(root.rank, ()))
    by = f"{count(waits, 'rank')} {'waits' if waits == 1 else 'wait'} " if waits else ""
    # In UTC: the ranks' machines may be anywhere.
    seconds = min(operation.record.created // 10**9, 10**11)
    since = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"{said}, {printable(str(operation))} ({by}since {since})"


def _lines(found: Diagnosis) -> Iterator[str]:
    roots = {root.rank for root in found.roots}
    if further := found.roots[_MOST_ROOTS:]:
        yield f"root: also {in_words(each.rank for each in further)}"
    if not roots:
        yield "No rank is seen to wait for another one."
    elif not found.is_sure:
        yield "The evidence does not decide between them: one is the root, or several."
    together: dict[str, list[int]] = {}
    for rank, stand in found.stands.items():
        if rank not in roots:
            together.setdefault(stand.words, []).append(rank)
    groups = sorted(together.items(), key=lambda each: len(each[1]), reverse=True)
    for words, ranks in groups[:_MOST_WAITS]:
        yield f"{in_words(ranks)}{': each' * (len(ranks) > 1)} {words}"
    if left := sum(len(ranks) for _, ranks in groups[_MOST_WAITS:]):
        yield f"{count(left, 'rank')} more"
    if len(found.chain) > 1:
        yield f"chain: {' → '.join(map(str, found.chain[-12:]))}"
    if found.by_rules and {*found.by_rules} != roots:
        yield f"Collectives alone would point at {in_words(found.by_rules)}."
    if found.missing_dumps is None:
        return
    said = f"dumps: {found.ranks - len(found.missing_dumps)} of {found.ranks} read"
    if found.missing_dumps:
        said += f"; none of {in_words(found.missing_dumps)}"
    unreadable = [f"{name}: {why}" for name, why in found.unreadable.items()]
    if len(unreadable) > 2:
        unreadable[2:] = [f"{count(len(unreadable) - 2, 'more file')} can't be read"]
    yield "; ".join([said, *unreadable])


def diagnosis_data(found: Diagnosis) -> dict[str, Any]:
    """The diagnosis for a program."""
    return {
        "roots": [
            {
                "rank": root.rank,
                "reason": root.cause,
                "action": root.place or None,
                "step": root.step,
                "waited_for_by": waiting_for(found.waits_for).get(root.rank, ()),
                **_operation(found.stands[root.rank].operation),
            }
            for root in found.roots
        ],
        "sure": found.is_sure and bool(found.roots),
        "waiting": [
            {
                "rank": rank,
                "waits_for": sorted(others),
                "stands": found.stands[rank].words,
                "action": found.stands[rank].action or None,
                **_operation(found.stands[rank].operation),
            }
            for rank, others in sorted(found.waits_for.items())
        ],
        "chain": found.chain,
        "by_rules": found.by_rules,
        "missing_dumps": found.missing_dumps or (),
        "unreadable": found.unreadable,
        "ranks": found.ranks,
    }


def _operation(operation: Operation | None) -> dict[str, Any]:
    if operation is None:
        return {"operation": None}
    return {
        "operation": operation.text,
        "sequence": operation.sequence,
        "group": operation.group.text,
        "group_ranks": operation.group.members,
        "posted_ns": operation.record.created,
    }
