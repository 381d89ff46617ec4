"""The lists of all ranks, laid end to end as columns of integers.

    place        0    1          2     3           4
    kind         F    SEND_ACT   F     RECV_ACT    F       as indices into KINDS
    stage        0    0          0     1           1
    microbatch   0    0          1     0           0       -1 for none
    version     -1   -1         -1    -1          -1       -1 for none
    rank         0    0          0     1           1       starts = 0 3 5

A place is an index into the columns. Millions of actions take a few dozen bytes each this way, and
whole columns are compared at once; an `Action` is made only where somebody looks at it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from schedir.ir.actions import Action, Kind

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

KINDS = tuple(Kind)
KIND_INDEX = {kind: index for index, kind in enumerate(KINDS)}


@attrs.frozen(eq=False, slots=False)
class Columns:
    """Every action of every rank. `starts[rank]` is the place of the rank's first one.

    All arrays are int64 of shape [actions], `starts` of shape [ranks + 1]. They are never written.
    """

    starts: Ints
    kind: Ints
    stage: Ints
    microbatch: Ints
    version: Ints

    def __len__(self) -> int:
        return len(self.kind)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns):
            return NotImplemented
        return all(map(np.array_equal, self._arrays(), other._arrays()))

    def __hash__(self) -> int:
        return hash(tuple(array.tobytes() for array in self._arrays()))

    def _arrays(self) -> tuple[Ints, ...]:
        return self.starts, self.kind, self.stage, self.microbatch, self.version

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.starts) - 1

    @cached_property
    def rank(self) -> Ints:
        """The rank of every place."""
        return np.repeat(np.arange(self.ranks), np.diff(self.starts))

    def is_kind(self, *kinds: Kind) -> Bools:
        """Where an action of one of `kinds` stands."""
        wanted = np.zeros(len(KINDS), dtype=np.bool_)
        wanted[[KIND_INDEX[kind] for kind in kinds]] = True
        return wanted[self.kind]

    def where(self, *kinds: Kind) -> Ints:
        """The places of the actions of `kinds`, ascending."""
        return np.flatnonzero(self.is_kind(*kinds))

    def position(self, place: int) -> tuple[int, int]:
        """The rank of a place, and its index in the rank's list."""
        rank = int(np.searchsorted(self.starts, place, side="right")) - 1
        return rank, int(place - self.starts[rank])

    def before(self, place: int) -> int:
        """The place before on the same rank, -1 where there is none."""
        return place - 1 if place > self.starts[self.rank[place]] else -1

    def action(self, place: int) -> Action:
        """The action that stands at a place."""
        return _action(
            int(self.kind[place]),
            int(self.stage[place]),
            int(self.microbatch[place]),
            int(self.version[place]),
        )

    def of_rank(self, rank: int) -> Iterator[Action]:
        """The actions of one rank, in list order."""
        own = slice(self.starts[rank], self.starts[rank + 1])
        return map(
            _action,
            self.kind[own].tolist(),
            self.stage[own].tolist(),
            self.microbatch[own].tolist(),
            self.version[own].tolist(),
        )

    def take(self, places: Ints, starts: Ints) -> Columns:
        """The columns with the actions at `places`, in that order; ranks as `starts` says."""
        return Columns(
            starts,
            self.kind[places],
            self.stage[places],
            self.microbatch[places],
            self.version[places],
        )


def columns_of(lists: Iterable[Iterable[Action]]) -> Columns:
    """The columns of one list of actions per rank. Raises TypeError for what is no Action."""
    starts = [0]
    kinds: list[int] = []
    stages: list[int] = []
    microbatches: list[int] = []
    versions: list[int] = []
    for rank, actions in enumerate(lists):
        listed = tuple(actions)
        for index, action in enumerate(listed):
            if not isinstance(action, Action):
                raise TypeError(f"rank {rank} #{index} is not an Action but {action!r}")
        kinds += [KIND_INDEX[action.kind] for action in listed]
        stages += [action.stage for action in listed]
        microbatches += [-1 if a.microbatch is None else a.microbatch for a in listed]
        versions += [-1 if action.version is None else action.version for action in listed]
        starts.append(len(kinds))
    return Columns(
        *(np.array(x, np.int64) for x in (starts, kinds, stages, microbatches, versions))
    )


def _action(kind: int, stage: int, microbatch: int, version: int) -> Action:
    return Action(
        KINDS[kind],
        stage,
        None if microbatch < 0 else microbatch,
        None if version < 0 else version,
    )
