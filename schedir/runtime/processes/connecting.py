"""Makes all NCCL communicators that the processes of an executor have asked for, in rounds.

All processes of a communicator must come to make it, and none goes on before. One after the other,
the communicators of a pipeline would take long. In a round each process makes at most one, so many
are made at the same time:

    ring of 4 ranks    round 0   0─1   2─3
                       round 1   1─2   3─0     as many rounds as a rank has groups, or some more

The processes of a communicator meet over gloo first, which has a timeout; NCCL has none there.
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
    """Make the communicators, so that the kernels of all of them fit on a GPU at once.

    `processors` are the multiprocessors of the smallest GPU: both ends of a transfer must use the
    same number. Raises WaitError if the other processes don't come in time.
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
    """The numbers of the groups by round; a group is given by its members.

    Each group goes to the first round in which none of its members has another group, so processes
    that list the groups in the same order get the same rounds. Groups of two members, with at most
    n groups a process, take fewer than 2 n rounds (an edge colouring); neighbours that are listed
    in turn take about n.
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
