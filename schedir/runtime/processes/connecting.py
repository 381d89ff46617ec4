"""Makes all communicators of NCCL that the processes of an executor have asked for, in rounds.

To make one, all of its processes have to come, and none goes on before that. In an order of all
communicators, ranks of a pipeline would make theirs one after the other; in rounds, each of which
has at most one of any process, as many as there are ranks are made at the same time:

    ring of 4 ranks    round 0   0─1   2─3
                       round 1   1─2   3─0     as many rounds as a rank has groups, or some more

Just before, those that make one meet over gloo, which has a timeout; NCCL has none there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, count

import torch.distributed as dist

from schedir.runtime.processes.control import Control
from schedir.runtime.processes.groups import Asked, Groups
from schedir.runtime.processes.nccl import shares


def connect(groups: Groups, control: Control, processors: int) -> None:
    """Make what was asked for, so that the kernels of all fit on a GPU at once.

    `processors` are the multiprocessors of the smallest GPU: both ends of a transfer must take as
    many. Raises WaitError where the other processes don't come in time.
    """
    own = {group.asked: group for group in groups.asked}
    every = [*dict.fromkeys(chain.from_iterable(control.gather([*own])))]
    share = shares(processors, *(_most(every, sums) for sums in (False, True)))
    for number in in_turn([asked.processes for asked in every], dist.get_rank()):
        control.meet(every[number].processes)
        groups.make_asked(own[every[number]], share)


def _most(every: Iterable[Asked], sums: bool) -> int:
    """The most communicators of a kind that a process has."""
    held = Counter(process for a in every if a.sums is sums for process in a.processes)
    return max(held.values(), default=0)


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


def in_turn(groups: Sequence[Collection[int]], own: int) -> list[int]:
    """The numbers of the groups that a process is in, in the order in which it makes them."""
    return [n for together in rounds(groups) for n in together if own in groups[n]]
