"""S2xx: each rank's compute is in an order that makes sense, and each gradient is applied once."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator

import attrs
import numpy as np

from schedir.checker.changes import Move, ahead, anywhere, back, in_turn
from schedir.checker.diagnostics import locate, locations
from schedir.checker.faults import Faults, Finding, fault
from schedir.checker.rules import ordering as rules
from schedir.ir import Columns, Ints, Kind, Schedule, collective_turns


def ordering(schedule: Schedule) -> Iterator[Faults]:
    """What is wrong with the order of compute on each rank. Expects a sound structure."""
    yield from _compute_order(schedule)
    columns = schedule.columns
    steps = columns.where(Kind.OPTIM_STEP)
    reduces = columns.where(Kind.REDUCE_GRAD)
    if len(reduces) or any(len(held) > 1 for held in schedule.placement):
        yield from _reduced(schedule, bool(len(steps)))
    if len(steps):
        yield from _applied_once(schedule, steps)


def without_steps(schedule: Schedule) -> Iterator[Faults]:
    """A schedule that is right, but leaves the update to its caller."""
    if not schedule.columns.is_kind(Kind.OPTIM_STEP).any():
        last = int(schedule.dataflow.weight_gradients.max())
        yield fault(rules.NoStep(locations=(locate(schedule, last),)))


def _compute_order(schedule: Schedule) -> Iterator[Faults]:
    """Every action stands behind what it uses of its own rank."""
    flow = schedule.dataflow
    forward, gradient = flow.of(Kind.FORWARD), flow.gradients
    weight = flow.of(Kind.BACKWARD_WEIGHT)
    rank = schedule.columns.rank
    for number, (rule, actions, used) in enumerate(
        (
            (rules.InputNotReady, forward[1:], forward[:-1]),
            (rules.InputNotReady, gradient[:-1], gradient[1:]),
            (rules.BackwardBeforeForward, gradient, forward),
            (rules.BackwardBeforeForward, weight, forward),
            (rules.WeightBeforeInput, weight, flow.of(Kind.BACKWARD_INPUT)),
        )
    ):
        early = (actions >= 0) & (used > actions) & (rank[actions] == rank[used])
        pairs = np.flatnonzero(early)
        if len(pairs):
            here, there = actions.ravel()[pairs], used.ravel()[pairs]
            order = np.argsort(here)
            yield Faults(
                rule=rule,
                keys=number * forward.size + pairs[order],
                findings=_too_early(schedule, rule, here[order], there[order]),
            )


def _too_early(
    schedule: Schedule, rule: type[rules.ListedEarly], here: Ints, there: Ints
) -> Iterator[Finding]:
    for place, later in zip(here.tolist(), there.tolist(), strict=True):
        slides = (back(schedule, place, later), ahead(schedule, later, place))
        yield Finding(
            rule(locations=locations(schedule, (place, later))),
            in_turn(schedule, slides),
        )


def _applied_once(schedule: Schedule, steps: Ints) -> Iterator[Faults]:
    """Every gradient has an OPTIM_STEP behind it, and every OPTIM_STEP has gradients."""
    turn, gradients = schedule.dataflow.steps_before, schedule.dataflow.weight_gradients
    places = np.sort(gradients.ravel())
    # One number for each stage on each rank; by it, how many steps that has.
    holding = _holdings(schedule)
    many = np.bincount(holding[steps], minlength=sum(map(len, schedule.placement)))
    late = places[turn[places] >= many[holding[places]]]
    yield from _never_applied(schedule, steps, late, holding)
    yield _empty_steps(schedule, steps, places, holding, turn)
    yield from _equally_often(schedule, steps, holding, many)
    if not len(late):  # which this would only echo
        yield _same_groups(schedule, steps, turn, turn[gradients])


def _holdings(schedule: Schedule) -> Ints:
    """For every place, the number of its stage on its rank: 0, 1, … by stage, then rank."""
    keys = np.array([stage * schedule.ranks + rank for stage, rank in schedule.holdings])
    return np.searchsorted(keys, schedule.columns.stage * schedule.ranks + schedule.columns.rank)


def _never_applied(schedule: Schedule, steps: Ints, late: Ints, holding: Ints) -> Iterator[Faults]:
    """The stages, on each of their ranks, with gradients behind their last OPTIM_STEP."""
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
            Finding(rules.GradientNeverApplied(locations=locations(schedule, late_of[number])))
            for number in numbers[~stepping].tolist()
        ),
    )


def _step_too_early(schedule: Schedule, last: int, gradients: list[int]) -> Finding:
    slides = [back(schedule, last, gradients[-1])]
    if len(gradients) == 1:
        slides.append(ahead(schedule, gradients[0], last))
    places = locations(schedule, (last, *gradients))
    return Finding(rules.StepBeforeGradients(locations=places), in_turn(schedule, slides))


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
            Finding(
                rules.EmptyStep(locations=(locate(schedule, place),)), anywhere(schedule, [place])
            )
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
                    rules.UnevenReplicas(
                        locations=(locate(schedule, int(own[has[least]])),),
                        has=has[rank],
                        least=least,
                        fewest=has[least],
                    ),
                    key=number,
                )
        first += len(held)


def _same_groups(schedule: Schedule, steps: Ints, turn: Ints, turns: Ints) -> Faults:
    """Every stage applies the same microbatches in its k-th OPTIM_STEP as the loss stage.

    `turns` says which step applies each gradient, shape [stages, microbatches].
    """
    differ = turns != turns[-1]
    stages = np.flatnonzero(differ.any(axis=1))
    return Faults(
        rule=rules.UnevenSteps,
        keys=stages,
        extents=differ.sum(axis=1)[stages],
        findings=_unequal_groups(schedule, steps, turn, turns, stages),
    )


def _unequal_groups(
    schedule: Schedule, steps: Ints, turn: Ints, turns: Ints, stages: Ints
) -> Iterator[Finding]:
    columns = schedule.columns
    loss = turns[-1]
    for stage in stages.tolist():
        here = turns[stage]
        # The first step that differs; those behind it do as a consequence.
        first = int(np.minimum(here, loss)[here != loss].min())
        own, last = (
            steps[(columns.stage[steps] == s) & (turn[steps] == first)]
            for s in (stage, schedule.stages - 1)
        )
        yield Finding(
            rules.UnevenSteps(
                locations=locations(schedule, (own[0], last[0])),
                turn=first,
                here=tuple(np.flatnonzero(here == first).tolist()),
                loss=tuple(np.flatnonzero(loss == first).tolist()),
            ),
            anywhere(schedule, (int(own[0]), int(last[0]))),
        )


@attrs.frozen
class _Round:
    """A stage's gradients and REDUCE_GRADs on a rank up to an OPTIM_STEP, None for the rest."""

    gradients: list[int]
    reduces: list[int]
    step: int | None


_EVENTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.REDUCE_GRAD, Kind.OPTIM_STEP)


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


def _reduced(schedule: Schedule, steps: bool) -> Iterator[Faults]:
    """Between two OPTIM_STEPs the gradients come first, then the REDUCE_GRAD."""
    rounds = _rounds(schedule.columns)
    held = schedule.placement
    # Of a stage on one rank, REDUCE_GRAD sums over a data-parallel group that the schedule does
    # not show: either all of those stages have it, or none.
    over_data = any(
        len(held[stage]) == 1 and any(each.reduces and each.gradients for each in own)
        for (_, stage), own in rounds.items()
    )
    unsummed: dict[int, tuple[int, bool]] = {}
    early: dict[int, tuple[int, _Round]] = {}
    for (rank, stage), own in sorted(rounds.items()):
        holding = (stage * schedule.ranks + rank) * len(schedule.columns)
        nth = 0
        for turn, each in enumerate(own):
            for reduce in each.reduces:
                if _late(reduce, each):
                    early[holding + nth] = reduce, each
                nth += 1
            # Gradients behind the last OPTIM_STEP are never applied, which is another finding.
            where = each.step
            if where is None and each.gradients and not steps:
                where = each.gradients[-1]
            needed = over_data or len(held[stage]) > 1
            if needed and not each.reduces and where is not None:
                unsummed[holding + turn] = where, each.step is not None
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


def _unsummed(schedule: Schedule, place: int, before: bool) -> Finding:
    location = locate(schedule, place)
    held = schedule.placement[location.action.stage]
    return Finding(
        rules.StepWithoutReduce(locations=(location,), held=held, before=before),
        _summing(schedule, place),
    )


def _summing(schedule: Schedule, place: int) -> Iterator[Move]:
    """What brings a sum before a step: moves of the step, or of the sum next to it."""
    columns = schedule.columns
    here = (columns.rank == columns.rank[place]) & (columns.stage == columns.stage[place])
    sums = np.flatnonzero(here & columns.is_kind(Kind.REDUCE_GRAD)).tolist()
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
    places = locations(schedule, (reduce, last))
    return Finding(
        rules.ReduceBeforeGradients(locations=places, late=late), in_turn(schedule, slides)
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
                rules.ReduceAcrossSteps(
                    locations=locations(schedule, places),
                    turns=tuple(turn[list(places)].tolist()),
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
            Finding(
                rules.EmptyReduce(locations=locations(schedule, places)), anywhere(schedule, places)
            )
            for places in empty.values()
        ),
    )
