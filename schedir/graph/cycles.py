"""The shortest cycle in a graph of waits, as the explanation of a deadlock."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from schedir.graph.paths import NEEDS, PART, POSTED, Waits

Wait: TypeAlias = tuple[int, int, int]
"""`later`, `earlier` and `why` of one wait."""

# Enough to search every start in any schedule that a person reads; a longer search would be
# quadratic, and the cycle found by then is as good an explanation.
_SEARCH_BUDGET = 250_000


def shortest_cycle(waiting: Waits) -> list[Wait]:
    """A shortest cycle among the stuck nodes, as waits that lead from each node to the next. There
    must be stuck nodes.

    In a huge schedule, it is the shortest cycle found within the budget. Its waits are between
    places: a step into a batch and out of it shows only in the part that they name.
    """
    never = waiting.stuck
    inside = np.flatnonzero(never[waiting.waiter] & never[waiting.awaited])
    # The waits of each node stand together, as its places stand in the lists.
    keys = waiting.why[inside], waiting.later[inside], waiting.waiter[inside]
    inside = inside[np.lexsort(keys)]
    waiter, awaited = waiting.waiter[inside], waiting.awaited[inside]
    bounds = np.searchsorted(waiter, np.arange(waiting.nodes + 1)).tolist()
    stuck = bounds, awaited.tolist(), waiter.tolist()
    starts = np.flatnonzero(never).tolist()
    best = _some_cycle(starts[0], *stuck[:2])
    # One as short that comes first in the lists is better still.
    most = len(best)
    budget = _SEARCH_BUDGET
    # Short cycles first, from every start: long searches from the first ones would use it all up.
    for depth in (4, 16, 64, len(best)):
        for start in starts:
            if budget <= 0 or not most:
                break
            found, visited = _cycle_through(start, min(depth, most), *stuck)
            budget -= visited
            if found:
                best, most = found, len(found) - 1
        if most < depth:
            break
    columns = waiting.later, waiting.earlier, waiting.why
    rows = (column[inside[best]].tolist() for column in columns)
    return _between_places([*zip(*rows, strict=True)])


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


# The functions below number the waits that lead from a stuck node to a stuck node: those of a node
# from bounds[node] to before bounds[node + 1], from waiter[wait] to awaited[wait].


def _some_cycle(node: int, bounds: list[int], awaited: list[int]) -> list[int]:
    """A cycle that following the first wait of each node leads into, from this node on."""
    path: dict[int, int] = {}
    while node not in path:
        path[node] = bounds[node]
        node = awaited[path[node]]
    return [*path.values()][[*path].index(node) :]


def _cycle_through(
    start: int, most: int, bounds: list[int], awaited: list[int], waiter: list[int]
) -> tuple[list[int], int]:
    """A shortest cycle through `start` of at most this many waits, if there is one, and how many
    nodes the search visited."""
    came_by: dict[int, int] = {}
    layer = [start]
    for _ in range(most):
        following = []
        for node in layer:
            for wait in range(bounds[node], bounds[node + 1]):
                if awaited[wait] not in came_by:
                    came_by[awaited[wait]] = wait
                    following.append(awaited[wait])
        layer = following
        if start in came_by or not layer:
            break
    cycle, node = list[int](), start
    while node in came_by and (node != start or not cycle):
        cycle.append(came_by[node])
        node = waiter[cycle[-1]]
    return cycle[::-1], len(came_by) + 1
