"""S1xx: every stage runs every microbatch once, on a rank that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import merge

import numpy as np

from schedir.checker.diagnostics import Diagnostic, Location, locations
from schedir.checker.faults import Faults, Finding
from schedir.checker.rules import structure as rules
from schedir.ir import KIND_INDEX, Action, Ints, Kind, Schedule, first_places

_SPLIT = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_KEPT = (Kind.FORWARD, Kind.BACKWARD, *_SPLIT)
_ORDERLESS = np.zeros(0, np.int64)


def structure(schedule: Schedule) -> Iterator[Faults]:
    """What is wrong with single actions, and with the set of them. No order can fix it."""
    columns = schedule.columns
    no_stage = columns.stage >= schedule.stages
    no_microbatch = ~no_stage & (columns.microbatch >= schedule.microbatches)
    yield _each(
        rules.UnknownStage,
        np.flatnonzero(no_stage),
        lambda place: rules.UnknownStage.at(schedule, place, stages=schedule.stages),
    )
    yield _each(
        rules.UnknownMicrobatch,
        np.flatnonzero(no_microbatch),
        lambda place: rules.UnknownMicrobatch.at(
            schedule, place, microbatches=schedule.microbatches
        ),
    )
    known = np.flatnonzero(~(no_stage | no_microbatch))
    yield _on_their_ranks(schedule, known)
    yield from _once_each(schedule, known[columns.microbatch[known] >= 0])


def _each(rule: type[Diagnostic], places: Ints, finding: Callable[[int], Diagnostic]) -> Faults:
    """One fault at each of the places."""
    findings = (Finding(finding(int(place))) for place in places)
    return Faults(rule=rule, keys=_ORDERLESS, findings=findings, many=len(places))


def _on_their_ranks(schedule: Schedule, places: Ints) -> Faults:
    """Each action stands on a rank that holds its stage."""
    columns = schedule.columns
    held = np.array([stage * schedule.ranks + rank for stage, rank in schedule.holdings])
    holding = columns.stage[places] * schedule.ranks + columns.rank[places]
    at = np.searchsorted(held, holding)  # they ascend
    return _each(
        rules.WrongRank,
        places[held[np.minimum(at, len(held) - 1)] != holding],
        lambda place: rules.WrongRank.at(
            schedule, place, held=schedule.placement[columns.stage[place]]
        ),
    )


def _once_each(schedule: Schedule, places: Ints) -> Iterator[Faults]:
    """Each (stage, microbatch) has one F and one B, or I and W, and at most one R, all on the same
    rank."""
    columns = schedule.columns
    pairs = schedule.stages * schedule.microbatches
    pair = columns.stage[places] * schedule.microbatches + columns.microbatch[places]
    numbers = np.arange(min(pairs, len(columns)))
    if pairs > len(columns):  # too few actions: the pairs that occur are numbered anew
        numbers, pair = np.unique(pair, return_inverse=True)
    table = first_places(columns.kind[places], pair, places, len(numbers))
    first = table[columns.kind[places], pair]
    again = first != places
    yield _pairs(schedule, rules.DuplicateAction, places[again], first[again])
    yield _missing(schedule, numbers, table)
    forward, backward, *split = (table[KIND_INDEX[kind]] for kind in _KEPT)
    for half in split:
        both = (half >= 0) & (backward >= 0)
        yield _pairs(schedule, rules.MixedBackward, half[both], backward[both])
    for some in (backward, *split, table[KIND_INDEX[Kind.RECOMPUTE]]):
        apart = (some >= 0) & (forward >= 0) & (columns.rank[some] != columns.rank[forward])
        yield _pairs(schedule, rules.SplitMicrobatch, some[apart], forward[apart])


def _pairs(schedule: Schedule, rule: type[Diagnostic], places: Ints, others: Ints) -> Faults:
    """One fault at each of the places, about another one as well."""
    order = np.argsort(places)
    findings = (
        Finding(rule.at(schedule, *pair))
        for pair in zip(places[order].tolist(), others[order].tolist(), strict=True)
    )
    return Faults(rule=rule, keys=_ORDERLESS, findings=findings, many=len(places))


def _missing(schedule: Schedule, numbers: Ints, table: Ints) -> Faults:
    """Every F, and every B, or I and W. `numbers` are the (stage, microbatch) pairs of which there
    is something, which a file that claims a billion of them need not have."""
    forward, backward, *split = (table[KIND_INDEX[kind]] for kind in _KEPT)
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
                kind: -1 if row is None else int(table[KIND_INDEX[kind], row]) for kind in _KEPT
            }
            yield from map(Finding, _pair(schedule, stage, microbatch, places))

    many = int((forward < 0).sum() + lacks.sum()) + 2 * absent
    return Faults(rule=rules.MissingAction, keys=_ORDERLESS, findings=findings(), many=many)


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
        yield rules.MissingAction(locations=(where, *related))
