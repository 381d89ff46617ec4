"""Where an action belongs in a rank's list: after what it uses, before what uses it, and in the
order of its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from schedir.checker.changes import Add, Edit, Several, beside, removal, several
from schedir.ir import BACKWARDS, RECEIVES, SENDS, Action, Columns, Kind, Schedule

Listed: TypeAlias = Callable[[Kind, int, int], int]
"""The place of a kind of action of a (stage, microbatch), -1 where the lists have none."""

_GRADIENTS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)

_USES = {
    Kind.FORWARD: ((Kind.RECV_ACT, 0), (Kind.FORWARD, -1)),
    Kind.RECOMPUTE: ((Kind.FORWARD, 0),),
    Kind.BACKWARD: (
        (Kind.FORWARD, 0),
        (Kind.RECOMPUTE, 0),
        (Kind.RECV_GRAD, 0),
        *((kind, 1) for kind in _GRADIENTS),
    ),
    Kind.BACKWARD_WEIGHT: ((Kind.FORWARD, 0), (Kind.BACKWARD_INPUT, 0)),
    Kind.SEND_ACT: ((Kind.FORWARD, 0),),
    Kind.SEND_GRAD: tuple((kind, 0) for kind in _GRADIENTS),
}
"""By kind, what it uses of its own rank: of which kind, and how many stages further on."""
_USES[Kind.BACKWARD_INPUT] = _USES[Kind.BACKWARD]

_USERS: dict[Kind, tuple[tuple[Kind, int], ...]] = {
    used: tuple(
        (kind, -further) for kind, uses in _USES.items() for other, further in uses if other is used
    )
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
    first = max([start, least, *(1 + p for p in found(_USES.get(action.kind, ()), microbatch))])
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

    late = any(used > place for used in of_rank(_USES.get(action.kind, ())))
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
