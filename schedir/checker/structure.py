"""S1xx: every stage runs every microbatch once, on a rank that holds it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, combinations, compress, product
from typing import Any

import numpy as np

from schedir.checker import rules
from schedir.checker.diagnostics import (
    Diagnostic,
    Faults,
    Finding,
    Location,
    Rule,
    fault,
    locations,
)
from schedir.graph.compile import Pairs, pairs_of
from schedir.ir import (
    COMPLETES_GRADIENTS,
    COMPUTE,
    COPIES,
    HOMES,
    Action,
    Ints,
    Kind,
    Schedule,
)
from schedir.ir.kinds import STAGE_WIDE, uses_of
from schedir.ir.schedule import placement_text


def _way(kind: Kind) -> tuple[Kind, ...]:
    alone = [kind]
    for use in uses_of(kind, "end"):
        makers = [maker for maker in Kind if uses_of(maker, "make", use.value)]
        alone += makers if len(makers) == 1 else []
    return tuple(each for each in Kind if each in alone)


WAYS = [_way(kind) for kind in Kind if kind in COMPLETES_GRADIENTS]
"""What a stage may run to a microbatch's goal, with what alone makes what that ends: a B, or an I
and its W."""
(_HOME,) = HOMES
_BESIDE = [kind for kind in Kind if kind in COMPUTE | COPIES and kind not in HOMES | STAGE_WIDE]
"""The kinds that belong on the rank of their forward."""


def structure(schedule: Schedule) -> Iterator[Faults]:
    """The faults of single actions, and of the set of actions. No order can fix them."""
    columns, pairs = schedule.columns, pairs_of(schedule)
    stages, microbatches = pairs.shape
    no_stage = columns.stage >= stages
    no_microbatch = ~no_stage & (columns.microbatch >= microbatches)
    strange = np.flatnonzero(no_stage), np.flatnonzero(no_microbatch)
    yield _told(rules.UNKNOWN_STAGE, schedule, strange[0], stages=stages)
    yield _told(rules.UNKNOWN_MICROBATCH, schedule, strange[1], microbatches=microbatches)
    known = np.flatnonzero(~(no_stage | no_microbatch))
    yield _on_their_ranks(schedule, known)
    places = known[columns.microbatch[known] >= 0]
    first = pairs.places[columns.kind[places], pairs.rows(columns, places)]
    again = first != places
    yield _told(rules.DUPLICATE_ACTION, schedule, places[again], first[again])
    yield _missing(schedule, pairs)
    yield from _in_one_way(schedule, pairs)
    home = pairs.of(_HOME)
    for kind in _BESIDE:  # on the rank of its forward
        some = pairs.of(kind)
        apart = (some >= 0) & (home >= 0) & (columns.rank[some] != columns.rank[home])
        yield _told(rules.SPLIT_MICROBATCH, schedule, some[apart], home[apart])


def _told(rule: Rule, schedule: Schedule, *columns: Ints, **facts: Any) -> Faults:
    """One fault at each place in the first of the columns, with the places in the other columns."""
    rows = np.stack(columns, axis=1)[np.argsort(columns[0])]
    return rule.each(schedule, rows, **facts)


def _on_their_ranks(schedule: Schedule, places: Ints) -> Faults:
    """Each action stands on a rank that holds its stage."""
    columns, now = schedule.columns, schedule.placement
    holding = columns.stage[places] * schedule.ranks + columns.rank[places]
    held = [stage * schedule.ranks + rank for stage, rank in schedule.holdings]
    wrong = places[~np.isin(holding, held)]
    elsewhere = _elsewhere(schedule, places, holding) if len(wrong) > 1 else None
    if elsewhere:
        placed = (elsewhere.get(stage, ranks) for stage, ranks in enumerate(now))
        return fault(
            rules.WRONG_RANK.at(
                schedule,
                int(wrong[0]),
                case="lists",
                elsewhere=[*elsewhere],
                misplaced=len(elsewhere),
                placed=placement_text(placed),
            )
        )
    homes = [now[stage] for stage in columns.stage[wrong].tolist()]
    return _told(rules.WRONG_RANK, schedule, wrong, case="action", held=homes)


def _elsewhere(schedule: Schedule, places: Ints, holding: Ints) -> dict[int, list[int]]:
    """The ranks that list each misplaced stage, given the number of each place's stage on its rank;
    of none, if a rank that holds it lists it too, or if several share a microbatch of it."""
    columns, found = schedule.columns, defaultdict[int, list[int]](list)
    for pair in np.unique(holding).tolist():
        stage, rank = divmod(pair, schedule.ranks)
        found[stage].append(rank)
    wrong = {s: ranks for s, ranks in found.items() if {*ranks} - {*schedule.placement[s]}}
    apart = all({*ranks}.isdisjoint(schedule.placement[s]) for s, ranks in wrong.items())
    of_pairs = places[columns.microbatch[places] >= 0]
    work = np.stack([getattr(columns, of)[of_pairs] for of in ("stage", "microbatch", "rank")])
    pairs, ranks = (np.unique(each, axis=1).shape[1] for each in (work[:2], work))
    return wrong if apart and pairs == ranks else {}


def _in_one_way(schedule: Schedule, pairs: Pairs) -> Iterator[Faults]:
    """Each (stage, microbatch) reaches its goal in one way."""
    for whole, way in combinations(WAYS, 2):
        for part, other in product(way, whole):
            both = (pairs.of(part) >= 0) & (pairs.of(other) >= 0)
            ends = pairs.of(part)[both], pairs.of(other)[both]
            yield _told(rules.MIXED_BACKWARD, schedule, *ends)


def _missing(schedule: Schedule, pairs: Pairs) -> Faults:
    """Missing forwards, and missing ways to a goal."""
    parts = (_HOME, *chain.from_iterable(WAYS))
    # One more row, for every pair that no action names: a file may claim a billion of them.
    places = np.array([np.append(pairs.of(kind), -1) for kind in parts])
    home, *ways = np.split(places >= 0, np.cumsum([1, *map(len, WAYS)])[:-1])
    complete = np.any([way.all(axis=0) for way in ways], axis=0)
    # The first way that is begun, else the first.
    chosen = np.argmax([way.any(axis=0) for way in ways], axis=0)
    lacks = [~way & ~complete & (chosen == number) for number, way in enumerate(ways)]
    lacking = np.concatenate((~home, *lacks))
    many = lacking.sum(axis=0)
    end = schedule.stages * schedule.microbatches

    def findings() -> Iterator[Finding]:
        row_of = dict(zip(pairs.numbers.tolist(), range(end), strict=False))
        for number in range(end):
            row = row_of.get(number, -1)
            if not many[row]:
                continue
            stage, microbatch = divmod(number, schedule.microbatches)
            related = locations(schedule, places[:, row][places[:, row] >= 0])
            # On the rank of what is there of its microbatch, else of its stage.
            rank = related[0].rank if related else schedule.placement[stage][0]
            for kind in compress(parts, lacking[:, row]):
                action = Action(kind, stage, microbatch)
                where = Location(rank, None, action), *related
                found = Diagnostic(rules.MISSING_ACTION, where)
                yield Finding(found)

    return Faults(
        rule=rules.MISSING_ACTION,
        keys=np.zeros(0, np.int64),
        findings=findings(),
        many=int(many[:-1].sum() + many[-1] * (end - len(pairs.numbers))),
    )
