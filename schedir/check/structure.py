"""S1xx: every stage runs every microbatch once, on a rank that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from schedir.check.diagnostics import Diagnostic, Location, locate
from schedir.check.rules import memory
from schedir.check.rules import structure as rules
from schedir.ir import BACKWARDS, KIND_INDEX, Action, Ints, Kind, Schedule, first_places

# A file may claim a billion microbatches and hold none of them; this many findings say enough.
_MOST_ABSENT = 1000
_SPLIT = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def structure(schedule: Schedule) -> Iterator[Diagnostic]:
    """What is wrong with single actions, and with the set of them."""
    columns = schedule.columns
    no_stage = columns.stage >= schedule.stages
    no_microbatch = ~no_stage & (columns.microbatch >= schedule.microbatches)
    for place in np.flatnonzero(no_stage).tolist():
        yield rules.UnknownStage(locations=(locate(schedule, place),), stages=schedule.stages)
    for place in np.flatnonzero(no_microbatch).tolist():
        yield rules.UnknownMicrobatch(
            locations=(locate(schedule, place),), microbatches=schedule.microbatches
        )
    known = np.flatnonzero(~(no_stage | no_microbatch))
    yield from _on_their_ranks(schedule, known)
    yield from _once_each(schedule, known[columns.microbatch[known] >= 0])


def _on_their_ranks(schedule: Schedule, places: Ints) -> Iterator[Diagnostic]:
    """Each action stands on a rank that holds its stage."""
    columns = schedule.columns
    held = [stage * schedule.ranks + rank for stage, rank in schedule.holdings]
    holding = columns.stage[places] * schedule.ranks + columns.rank[places]
    for place in places[~np.isin(holding, held)].tolist():
        ranks = schedule.placement[columns.stage[place]]
        yield rules.WrongRank(locations=(locate(schedule, place),), held=ranks)


def _once_each(schedule: Schedule, places: Ints) -> Iterator[Diagnostic]:
    """Each (stage, microbatch) has one F and one B, or I and W, all on the same rank."""
    columns = schedule.columns
    pairs = schedule.stages * schedule.microbatches
    pair = columns.stage[places] * schedule.microbatches + columns.microbatch[places]
    numbers = np.arange(min(pairs, len(columns)))
    if pairs > len(columns):  # too few actions: the pairs that occur are numbered anew
        numbers, pair = np.unique(pair, return_inverse=True)
    table = first_places(columns.kind[places], pair, places, len(numbers))
    first = table[columns.kind[places], pair]
    for place, original in zip(
        places[first != places].tolist(), first[first != places].tolist(), strict=True
    ):
        yield rules.DuplicateAction(locations=(locate(schedule, place), locate(schedule, original)))
    forward, backward, *split = (
        table[KIND_INDEX[kind]] for kind in (Kind.FORWARD, Kind.BACKWARD, *_SPLIT)
    )
    halves = (split[0] >= 0).astype(np.int64) + (split[1] >= 0)
    sound = (forward >= 0) & np.where(backward >= 0, halves == 0, halves == 2)
    for some in (backward, *split):
        sound &= (some < 0) | (columns.rank[some] == columns.rank[forward])
    unsound = np.flatnonzero(~sound)
    rows = {int(numbers[row]): table[:, row] for row in unsound.tolist()}
    if len(numbers) < pairs:
        nothing = np.full(len(table), -1)
        rows |= dict.fromkeys(islice(_absent(numbers, pairs), _MOST_ABSENT + 1), nothing)
    absent = 0  # pairs without any backward
    for number in sorted(rows):
        found = rows[number]
        absent += all(found[KIND_INDEX[kind]] < 0 for kind in BACKWARDS)
        if absent > _MOST_ABSENT:
            return
        yield from _pair(schedule, *divmod(number, schedule.microbatches), found)
    yield from _never_released(schedule, table)


def _absent(numbers: Ints, end: int) -> Iterator[int]:
    """What is missing from `numbers`, ascending, of 0..end - 1."""
    following = 0
    for number in [*numbers.tolist(), end]:
        yield from range(following, number)
        following = number + 1


def _pair(schedule: Schedule, stage: int, microbatch: int, row: Ints) -> Iterator[Diagnostic]:
    """What is wrong with one stage's work on one microbatch; `row` has its place by kind."""
    forward, backward = (int(row[KIND_INDEX[kind]]) for kind in (Kind.FORWARD, Kind.BACKWARD))
    split = {kind: int(row[KIND_INDEX[kind]]) for kind in _SPLIT}
    places = [place for place in (forward, backward, *split.values()) if place >= 0]
    missing = [Kind.FORWARD] if forward < 0 else []
    if backward < 0:
        absent = [kind for kind, place in split.items() if place < 0]
        missing += absent if len(absent) < 2 else [Kind.BACKWARD]
    for kind in missing:
        related = tuple(locate(schedule, place) for place in places)
        # On the rank of what is there of its microbatch, else of its stage.
        rank = related[0].rank if related else schedule.placement[stage][0]
        where = Location(rank, None, Action(kind, stage, microbatch))
        yield rules.MissingAction(locations=(where, *related))
    for place in split.values():
        if backward >= 0 and place >= 0:
            yield rules.MixedBackward(
                locations=(locate(schedule, place), locate(schedule, backward))
            )
    for place in (backward, *split.values()):
        if forward >= 0 <= place and schedule.columns.rank[place] != schedule.columns.rank[forward]:
            yield rules.SplitMicrobatch(
                locations=(locate(schedule, place), locate(schedule, forward))
            )


def _never_released(schedule: Schedule, table: Ints) -> Iterator[Diagnostic]:
    """Every forward's activation is released, by its B or its W."""
    forward = table[KIND_INDEX[Kind.FORWARD]]
    released = (table[KIND_INDEX[Kind.BACKWARD]] >= 0) | (
        table[KIND_INDEX[Kind.BACKWARD_WEIGHT]] >= 0
    )
    kept = np.sort(forward[(forward >= 0) & ~released])
    for rank in np.unique(schedule.columns.rank[kept]).tolist():
        own = kept[schedule.columns.rank[kept] == rank].tolist()
        yield memory.ActivationNeverReleased(
            locations=tuple(locate(schedule, place) for place in own)
        )
