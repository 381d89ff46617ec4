"""Who waits for whom: the roots of a hang are the sinks of the waits-for graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set


def sinks(edges: Mapping[int, Set[int]]) -> list[tuple[int, ...]]:
    """The sets of ranks that everybody else waits for, and that wait for nobody outside the set.

    `edges[rank]` are the ranks that it waits for. A set of one rank is the end of a chain. In a set
    of several, each waits for all others, over some chain: a circle.
    """
    return [ranks for ranks in _circles(edges) if not _left_by(edges, ranks) - set(ranks)]


def chain(edges: Mapping[int, Set[int]], ends: Iterable[int]) -> list[int]:
    """The longest of the shortest ways to one of the `ends`: each rank waits for the next one."""
    waiting: dict[int, list[int]] = {}
    for rank in sorted(edges):
        for awaited in edges[rank]:
            waiting.setdefault(awaited, []).append(rank)
    after: dict[int, int | None] = dict.fromkeys(sorted(ends))
    last = list(after)
    for rank in last:  # grows: ranks near to an end come first
        for waits in waiting.get(rank, ()):
            if waits not in after:
                after[waits] = rank
                last.append(waits)
    way: list[int] = []
    rank_or_none = last[-1] if last else None
    while rank_or_none is not None:
        way.append(rank_or_none)
        rank_or_none = after[rank_or_none]
    return way


def _left_by(edges: Mapping[int, Set[int]], ranks: Iterable[int]) -> set[int]:
    return set().union(*(edges.get(rank, ()) for rank in ranks))


def _circles(edges: Mapping[int, Set[int]]) -> list[tuple[int, ...]]:
    """The strongly connected components, by Tarjan's algorithm, without recursion."""
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    open_: list[int] = []
    is_open: set[int] = set()
    found = []
    for root in sorted(set(edges).union(*edges.values())):
        if root in number:
            continue
        path = [(root, iter(sorted(edges.get(root, ()))))]
        number[root] = low[root] = len(number)
        open_.append(root)
        is_open.add(root)
        while path:
            rank, further = path[-1]
            for other in further:
                if other not in number:
                    path.append((other, iter(sorted(edges.get(other, ())))))
                    number[other] = low[other] = len(number)
                    open_.append(other)
                    is_open.add(other)
                    break
                if other in is_open:
                    low[rank] = min(low[rank], number[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[rank])
                if low[rank] == number[rank]:
                    circle = [open_.pop()]
                    while circle[-1] != rank:
                        circle.append(open_.pop())
                    is_open.difference_update(circle)
                    found.append(tuple(sorted(circle)))
    return found
