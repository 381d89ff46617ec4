"""S301: deadlock, and its shortest explanation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TypeAlias

import numpy as np

from schedir.check.channels import CHANNELS
from schedir.check.diagnostics import Diagnostic, Excerpt, Move, locate, move
from schedir.check.rules.communication import MEETS, WaitCycle
from schedir.check.waits import AFTER, QUEUED, REASONS, Waits, host_order, stuck, waits
from schedir.ir import COMPUTE, RECEIVES, Bools, Schedule, Ties

_AROUND = 2


def clean_channels(schedule: Schedule, ties: Ties = ()) -> tuple[str, ...]:
    """The channel models under which the schedule runs to its end, strictest first.

    Expects matched communication.
    """
    if not ties and host_order(schedule):
        return CHANNELS
    for strictest, channel in enumerate(CHANNELS):
        if (ties or channel != "host") and _has_no_cycle(schedule, channel, ties):
            return CHANNELS[strictest:]  # each enforces a part of the one before
    return ()


def runs(schedule: Schedule, channel: str, ties: Ties = ()) -> bool:
    """Whether the schedule runs to its end under a channel model."""
    # The walk in the order of `host` knows no ties, but all else.
    in_order = not ties and host_order(schedule)
    return in_order or (
        (bool(ties) or channel != "host") and _has_no_cycle(schedule, channel, ties)
    )


def _has_no_cycle(schedule: Schedule, channel: str, ties: Ties) -> bool:
    return not stuck(waits(schedule, channel, ties)).any()


def deadlock(
    schedule: Schedule,
    channel: str,
    clean: tuple[str, ...],
    ties: Ties = (),
    *,
    inserted: bool = False,
) -> Iterator[Diagnostic]:
    """The shortest wait cycle under `channel`, if there is one; `clean` are the models without.

    A compute-only schedule is judged by its compute, collectives and ties: a cycle of these exists
    under every model. `inserted` says that the schedule is not as its author gave it.
    """
    waiting = waits(schedule, channel, ties)
    never = stuck(waiting)
    if not never.any():
        return
    cycle = _shortest_cycle(waiting, never)
    rows = _rows(cycle)
    moves = () if inserted else tuple(islice(_moves(schedule, cycle), _MOST_MOVES))
    yield WaitCycle(
        locations=tuple(locate(schedule, place) for place, _, _ in rows),
        reasons=tuple(why for _, why, _ in rows),
        channel=channel,
        clean=clean,
        complete=schedule.is_complete,
        inserted=inserted,
        pieces=tuple(_excerpts(schedule, [place for place, _, _ in rows])),
        moves=moves,
    )


_Wait: TypeAlias = tuple[int, int, int]
"""`later`, `earlier` and `why` of one wait."""

# Enough to search every start in any schedule that a person reads; a longer search would be
# quadratic, and the cycle found by then is as good an explanation.
_SEARCH_BUDGET = 1_000_000
_MOST_MOVES = 8

_Leads: TypeAlias = dict[int, list[tuple[int, _Wait]]]
"""For each stuck node, the stuck nodes that it waits for, and why."""


def _shortest_cycle(waiting: Waits, never: Bools) -> list[_Wait]:
    """A shortest cycle among the stuck nodes, as waits that lead from each node to the next.

    In a huge schedule, the shortest of those that the budget allows to look for.
    """
    node = waiting.node
    inside = never[node[waiting.later]] & never[node[waiting.earlier]]
    leads: _Leads = {}
    for later, earlier, why, source, target in zip(
        waiting.later[inside].tolist(),
        waiting.earlier[inside].tolist(),
        waiting.why[inside].tolist(),
        node[waiting.later[inside]].tolist(),
        node[waiting.earlier[inside]].tolist(),
        strict=True,
    ):
        leads.setdefault(source, []).append((target, (later, earlier, why)))
    starts = np.flatnonzero(never).tolist()
    best = _some_cycle(leads, starts[0])
    # One as short that comes first in the lists is better still.
    most = len(best)
    budget = _SEARCH_BUDGET
    # Short cycles first, from every start: long searches from the first ones would use it all up.
    for depth in (4, 16, 64, len(best)):
        for start in starts:
            if budget <= 0 or not most:
                break
            found, visited = _cycle_through(start, leads, min(depth, most))
            budget -= visited
            if found:
                best, most = found, len(found) - 1
        if most < depth:
            break
    return best


def _some_cycle(leads: _Leads, start: int) -> list[_Wait]:
    """A cycle that following the first wait of each node leads into."""
    order: dict[int, int] = {}
    path: list[_Wait] = []
    current = start
    while current not in order:
        order[current] = len(path)
        current, wait = leads[current][0]
        path.append(wait)
    return path[order[current] :]


def _cycle_through(start: int, leads: _Leads, most: int) -> tuple[list[_Wait], int]:
    """A shortest cycle through `start` of at most so many waits, if there is one, and how many
    nodes it took to know."""
    came_by: dict[int, tuple[int, _Wait]] = {}
    layer = [start]
    for _ in range(most):
        following = []
        for current in layer:
            for target, wait in leads[current]:
                if target not in came_by:
                    came_by[target] = (current, wait)
                    following.append(target)
        layer = following
        if start in came_by or not layer:
            break
    if start not in came_by:
        return [], len(came_by) + 1
    cycle: list[_Wait] = []
    current = start
    while not cycle or current != start:
        current, wait = came_by[current]
        cycle.append(wait)
    return cycle[::-1], len(came_by) + 1


def _rows(cycle: list[_Wait]) -> list[tuple[int, str, int]]:
    """The cycle with both kinds of edge: within a list, and between the ends of a transfer.

    It starts at the place that comes first in the lists.
    """
    rows = []
    for (_, before, _), (later, earlier, why) in zip([cycle[-1], *cycle], cycle, strict=False):
        if before != later:
            rows.append((before, MEETS, later))
        rows.append((later, REASONS[why], earlier))
    first = min(range(len(rows)), key=lambda row: (rows[row][0], rows[row][1] != MEETS))
    return rows[first:] + rows[:first]


def _moves(schedule: Schedule, cycle: list[_Wait]) -> Iterator[Move]:
    """The moves that break the cycle: each takes an action ahead of the one that it waits for."""
    columns = schedule.columns
    receives, computes = columns.is_kind(*RECEIVES), columns.is_kind(*COMPUTE)
    waiting = [(later, earlier) for later, earlier, why in cycle if why in (QUEUED, AFTER)]
    # A receive can always be posted earlier as far as data goes, so those are tried first.
    waiting.sort(key=lambda wait: not receives[wait[0]])
    for later, earlier in waiting:
        yield move(columns, later, "before", earlier, "move" if computes[later] else "post")


def _excerpts(schedule: Schedule, places: list[int]) -> Iterator[Excerpt]:
    """The pieces of the ranks' lists that hold the cycle, a few actions around each part of it."""
    columns = schedule.columns
    marked = sorted(set(places))
    pieces: list[list[int]] = []
    for place in marked:
        near = pieces and place - pieces[-1][-1] <= 2 * _AROUND + 1
        if near and columns.rank[place] == columns.rank[pieces[-1][-1]]:
            pieces[-1].append(place)
        else:
            pieces.append([place])
    for piece in pieces:
        rank = int(columns.rank[piece[0]])
        start, end = int(columns.starts[rank]), int(columns.starts[rank + 1])
        first = max(start, piece[0] - _AROUND)
        last = min(end, piece[-1] + _AROUND + 1)
        yield Excerpt(
            rank,
            first - start,
            tuple(columns.action(place) for place in range(first, last)),
            frozenset(place - start for place in piece),
            end - start,
        )
