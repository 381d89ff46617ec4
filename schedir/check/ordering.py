"""S2xx: each rank's compute is in an order that makes sense, and each gradient is applied once."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator

import attrs
import numpy as np

from schedir.check.diagnostics import Diagnostic, locate, move
from schedir.check.rules import ordering as rules
from schedir.ir import Columns, Ints, Kind, Schedule, collective_turns


def ordering(schedule: Schedule) -> Iterator[Diagnostic]:
    """What is wrong with the order of compute on each rank. Expects a sound structure."""
    yield from _compute_order(schedule)
    columns = schedule.columns
    steps = columns.where(Kind.OPTIM_STEP)
    reduces = columns.where(Kind.REDUCE_GRAD)
    if len(reduces) or any(len(held) > 1 for held in schedule.placement):
        yield from _reduced(schedule, bool(len(steps)))
    if len(steps):
        yield from _applied_once(schedule, steps)


def _compute_order(schedule: Schedule) -> Iterator[Diagnostic]:
    """Every action stands behind what it uses of its own rank."""
    flow = schedule.dataflow
    forward, gradient = flow.of(Kind.FORWARD), flow.gradients
    weight = flow.of(Kind.BACKWARD_WEIGHT)
    for rule, actions, used in (
        (rules.InputNotReady, forward[1:], forward[:-1]),
        (rules.InputNotReady, gradient[:-1], gradient[1:]),
        (rules.BackwardBeforeForward, gradient, forward),
        (rules.BackwardBeforeForward, weight, forward),
        (rules.WeightBeforeInput, weight, flow.of(Kind.BACKWARD_INPUT)),
    ):
        early = (actions >= 0) & (used > actions)
        here, there = actions[early], used[early]
        same = schedule.columns.rank[here] == schedule.columns.rank[there]
        for place, later in zip(here[same].tolist(), there[same].tolist(), strict=True):
            yield rule(
                locations=(locate(schedule, place), locate(schedule, later)),
                moves=(
                    move(schedule.columns, place, "behind", later),
                    move(schedule.columns, later, "before", place),
                ),
            )


def _applied_once(schedule: Schedule, steps: Ints) -> Iterator[Diagnostic]:
    """Every gradient has an OPTIM_STEP behind it, and every OPTIM_STEP has gradients."""
    turn, gradients = schedule.dataflow.steps_before, schedule.dataflow.weight_gradients
    places = np.sort(gradients.ravel())
    # One number for each stage on each rank; by it, how many steps that has.
    holding = _holdings(schedule)
    many = np.bincount(holding[steps], minlength=sum(map(len, schedule.placement)))
    late = places[turn[places] >= many[holding[places]]]
    yield from _never_applied(schedule, steps, late, holding)
    yield from _empty_steps(schedule, steps, places, holding, turn)
    yield from _equally_often(schedule, steps, holding, many)
    if not len(late):  # which this would only echo
        yield from _same_groups(schedule, steps, turn, turn[gradients])


def _holdings(schedule: Schedule) -> Ints:
    """For every place, the number of its stage on its rank: 0, 1, … by stage, then rank."""
    keys = np.array([stage * schedule.ranks + rank for stage, rank in schedule.holdings])
    return np.searchsorted(keys, schedule.columns.stage * schedule.ranks + schedule.columns.rank)


def _never_applied(
    schedule: Schedule, steps: Ints, late: Ints, holding: Ints
) -> Iterator[Diagnostic]:
    for each in np.unique(holding[late]).tolist():
        own = late[holding[late] == each].tolist()
        own_steps = steps[holding[steps] == each].tolist()
        places = tuple(locate(schedule, place) for place in own)
        if own_steps:
            last = own_steps[-1]
            yield rules.StepBeforeGradients(
                locations=(locate(schedule, last), *places),
                moves=(move(schedule.columns, last, "behind", own[-1]),),
            )
        else:
            yield rules.GradientNeverApplied(locations=places)


def _empty_steps(
    schedule: Schedule, steps: Ints, gradients: Ints, holding: Ints, turn: Ints
) -> Iterator[Diagnostic]:
    columns = schedule.columns
    # A replica may have run none of the step's microbatches; REDUCE_GRAD gives it the sum.
    replicated = np.array([len(held) > 1 for held in schedule.placement])
    reduces = columns.where(Kind.REDUCE_GRAD)
    filling = np.concatenate((gradients, reduces[replicated[columns.stage[reduces]]]))
    round_ = holding * len(columns) + turn
    for place in steps[~np.isin(round_[steps], round_[filling])].tolist():
        yield rules.EmptyStep(locations=(locate(schedule, place),))


def _equally_often(
    schedule: Schedule, steps: Ints, holding: Ints, many: Ints
) -> Iterator[Diagnostic]:
    """The replicas of a stage have the same number of OPTIM_STEPs."""
    first = 0  # the number of the stage on its first rank
    for held in schedule.placement:
        has = dict(zip(held, many[first : first + len(held)].tolist(), strict=True))
        least = min(held, key=lambda rank: (has[rank], rank))
        for number, rank in enumerate(held, first):
            if has[rank] > has[least]:
                own = steps[holding[steps] == number]
                yield rules.UnevenReplicas(
                    locations=(locate(schedule, int(own[has[least]])),),
                    has=has[rank],
                    least=least,
                    fewest=has[least],
                )
        first += len(held)


def _same_groups(schedule: Schedule, steps: Ints, turn: Ints, turns: Ints) -> Iterator[Diagnostic]:
    """Every stage applies the same microbatches in its k-th OPTIM_STEP as the loss stage.

    `turns` says which step applies each gradient, shape [stages, microbatches].
    """
    columns = schedule.columns
    loss = turns[-1]
    for stage in np.flatnonzero((turns != loss).any(axis=1)).tolist():
        here = turns[stage]
        # The first step that differs; those behind it do as a consequence.
        first = int(np.minimum(here, loss)[here != loss].min())
        own, last = (
            steps[(columns.stage[steps] == s) & (turn[steps] == first)]
            for s in (stage, schedule.stages - 1)
        )
        if len(own) and len(last):
            yield rules.UnevenSteps(
                locations=(locate(schedule, int(own[0])), locate(schedule, int(last[0]))),
                turn=first,
                here=tuple(np.flatnonzero(here == first).tolist()),
                loss=tuple(np.flatnonzero(loss == first).tolist()),
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


def _reduced(schedule: Schedule, steps: bool) -> Iterator[Diagnostic]:
    """Between two OPTIM_STEPs the gradients come first, then the REDUCE_GRAD."""
    rounds = _rounds(schedule.columns)
    held = schedule.placement
    # Of a stage on one rank, REDUCE_GRAD sums over a data-parallel group that the schedule does
    # not show: either all of those stages have it, or none.
    over_data = any(
        len(held[stage]) == 1 and any(each.reduces and each.gradients for each in own)
        for (_, stage), own in rounds.items()
    )
    for (_, stage), own in sorted(rounds.items()):
        for each in own:
            yield from _reduced_last(schedule, each)
            # Gradients behind the last OPTIM_STEP are never applied, which is another finding.
            where = each.step
            if where is None and each.gradients and not steps:
                where = each.gradients[-1]
            needed = over_data or len(held[stage]) > 1
            if needed and not each.reduces and where is not None:
                yield rules.StepWithoutReduce(
                    locations=(locate(schedule, where),),
                    held=held[stage],
                    before=each.step is not None,
                )
    yield from _collectives(schedule, rounds)


def _reduced_last(schedule: Schedule, each: _Round) -> Iterator[Diagnostic]:
    for reduce in each.reduces:
        late = len(each.gradients) - bisect(each.gradients, reduce)
        if late:
            last = each.gradients[-1]
            yield rules.ReduceBeforeGradients(
                locations=(locate(schedule, reduce), locate(schedule, last)),
                late=late,
                moves=(move(schedule.columns, reduce, "behind", last),),
            )


def _collectives(
    schedule: Schedule, rounds: dict[tuple[int, int], list[_Round]]
) -> Iterator[Diagnostic]:
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
    for places in collective_turns(schedule):
        locations = tuple(locate(schedule, place) for place in places)
        if len(set(turn[list(places)].tolist())) > 1:
            yield rules.ReduceAcrossSteps(
                locations=locations, turns=tuple(turn[list(places)].tolist())
            )
        elif len(places) > 1 and not any(new[place] for place in places):
            yield rules.EmptyReduce(locations=locations)
