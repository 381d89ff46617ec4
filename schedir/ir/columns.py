"""The lists of all ranks, laid end to end as columns of integers.

    place        0    1          2     3           4
    kind         F    SEND_ACT   F     RECV_ACT    F       as indices into KINDS
    stage        0    0          0     1           1
    microbatch   0    0          1     0           0       -1 for none
    version     -1   -1         -1    -1          -1       -1 for none
    joined       .    .          .     .           .       True: of the entry of the place before
    rank         0    0          0     1           1       starts = 0 3 5

A place is an index into the columns; an entry of several actions has one for each. Millions of
actions take a few dozen bytes each this way, and whole columns are compared at once; an `Action` is
made only where somebody looks at it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from schedir.ir.action import Action, Entry, Together
from schedir.ir.kinds import COMPUTE, Kind

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

KINDS = tuple(Kind)
KIND_INDEX = {kind: index for index, kind in enumerate(KINDS)}


@attrs.frozen(eq=False, slots=False)
class Columns:
    """Every action of every rank. `starts[rank]` is the place of the rank's first action.

    All arrays are int64 of shape [actions], except `joined`, which is bool, and `starts`, of shape
    [ranks + 1]. Nobody writes to them.
    """

    starts: Ints
    kind: Ints
    stage: Ints
    microbatch: Ints
    version: Ints
    joined: Bools

    def __len__(self) -> int:
        return len(self.kind)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns):
            return NotImplemented
        return self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _fields(self) -> tuple[Ints, ...]:
        """What the fields of the actions are made from."""
        return self.kind, self.stage, self.microbatch, self.version

    @property
    def _content(self) -> tuple[bytes, ...]:
        return tuple(array.tobytes() for array in (self.starts, *self._fields, self.joined))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.starts) - 1

    @cached_property
    def rank(self) -> Ints:
        """The rank of every place."""
        return np.repeat(np.arange(self.ranks), np.diff(self.starts))

    @cached_property
    def together(self) -> bool:
        """True if any entry has several actions."""
        return bool(self.joined.any())

    @cached_property
    def heads(self) -> Ints:
        """The place of the first action of every entry, ascending."""
        return np.flatnonzero(~self.joined)

    @cached_property
    def entry(self) -> Ints:
        """The number of the entry of every place, counted over all ranks."""
        return np.cumsum(~self.joined) - 1

    @cached_property
    def shared(self) -> Bools:
        """Where an action is one of several in its entry."""
        shared = self.joined.copy()
        shared[:-1] |= self.joined[1:]
        return shared

    @cached_property
    def computes(self) -> Ints:
        """The place of the first action of every entry of compute, ascending."""
        return np.flatnonzero(self.is_kind(*COMPUTE) & ~self.joined)

    @property
    def first(self) -> Ints:
        """For every place, the place of the first action of its entry."""
        return self.heads[self.entry]

    @cached_property
    def last(self) -> Ints:
        """For every place, the place of the last action of its entry."""
        return np.append(self.heads[1:], len(self))[self.entry] - 1

    def is_kind(self, *kinds: Kind) -> Bools:
        """Where an action is of one of these `kinds`, shape [actions]."""
        return _among(kinds)[self.kind]

    def where(self, *kinds: Kind) -> Ints:
        """The places of the actions of `kinds`, ascending."""
        return np.flatnonzero(self.is_kind(*kinds))

    def alike(self, places: Ints, others: Ints) -> Bools:
        """Which of the `places` have the rank, stage and microbatch of one of the `others`."""
        both = np.append(places, others)
        stages = 1 + int(self.stage.max(initial=0))
        _, holding = np.unique(self.rank[both] * stages + self.stage[both], return_inverse=True)
        keys = holding * (1 + int(self.microbatch.max(initial=0))) + self.microbatch[both]
        return np.isin(keys[: len(places)], keys[len(places) :])

    def position(self, place: int) -> tuple[int, int]:
        """The rank of a place, and the index of its entry in the rank's list."""
        rank = int(np.searchsorted(self.starts, place, side="right")) - 1
        return rank, int(self.entry[place] - self.entry[self.starts[rank]])

    def place(self, rank: int, index: int) -> int:
        """The place of the first action of a rank's entry."""
        return int(self.heads[self.entry[self.starts[rank]] + index])

    def action(self, place: int) -> Action:
        """The action that stands at a place."""
        return _action(*[field.item(place) for field in self._fields])

    def of_rank(self, rank: int) -> Iterator[Action]:
        """The actions of one rank, in list order."""
        own = slice(self.starts[rank], self.starts[rank + 1])
        return map(_action, *(field[own].tolist() for field in self._fields))

    def entries_of(self, rank: int) -> Iterator[Entry]:
        """The entries of one rank, in list order."""
        entry = self.entry[self.starts[rank] : self.starts[rank + 1]].tolist()
        for _, numbered in groupby(zip(entry, self.of_rank(rank), strict=True), itemgetter(0)):
            actions = [action for _, action in numbered]
            yield actions[0] if len(actions) == 1 else Together(actions)

    def take(self, places: Ints, starts: Ints) -> Columns:
        """The columns with the actions at `places`, in that order; ranks as `starts` says.

        Actions of one entry stay one where they still follow each other in their order.
        """
        joined = np.zeros(len(places), np.bool_)
        if self.together:
            entry = self.entry[places]
            joined[1:] = (entry[1:] == entry[:-1]) & (places[1:] > places[:-1])
            joined[starts[starts < len(places)]] = False
        kind, stage, microbatch, version = (field[places] for field in self._fields)
        return Columns(starts, kind, stage, microbatch, version, joined)


@cache
def _among(kinds: tuple[Kind, ...]) -> Bools:
    """By the index of each kind, whether it is one of these."""
    wanted = np.zeros(len(KINDS), dtype=np.bool_)
    wanted[[KIND_INDEX[kind] for kind in kinds]] = True
    return wanted


def columns_of(lists: Iterable[Iterable[Entry]]) -> Columns:
    """The columns of one list of entries per rank. Raises TypeError for anything that is not an
    entry."""
    # Machine words, rank by rank: no list of all ranks' actions or integers is ever held.
    starts = [0]
    joined: list[int] = []
    kinds, stages, microbatches, versions = (array("q") for _ in range(4))
    for rank, entries in enumerate(lists):
        if not isinstance(entries, Iterable):
            raise TypeError(f"the list of rank {rank} is not a list: {entries!r}")
        listed: list[Action] = []
        for index, entry in enumerate(entries):
            if isinstance(entry, Action):
                listed.append(entry)
            elif isinstance(entry, Together):
                first = starts[-1] + len(listed)
                joined += range(first + 1, first + len(entry.actions))
                listed += entry.actions
            else:
                raise TypeError(f"rank {rank} #{index} is not an Action but {entry!r}")
        kinds.fromlist([KIND_INDEX[action.kind] for action in listed])
        stages.fromlist([action.stage for action in listed])
        microbatches.fromlist([-1 if a.microbatch is None else a.microbatch for a in listed])
        versions.fromlist([-1 if action.version is None else action.version for action in listed])
        starts.append(len(kinds))
    is_joined = np.zeros(len(kinds), np.bool_)
    is_joined[joined] = True
    start, kind, stage, microbatch, version = (
        np.array(each, np.int64) for each in (starts, kinds, stages, microbatches, versions)
    )
    return Columns(start, kind, stage, microbatch, version, is_joined)


def _action(kind: int, stage: int, microbatch: int, version: int) -> Action:
    return Action(
        KINDS[kind],
        stage,
        None if microbatch < 0 else microbatch,
        None if version < 0 else version,
    )
