"""Changes that may fix a list: one entry moved, a few put in another order, sends and receives
joined into batches, or left out for schedir to insert. What runs together is moved together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Literal, TypeAlias

import attrs
import numpy as np

from schedir.ir import Ints, Schedule
from schedir.passes import batch_communication, strip_communication

Side = Literal["before", "after"]
Verb = Literal["move", "post"]


@attrs.frozen
class Move:
    """Take the entry at `index` of a rank's list, and put it before (or after) the one at
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
    """Take the entries at `indices` of a rank's list, and put them in that order where they stand
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
class Batch:
    """Join the sends and receives of a rank that block each other. `tried` says whether moves were
    tried before."""

    tried: bool = False

    def __str__(self) -> str:
        return (
            f"{_after_moves(self.tried)}post the sends and receives that block each other as "
            "batches, as schedir.batch_communication does"
        )


@attrs.frozen
class LeaveOut:
    """Leave the communication out; schedir inserts it. `tried` as of a Batch."""

    tried: bool = False

    def __str__(self) -> str:
        return f"{_after_moves(self.tried)}leave the communication out, and schedir inserts it"


def _after_moves(tried: bool) -> str:
    return "none of the moves tried fixes it; " if tried else ""


Change: TypeAlias = Move | Reorder | Batch | LeaveOut


def changed(schedule: Schedule, change: Change) -> Schedule:
    """The schedule with a change made."""
    if isinstance(change, LeaveOut):
        return strip_communication(schedule)
    if isinstance(change, Batch):
        return batch_communication(schedule)
    columns = schedule.columns
    start, end = columns.starts[change.rank], columns.starts[change.rank + 1]
    places = np.arange(len(columns))
    entries = columns.entry[start] + np.arange(columns.entry[end - 1] - columns.entry[start] + 1)
    if isinstance(change, Move):
        to = change.target + (change.side == "after")
        to -= change.index < to  # it leaves a gap where it stood
        moved = np.insert(np.delete(entries, change.index), to, entries[change.index])
    else:
        moved = entries.copy()
        moved[sorted(change.indices)] = entries[list(change.indices)]
    # By the places of the entries in their new order.
    turn = np.empty_like(moved)
    turn[moved - entries[0]] = np.arange(len(moved))
    turns = turn[columns.entry[start:end] - entries[0]]
    places[start:end] = start + np.argsort(turns, kind="stable")
    return schedule.take(places, columns.starts)


@attrs.frozen
class Slide:
    """The moves of an entry of a rank to a side of each of the `targets`, nearest first."""

    rank: int
    index: int
    side: Side
    targets: range
    verb: Verb = "move"

    def moves(self) -> Iterator[Move]:
        """Each of them."""
        for target in self.targets:
            yield Move(self.rank, self.index, self.side, target, self.verb)


def ahead(
    schedule: Schedule, place: int, target: int, verb: Verb = "move", first: int | None = None
) -> Slide:
    """What stands at `place` to before `target`, or further ahead: as far as before `first`, or
    the rank's first place."""
    columns = schedule.columns
    rank, index = columns.position(place)
    start = int(columns.starts[rank])
    most = min(columns.position(target)[1], index - 1) if target >= start else -1
    least = 0
    if first is not None and first > start:
        least = columns.position(first - 1)[1] + 1
    return Slide(rank, index, "before", range(most, least - 1, -1), verb)


def back(
    schedule: Schedule, place: int, target: int, verb: Verb = "move", last: int | None = None
) -> Slide:
    """What stands at `place` to after `target`, or further back: as far as after `last`, or the
    rank's last place."""
    columns = schedule.columns
    rank, index = columns.position(place)
    end = int(columns.starts[rank + 1])
    _, most = columns.position(end - 1)
    least = max(columns.position(target)[1], index + 1) if target < end else most + 1
    if last is not None and last + 1 < end:
        most = columns.position(last + 1)[1] - 1
    return Slide(rank, index, "after", range(least, most + 1), verb)


def anywhere(schedule: Schedule, places: Iterable[int]) -> Iterator[Move]:
    """The moves of any of the places, within its list, likely ones first."""
    return in_turn(
        [side for p in places for side in (back(schedule, p, p + 1), ahead(schedule, p, p - 1))]
    )


def in_turn(slides: Sequence[Slide]) -> Iterator[Move]:
    """The moves of all, the likely ones first: the nearest of each, then the furthest of each,
    which is a send right after its maker, say, then the others, nearer ones first."""
    slides = [slide for slide in slides if slide.targets]
    ends = [attrs.evolve(slide, targets=slide.targets[:1]) for slide in slides]
    ends += [attrs.evolve(s, targets=s.targets[-1:]) for s in slides if len(s.targets) > 1]
    between = [attrs.evolve(slide, targets=slide.targets[1:-1]) for slide in slides]
    for slide in ends:
        yield from slide.moves()
    rows = zip_longest(*(slide.moves() for slide in between))
    yield from (move for move in chain.from_iterable(rows) if move is not None)


# A text that lists more actions than these is no help.
_MOST_REORDERED = 8


def reorder(schedule: Schedule, places: Ints) -> Iterator[Reorder]:
    """The places of a rank in another order; nothing where they are too many to say, or part of an
    entry of several actions."""
    columns = schedule.columns
    parts = columns.joined[places] | (columns.last[places] != places)
    if len(places) <= _MOST_REORDERED and not parts.any():
        rank, _ = columns.position(int(places[0]))
        yield Reorder(rank, tuple(columns.position(place)[1] for place in places.tolist()))
