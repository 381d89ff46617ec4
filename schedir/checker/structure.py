"""S1xx: every stage runs every microbatch once, on a rank that holds it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from heapq import merge
from itertools import chain, combinations, product

import attrs
import numpy as np

from schedir.checker import rules
from schedir.checker.changes import (
    Change,
    added,
    beside,
    is_misplaced,
    last_of_stage,
    removal,
    several,
    taken_to,
)
from schedir.checker.diagnostics import Diagnostic, Location, Rule, locations
from schedir.checker.fixes import Faults, Finding
from schedir.errors import UnsoundError
from schedir.graph.compile import first_places, graph_of
from schedir.ir import (
    COMPLETES_GRADIENTS,
    COMPUTE,
    COPIES,
    HOMES,
    KIND_INDEX,
    KINDS,
    SUMS,
    Action,
    Ints,
    Kind,
    Schedule,
)
from schedir.ir.kinds import STAGE_WIDE, uses_of
from schedir.ir.schedule import placement_text

_ORDERLESS = np.zeros(0, np.int64)


def _way(kind: Kind) -> tuple[Kind, ...]:
    alone = [kind]
    for use in uses_of(kind, "end"):
        makers = [maker for maker in Kind if uses_of(maker, "make", use.value)]
        alone += makers if len(makers) == 1 else []
    return tuple(each for each in Kind if each in alone)


_WAYS = [_way(kind) for kind in Kind if kind in COMPLETES_GRADIENTS]
"""What a stage may run to a microbatch's goal, with what alone makes what that ends: a B, or an I
and its W."""
_HOME = next(kind for kind in Kind if kind in HOMES)
_PARTS = (_HOME, *chain.from_iterable(_WAYS))


def _lacking(listed: set[Kind]) -> list[Kind]:
    lacks = [] if _HOME in listed else [_HOME]
    if not any(listed.issuperset(way) for way in _WAYS):
        begun = next((way for way in _WAYS if not listed.isdisjoint(way)), _WAYS[0])
        lacks += (kind for kind in begun if kind not in listed)
    return lacks


_LACKING = [
    _lacking({kind for bit, kind in enumerate(_PARTS) if listed >> bit & 1})
    for listed in range(1 << len(_PARTS))
]
"""What a (stage, microbatch) lacks, by which parts it has, as a binary number: its forward, and the
rest of the first way to its goal that is begun."""
_BESIDE = [kind for kind in Kind if kind in COMPUTE | COPIES and kind not in HOMES | STAGE_WIDE]
"""The kinds that belong on the rank of their forward."""


@attrs.frozen(eq=False)
class _Table:
    """The first place of each kind of action of each (stage, microbatch) with any action, -1 for
    none: `places[kind, row]`. The rows are those of `numbers`, ascending."""

    schedule: Schedule
    numbers: Ints
    places: Ints

    def of(self, kind: Kind) -> Ints:
        """The first places of a kind, by row."""
        places: Ints = self.places[KIND_INDEX[kind]]
        return places

    def listed(self, kind: Kind, stage: int, microbatch: int) -> int:
        """The place of an action, -1 where there is none."""
        schedule = self.schedule
        if not (0 <= stage < schedule.stages and 0 <= microbatch < schedule.microbatches):
            return -1
        number = stage * schedule.microbatches + microbatch
        row = int(np.searchsorted(self.numbers, number))
        if row == len(self.numbers) or self.numbers[row] != number:
            return -1
        return int(self.of(kind)[row])

    def home(self, stage: int, microbatch: int) -> int | None:
        """The rank that has most of a stage's work on a microbatch, of those that hold the stage;
        the one of the forward, of several."""
        ranks = self.schedule.columns.rank
        found = [
            int(ranks[place])
            for kind in (_HOME, *KINDS)
            if (place := self.listed(kind, stage, microbatch)) >= 0
        ]
        held = [rank for rank in found if rank in self.schedule.placement[stage]]
        return max(held, key=held.count, default=None)


def structure(schedule: Schedule) -> Iterator[Faults]:
    """The faults of single actions, and of the set of actions. No order can fix them."""
    columns, out = schedule.columns, partial(removal, schedule)
    stages, microbatches = schedule.stages, schedule.microbatches
    no_stage = columns.stage >= stages
    no_microbatch = ~no_stage & (columns.microbatch >= microbatches)
    strange = np.flatnonzero(no_stage), np.flatnonzero(no_microbatch)
    yield _told(schedule, rules.UNKNOWN_STAGE, out, strange[0], stages=stages)
    yield _told(schedule, rules.UNKNOWN_MICROBATCH, out, strange[1], microbatches=microbatches)
    known = np.flatnonzero(~(no_stage | no_microbatch))
    places = known[columns.microbatch[known] >= 0]
    rows, table = _table(schedule, places)
    yield _on_their_ranks(schedule, known, table)
    yield from _once_each(schedule, places, rows, table)
    yield _missing(schedule, table)
    yield from _in_one_way(schedule, table)
    yield from _on_one_rank(schedule, table)


def _told(
    schedule: Schedule, rule: Rule, change: Callable[..., Change], *columns: Ints, **facts: int
) -> Faults:
    """One fault at each place in the first of the columns, with the places in the other columns."""
    order = np.argsort(columns[0])
    rows = zip(*(column[order].tolist() for column in columns), strict=True)
    return Faults(
        rule=rule,
        keys=_ORDERLESS,
        findings=(
            Finding(rule.at(schedule, *row, **facts), otherwise=change(*row)) for row in rows
        ),
        many=len(order),
    )


def _table(schedule: Schedule, places: Ints) -> tuple[Ints, _Table]:
    """The row of each of the places, and the table."""
    columns = schedule.columns
    pair = columns.stage[places] * schedule.microbatches + columns.microbatch[places]
    try:
        table = graph_of(schedule).places.reshape(len(KINDS), -1)
    except UnsoundError:  # the pairs that occur are numbered anew
        numbers, pair = np.unique(pair, return_inverse=True)
        first = first_places(columns.kind[places], pair, places, len(numbers))
        return pair, _Table(schedule, numbers, first)
    return pair, _Table(schedule, np.arange(table.shape[1]), table)


def _on_their_ranks(schedule: Schedule, places: Ints, table: _Table) -> Faults:
    """Each action stands on a rank that holds its stage."""
    columns = schedule.columns
    first = np.array([held[0] for held in schedule.placement])
    apart = places[first[columns.stage[places]] != columns.rank[places]]
    held = [stage * schedule.ranks + rank for stage, rank in schedule.holdings]
    holding = columns.stage[apart] * schedule.ranks + columns.rank[apart]
    wrong = apart[~np.isin(holding, held)].tolist()
    elsewhere = _elsewhere(schedule, places) if len(wrong) > 1 else None
    if elsewhere:
        now = enumerate(schedule.placement)
        finding = rules.WRONG_RANK.at(
            schedule,
            wrong[0],
            elsewhere=[*elsewhere],
            placed=placement_text(elsewhere.get(stage, ranks) for stage, ranks in now),
        )
        return Faults(rule=rules.WRONG_RANK, keys=_ORDERLESS, findings=[Finding(finding)], many=1)
    return Faults(
        rule=rules.WRONG_RANK,
        keys=_ORDERLESS,
        findings=(
            Finding(
                rules.WRONG_RANK.at(schedule, place, held=schedule.placement[columns.stage[place]]),
                otherwise=_to_its_rank(schedule, place, table),
            )
            for place in wrong
        ),
        many=len(wrong),
    )


def _elsewhere(schedule: Schedule, places: Ints) -> dict[int, list[int]]:
    """The ranks that list each misplaced stage; of none, if a rank that holds it lists it too, or
    if several share a microbatch of it."""
    columns, found = schedule.columns, defaultdict[int, list[int]](list)
    for pair in np.unique(columns.stage[places] * schedule.ranks + columns.rank[places]).tolist():
        stage, rank = divmod(pair, schedule.ranks)
        found[stage].append(rank)
    wrong = {s: ranks for s, ranks in found.items() if {*ranks} - {*schedule.placement[s]}}
    apart = all({*ranks}.isdisjoint(schedule.placement[s]) for s, ranks in wrong.items())
    of_pairs = places[columns.microbatch[places] >= 0]
    pair = columns.stage[of_pairs] * schedule.microbatches + columns.microbatch[of_pairs]
    split = np.unique(np.stack((pair, columns.rank[of_pairs])), axis=1).shape[1]
    return wrong if apart and split == len(np.unique(pair)) else {}


def _to_its_rank(schedule: Schedule, place: int, table: _Table) -> Change:
    """The change that moves an action to a rank that holds its stage, or removes it if that rank
    has it."""
    action, out = schedule.columns.action(place), removal(schedule, place)
    if action.microbatch is None:
        return _of_stage_to_its_rank(schedule, place)
    there = table.listed(action.kind, action.stage, action.microbatch) != place
    if there:
        return out
    rank = table.home(action.stage, action.microbatch)
    if rank is None:
        rank = schedule.placement[action.stage][0]
    return several((out, added(schedule, action, rank, table.listed)))


def _of_stage_to_its_rank(schedule: Schedule, place: int) -> Change:
    """The change that moves a stage-wide action to a rank of its stage that has none after its
    gradients, or removes it."""
    columns, out = schedule.columns, removal(schedule, place)
    stage, kind = out.action.stage, out.action.kind
    for rank in schedule.placement[stage]:
        gradient = last_of_stage(columns, stage, rank, *COMPLETES_GRADIENTS)
        after = last_of_stage(columns, stage, rank, *COMPLETES_GRADIENTS, *SUMS)
        if gradient >= 0 and last_of_stage(columns, stage, rank, kind) < gradient:
            target = gradient if kind in SUMS else after
            return several((out, beside(schedule, out.action, "after", target)))
    return out


def _once_each(schedule: Schedule, places: Ints, rows: Ints, table: _Table) -> Iterator[Faults]:
    """Nothing is listed twice."""
    first = table.places[schedule.columns.kind[places], rows]
    again = first != places
    spare = partial(_spare, schedule, table)
    yield _told(schedule, rules.DUPLICATE_ACTION, spare, places[again], first[again])


def _in_one_way(schedule: Schedule, table: _Table) -> Iterator[Faults]:
    """Each (stage, microbatch) reaches its goal in one way."""
    for whole, way in combinations(_WAYS, 2):
        complete = np.logical_and.reduce([table.of(part) >= 0 for part in way])
        for part, other in product(way, whole):
            both = (table.of(part) >= 0) & (table.of(other) >= 0)
            to_go = {*table.of(other)[both & complete].tolist()}
            ends = table.of(part)[both], table.of(other)[both]
            yield _told(schedule, rules.MIXED_BACKWARD, partial(_one_way, schedule, to_go), *ends)


def _one_way(schedule: Schedule, to_go: set[int], place: int, other: int) -> Change:
    return removal(schedule, other if other in to_go else place)


def _on_one_rank(schedule: Schedule, table: _Table) -> Iterator[Faults]:
    """All actions of a (stage, microbatch) are on the rank of its forward."""
    home, ranks = table.of(_HOME), schedule.columns.rank
    together = partial(_brought_together, schedule, table)
    for kind in _BESIDE:
        some = table.of(kind)
        apart = (some >= 0) & (home >= 0) & (ranks[some] != ranks[home])
        yield _told(schedule, rules.SPLIT_MICROBATCH, together, some[apart], home[apart])


def _spare(schedule: Schedule, table: _Table, again: int, first: int) -> Change:
    """The change that removes one of two equal actions: the second, unless only that one is in the
    right place."""
    ranks = schedule.columns.rank
    home = table.home(int(schedule.columns.stage[first]), int(schedule.columns.microbatch[first]))

    def astray(place: int) -> bool:
        return ranks[place] != home or is_misplaced(schedule, place, table.listed)

    return removal(schedule, first if astray(first) and not astray(again) else again)


def _brought_together(schedule: Schedule, table: _Table, place: int, forward: int) -> Change:
    """The change that moves a part of a microbatch's work to the rank that has most of it: the
    forward, if the forward is alone."""
    columns = schedule.columns
    rank = table.home(int(columns.stage[place]), int(columns.microbatch[place]))
    if rank is None:
        rank = int(columns.rank[forward])
    moved = forward if columns.rank[forward] != rank and columns.rank[place] == rank else place
    return taken_to(schedule, moved, rank, table.listed, there=False)


def _missing(schedule: Schedule, table: _Table) -> Faults:
    """Missing forwards, and missing ways to a goal.

    The table holds only (stage, microbatch) pairs that occur: a file that claims a billion of them
    need not have them all.
    """
    numbers, parts = table.numbers, np.stack([table.of(kind) for kind in _PARTS])
    listed = (1 << np.arange(len(parts))) @ (parts >= 0)
    many = np.array([len(lacks) for lacks in _LACKING])[listed]
    rows = np.flatnonzero(many)
    absent = schedule.stages * schedule.microbatches - len(numbers)

    def findings() -> Iterator[Finding]:
        row_of = dict(zip(numbers[rows].tolist(), rows.tolist(), strict=True))
        end = len(numbers) + absent
        for number in merge(row_of, _absent(numbers, end) if absent else ()):
            stage, microbatch = divmod(number, schedule.microbatches)
            row = row_of.get(number)
            lacks, places = _LACKING[0], _ORDERLESS
            if row is not None:
                lacks, places = _LACKING[listed[row]], parts[:, row]
            related = locations(schedule, places[places >= 0])
            # On the rank of what is there of its microbatch, else of its stage.
            rank = related[0].rank if related else schedule.placement[stage][0]
            for kind in lacks:
                action = Action(kind, stage, microbatch)
                where = Location(rank, None, action)
                yield Finding(
                    Diagnostic(rules.MISSING_ACTION, (where, *related)),
                    otherwise=added(schedule, action, rank, table.listed),
                )

    total = int(many.sum()) + len(_LACKING[0]) * absent
    return Faults(rule=rules.MISSING_ACTION, keys=_ORDERLESS, findings=findings(), many=total)


def _absent(numbers: Ints, end: int) -> Iterator[int]:
    """The numbers in 0..end - 1 that `numbers`, ascending, lacks."""
    following = 0
    for number in [*numbers.tolist(), end]:
        yield from range(following, number)
        following = number + 1
