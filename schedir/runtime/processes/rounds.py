"""In which order process groups are made, so that no process waits for a chain of others.

The members of a group meet when it is made. In an order of all groups, ranks of a pipeline would
make theirs one after the other; in rounds, each of which has at most one group of any process, as
many as there are ranks make theirs at the same time:

    ring of 4 ranks    round 0   0─1   2─3
                       round 1   1─2   3─0        as many rounds as a rank has groups, or a few more
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import count


def rounds(groups: Sequence[Collection[int]]) -> list[list[int]]:
    """The numbers of the groups, of which each is given by its members, round by round.

    Each goes to the first round in which none of its members has another one, so all processes that
    list the groups alike find the same. Of two members each, with at most n a process, they take
    fewer than 2 n rounds (an edge colouring); neighbours that are listed in turn take about n.
    """
    found: list[list[int]] = []
    taken: dict[int, set[int]] = {}  # by member, the rounds in which it has a group
    for number, members in enumerate(groups):
        busy = set().union(*(taken.setdefault(member, set()) for member in members))
        turn = next(turn for turn in count() if turn not in busy)
        for member in members:
            taken[member].add(turn)
        if turn == len(found):
            found.append([])
        found[turn].append(number)
    return found


def in_turn(groups: Sequence[Collection[int]], own: int) -> Iterator[int]:
    """The numbers of the groups that a process is in, in the order in which it makes them."""
    for together in rounds(groups):
        for number in together:
            if own in groups[number]:
                yield number
