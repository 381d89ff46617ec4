"""S2xx: each rank's compute is in an order that makes sense, and each gradient is applied once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeAlias

import numpy as np

from schedir.checker import rules
from schedir.checker.changes import (
    Add,
    Change,
    Edit,
    ahead,
    anywhere,
    back,
    beside,
    in_turn,
    last_of_stage,
    moved_beside,
    removal,
    several,
)
from schedir.checker.fixes import Faults, Finding, fault
from schedir.checker.reductions import reductions
from schedir.checker.values import values
from schedir.ir import COMPLETES_GRADIENTS, Action, Ints, Kind, Schedule, Ties

# What a stage has on a rank, but for what it computes first: the last of it is an OPTIM_STEP.
_ENDS_WITH_A_STEP = (*COMPLETES_GRADIENTS, Kind.REDUCE_GRAD, Kind.OPTIM_STEP)


def ordering(schedule: Schedule, ties: Ties = ()) -> Iterator[Faults]:
    """What is wrong with the order of compute on each rank. Expects a sound structure."""
    yield from values(schedule)
    columns = schedule.columns
    steps = columns.where(Kind.OPTIM_STEP)
    reduces = columns.where(Kind.REDUCE_GRAD)
    if len(reduces) or any(len(held) > 1 for held in schedule.placement):
        yield from reductions(schedule)
    if len(steps):
        yield from _applied_once(schedule, steps, ties)


def without_steps(schedule: Schedule) -> Iterator[Faults]:
    """A schedule that is right, but leaves the update to its caller."""
    if not schedule.columns.is_kind(Kind.OPTIM_STEP).any():
        last = int(schedule.dataflow.weight_gradients.max())
        yield fault(rules.NO_STEP.at(schedule, last))


def _applied_once(schedule: Schedule, steps: Ints, ties: Ties) -> Iterator[Faults]:
    """Every gradient has an OPTIM_STEP after it, and every OPTIM_STEP has gradients."""
    turn, gradients = schedule.dataflow.steps_before, schedule.dataflow.weight_gradients
    places = np.sort(gradients.ravel())
    # One number for each stage on each rank; by it, how many steps that has.
    holding = _holdings(schedule)
    many = np.bincount(holding[steps], minlength=len(schedule.holdings))
    late = places[turn[places] >= many[holding[places]]]
    if len(late):
        yield from _never_applied(schedule, steps, late, holding, many)
    yield _empty_steps(schedule, steps, places, holding, many)
    yield from _equally_often(schedule, steps, holding, many)
    if not len(late):  # which this would only echo
        yield from _tied_groups(schedule, ties)


def _holdings(schedule: Schedule) -> Ints:
    """For every place, the number of its stage on its rank: 0, 1, … by stage, then rank."""
    keys = np.array([stage * schedule.ranks + rank for stage, rank in schedule.holdings])
    return np.searchsorted(keys, schedule.columns.stage * schedule.ranks + schedule.columns.rank)


def _usual(schedule: Schedule, many: Ints, number: int) -> int | None:
    """How many OPTIM_STEPs most of the other stages have, and the replicas of this one; None where
    there are none."""
    others = np.delete(many, number).tolist()
    return max(others, key=lambda steps: (others.count(steps), steps), default=None)


def _never_applied(
    schedule: Schedule, steps: Ints, late: Ints, holding: Ints, many: Ints
) -> Iterator[Faults]:
    """The stages, on each of their ranks, with gradients after their last OPTIM_STEP."""
    numbers, extents = np.unique(holding[late], return_counts=True)
    stepping = np.isin(numbers, holding[steps])
    late_of = {number: late[holding[late] == number].tolist() for number in numbers.tolist()}
    last_of = {number: int(steps[holding[steps] == number][-1]) for number in numbers[stepping]}
    yield Faults(
        rule=rules.STEP_BEFORE_GRADIENTS,
        keys=numbers[stepping],
        extents=extents[stepping],
        findings=(
            _step_too_early(
                schedule,
                last_of[number],
                late_of[number],
                lacks=many[number] < (_usual(schedule, many, number) or 0),
            )
            for number in numbers[stepping].tolist()
        ),
    )
    yield Faults(
        rule=rules.GRADIENT_NEVER_APPLIED,
        keys=numbers[~stepping],
        extents=extents[~stepping],
        findings=(
            Finding(
                rules.GRADIENT_NEVER_APPLIED.at(schedule, *late_of[number]),
                otherwise=_one_more_step(schedule, *schedule.holdings[number]),
            )
            for number in numbers[~stepping].tolist()
        ),
    )


def _step_too_early(schedule: Schedule, last: int, gradients: list[int], *, lacks: bool) -> Finding:
    """The finding for a stage on a rank; `lacks` says that it has fewer steps than others."""
    columns = schedule.columns
    slides = [back(schedule, last, gradients[-1])]
    if len(gradients) == 1:
        slides.append(ahead(schedule, gradients[0], last))
    moves: Iterable[Change] = in_turn(slides)
    add = _one_more_step(schedule, int(columns.stage[last]), int(columns.rank[last]))
    return Finding(
        rules.STEP_BEFORE_GRADIENTS.at(schedule, last, *gradients, late=len(gradients)),
        chain((add,), moves) if lacks else moves,
        add if lacks else moved_beside(schedule, last, "after", gradients[-1]),
    )


def _one_more_step(schedule: Schedule, stage: int, rank: int) -> Add:
    """An OPTIM_STEP after all that a stage has to apply on a rank, and has summed."""
    last = last_of_stage(schedule.columns, stage, rank, *_ENDS_WITH_A_STEP)
    step = Action(Kind.OPTIM_STEP, stage)
    if last < 0:
        return Add(step, rank, "after", _last_index(schedule, rank))
    return beside(schedule, step, "after", last)


def _last_index(schedule: Schedule, rank: int) -> int | None:
    columns = schedule.columns
    if columns.starts[rank] == columns.starts[rank + 1]:
        return None
    return columns.position(int(columns.starts[rank + 1]) - 1)[1]


def _empty_steps(
    schedule: Schedule, steps: Ints, gradients: Ints, holding: Ints, many: Ints
) -> Faults:
    columns, turn = schedule.columns, schedule.dataflow.steps_before
    # A replica may have run none of the step's microbatches; REDUCE_GRAD gives it the sum.
    replicated = np.array([len(held) > 1 for held in schedule.placement])
    reduces = columns.where(Kind.REDUCE_GRAD)
    filling = np.concatenate((gradients, reduces[replicated[columns.stage[reduces]]]))
    round_ = holding * len(columns) + turn
    empty = steps[~np.isin(round_[steps], round_[filling])]
    return Faults(
        rule=rules.EMPTY_STEP,
        keys=holding[empty],
        findings=(_empty(schedule, place, holding, many) for place in empty.tolist()),
    )


def _empty(schedule: Schedule, place: int, holding: Ints, many: Ints) -> Finding:
    """It is taken out, unless its stage would have none or fewer than others then: it gets
    something to apply instead."""
    columns, number = schedule.columns, int(holding[place])
    usual = _usual(schedule, many, number)
    out, moves = removal(schedule, place), anywhere(schedule, [place])
    finding = rules.EMPTY_STEP.at(schedule, place)
    if many[number] > (usual or 1):
        return Finding(finding, chain((out,), moves), out)
    stage, rank = schedule.holdings[number]
    otherwise: Change = out
    turns, gradients = schedule.dataflow.steps_before, schedule.dataflow.weight_gradients[stage]
    if not (turns[gradients] == turns[place]).any():  # nor has it anything on other ranks
        steps = columns.is_kind(Kind.OPTIM_STEP) & (columns.stage == stage)
        steps &= turns == turns[place]
        otherwise = several(removal(schedule, step) for step in np.flatnonzero(steps).tolist())
    elif len(schedule.placement[stage]) > 1:
        last = last_of_stage(columns, stage, rank, *_ENDS_WITH_A_STEP)
        if columns.is_kind(Kind.REDUCE_GRAD)[last] and last > place:
            otherwise = moved_beside(schedule, place, "after", last)
        else:
            otherwise = beside(schedule, Action(Kind.REDUCE_GRAD, stage), "before", place)
    return Finding(finding, chain(moves, (otherwise, out)), otherwise)


def _equally_often(schedule: Schedule, steps: Ints, holding: Ints, many: Ints) -> Iterator[Faults]:
    """The replicas of a stage have the same number of OPTIM_STEPs."""
    first = 0  # the number of the stage on its first rank
    usual = Counter(many.tolist())
    for stage, held in enumerate(schedule.placement):
        has = dict(zip(held, many[first : first + len(held)].tolist(), strict=True))
        least = min(held, key=lambda rank: (has[rank], rank))
        for number, rank in enumerate(held, first):
            if has[rank] > has[least]:
                own = steps[holding[steps] == number].tolist()
                add = _one_more_step(schedule, stage, least)
                out = several(removal(schedule, step) for step in own[has[least] :])
                lacks = usual[has[least]] <= usual[has[rank]]
                enough = has[rank] - has[least] == 1
                likely, other = (add, out) if lacks and enough else (out, add)
                single = map(removal, [schedule] * len(own), own)
                yield fault(
                    rules.UNEVEN_REPLICAS.at(
                        schedule,
                        own[has[least]],
                        steps=has[rank],
                        least=least,
                        fewest=has[least],
                    ),
                    chain((likely, other), single),
                    otherwise=likely,
                    key=number,
                    extent=has[rank] - has[least],
                )
        first += len(held)


def _tied_groups(schedule: Schedule, ties: Ties) -> Iterator[Faults]:
    """The stages of a tie apply the same microbatches in their k-th OPTIM_STEPs."""
    turns = _turns(schedule)
    for number, tie in enumerate(ties):
        for stage in tie[1:]:
            if (turns[stage] != turns[tie[0]]).any():
                step, places, microbatches = _first_difference(schedule, stage, tie[0])
                finding = rules.UNEVEN_STEPS.at(
                    schedule,
                    *places,
                    step=step,
                    applied=microbatches[0],
                    expected=microbatches[1],
                )
                key = number * schedule.stages + stage
                extent = int((turns[stage] != turns[tie[0]]).sum())
                grouped = [
                    change
                    for one, other in ((stage, tie[0]), (tie[0], stage))
                    if (change := _grouped_as(schedule, one, turns[other]))
                ]
                merged = _merged(schedule, (stage, tie[0]), step, microbatches)
                yield fault(
                    finding,
                    chain(grouped, anywhere(schedule, places), (merged,)),
                    otherwise=merged,
                    key=key,
                    extent=extent,
                )


def _merged(
    schedule: Schedule, stages: tuple[int, int], step: int, microbatches: _TwoSets
) -> Change:
    """One of two stages, or both, without the OPTIM_STEP of a number, so that the next one applies
    its gradients: the one that applies a part of the other's."""
    columns, turns = schedule.columns, schedule.dataflow.steps_before
    steps = columns.where(Kind.OPTIM_STEP)
    one, other = map(set, microbatches)
    merged = stages[:1] if one < other else stages[1:] if other < one else stages
    edits = []
    for stage in merged:
        own = steps[columns.stage[steps] == stage]
        if turns[own].max() > step:
            edits += [removal(schedule, place) for place in own[turns[own] == step].tolist()]
    return several(edits)


def _grouped_as(schedule: Schedule, stage: int, turns: Ints) -> Change | None:
    """The OPTIM_STEPs of a stage after the same microbatches as another one's, of which `turns`
    says by microbatch which one applies it; None where the order of its gradients allows none, or
    where they are summed before."""
    columns, flow = schedule.columns, schedule.dataflow
    own = columns.stage == stage
    if (own & columns.is_kind(Kind.REDUCE_GRAD)).any() or len(schedule.placement[stage]) > 1:
        return None
    gradients = flow.weight_gradients[stage]
    order = np.argsort(gradients)
    wanted = turns[order]
    if (np.diff(wanted) < 0).any():
        return None
    # A step comes after the last gradient that it applies, and before the first of the next one.
    ends = np.flatnonzero(np.append(np.diff(wanted) > 0, True))
    after = gradients[order][ends].tolist()
    before = [*gradients[order][ends[:-1] + 1].tolist(), len(columns)]
    steps = np.flatnonzero(own & columns.is_kind(Kind.OPTIM_STEP)).tolist()
    edits: list[Edit] = []
    for low, high in zip(after, before, strict=True):
        right = next((step for step in steps if low < step < high), None)
        if right is None:
            edits.append(beside(schedule, Action(Kind.OPTIM_STEP, stage), "after", low))
        else:
            steps.remove(right)
    edits += (removal(schedule, step) for step in steps)
    return several(edits) if edits else None


def different_rates(schedule: Schedule) -> Iterator[Faults]:
    """One note for a schedule that is right, but whose stages don't step after the same
    microbatches."""
    if not schedule.columns.is_kind(Kind.OPTIM_STEP).any():
        return
    turns = _turns(schedule)
    stages = np.flatnonzero((turns != turns[-1]).any(axis=1))
    if len(stages):
        step, places, microbatches = _first_difference(
            schedule, int(stages[0]), schedule.stages - 1
        )
        yield fault(
            rules.DIFFERENT_RATES.at(
                schedule,
                *places,
                step=step,
                applied=microbatches[0],
                expected=microbatches[1],
                differing=len(stages),
                stages=schedule.stages,
            ),
            extent=len(stages),
        )


def _turns(schedule: Schedule) -> Ints:
    """Which OPTIM_STEP of its stage applies each gradient, shape [stages, microbatches]."""
    return schedule.dataflow.steps_before[schedule.dataflow.weight_gradients]


_TwoSets: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def _first_difference(
    schedule: Schedule, stage: int, other: int
) -> tuple[int, tuple[int, int], _TwoSets]:
    """The first OPTIM_STEP for which two stages do not have the same microbatches; those after it
    differ as a consequence. Its number, its places in both stages, and their microbatches."""
    columns, turns, turn = schedule.columns, _turns(schedule), schedule.dataflow.steps_before
    both = turns[[stage, other]]
    step = int(both.min(axis=0)[both[0] != both[1]].min())
    steps = columns.where(Kind.OPTIM_STEP)
    steps = steps[turn[steps] == step]
    one, two = (int(steps[columns.stage[steps] == s][0]) for s in (stage, other))
    applied, expected = (tuple(np.flatnonzero(own == step).tolist()) for own in both)
    return step, (one, two), (applied, expected)
