"""S1xx: every stage runs every microbatch once, on a rank that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import merge

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
from schedir.ir import (
    COMPLETES_GRADIENTS,
    KIND_INDEX,
    KINDS,
    Action,
    Ints,
    Kind,
    Schedule,
    first_places,
)

_SPLIT = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_KEPT = (Kind.FORWARD, Kind.BACKWARD, *_SPLIT)
_ORDERLESS = np.zeros(0, np.int64)


@attrs.frozen(eq=False)
class _Table:
    """The first place of each kind of action of each (stage, microbatch) that there is anything
    of, -1 for none: `places[kind, row]`, the rows being those of `numbers`, ascending."""

    schedule: Schedule
    numbers: Ints
    places: Ints

    def listed(self, kind: Kind, stage: int, microbatch: int) -> int:
        """The place of an action, -1 where there is none."""
        schedule = self.schedule
        if not (0 <= stage < schedule.stages and 0 <= microbatch < schedule.microbatches):
            return -1
        number = stage * schedule.microbatches + microbatch
        row = int(np.searchsorted(self.numbers, number))
        if row == len(self.numbers) or self.numbers[row] != number:
            return -1
        return int(self.places[KIND_INDEX[kind], row])

    def home(self, stage: int, microbatch: int) -> int | None:
        """The rank that has most of a stage's work on a microbatch, of those that hold the stage;
        the one of the forward, of several."""
        ranks = self.schedule.columns.rank
        found = [
            int(ranks[place])
            for kind in (Kind.FORWARD, *KINDS)
            if (place := self.listed(kind, stage, microbatch)) >= 0
        ]
        held = [rank for rank in found if rank in self.schedule.placement[stage]]
        return max(held, key=held.count, default=None)


def structure(schedule: Schedule) -> Iterator[Faults]:
    """What is wrong with single actions, and with the set of them. No order can fix it."""
    columns = schedule.columns
    no_stage = columns.stage >= schedule.stages
    no_microbatch = ~no_stage & (columns.microbatch >= schedule.microbatches)
    yield _each(
        np.flatnonzero(no_stage),
        rules.UNKNOWN_STAGE,
        lambda place: Finding(
            rules.UNKNOWN_STAGE.at(schedule, place, stages=schedule.stages),
            otherwise=removal(schedule, place),
        ),
    )
    yield _each(
        np.flatnonzero(no_microbatch),
        rules.UNKNOWN_MICROBATCH,
        lambda place: Finding(
            rules.UNKNOWN_MICROBATCH.at(schedule, place, microbatches=schedule.microbatches),
            otherwise=removal(schedule, place),
        ),
    )
    known = np.flatnonzero(~(no_stage | no_microbatch))
    places = known[columns.microbatch[known] >= 0]
    rows, table = _table(schedule, places)
    yield _on_their_ranks(schedule, known, table)
    yield from _once_each(schedule, places, rows, table)


def _each(places: Ints, rule: Rule, finding: Callable[[int], Finding]) -> Faults:
    """One fault at each of the places."""
    findings = map(finding, places.tolist())
    return Faults(rule=rule, keys=_ORDERLESS, findings=findings, many=len(places))


def _table(schedule: Schedule, places: Ints) -> tuple[Ints, _Table]:
    """The row of each of the places, and the table."""
    columns = schedule.columns
    pairs = schedule.stages * schedule.microbatches
    pair = columns.stage[places] * schedule.microbatches + columns.microbatch[places]
    numbers = np.arange(min(pairs, len(columns)))
    if pairs > len(columns):  # too few actions: the pairs that occur are numbered anew
        numbers, pair = np.unique(pair, return_inverse=True)
    first = first_places(columns.kind[places], pair, places, len(numbers))
    return pair, _Table(schedule, numbers, first)


def _on_their_ranks(schedule: Schedule, places: Ints, table: _Table) -> Faults:
    """Each action stands on a rank that holds its stage."""
    columns = schedule.columns
    held = np.array([stage * schedule.ranks + rank for stage, rank in schedule.holdings])
    holding = columns.stage[places] * schedule.ranks + columns.rank[places]
    at = np.searchsorted(held, holding)  # they ascend
    return _each(
        places[held[np.minimum(at, len(held) - 1)] != holding],
        rules.WRONG_RANK,
        lambda place: Finding(
            rules.WRONG_RANK.at(schedule, place, held=schedule.placement[columns.stage[place]]),
            otherwise=_to_its_rank(schedule, place, table),
        ),
    )


def _to_its_rank(schedule: Schedule, place: int, table: _Table) -> Change:
    """What stands on a rank that does not hold its stage, on one that does: taken there, or out
    where it stands there already."""
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
    """A REDUCE_GRAD or OPTIM_STEP that is taken to a rank of its stage that has none after its
    gradients, or taken out."""
    columns, out = schedule.columns, removal(schedule, place)
    stage, kind = out.action.stage, out.action.kind
    for rank in schedule.placement[stage]:
        gradient = last_of_stage(columns, stage, rank, *COMPLETES_GRADIENTS)
        after = last_of_stage(columns, stage, rank, *COMPLETES_GRADIENTS, Kind.REDUCE_GRAD)
        if gradient >= 0 and last_of_stage(columns, stage, rank, kind) < gradient:
            target = gradient if kind is Kind.REDUCE_GRAD else after
            return several((out, beside(schedule, out.action, "after", target)))
    return out


def _once_each(schedule: Schedule, places: Ints, rows: Ints, table: _Table) -> Iterator[Faults]:
    """Each (stage, microbatch) has one F and one B, or I and W, and at most one R, all on the same
    rank."""
    columns = schedule.columns
    first = table.places[columns.kind[places], rows]
    again = first != places
    yield _pairs(
        schedule,
        rules.DUPLICATE_ACTION,
        places[again],
        first[again],
        lambda place, other: removal(schedule, _spare(schedule, place, other, table)),
    )
    yield _missing(schedule, table)
    forward, backward, *split = (table.places[KIND_INDEX[kind]] for kind in _KEPT)
    whole = np.logical_and.reduce([half >= 0 for half in split])
    to_go = set(backward[whole & (backward >= 0)].tolist())
    for half in split:
        both = (half >= 0) & (backward >= 0)
        yield _pairs(
            schedule,
            rules.MIXED_BACKWARD,
            half[both],
            backward[both],
            lambda place, other: removal(schedule, other if other in to_go else place),
        )
    for some in (backward, *split, table.places[KIND_INDEX[Kind.RECOMPUTE]]):
        apart = (some >= 0) & (forward >= 0) & (columns.rank[some] != columns.rank[forward])
        yield _pairs(
            schedule,
            rules.SPLIT_MICROBATCH,
            some[apart],
            forward[apart],
            lambda place, other: _brought_together(schedule, place, other, table),
        )


def _spare(schedule: Schedule, again: int, first: int, table: _Table) -> int:
    """Which of two like actions is to go: the second, unless that alone stands where it belongs."""
    ranks = schedule.columns.rank
    home = table.home(int(schedule.columns.stage[first]), int(schedule.columns.microbatch[first]))

    def astray(place: int) -> bool:
        return ranks[place] != home or is_misplaced(schedule, place, table.listed)

    return first if astray(first) and not astray(again) else again


def _brought_together(schedule: Schedule, place: int, forward: int, table: _Table) -> Change:
    """A part of a microbatch's work taken to the rank that has most of it: the forward, if it is
    alone."""
    columns = schedule.columns
    rank = table.home(int(columns.stage[place]), int(columns.microbatch[place]))
    if rank is None:
        rank = int(columns.rank[forward])
    moved = forward if columns.rank[forward] != rank and columns.rank[place] == rank else place
    return taken_to(schedule, moved, rank, table.listed, there=False)


def _pairs(
    schedule: Schedule,
    rule: Rule,
    places: Ints,
    others: Ints,
    change: Callable[[int, int], Change],
) -> Faults:
    """One fault at each of the places, about another one as well."""
    order = np.argsort(places)
    findings = (
        Finding(rule.at(schedule, *pair), otherwise=change(*pair))
        for pair in zip(places[order].tolist(), others[order].tolist(), strict=True)
    )
    return Faults(rule=rule, keys=_ORDERLESS, findings=findings, many=len(places))


def _missing(schedule: Schedule, table: _Table) -> Faults:
    """Every F, and every B, or I and W. Of the (stage, microbatch) pairs, the table has those of
    which there is something: a file that claims a billion of them need not have them all."""
    numbers = table.numbers
    forward, backward, *split = (table.places[KIND_INDEX[kind]] for kind in _KEPT)
    halves = sum((half >= 0).astype(np.int64) for half in split)
    lacks = (backward < 0) & (halves < 2)
    rows = np.flatnonzero((forward < 0) | lacks)
    absent = schedule.stages * schedule.microbatches - len(numbers)

    def findings() -> Iterator[Finding]:
        row_of = dict(zip(numbers[rows].tolist(), rows.tolist(), strict=True))
        end = len(numbers) + absent
        for number in merge(row_of, _absent(numbers, end) if absent else ()):
            stage, microbatch = divmod(number, schedule.microbatches)
            row = row_of.get(number)
            places = {
                kind: -1 if row is None else int(table.places[KIND_INDEX[kind], row])
                for kind in _KEPT
            }
            for finding in _pair(schedule, stage, microbatch, places):
                add = added(schedule, finding.action, finding.rank, table.listed)
                yield Finding(finding, otherwise=add)

    many = int((forward < 0).sum() + lacks.sum()) + 2 * absent
    return Faults(rule=rules.MISSING_ACTION, keys=_ORDERLESS, findings=findings(), many=many)


def _absent(numbers: Ints, end: int) -> Iterator[int]:
    """What is missing from `numbers`, ascending, of 0..end - 1."""
    following = 0
    for number in [*numbers.tolist(), end]:
        yield from range(following, number)
        following = number + 1


def _pair(
    schedule: Schedule, stage: int, microbatch: int, places: dict[Kind, int]
) -> Iterator[Diagnostic]:
    """What one stage's work on one microbatch lacks; `places` has what it has, -1 for nothing."""
    missing = [Kind.FORWARD] if places[Kind.FORWARD] < 0 else []
    if places[Kind.BACKWARD] < 0:
        absent = [kind for kind in _SPLIT if places[kind] < 0]
        missing += absent if len(absent) < 2 else [Kind.BACKWARD]
    for kind in missing:
        related = locations(schedule, (place for place in places.values() if place >= 0))
        # On the rank of what is there of its microbatch, else of its stage.
        rank = related[0].rank if related else schedule.placement[stage][0]
        where = Location(rank, None, Action(kind, stage, microbatch))
        yield Diagnostic(rules.MISSING_ACTION, (where, *related))
