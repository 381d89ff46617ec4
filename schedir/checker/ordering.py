"""S2xx: each rank's compute is in an order that makes sense, and each gradient is applied once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from schedir.checker.changes import ahead, anywhere, back, in_turn
from schedir.checker.faults import Faults, Finding, fault
from schedir.checker.reductions import reductions
from schedir.checker.rules import ordering as rules
from schedir.ir import Ints, Kind, Schedule, Ties


def ordering(schedule: Schedule, ties: Ties = ()) -> Iterator[Faults]:
    """What is wrong with the order of compute on each rank. Expects a sound structure."""
    yield from _compute_order(schedule)
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
        yield fault(rules.NoStep.at(schedule, last))


def _compute_order(schedule: Schedule) -> Iterator[Faults]:
    """Every action stands after what it uses of its own rank."""
    flow = schedule.dataflow
    forward, gradient = flow.of(Kind.FORWARD), flow.gradients
    weight, again = flow.of(Kind.BACKWARD_WEIGHT), flow.of(Kind.RECOMPUTE)
    rank = schedule.columns.rank
    for number, (rule, actions, used) in enumerate(
        (
            (rules.InputNotReady, forward[1:], forward[:-1]),
            (rules.InputNotReady, gradient[:-1], gradient[1:]),
            (rules.BackwardBeforeForward, gradient, forward),
            (rules.BackwardBeforeForward, weight, forward),
            (rules.WeightBeforeInput, weight, flow.of(Kind.BACKWARD_INPUT)),
            (rules.RecomputeBeforeForward, again, forward),
            (rules.BackwardBeforeRecompute, gradient, again),
        )
    ):
        early = (actions >= 0) & (used > actions) & (rank[actions] == rank[used])
        pairs = np.flatnonzero(early)
        if len(pairs):
            early_places, used_places = actions.ravel()[pairs], used.ravel()[pairs]
            order = np.argsort(early_places)
            yield Faults(
                rule=rule,
                keys=number * forward.size + pairs[order],
                findings=_too_early(schedule, rule, early_places[order], used_places[order]),
            )


def _too_early(
    schedule: Schedule, rule: type[rules.ListedEarly], early: Ints, used: Ints
) -> Iterator[Finding]:
    for place, later in zip(early.tolist(), used.tolist(), strict=True):
        slides = (back(schedule, place, later), ahead(schedule, later, place))
        yield Finding(rule.at(schedule, place, later), in_turn(slides))


def _applied_once(schedule: Schedule, steps: Ints, ties: Ties) -> Iterator[Faults]:
    """Every gradient has an OPTIM_STEP after it, and every OPTIM_STEP has gradients."""
    turn, gradients = schedule.dataflow.steps_before, schedule.dataflow.weight_gradients
    places = np.sort(gradients.ravel())
    # One number for each stage on each rank; by it, how many steps that has.
    holding = _holdings(schedule)
    many = np.bincount(holding[steps], minlength=sum(map(len, schedule.placement)))
    late = places[turn[places] >= many[holding[places]]]
    if len(late):
        yield from _never_applied(schedule, steps, late, holding)
    yield _empty_steps(schedule, steps, places, holding, turn)
    yield from _equally_often(schedule, steps, holding, many)
    if not len(late):  # which this would only echo
        yield from _tied_groups(schedule, ties)


def _holdings(schedule: Schedule) -> Ints:
    """For every place, the number of its stage on its rank: 0, 1, … by stage, then rank."""
    keys = np.array([stage * schedule.ranks + rank for stage, rank in schedule.holdings])
    return np.searchsorted(keys, schedule.columns.stage * schedule.ranks + schedule.columns.rank)


def _never_applied(schedule: Schedule, steps: Ints, late: Ints, holding: Ints) -> Iterator[Faults]:
    """The stages, on each of their ranks, with gradients after their last OPTIM_STEP."""
    numbers, many = np.unique(holding[late], return_counts=True)
    stepping = np.isin(numbers, holding[steps])
    late_of = {number: late[holding[late] == number].tolist() for number in numbers.tolist()}
    last_of = {number: int(steps[holding[steps] == number][-1]) for number in numbers[stepping]}
    yield Faults(
        rule=rules.StepBeforeGradients,
        keys=numbers[stepping],
        extents=many[stepping],
        findings=(
            _step_too_early(schedule, last_of[number], late_of[number])
            for number in numbers[stepping].tolist()
        ),
    )
    yield Faults(
        rule=rules.GradientNeverApplied,
        keys=numbers[~stepping],
        extents=many[~stepping],
        findings=(
            Finding(rules.GradientNeverApplied.at(schedule, *late_of[number]))
            for number in numbers[~stepping].tolist()
        ),
    )


def _step_too_early(schedule: Schedule, last: int, gradients: list[int]) -> Finding:
    slides = [back(schedule, last, gradients[-1])]
    if len(gradients) == 1:
        slides.append(ahead(schedule, gradients[0], last))
    finding = rules.StepBeforeGradients.at(schedule, last, *gradients)
    return Finding(finding, in_turn(slides))


def _empty_steps(
    schedule: Schedule, steps: Ints, gradients: Ints, holding: Ints, turn: Ints
) -> Faults:
    columns = schedule.columns
    # A replica may have run none of the step's microbatches; REDUCE_GRAD gives it the sum.
    replicated = np.array([len(held) > 1 for held in schedule.placement])
    reduces = columns.where(Kind.REDUCE_GRAD)
    filling = np.concatenate((gradients, reduces[replicated[columns.stage[reduces]]]))
    round_ = holding * len(columns) + turn
    empty = steps[~np.isin(round_[steps], round_[filling])]
    return Faults(
        rule=rules.EmptyStep,
        keys=round_[empty],
        findings=(
            Finding(rules.EmptyStep.at(schedule, place), anywhere(schedule, [place]))
            for place in empty.tolist()
        ),
    )


def _equally_often(schedule: Schedule, steps: Ints, holding: Ints, many: Ints) -> Iterator[Faults]:
    """The replicas of a stage have the same number of OPTIM_STEPs."""
    first = 0  # the number of the stage on its first rank
    for held in schedule.placement:
        has = dict(zip(held, many[first : first + len(held)].tolist(), strict=True))
        least = min(held, key=lambda rank: (has[rank], rank))
        for number, rank in enumerate(held, first):
            if has[rank] > has[least]:
                own = steps[holding[steps] == number]
                yield fault(
                    rules.UnevenReplicas.at(
                        schedule,
                        own[has[least]],
                        steps=has[rank],
                        least=least,
                        fewest=has[least],
                    ),
                    key=number,
                )
        first += len(held)


def _tied_groups(schedule: Schedule, ties: Ties) -> Iterator[Faults]:
    """The stages of a tie apply the same microbatches in their k-th OPTIM_STEPs."""
    turns = _turns(schedule)
    for number, tie in enumerate(ties):
        for stage in tie[1:]:
            if (turns[stage] != turns[tie[0]]).any():
                step, places, microbatches = _first_difference(schedule, stage, tie[0])
                finding = rules.UnevenSteps.at(
                    schedule,
                    *places,
                    step=step,
                    applied=microbatches[0],
                    expected=microbatches[1],
                )
                key = number * schedule.stages + stage
                extent = int((turns[stage] != turns[tie[0]]).sum())
                yield fault(finding, anywhere(schedule, places), key=key, extent=extent)


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
            rules.DifferentRates.at(
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
