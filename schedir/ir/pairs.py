"""Overlapped pairs: a forward and a backward that start once the inputs of both are there.

    rank 0   0F0  (0F1;0B0)  ...        0B0 needs 1B0, which stands after 1F1, which needs the
                     ↘  ↗               0F1 of the pair: it can never start, though its parts could,
    rank 1      1F0  1F1  1B0  ...      one after the other

A list holds the parts of a pair one after the other, as no entry runs two actions together yet.
Where its communication is listed, that order stands for the pair: whatever leaves the rank is
listed after both parts, so nobody gets the output of the first before the second has run. In a
compute-only list, a cycle through a pair would vanish with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs

from schedir.errors import UnsoundError
from schedir.ir.clock import Exchanges, run
from schedir.ir.columns import Columns
from schedir.ir.schedule import Schedule

_MOST_WAITS = 4  # in a message


@attrs.frozen
class _Wait:
    """What a rank stands at for ever: the places of that entry (of its first part, if it is a
    pair), of the part that lacks its input, and of the compute that would make it."""

    entry: int
    part: int
    maker: int


def never_starts(schedule: Schedule, pairs: Collection[int]) -> tuple[int, str] | None:
    """The first pair on a wait cycle that is there only because it is one, and why it can't start.

    A pair is told by the place of its first part. None where there is no such cycle, or one without
    pairs too, which `schedir.check` finds.
    """
    if schedule.is_complete:
        return None
    try:
        flow = schedule.dataflow
    except UnsoundError:
        return None  # the lists lack actions, as `schedir.check` says
    bounds, count = schedule.columns.starts.tolist(), len(schedule.columns)
    needs, makers = flow.arrivals.tolist(), flow.transfers.maker.tolist()

    def ends(posts: list[tuple[int, ...]]) -> list[float]:
        return run(bounds, [0] * count, needs, Exchanges(posts, (), [0] * len(posts))).ends

    if -1 in ends([(maker,) for maker in makers]):
        return None
    last = list(range(count))
    for first in pairs:
        last[first] += 1
    posts: list[tuple[int, ...]] = [(-1 if maker < 0 else last[maker],) for maker in makers]
    for first in pairs:
        wanted = [need for need in needs[first : first + 2] if need >= 0]
        if wanted:
            needs[first] = len(posts)
            posts.append(tuple(post for need in wanted for post in posts[need]))
    never = [place for place, end in enumerate(ends(posts)) if end < 0]
    if not never:
        return None
    circle = _circle(schedule, pairs, never)
    return circle[0].entry, _in_words(schedule.columns, pairs, circle)


def _circle(schedule: Schedule, pairs: Collection[int], never: Sequence[int]) -> list[_Wait]:
    """A cycle of ranks each of which waits for the next, from the first pair on."""
    rank_of, flow, stuck = schedule.columns.rank.tolist(), schedule.dataflow, set(never)
    fronts = {rank_of[place]: place for place in reversed(never)}
    waits: dict[int, _Wait] = {}
    rank = rank_of[never[0]]
    while rank not in waits:
        entry = fronts[rank]
        for part in (entry, entry + 1) if entry in pairs else (entry,):
            arrival = flow.arrivals[part]
            maker = int(flow.transfers.maker[arrival]) if arrival >= 0 else -1
            if maker in stuck:
                waits[rank] = _Wait(entry, part, maker)
        rank = rank_of[waits[rank].maker]
    circle = list(waits.values())[list(waits).index(rank) :]
    start = circle.index(min((w for w in circle if w.entry in pairs), key=lambda w: w.entry))
    return circle[start:] + circle[:start]


def _in_words(columns: Columns, pairs: Collection[int], circle: list[_Wait]) -> str:
    """The cycle, each rank waiting for the next."""
    waits = []
    for wait, following in zip(circle, [*circle[1:], circle[0]], strict=True):
        front = following.entry
        named = str(columns.action(front))
        if front in pairs:
            named = f"({named};{columns.action(front + 1)})"
        link = ""
        if wait.maker > front + (front in pairs):
            link = f", which stands after {named}"
        elif front in pairs:
            link = f", a part of {named}"
        waits.append(
            f"{columns.action(wait.part)} needs {columns.action(wait.maker)} of rank "
            f"{columns.rank[wait.maker]}{link}"
        )
    if len(waits) > _MOST_WAITS:
        waits[_MOST_WAITS - 1 : -1] = ["…"]
    return "; ".join(waits)
