"""S208 to S210 and S212: REDUCE_GRADs sum what an OPTIM_STEP applies, once, on all replicas."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator
from itertools import chain

import attrs
import numpy as np

from schedir.checker import rules
from schedir.checker.changes import (
    Change,
    Edit,
    Move,
    Side,
    ahead,
    anywhere,
    back,
    beside,
    in_turn,
    moved_beside,
    removal,
    several,
)
from schedir.checker.fixes import Faults, Finding
from schedir.ir import (
    COMPLETES_GRADIENTS,
    Action,
    Columns,
    Kind,
    Schedule,
    collective_turns,
    reduces_by_stage,
)


@attrs.frozen
class _Round:
    """A stage's gradients and REDUCE_GRADs on a rank up to an OPTIM_STEP, None for the rest."""

    gradients: list[int]
    reduces: list[int]
    step: int | None


_EVENTS = (*COMPLETES_GRADIENTS, Kind.REDUCE_GRAD, Kind.OPTIM_STEP)


def _rounds(columns: Columns) -> dict[tuple[int, int], list[_Round]]:
    """The rounds of each stage on each rank, the last one those that no step follows."""
    rounds: dict[tuple[int, int], list[_Round]] = {}
    places = columns.where(*_EVENTS)
    is_reduce, is_step = (
        columns.is_kind(kind)[places].tolist() for kind in (Kind.REDUCE_GRAD, Kind.OPTIM_STEP)
    )
    ranks, stages = columns.rank[places].tolist(), columns.stage[places].tolist()
    for place, rank, stage, reduces, steps in zip(
        places.tolist(), ranks, stages, is_reduce, is_step, strict=True
    ):
        own = rounds.setdefault((rank, stage), [_Round([], [], None)])
        if steps:
            own[-1] = attrs.evolve(own[-1], step=place)
            own.append(_Round([], [], None))
        else:
            (own[-1].reduces if reduces else own[-1].gradients).append(place)
    return rounds


def reductions(schedule: Schedule) -> Iterator[Faults]:
    """Between two OPTIM_STEPs the gradients come first, then the REDUCE_GRAD."""
    steps = bool(schedule.columns.is_kind(Kind.OPTIM_STEP).any())
    rounds = _rounds(schedule.columns)
    held = schedule.placement
    # Of a stage on one rank, REDUCE_GRAD sums over a data-parallel group that the schedule does
    # not show: either all of those stages have it, or none.
    over_data = any(
        len(held[stage]) == 1 and any(each.reduces and each.gradients for each in own)
        for (_, stage), own in rounds.items()
    )
    unsummed: list[tuple[int, Side]] = []
    early: list[tuple[int, _Round]] = []
    for (_, stage), own in sorted(rounds.items()):
        for each in own:
            early += ((reduce, each) for reduce in each.reduces if _late(reduce, each))
            # Gradients after the last OPTIM_STEP are never applied, which is another finding.
            where = each.step
            if where is None and each.gradients and not steps:
                where = each.gradients[-1]
            needed = over_data or len(held[stage]) > 1
            if needed and not each.reduces and where is not None:
                unsummed.append((where, "after" if each.step is None else "before"))
    columns = schedule.columns
    holding = columns.stage * schedule.ranks + columns.rank
    yield Faults(
        rule=rules.STEP_WITHOUT_REDUCE,
        keys=holding[np.array([place for place, _ in unsummed], np.int64)],
        findings=(_unsummed(schedule, *each) for each in unsummed),
    )
    yield Faults(
        rule=rules.REDUCE_BEFORE_GRADIENTS,
        keys=holding[np.array([reduce for reduce, _ in early], np.int64)],
        extents=np.array([_late(*each) for each in early], np.int64),
        findings=(_reduced_early(schedule, *each) for each in early),
    )
    yield from _collectives(schedule, rounds)


def _unsummed(schedule: Schedule, place: int, side: Side) -> Finding:
    stage = int(schedule.columns.stage[place])
    add = beside(schedule, Action(Kind.REDUCE_GRAD, stage), side, place)
    return Finding(
        rules.STEP_WITHOUT_REDUCE.at(schedule, place, held=schedule.placement[stage]),
        chain(_summing(schedule, place), (add,)),
        add,
    )


def _summing(schedule: Schedule, place: int) -> Iterator[Move]:
    """What brings a sum before a step: moves of the step, or of the sum next to it."""
    columns = schedule.columns
    own = (columns.rank == columns.rank[place]) & (columns.stage == columns.stage[place])
    sums = np.flatnonzero(own & columns.is_kind(Kind.REDUCE_GRAD)).tolist()
    next_to = bisect(sums, place)
    if sums:
        yield from anywhere(schedule, (place, *sums[max(0, next_to - 1) : next_to + 1]))


def _late(reduce: int, each: _Round) -> int:
    return len(each.gradients) - bisect(each.gradients, reduce)


def _reduced_early(schedule: Schedule, reduce: int, each: _Round) -> Finding:
    last, late = each.gradients[-1], _late(reduce, each)
    finding = rules.REDUCE_BEFORE_GRADIENTS.at(schedule, reduce, last, late=late)
    if each.reduces[-1] > last:  # which sums all: the early one is one too many
        alone = removal(schedule, reduce)
        return Finding(finding, (alone, several(_everywhere(schedule, reduce))), alone)
    slides = [back(schedule, reduce, last)]
    if late == 1:
        slides.append(ahead(schedule, last, reduce))
    return Finding(finding, in_turn(slides), moved_beside(schedule, reduce, "after", last))


def _everywhere(schedule: Schedule, reduce: int) -> Iterator[Edit]:
    """A REDUCE_GRAD, and those that it meets on other ranks, taken out."""
    by_rank = reduces_by_stage(schedule)[int(schedule.columns.stage[reduce])]
    turn = by_rank[int(schedule.columns.rank[reduce])].index(reduce)
    yield from (removal(schedule, own[turn]) for own in by_rank.values() if turn < len(own))


def _collectives(
    schedule: Schedule, rounds: dict[tuple[int, int], list[_Round]]
) -> Iterator[Faults]:
    """The k-th REDUCE_GRAD of a replicated stage belongs to one step on all ranks, and sums
    something new on one of them at least."""
    new: dict[int, bool] = {}
    round_of: dict[int, _Round] = {}
    for own in rounds.values():
        for each in own:
            summed = 0
            for reduce in each.reduces:
                so_far = bisect(each.gradients, reduce)
                new[reduce] = so_far > summed
                round_of[reduce] = each
                summed = so_far
    turn, stage_of = schedule.dataflow.steps_before, schedule.columns.stage
    across: list[tuple[int, ...]] = []
    empty: list[tuple[int, ...]] = []
    for places in collective_turns(schedule):
        if len(set(turn[list(places)].tolist())) > 1:
            across.append(places)
        elif len(places) > 1 and not any(new[place] for place in places):
            empty.append(places)

    yield Faults(
        rule=rules.REDUCE_ACROSS_STEPS,
        keys=np.array([stage_of[places[0]] for places in across], np.int64),
        findings=(_across(schedule, places, round_of) for places in across),
    )
    yield Faults(
        rule=rules.EMPTY_REDUCE,
        keys=np.array([stage_of[places[0]] for places in empty], np.int64),
        findings=(_empty(schedule, places) for places in empty),
    )


def _empty(schedule: Schedule, places: tuple[int, ...]) -> Finding:
    out = several(removal(schedule, place) for place in places)
    return Finding(
        rules.EMPTY_REDUCE.at(schedule, *places), chain((out,), anywhere(schedule, places)), out
    )


def _across(schedule: Schedule, places: tuple[int, ...], round_of: dict[int, _Round]) -> Finding:
    """Where some ranks have one sum more in an earlier round than others, that goes, or the others
    get one."""
    turns = schedule.dataflow.steps_before[list(places)].tolist()
    first = min(turns)
    behind = [place for place, turn in zip(places, turns, strict=True) if turn == first]
    further = [place for place, turn in zip(places, turns, strict=True) if turn > first]
    changes: list[Change] = []
    if all(len(round_of[place].reduces) > 1 for place in behind):
        changes.append(several(removal(schedule, place) for place in behind))
    changes.append(several(_one_more(schedule, place, first) for place in further))
    moves: Iterable[Change] = anywhere(schedule, places)
    return Finding(
        rules.REDUCE_ACROSS_STEPS.at(schedule, *places, steps=tuple(turns)),
        chain(changes, moves),
        changes[0],
    )


def _one_more(schedule: Schedule, reduce: int, turn: int) -> Edit:
    """One more REDUCE_GRAD on the rank of a later one, before the OPTIM_STEP of a round."""
    columns = schedule.columns
    action = columns.action(reduce)
    own = columns.is_kind(Kind.OPTIM_STEP) & (columns.rank == columns.rank[reduce])
    own &= (columns.stage == action.stage) & (schedule.dataflow.steps_before == turn)
    return beside(schedule, action, "before", int(np.flatnonzero(own)[0]))
