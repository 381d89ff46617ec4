"""Changes that may fix a list: move, reorder, add, remove or rewrite entries, join sends and
receives into batches, or leave them out for schedir to insert.

The text of a change is the help line that a user reads. Following it to the letter makes exactly
that change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import chain, zip_longest
from typing import Literal, TypeAlias

import attrs
import numpy as np

from schedir.graph.compile import graph_of, pairs_of
from schedir.ir import (
    BACKWARDS,
    COMMUNICATION,
    SENDS,
    VALUES,
    Action,
    Columns,
    Ints,
    Kind,
    Schedule,
    Sources,
    columns_of,
)
from schedir.ir.kinds import uses_of
from schedir.passes import batch_communication, strip_communication

Side = Literal["before", "after"]
Verb = Literal["move", "post"]


@attrs.frozen
class Move:
    """Move the entry at `index` of a rank's list, with all its parts, before or after the entry at
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
    """Put the entries at `indices` of a rank's list into that order, in the places that they occupy
    now."""

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
class Add:
    """Put an action into a rank's list, before or after the entry at `target`; None if the list is
    empty."""

    action: Action
    rank: int
    side: Side
    target: int | None

    def __str__(self) -> str:
        if self.target is None:
            return f"add {self.action} to rank {self.rank}"
        return f"add {self.action} {self.side} rank {self.rank} #{self.target}"


@attrs.frozen
class Remove:
    """Take an action out of a rank's list; the other parts of its entry stay."""

    action: Action
    rank: int
    index: int

    def __str__(self) -> str:
        return f"remove {self.action} at rank {self.rank} #{self.index}"


@attrs.frozen
class Write:
    """Write an action in place of another one."""

    action: Action
    old: Action
    rank: int
    index: int

    def __str__(self) -> str:
        return f"write {self.action} in place of {self.old} at rank {self.rank} #{self.index}"


@attrs.frozen
class Several:
    """Several changes, one after the other. `several` orders them so that no change renumbers an
    entry that a later one names."""

    changes: tuple[Add | Remove | Write, ...]

    def __str__(self) -> str:
        return ", and ".join(map(str, self.changes))


@attrs.frozen
class AsSent:
    """Reorder what a rank receives from another rank into the order in which that rank sends it."""

    source: int
    target: int

    def __str__(self) -> str:
        return (
            f"order rank {self.target}'s receives from rank {self.source} as rank {self.source} "
            "sends them"
        )


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
    """Leave the communication out; schedir inserts it. `tried` means the same as in Batch."""

    tried: bool = False

    def __str__(self) -> str:
        return f"{_after_moves(self.tried)}leave the communication out, and schedir inserts it"


def _after_moves(tried: bool) -> str:
    return "none of the moves tried fixes it; " if tried else ""


Edit: TypeAlias = Add | Remove | Write
Change: TypeAlias = Move | Reorder | Edit | Several | AsSent | Batch | LeaveOut


def changed(schedule: Schedule, change: Change) -> Schedule:
    """The schedule after a change."""
    if isinstance(change, LeaveOut):
        return strip_communication(schedule)
    if isinstance(change, Batch):
        return batch_communication(schedule)
    if isinstance(change, Several):
        return reduce(changed, change.changes, schedule)
    columns, new = schedule.columns, len(schedule.columns)
    rank = change.target if isinstance(change, AsSent) else change.rank
    start, end = columns.starts[[rank, rank + 1]].tolist()
    heads = columns.heads[(columns.heads > start) & (columns.heads < end)]
    entries = [entry.tolist() for entry in np.split(np.arange(start, end), heads - start)]
    entries, like = _edited(schedule, change, entries)
    own = np.array([place for entry in entries for place in entry], np.int64)
    joined = [part > 0 for entry in entries for part in range(len(entry))]
    places = np.concatenate((np.arange(start), own, np.arange(end, new)))
    row = columns_of([[change.action] if isinstance(change, Add | Write) else []])
    kind, stage, microbatch, version = (
        np.append(getattr(columns, name), getattr(row, name))[places]
        for name in ("kind", "stage", "microbatch", "version")
    )
    listed = Columns(
        columns.starts + (len(own) - (end - start)) * (np.arange(columns.ranks + 1) > rank),
        kind,
        stage,
        microbatch,
        version,
        np.concatenate((columns.joined[:start], np.array(joined, np.bool_), columns.joined[end:])),
    )
    sources = schedule.sources
    if sources is not None:
        lines = np.append(sources.line_of, -1 if like < 0 else sources.line_of[like])
        sources = Sources(sources.lines, lines[places])
    return attrs.evolve(schedule, actions=listed, sources=sources)


def _edited(
    schedule: Schedule, change: Move | Reorder | Edit | AsSent, entries: list[list[int]]
) -> tuple[list[list[int]], int]:
    """The entries of a rank after a change, as places, and the place that a new action replaces, -1
    for none.

    The place of a new action is the one after all others.
    """
    columns, new = schedule.columns, len(schedule.columns)
    if isinstance(change, Move):
        entry, to = entries.pop(change.index), change.target + (change.side == "after")
        entries.insert(to - (change.index < to), entry)  # it leaves a gap where it stood
    elif isinstance(change, Reorder):
        moved = [entries[index] for index in change.indices]
        for index, entry in zip(sorted(change.indices), moved, strict=True):
            entries[index] = entry
    elif isinstance(change, Add):
        entries.insert((change.target or 0) + (change.side == "after"), [new])
    elif isinstance(change, AsSent):
        # What runs together are slots: the receives change places, and nothing else does.
        transfers = graph_of(schedule).transfers
        order, _ = transfers.by_channel
        own = transfers.source[order] == change.source
        own &= transfers.target[order] == change.target
        receives = transfers.receive[order[own]].tolist()
        slots = dict(zip(sorted(receives), receives, strict=True))
        entries = [[slots.get(place, place) for place in entry] for entry in entries]
    else:  # one of the parts of an entry
        entry = entries[change.index]
        wanted = change.action if isinstance(change, Remove) else change.old
        at = next(at for at, place in enumerate(entry) if columns.action(place) == wanted)
        old = entry[at]
        entry[at : at + 1] = [new] if isinstance(change, Write) else []
        return entries, old
    return entries, -1


def several(edits: Iterable[Edit]) -> Edit | Several:
    """The changes, ordered so that no change renumbers an entry that a later one names."""

    def position(edit: Edit) -> tuple[int, float]:
        if not isinstance(edit, Add):
            return edit.rank, -edit.index
        target = -1 if edit.target is None else edit.target
        return edit.rank, -(target + (0.5 if edit.side == "after" else -0.5))

    ordered = sorted(edits, key=position)
    return ordered[0] if len(ordered) == 1 else Several(tuple(ordered))


def removal(schedule: Schedule, place: int) -> Remove:
    """The change that takes out the action at a place."""
    rank, index = schedule.columns.position(place)
    return Remove(schedule.columns.action(place), rank, index)


def rewriting(schedule: Schedule, place: int, action: Action) -> Write:
    """The change that writes an action in place of the one at a place."""
    rank, index = schedule.columns.position(place)
    return Write(action, schedule.columns.action(place), rank, index)


def beside(schedule: Schedule, action: Action, side: Side, place: int) -> Add:
    """The change that adds an action next to a place."""
    rank, index = schedule.columns.position(place)
    return Add(action, rank, side, index)


def moved_beside(schedule: Schedule, place: int, side: Side, target: int) -> Move | Several:
    """The change that moves the action at a place next to another place of its rank, without the
    other parts of its entry."""
    columns = schedule.columns
    if columns.shared[place]:
        out = removal(schedule, place)
        split = several((out, beside(schedule, out.action, side, target)))
        assert isinstance(split, Several)
        return split
    rank, index = columns.position(place)
    return Move(rank, index, side, columns.position(target)[1])


@attrs.frozen
class Slide:
    """The moves of an entry to one side of each of the `targets`, nearest first."""

    rank: int
    index: int
    side: Side
    targets: range
    verb: Verb = "move"

    def moves(self) -> Iterator[Move]:
        """Every move."""
        for target in self.targets:
            yield Move(self.rank, self.index, self.side, target, self.verb)


def ahead(
    schedule: Schedule, place: int, target: int, verb: Verb = "move", first: int | None = None
) -> Slide:
    """The moves of the entry at `place` to before `target`, or further ahead, at most to before
    `first` or the rank's first place."""
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
    """The moves of the entry at `place` to after `target`, or further back, at most to after `last`
    or the rank's last place."""
    columns = schedule.columns
    rank, index = columns.position(place)
    end = int(columns.starts[rank + 1])
    _, most = columns.position(end - 1)
    least = max(columns.position(target)[1], index + 1) if target < end else most + 1
    if last is not None and last + 1 < end:
        most = columns.position(last + 1)[1] - 1
    return Slide(rank, index, "after", range(least, most + 1), verb)


def anywhere(schedule: Schedule, places: Iterable[int]) -> Iterator[Move]:
    """The moves of any of the places within its list, likely ones first."""
    return in_turn(
        [side for p in places for side in (back(schedule, p, p + 1), ahead(schedule, p, p - 1))]
    )


def in_turn(slides: Sequence[Slide]) -> Iterator[Move]:
    """The moves of all slides, likely ones first: the nearest of each, then the furthest of each
    (which puts a send right after its maker, for example), then the others, nearer ones first."""
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
    """The change that puts places of a rank into another order. Nothing if there are too many for a
    help line, or if some are parts of an entry."""
    columns = schedule.columns
    parts = columns.joined[places] | (columns.last[places] != places)
    if len(places) <= _MOST_REORDERED and not parts.any():
        rank, _ = columns.position(int(places[0]))
        yield Reorder(rank, tuple(columns.position(place)[1] for place in places.tolist()))


# Where an action belongs: after what it uses, before what uses it, in the order of its kind.


def _uses(kind: Kind) -> Iterator[tuple[Kind, int]]:
    for use in kind.meaning.uses:
        value = VALUES[use.value]
        if use.does != "make" and value.per == "microbatch":
            made = (use.value, 0), *((value.link,) if value.link else ())
            for name, further in made:
                yield from ((maker, further) for maker in Kind if uses_of(maker, "make", name))


_USES = {kind: frozenset(_uses(kind)) for kind in Kind}
"""By kind, the kinds on the same rank that make its inputs, and how many stages further on each
is."""
_USERS = {
    used: [(kind, -further) for kind, uses in _USES.items() for by, further in uses if by is used]
    for used in Kind
}


def added(schedule: Schedule, action: Action, rank: int) -> Add:
    """The change that adds a missing action to the list of a rank.

    It goes next to the compute that it communicates for, or after compute of its kind for the
    microbatch before, if that is after its inputs and before its use.
    """
    return next(additions(schedule, action, rank))


def additions(
    schedule: Schedule,
    action: Action,
    rank: int,
    least: int = 0,
    most: int | None = None,
) -> Iterator[Add]:
    """The changes that add a missing action to the list of a rank, between the places `least` and
    `most` if possible: first at its most likely place, then everywhere else between its inputs and
    its use."""
    start, end = schedule.columns.starts[[rank, rank + 1]].tolist()
    uses, users = _around(schedule, action, rank)
    first = max([start, least, *(1 + place for place in uses)])
    last = min([end if most is None else most, *users])
    likely = first if action.kind in SENDS else last
    if action.kind not in COMMUNICATION:
        own = BACKWARDS if action.kind in BACKWARDS else (action.kind,)
        listed = pairs_of(schedule).listed
        microbatch = action.microbatch or 0
        before, after = (
            [p for kind in own if start <= (p := listed(kind, action.stage, other)) < end]
            for other in (microbatch - 1, microbatch + 1)
        )
        beside = [1 + max(before)] if before else after or [last if last < end else first]
        likely = max(first, min(*beside, last))
    for place in (likely, *range(last, first - 1, -1)):
        yield at_gap(schedule, action, rank, place, ahead=place == last)


def _around(schedule: Schedule, action: Action, rank: int) -> tuple[list[int], list[int]]:
    """The places on a rank that make an action's inputs, and the places there that use its
    result."""
    listed = pairs_of(schedule).listed
    start, end = schedule.columns.starts[[rank, rank + 1]].tolist()
    uses, users = (
        [listed(kind, action.stage + further, action.microbatch or 0) for kind, further in of]
        for of in (_USES[action.kind], _USERS[action.kind])
    )
    return [p for p in uses if start <= p < end], [p for p in users if start <= p < end]


def is_misplaced(schedule: Schedule, place: int) -> bool:
    """True if the action at a place comes before its inputs on its rank, or after its use."""
    columns = schedule.columns
    uses, users = _around(schedule, columns.action(place), int(columns.rank[place]))
    return max(uses, default=-1) > place or min(users, default=place) < place


def at_gap(schedule: Schedule, action: Action, rank: int, place: int, *, ahead: bool) -> Add:
    """The change that adds an action before a place: ahead of the entry there, or after the entry
    before it."""
    columns = schedule.columns
    start, end = int(columns.starts[rank]), int(columns.starts[rank + 1])
    if start == end:
        return Add(action, rank, "after", None)
    if place == start or (ahead and place < end):
        return beside(schedule, action, "before", place)
    return beside(schedule, action, "after", place - 1)


def taken_to(schedule: Schedule, place: int, rank: int, *, there: bool) -> Edit | Several:
    """The change that moves the action at a place to another rank, or only removes it if that rank
    already has it."""
    out = removal(schedule, place)
    if there:
        return out
    return several((out, added(schedule, out.action, rank)))


def last_of_stage(columns: Columns, stage: int, rank: int, *kinds: Kind) -> int:
    """The last place of these kinds of a stage on a rank, -1 for none."""
    own = slice(columns.starts[rank], columns.starts[rank + 1])
    found = (columns.is_kind(*kinds)[own] & (columns.stage[own] == stage)).nonzero()[0]
    return int(columns.starts[rank] + found[-1]) if len(found) else -1


def after_stage(schedule: Schedule, action: Action, rank: int, *kinds: Kind) -> Add:
    """The change that adds an action after the last of these kinds of its stage on a rank, or at
    the end of the list."""
    last = last_of_stage(schedule.columns, action.stage, rank, *kinds)
    place = last + 1 if last >= 0 else int(schedule.columns.starts[rank + 1])
    return at_gap(schedule, action, rank, place, ahead=False)
