"""Who is the root of a hang, in ten lines or as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from schedir.diagnosis.blame import REASONS, Root, Verdict, Waiting
from schedir.diagnosis.operations import Operation
from schedir.diagnosis.standing import Standing, stands
from schedir.diagnosis.verdict import Diagnosis
from schedir.ir import printable
from schedir.render.text import Block, Piece, count

_ROOT = "bold red"
_MOST_ROOTS = 3
_MOST_WAITS = 3


def hang_blocks(verdict: Verdict) -> Iterator[Block]:
    """At most ten lines: the roots, why, who waits, and what was read."""
    for root in verdict.roots[:_MOST_ROOTS]:
        yield Piece(f"root: rank {root.rank}", _ROOT)
        yield Piece(f"{_action(root)}: {root.reason}: {REASONS[root.reason]}{_about(root)}\n")
    if len(verdict.roots) > _MOST_ROOTS:
        yield Piece(f"root: also {_ranks(each.rank for each in verdict.roots[_MOST_ROOTS:])}\n")
    if not verdict.roots:
        yield Piece("No rank is seen to wait for another one.\n")
    elif not verdict.is_sure:
        yield Piece("The evidence does not decide between them: one is the root, or several.\n")
    yield from (Piece(f"{line}\n") for line in _waits(verdict.waiting))
    if len(verdict.chain) > 2:
        yield Piece(f"chain: {' → '.join(map(str, verdict.chain[-12:]))}\n")
    yield from (Piece(f"{line}\n") for line in _notes(verdict))


def hang_data(verdict: Verdict) -> dict[str, Any]:
    """The verdict for a program."""
    return {
        "roots": [
            {
                "rank": each.rank,
                "reason": each.reason,
                "action": each.action or None,
                "waited_for_by": each.waited_for_by,
                **_operation(each.operation),
            }
            for each in verdict.roots
        ],
        "sure": verdict.is_sure and bool(verdict.roots),
        "waiting": [
            {
                "rank": each.rank,
                "waits_for": each.waits_for,
                "action": each.action or None,
                **_operation(each.operation),
            }
            for each in verdict.waiting
        ],
        "chain": verdict.chain,
        "by_rules": verdict.by_rules,
        "missing_dumps": verdict.missing_dumps,
        "unreadable": verdict.unreadable,
        "ranks": len(verdict.ranks),
    }


def standing_blocks(standing: Standing, found: Diagnosis) -> Iterator[Block]:
    """The roots of a job of schedir, and where its other ranks stood, in ten lines."""
    for root in found.roots[:_MOST_ROOTS]:
        yield Piece("root: ", _ROOT)
        yield Piece(f"{printable(str(root))}\n")
    if len(found.roots) > _MOST_ROOTS:
        yield Piece(f"root: also {_ranks(each.rank for each in found.roots[_MOST_ROOTS:])}\n")
    if not found.roots:
        yield Piece("No rank is seen to wait for another one.\n")
    roots = {root.rank for root in found.roots}
    others = [(rank, said) for rank, said in stands(standing, found).items() if rank not in roots]
    for rank, said in others[:_MOST_WAITS]:
        yield Piece(f"rank {rank} {said}\n")
    if left := len(others[_MOST_WAITS:]):
        yield Piece(f"{count(left, 'rank')} more\n")
    if len(found.chain) > 1:
        yield Piece(f"chain: {' → '.join(map(str, found.chain[-12:]))}\n")


def standing_data(standing: Standing, found: Diagnosis) -> dict[str, Any]:
    """The same for a program, with the keys of `hang_data`."""
    said = stands(standing, found)
    return {
        "roots": [
            {
                "rank": root.rank,
                "reason": root.cause,
                "action": None if root.action is None else f"#{root.index} {root.action}",
                "step": root.step,
                "waited_for_by": [
                    r for r, others in found.waits_for.items() if root.rank in others
                ],
            }
            for root in found.roots
        ],
        "sure": len(found.roots) == 1,
        "waiting": [
            {"rank": rank, "waits_for": sorted(others), "stands": said[rank]}
            for rank, others in sorted(found.waits_for.items())
        ],
        "chain": found.chain,
        "missing_dumps": (),
        "ranks": len(standing.ranks),
    }


def _operation(operation: Operation | None) -> dict[str, Any]:
    if operation is None:
        return {"operation": None}
    return {
        "operation": operation.text,
        "sequence": operation.sequence,
        "group": operation.group.text,
        "group_ranks": operation.group.members,
        "posted_ns": operation.created,
    }


def _about(root: Root) -> str:
    if root.operation is None:
        return ""
    at = f", {_named(root.operation)}"
    waits = len(root.waited_for_by)
    by = f"{count(waits, 'rank')} {'waits' if waits == 1 else 'wait'} " if waits else ""
    # In UTC: the ranks' machines may be anywhere.
    seconds = min(root.operation.created // 10**9, 10**11)
    return f"{at} ({by}since {datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC)"


def _action(each: Root | Waiting) -> str:
    return f" {each.action}" if each.action else ""


def _named(operation: Operation) -> str:
    number = "" if operation.transfers else f" {operation.sequence}"
    return printable(f"{operation.text}{number} of group {operation.group.text}")


def _waits(waiting: Sequence[Waiting]) -> Iterator[str]:
    """Ranks that wait in the same place together, most ranks first."""
    places: dict[tuple[object, ...], list[Waiting]] = {}
    for each in waiting:
        operation = each.operation
        own = operation.text if operation.transfers else ""
        place = own, operation.group, operation.sequence, each.waits_for, each.action
        places.setdefault(place, []).append(each)
    found = sorted(places.values(), key=len, reverse=True)
    for group in found[:_MOST_WAITS]:
        first = group[0]
        yield (
            f"waiting: {_ranks(each.rank for each in group)}{_action(first)}: "
            f"{_named(first.operation)}, for {_ranks(first.waits_for)}"
        )
    if left := sum(map(len, found[_MOST_WAITS:])):
        yield f"waiting: {count(left, 'rank')} more"


def _notes(verdict: Verdict) -> Iterator[str]:
    roots = {root.rank for root in verdict.roots}
    if verdict.by_rules and set(verdict.by_rules) != roots:
        yield f"Collectives alone would point at {_ranks(verdict.by_rules)}."
    said = f"dumps: {len(verdict.ranks) - len(verdict.missing_dumps)} of {len(verdict.ranks)} read"
    if verdict.missing_dumps:
        said += f"; none of {_ranks(verdict.missing_dumps)}"
    unreadable = [f"{printable(name)}: {why}" for name, why in verdict.unreadable.items()]
    if len(unreadable) > 2:
        unreadable[2:] = [f"{count(len(unreadable) - 2, 'more file')} can't be read"]
    yield "; ".join([said, *unreadable])


def _ranks(ranks: Iterable[int]) -> str:
    """Ranks in words, runs of them shortened: `ranks 0–3, 8`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [f"{a}" if a == b else f"{a}, {b}" if a + 1 == b else f"{a}–{b}" for a, b in runs]
    many = len(runs) > 1 or (runs and runs[0][0] != runs[0][1])
    return f"rank{'s' if many else ''} {', '.join(words[:8])}{' …' if len(words) > 8 else ''}"
