"""Changes that may fix a list: one action moved, a few put in another order, or communication
left out for schedir to insert."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Literal, TypeAlias

import attrs
import numpy as np

from schedir.ir import Columns, Ints, Schedule
from schedir.passes import strip_communication

Side = Literal["before", "after"]
Verb = Literal["move", "post"]


@attrs.frozen
class Move:
    """Take the action at `index` of a rank's list, and put it before (or after) the one at
    `target`."""

    rank: int
    index: int
    side: Side
    target: int
    verb: Verb = "move"

    def __str__(self) -> str:
        return (
            f"{self.verb} rank {self.rank} #{self.index} {self.side} rank {self.rank} "
            f"#{self.target}"
        )


@attrs.frozen
class Reorder:
    """Take the actions at `indices` of a rank's list, and put them in that order where they stand
    together now: the first of them where the least index is."""

    rank: int
    indices: tuple[int, ...]

    def __str__(self) -> str:
        if len(self.indices) == 2:
            high, low = self.indices
            return f"swap rank {self.rank} #{low} and rank {self.rank} #{high}"
        slots = " ".join(f"#{index}" for index in sorted(self.indices))
        order = " ".join(f"#{index}" for index in self.indices)
        return f"list rank {self.rank} {slots} in the order {order}"


@attrs.frozen
class LeaveOut:
    """Leave the communication out; schedir inserts it. `tried` says whether moves were before."""

    tried: bool = False

    def __str__(self) -> str:
        before = "none of the moves tried fixes it; " if self.tried else ""
        return f"{before}leave the communication out, and schedir inserts it"


Change: TypeAlias = Move | Reorder | LeaveOut


def changed(schedule: Schedule, change: Change) -> Schedule:
    """The schedule with a change made."""
    if isinstance(change, LeaveOut):
        return strip_communication(schedule)
    columns = schedule.columns
    start, end = columns.starts[change.rank], columns.starts[change.rank + 1]
    places = np.arange(len(columns))
    own = places[start:end]
    if isinstance(change, Move):
        to = change.target + (change.side == "after")
        to -= change.index < to  # it leaves a gap where it stood
        own = np.insert(np.delete(own, change.index), to, own[change.index])
    else:
        own = own.copy()
        own[sorted(change.indices)] = places[start:end][list(change.indices)]
    places[start:end] = own
    return schedule.take(places, columns.starts)


@attrs.frozen
class Slide:
    """The moves of what stands at `place` to a side of each of the `targets`, nearest first."""

    place: int
    side: Side
    targets: range
    verb: Verb = "move"

    def moves(self, columns: Columns) -> Iterator[Move]:
        """Each of them."""
        rank, index = columns.position(self.place)
        start = int(columns.starts[rank])
        for target in self.targets:
            yield Move(rank, index, self.side, target - start, self.verb)


def ahead(
    schedule: Schedule, place: int, target: int, verb: Verb = "move", first: int | None = None
) -> Slide:
    """To before `target`, or further ahead: as far as before `first`, or the rank's first place."""
    rank, _ = schedule.columns.position(place)
    start = int(schedule.columns.starts[rank])
    least = start if first is None else max(start, first)
    return Slide(place, "before", range(target, least - 1, -1), verb)


def back(
    schedule: Schedule, place: int, target: int, verb: Verb = "move", last: int | None = None
) -> Slide:
    """To after `target`, or further back: as far as after `last`, or the rank's last place."""
    rank, _ = schedule.columns.position(place)
    end = int(schedule.columns.starts[rank + 1]) - 1
    most = end if last is None else min(end, last)
    return Slide(place, "after", range(target, most + 1), verb)


def anywhere(schedule: Schedule, places: Iterable[int]) -> Iterator[Move]:
    """The moves of any of the places, within its list, likely ones first."""
    slides = [
        side for p in places for side in (back(schedule, p, p + 1), ahead(schedule, p, p - 1))
    ]
    return in_turn(schedule, slides)


def in_turn(schedule: Schedule, slides: Sequence[Slide]) -> Iterator[Move]:
    """The moves of all, the likely ones first: the nearest of each, then the furthest of each,
    which is a send right after its maker, say, then the others, nearer ones first."""
    slides = [slide for slide in slides if slide.targets]
    ends = [attrs.evolve(slide, targets=slide.targets[:1]) for slide in slides]
    ends += [attrs.evolve(s, targets=s.targets[-1:]) for s in slides if len(s.targets) > 1]
    between = [attrs.evolve(slide, targets=slide.targets[1:-1]) for slide in slides]
    for slide in ends:
        yield from slide.moves(schedule.columns)
    rows = zip_longest(*(slide.moves(schedule.columns) for slide in between))
    yield from (move for move in chain.from_iterable(rows) if move is not None)


# A text that lists more actions than these is no help.
_MOST_REORDERED = 8


def reorder(schedule: Schedule, places: Ints) -> Iterator[Reorder]:
    """The places of a rank in another order; nothing where they are too many to say."""
    if len(places) <= _MOST_REORDERED:
        rank, _ = schedule.columns.position(int(places[0]))
        start = int(schedule.columns.starts[rank])
        yield Reorder(rank, tuple((places - start).tolist()))
