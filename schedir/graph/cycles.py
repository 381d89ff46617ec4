"""The shortest cycle in a graph of waits, as the explanation of a deadlock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from schedir.graph.paths import NEEDS, PART, POSTED, Waits
from schedir.ir import Bools

Wait: TypeAlias = tuple[int, int, int]
"""`later`, `earlier` and `why` of one wait."""

# Enough to search every start in any schedule that a person reads; a longer search would be
# quadratic, and the cycle found by then is as good an explanation.
_SEARCH_BUDGET = 250_000

_Leads: TypeAlias = Callable[[int], Iterator[tuple[int, Wait]]]
"""The stuck nodes that a stuck node waits for, and why."""


def shortest_cycle(waiting: Waits) -> list[Wait]:
    """A shortest cycle among the stuck nodes, as waits that lead from each node to the next. There
    must be stuck nodes.

    In a huge schedule, it is the shortest cycle found within the budget. Its waits are between
    places: a step into a batch and out of it shows only in the part that they name.
    """
    never = waiting.stuck
    leads = _leads(waiting, never)
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
    return _between_places(best)


def _between_places(cycle: list[Wait]) -> list[Wait]:
    """The cycle without the nodes of batches.

    An entry behind a batch waits for the part through which the cycle continues; an entry that
    needs one part needs the other parts too.
    """
    told = []
    for at, (later, earlier, why) in enumerate(cycle):
        if why in (PART, POSTED):
            continue
        before, following = cycle[at - 1], cycle[(at + 1) % len(cycle)]
        if before[2] == POSTED:
            later = before[0]
        if following[2] == PART and why != NEEDS:
            earlier = following[0]
        told.append((later, earlier, why))
        if following[2] == PART and following[0] != earlier:
            told.append((earlier, following[0], PART))
    return told


def _leads(waiting: Waits, never: Bools) -> _Leads:
    inside = np.flatnonzero(never[waiting.waiter] & never[waiting.awaited])
    # Those of each node as its places stand in the lists.
    keys = waiting.why[inside], waiting.later[inside], waiting.waiter[inside]
    inside = inside[np.lexsort(keys)]
    bounds = np.searchsorted(waiting.waiter[inside], np.arange(waiting.nodes + 1)).tolist()
    later, earlier, why, target = (
        column[inside].tolist()
        for column in (waiting.later, waiting.earlier, waiting.why, waiting.awaited)
    )

    def leads(source: int) -> Iterator[tuple[int, Wait]]:
        for at in range(bounds[source], bounds[source + 1]):
            yield target[at], (later[at], earlier[at], why[at])

    return leads


def _some_cycle(leads: _Leads, start: int) -> list[Wait]:
    """A cycle that following the first wait of each node leads into."""
    order: dict[int, int] = {}
    path: list[Wait] = []
    current = start
    while current not in order:
        order[current] = len(path)
        current, wait = next(leads(current))
        path.append(wait)
    return path[order[current] :]


def _cycle_through(start: int, leads: _Leads, most: int) -> tuple[list[Wait], int]:
    """A shortest cycle through `start` of at most this many waits, if there is one, and how many
    nodes the search visited."""
    came_by: dict[int, tuple[int, Wait]] = {}
    layer = [start]
    for _ in range(most):
        following = []
        for current in layer:
            for target, wait in leads(current):
                if target not in came_by:
                    came_by[target] = (current, wait)
                    following.append(target)
        layer = following
        if start in came_by or not layer:
            break
    if start not in came_by:
        return [], len(came_by) + 1
    cycle: list[Wait] = []
    current = start
    while not cycle or current != start:
        current, wait = came_by[current]
        cycle.append(wait)
    return cycle[::-1], len(came_by) + 1
