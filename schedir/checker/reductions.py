"""S208 to S210 and S212: REDUCE_GRADs sum what an OPTIM_STEP applies, once, on all replicas."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator

import attrs
import numpy as np

from schedir.checker.changes import Move, Side, ahead, anywhere, back, in_turn
from schedir.checker.faults import Faults, Finding
from schedir.checker.rules import ordering as rules
from schedir.ir import COMPLETES_GRADIENTS, Columns, Kind, Schedule, collective_turns


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
    unsummed: dict[int, tuple[int, Side]] = {}
    early: dict[int, tuple[int, _Round]] = {}
    for (rank, stage), own in sorted(rounds.items()):
        holding = (stage * schedule.ranks + rank) * len(schedule.columns)
        nth = 0
        for turn, each in enumerate(own):
            for reduce in each.reduces:
                if _late(reduce, each):
                    early[holding + nth] = reduce, each
                nth += 1
            # Gradients after the last OPTIM_STEP are never applied, which is another finding.
            where = each.step
            if where is None and each.gradients and not steps:
                where = each.gradients[-1]
            needed = over_data or len(held[stage]) > 1
            if needed and not each.reduces and where is not None:
                unsummed[holding + turn] = where, "after" if each.step is None else "before"
    yield Faults(
        rule=rules.StepWithoutReduce,
        keys=np.array([*unsummed], np.int64),
        findings=(_unsummed(schedule, *each) for each in unsummed.values()),
    )
    yield Faults(
        rule=rules.ReduceBeforeGradients,
        keys=np.array([*early], np.int64),
        extents=np.array([_late(*each) for each in early.values()], np.int64),
        findings=(_reduced_early(schedule, *each) for each in early.values()),
    )
    yield from _collectives(schedule, rounds)


def _unsummed(schedule: Schedule, place: int, side: Side) -> Finding:
    held = schedule.placement[schedule.columns.stage[place]]
    return Finding(
        rules.StepWithoutReduce.at(schedule, place, held=held, side=side),
        _summing(schedule, place),
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
    slides = [back(schedule, reduce, last)]
    if late == 1:
        slides.append(ahead(schedule, last, reduce))
    return Finding(
        rules.ReduceBeforeGradients.at(schedule, reduce, last, late=late),
        in_turn(slides),
    )


def _collectives(
    schedule: Schedule, rounds: dict[tuple[int, int], list[_Round]]
) -> Iterator[Faults]:
    """The k-th REDUCE_GRAD of a replicated stage belongs to one step on all ranks, and sums
    something new on one of them at least."""
    new: dict[int, bool] = {}
    for own in rounds.values():
        for each in own:
            summed = 0
            for reduce in each.reduces:
                so_far = bisect(each.gradients, reduce)
                new[reduce] = so_far > summed
                summed = so_far
    turn = schedule.dataflow.steps_before
    across: dict[int, tuple[int, ...]] = {}
    empty: dict[int, tuple[int, ...]] = {}
    for number, places in enumerate(collective_turns(schedule)):
        if len(set(turn[list(places)].tolist())) > 1:
            across[number] = places
        elif len(places) > 1 and not any(new[place] for place in places):
            empty[number] = places

    yield Faults(
        rule=rules.ReduceAcrossSteps,
        keys=np.array([*across], np.int64),
        findings=(
            Finding(
                rules.ReduceAcrossSteps.at(
                    schedule, *places, steps=tuple(turn[list(places)].tolist())
                ),
                anywhere(schedule, places),
            )
            for places in across.values()
        ),
    )
    yield Faults(
        rule=rules.EmptyReduce,
        keys=np.array([*empty], np.int64),
        findings=(
            Finding(rules.EmptyReduce.at(schedule, *places), anywhere(schedule, places))
            for places in empty.values()
        ),
    )
