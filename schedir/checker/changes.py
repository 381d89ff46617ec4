"""Changes that may fix a list: an entry moved, a few put in another order, an action added, removed
or written otherwise, sends and receives joined into batches, or left out for schedir to insert.

A change's text is the help that a user reads: who follows it to the letter makes that change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import chain, zip_longest
from typing import Literal, TypeAlias

import attrs
import numpy as np

from schedir.graph.compile import graph_of
from schedir.ir import (
    BACKWARDS,
    KIND_INDEX,
    RECEIVES,
    SENDS,
    VALUES,
    Action,
    Columns,
    Ints,
    Kind,
    Schedule,
    Sources,
)
from schedir.ir.kinds import uses_of
from schedir.passes import batch_communication, strip_communication

Side = Literal["before", "after"]
Verb = Literal["move", "post"]


@attrs.frozen
class Move:
    """Take the entry at `index` of a rank's list, all that runs together there, and put it before
    (or after) the one at `target`."""

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
class Add:
    """Put an action into a rank's list, before or after the entry at `target`, which is None where
    the list is empty."""

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
    """Take an action out of a rank's list: what runs together with it stays."""

    action: Action
    rank: int
    index: int

    def __str__(self) -> str:
        return f"remove {self.action} at rank {self.rank} #{self.index}"


@attrs.frozen
class Write:
    """Write an action in the place of another one."""

    action: Action
    old: Action
    rank: int
    index: int

    def __str__(self) -> str:
        return f"write {self.action} in place of {self.old} at rank {self.rank} #{self.index}"


@attrs.frozen
class Several:
    """Some changes, one after the other; `several` puts them in an order in which none renumbers
    what a later one names."""

    changes: tuple[Add | Remove | Write, ...]

    def __str__(self) -> str:
        return ", and ".join(map(str, self.changes))


@attrs.frozen
class AsSent:
    """List what a rank receives from another one in the order in which that sends it."""

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
    """Leave the communication out; schedir inserts it. `tried` as of a Batch."""

    tried: bool = False

    def __str__(self) -> str:
        return f"{_after_moves(self.tried)}leave the communication out, and schedir inserts it"


def _after_moves(tried: bool) -> str:
    return "none of the moves tried fixes it; " if tried else ""


Edit: TypeAlias = Add | Remove | Write
Change: TypeAlias = Move | Reorder | Edit | Several | AsSent | Batch | LeaveOut


def changed(schedule: Schedule, change: Change) -> Schedule:
    """The schedule with a change made."""
    if isinstance(change, LeaveOut):
        return strip_communication(schedule)
    if isinstance(change, Batch):
        return batch_communication(schedule)
    if isinstance(change, Several):
        return reduce(changed, change.changes, schedule)
    if isinstance(change, Add):
        return _added(schedule, change)
    if isinstance(change, Remove):
        return _removed(schedule, change)
    if isinstance(change, Write):
        return _written(schedule, change)
    if isinstance(change, AsSent):
        return _as_sent(schedule, change)
    return _reordered(schedule, change)


def _reordered(schedule: Schedule, change: Move | Reorder) -> Schedule:
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


def _added(schedule: Schedule, change: Add) -> Schedule:
    columns, action = schedule.columns, change.action
    place = int(columns.starts[change.rank])
    if change.target is not None:
        place = columns.place(change.rank, change.target)
        if change.side == "after":
            place = int(columns.last[place]) + 1
    added = attrs.evolve(
        columns,
        starts=columns.starts + (np.arange(len(columns.starts)) > change.rank),
        joined=np.insert(columns.joined, place, False),
        **{name: np.insert(getattr(columns, name), place, n) for name, n in _numbers(action)},
    )
    sources = schedule.sources
    if sources is not None:
        sources = Sources(sources.lines, np.insert(sources.line_of, place, -1))
    return attrs.evolve(schedule, actions=added, sources=sources)


def _removed(schedule: Schedule, change: Remove) -> Schedule:
    place, starts = _found(schedule, change), schedule.columns.starts
    return schedule.take(
        np.delete(np.arange(len(schedule.columns)), place),
        starts - (np.arange(len(starts)) > change.rank),
    )


def _written(schedule: Schedule, change: Write) -> Schedule:
    columns, place = schedule.columns, _found(schedule, change)
    written = {}
    for name, number in _numbers(change.action):
        written[name] = getattr(columns, name).copy()
        written[name][place] = number
    return attrs.evolve(schedule, actions=attrs.evolve(columns, **written))


def _as_sent(schedule: Schedule, change: AsSent) -> Schedule:
    transfers = graph_of(schedule).transfers
    order, _ = transfers.by_channel
    own = (transfers.source[order] == change.source) & (transfers.target[order] == change.target)
    receives = transfers.receive[order[own]]
    places = np.arange(len(schedule.columns))
    places[np.sort(receives)] = receives
    # What runs together are slots: the receives change places, and nothing else does.
    taken = schedule.columns.take(places, schedule.columns.starts)
    columns = attrs.evolve(taken, joined=schedule.columns.joined)
    sources = schedule.sources
    if sources is not None:
        sources = Sources(sources.lines, sources.line_of[places])
    return attrs.evolve(schedule, actions=columns, sources=sources)


def _numbers(action: Action) -> Iterator[tuple[str, int]]:
    """An action as the numbers of the columns."""
    yield "kind", KIND_INDEX[action.kind]
    yield "stage", action.stage
    yield "microbatch", -1 if action.microbatch is None else action.microbatch
    yield "version", -1 if action.version is None else action.version


def _found(schedule: Schedule, change: Remove | Write) -> int:
    """The place of the action that a change names, which may be one of several of its entry."""
    columns = schedule.columns
    wanted = change.action if isinstance(change, Remove) else change.old
    first = columns.place(change.rank, change.index)
    parts = range(first, int(columns.last[first]) + 1)
    return next(place for place in parts if columns.action(place) == wanted)


def several(edits: Iterable[Edit]) -> Edit | Several:
    """The changes, in an order in which none renumbers what a later one names."""

    def position(edit: Edit) -> tuple[int, float]:
        if not isinstance(edit, Add):
            return edit.rank, -edit.index
        target = -1 if edit.target is None else edit.target
        return edit.rank, -(target + (0.5 if edit.side == "after" else -0.5))

    ordered = sorted(edits, key=position)
    return ordered[0] if len(ordered) == 1 else Several(tuple(ordered))


def removal(schedule: Schedule, place: int) -> Remove:
    """What stands at a place taken out."""
    rank, index = schedule.columns.position(place)
    return Remove(schedule.columns.action(place), rank, index)


def rewriting(schedule: Schedule, place: int, action: Action) -> Write:
    """An action written in the place of what stands there."""
    rank, index = schedule.columns.position(place)
    return Write(action, schedule.columns.action(place), rank, index)


def beside(schedule: Schedule, action: Action, side: Side, place: int) -> Add:
    """An action added next to a place."""
    rank, index = schedule.columns.position(place)
    return Add(action, rank, side, index)


def moved_beside(schedule: Schedule, place: int, side: Side, target: int) -> Move | Several:
    """What stands at a place put next to another one of its rank, without what it runs together
    with."""
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


# Where an action belongs: after what it uses, before what uses it, in the order of its kind.

Listed: TypeAlias = Callable[[Kind, int, int], int]
"""The place of a kind of action of a (stage, microbatch), -1 where the lists have none."""


def _uses(kind: Kind) -> Iterator[tuple[Kind, int]]:
    for use in kind.meaning.uses:
        value = VALUES[use.value]
        if use.does != "make" and value.per == "microbatch":
            made = (use.value, 0), *((value.link,) if value.link else ())
            for name, further in made:
                yield from ((maker, further) for maker in Kind if uses_of(maker, "make", name))


_USES = {kind: frozenset(_uses(kind)) for kind in Kind}
"""By kind, what makes what it uses on its own rank: of which kind, and how many stages further
on."""
_USERS = {
    used: [(kind, -further) for kind, uses in _USES.items() for by, further in uses if by is used]
    for used in Kind
}


def added(schedule: Schedule, action: Action, rank: int, listed: Listed) -> Add:
    """A missing action in the list of a rank: next to what it communicates for, or after compute of
    its kind for the microbatch before, where that is after what it uses and before its use."""
    return next(additions(schedule, action, rank, listed))


def additions(
    schedule: Schedule,
    action: Action,
    rank: int,
    listed: Listed,
    least: int = 0,
    most: int | None = None,
) -> Iterator[Add]:
    """A missing action in the list of a rank, between the places `least` and `most` if it can be:
    where it most likely belongs, then everywhere else between what it uses and its use."""
    start, end = (int(each) for each in schedule.columns.starts[[rank, rank + 1]])

    def found(kinds: Iterable[tuple[Kind, int]], microbatch: int) -> Iterator[int]:
        for kind, further in kinds:
            place = listed(kind, action.stage + further, microbatch)
            if start <= place < end:
                yield place

    microbatch = action.microbatch or 0
    first = max([start, least, *(1 + p for p in found(_USES[action.kind], microbatch))])
    last = min([end if most is None else most, *found(_USERS[action.kind], microbatch)])
    if action.kind in SENDS:
        likely = first
    elif action.kind in RECEIVES:
        likely = last
    else:
        own = BACKWARDS if action.kind in BACKWARDS else (action.kind,)
        before = [1 + p for p in found(((kind, 0) for kind in own), microbatch - 1)]
        after = found(((kind, 0) for kind in own), microbatch + 1)
        likely = max(before) if before else min(after, default=last if last < end else first)
        likely = max(first, min(likely, last))
    for place in (likely, *range(last, first - 1, -1)):
        yield at_gap(schedule, action, rank, place, ahead=place == last)


def is_misplaced(schedule: Schedule, place: int, listed: Listed) -> bool:
    """Whether what stands at a place comes before what it uses on its rank, or after its use."""
    columns = schedule.columns
    action, rank = columns.action(place), columns.rank[place]

    def of_rank(kinds: Iterable[tuple[Kind, int]]) -> Iterator[int]:
        for kind, further in kinds:
            other = listed(kind, action.stage + further, action.microbatch or 0)
            if other >= 0 and columns.rank[other] == rank:
                yield other

    late = any(used > place for used in of_rank(_USES[action.kind]))
    return late or any(user < place for user in of_rank(_USERS[action.kind]))


def at_gap(schedule: Schedule, action: Action, rank: int, place: int, *, ahead: bool) -> Add:
    """An action added before what stands at a place: ahead of the entry of that, or behind the
    entry before it."""
    columns = schedule.columns
    start, end = int(columns.starts[rank]), int(columns.starts[rank + 1])
    if start == end:
        return Add(action, rank, "after", None)
    if place == start or (ahead and place < end):
        return beside(schedule, action, "before", place)
    return beside(schedule, action, "after", place - 1)


def taken_to(
    schedule: Schedule, place: int, rank: int, listed: Listed, *, there: bool
) -> Edit | Several:
    """What stands at a place taken to another rank, or just taken out where that one has it."""
    out = removal(schedule, place)
    if there:
        return out
    return several((out, added(schedule, out.action, rank, listed)))


def last_of_stage(columns: Columns, stage: int, rank: int, *kinds: Kind) -> int:
    """The last place of these kinds of a stage on a rank, -1 where there is none."""
    own = slice(columns.starts[rank], columns.starts[rank + 1])
    found = (columns.is_kind(*kinds)[own] & (columns.stage[own] == stage)).nonzero()[0]
    return int(columns.starts[rank] + found[-1]) if len(found) else -1
