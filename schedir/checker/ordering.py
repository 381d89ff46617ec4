"""S2xx: each rank's compute is in a sensible order, and each gradient is summed and applied
once."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from schedir.checker import rules
from schedir.checker.changes import (
    Add,
    Change,
    Edit,
    Move,
    Side,
    after_stage,
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
from schedir.checker.diagnostics import Faults, Finding, fault
from schedir.checker.values import values, wrong
from schedir.graph.compile import Graph, graph_of
from schedir.ir import COMPLETES_GRADIENTS, KIND_INDEX, STEPS, SUMS, Action, Ints, Schedule, Ties

(_STEP,), (_SUM,) = STEPS, SUMS
# What a stage has on a rank, but for what it computes first: the last of it is a step.
_ENDS_WITH_A_STEP = (*COMPLETES_GRADIENTS, _SUM, _STEP)


def ordering(schedule: Schedule, ties: Ties = ()) -> Iterator[Faults]:
    """The faults in the order of compute on each rank. Expects a sound structure."""
    yield from (values(schedule, told) for told in wrong(schedule))
    graph = graph_of(schedule)
    if schedule.columns.is_kind(_SUM).any() or graph.summed.any():
        yield from _summed_once(graph)
    if len(graph.steps):
        yield from _applied_once(graph, ties)


def without_steps(schedule: Schedule) -> Iterator[Faults]:
    """The note for a correct schedule that leaves the update to its caller."""
    graph = graph_of(schedule)
    if not len(graph.steps):
        yield fault(rules.NO_STEP.at(schedule, int(graph.weight_gradients.max())))


# Sums of gradients: once, of all that a round of steps applies.


def _round(graph: Graph, places: Ints) -> Ints:
    """The number of each place's round, which lasts from one step of its stage on its rank to the
    next."""
    rounds: Ints = graph.first_round[graph.holding[places]] + graph.turn[places]
    return rounds


def _summed_once(graph: Graph) -> Iterator[Faults]:
    """Between two steps the gradients come first, then their sum, which all replicas make."""
    columns, size = graph.columns, len(graph.columns)
    # By round, then place.
    gradients, sums = (
        np.sort(_round(graph, places) * size + places)
        for places in (graph.weight_gradients.ravel(), columns.where(_SUM))
    )
    places, rounds = sums % size, sums // size
    here, end = (np.searchsorted(gradients, bound) for bound in (sums, (rounds + 1) * size))
    many = np.bincount(rounds, minlength=int(graph.first_round[-1]))
    yield _without_sum(graph, gradients, many)
    late = end - here
    early = np.flatnonzero(late)
    whole = np.isin(rounds[early], rounds[late == 0])
    facts = places[early], gradients[end[early] - 1] % size, late[early], whole
    yield Faults(
        rule=rules.REDUCE_BEFORE_GRADIENTS,
        keys=graph.holding[places[early]],
        extents=late[early],
        findings=map(partial(_summed_early, graph), *(fact.tolist() for fact in facts)),
    )
    # Of each gradient the sum after it.
    after = np.searchsorted(sums, gradients)
    summed = np.append(rounds, -1)[after] == gradients // size
    new = {*places[after[summed]].tolist()}
    meetings = [p for p in graph.collectives if columns.kind[p[0]] == KIND_INDEX[_SUM]]
    turns = {p: len({*graph.turn[[*p]].tolist()}) for p in meetings}
    across = [p for p in meetings if turns[p] > 1]
    empty = [p for p in meetings if turns[p] == 1 and new.isdisjoint(p)]
    for rule, found, finding in (
        (rules.REDUCE_ACROSS_STEPS, across, partial(_across, graph, many)),
        (rules.EMPTY_REDUCE, empty, partial(_empty_sum, graph)),
    ):
        firsts = np.array([meeting[0] for meeting in found], np.int64)
        yield Faults(rule=rule, keys=columns.stage[firsts], findings=map(finding, found))


def _without_sum(graph: Graph, gradients: Ints, many: Ints) -> Faults:
    """The rounds without a sum, of a stage whose gradients are summed. `many` is the number of
    `gradients` in each round."""
    stage, size = graph.columns.stage, len(graph.columns)
    needed = graph.summed
    where = graph.steps
    side: Side = "before" if len(where) else "after"
    if not len(where):
        # Gradients after the last step are never applied, which is another finding.
        last = np.append(np.diff(gradients // size) > 0, True)
        where = np.sort(gradients[last] % size)
    where = where[needed[stage[where]] & (many[_round(graph, where)] == 0)]
    return Faults(
        rule=rules.STEP_WITHOUT_REDUCE,
        keys=graph.holding[where],
        findings=(_unsummed(graph.schedule, place, side) for place in where.tolist()),
    )


def _unsummed(schedule: Schedule, place: int, side: Side) -> Finding:
    stage = int(schedule.columns.stage[place])
    add = beside(schedule, Action(_SUM, stage), side, place)
    return Finding(
        rules.STEP_WITHOUT_REDUCE.at(
            schedule,
            place,
            held=schedule.placement[stage],
            sharded=graph_of(schedule).sharded[stage],
        ),
        chain(_summing(schedule, place), (add,)),
        add,
    )


def _summing(schedule: Schedule, place: int) -> Iterator[Move]:
    """The changes that bring a sum before a step: moves of the step, or of the sum next to it."""
    columns = schedule.columns
    own = (columns.rank == columns.rank[place]) & (columns.stage == columns.stage[place])
    sums = np.flatnonzero(own & columns.is_kind(_SUM)).tolist()
    next_to = bisect(sums, place)
    if sums:
        yield from anywhere(schedule, (place, *sums[max(0, next_to - 1) : next_to + 1]))


def _summed_early(graph: Graph, place: int, last: int, late: int, whole: bool) -> Finding:
    """The finding for a sum with `late` gradients after it, up to the `last` one; another sum may
    cover the `whole` round."""
    schedule = graph.schedule
    finding = rules.REDUCE_BEFORE_GRADIENTS.at(schedule, place, last, late=late)
    if whole:  # the early one is one too many
        alone = removal(schedule, place)
        return Finding(finding, (alone, several(_everywhere(graph, place))), alone)
    slides = [back(schedule, place, last)]
    if late == 1:
        slides.append(ahead(schedule, last, place))
    return Finding(finding, in_turn(slides), moved_beside(schedule, place, "after", last))


def _everywhere(graph: Graph, place: int) -> Iterator[Edit]:
    """The change that removes a sum, and the sums on other ranks that it meets."""
    met = next((places for places in graph.collectives if place in places), (place,))
    yield from (removal(graph.schedule, each) for each in met)


def _empty_sum(graph: Graph, places: tuple[int, ...]) -> Finding:
    out, moves = _removals(graph.schedule, places), anywhere(graph.schedule, places)
    return Finding(rules.EMPTY_REDUCE.at(graph.schedule, *places), chain((out,), moves), out)


def _removals(schedule: Schedule, places: Iterable[int]) -> Change:
    return several(removal(schedule, place) for place in places)


def _across(graph: Graph, many: Ints, places: tuple[int, ...]) -> Finding:
    """The changes that remove a sum that some ranks have in excess in an earlier round, or add one
    on the other ranks."""
    schedule, turns = graph.schedule, graph.turn[[*places]]
    behind = np.array(places)[turns == turns.min()]
    further = np.array(places)[turns > turns.min()].tolist()
    changes: list[Change] = []
    if (many[_round(graph, behind)] > 1).all():
        changes.append(_removals(schedule, behind.tolist()))
    changes.append(several(_one_more_sum(graph, place, int(turns.min())) for place in further))
    return Finding(
        rules.REDUCE_ACROSS_STEPS.at(schedule, *places, steps=tuple(turns.tolist())),
        chain(changes, anywhere(schedule, places)),
        changes[0],
    )


def _one_more_sum(graph: Graph, place: int, turn: int) -> Edit:
    """The change that adds a sum on the rank of a later one, before the step of a round."""
    step = _steps_of(graph, int(graph.holding[place]))[turn]
    return beside(graph.schedule, graph.columns.action(place), "before", step)


# Steps: each gradient has one, and each has gradients.


def _applied_once(graph: Graph, ties: Ties) -> Iterator[Faults]:
    """Every gradient has a step after it, and every step has gradients."""
    gradients = graph.weight_gradients.ravel()
    late = np.sort(gradients[graph.turn[gradients] >= graph.steps_of[graph.holding[gradients]]])
    if len(late):
        yield from _never_applied(graph, late)
    yield _empty_steps(graph, gradients)
    yield from _equally_often(graph)
    if not len(late):  # which this would only echo
        yield from _tied_groups(graph, ties)


def _steps_of(graph: Graph, holding: int) -> list[int]:
    """The places of the steps of a stage on a rank."""
    places: list[int] = graph.steps[graph.holding[graph.steps] == holding].tolist()
    return places


def _usual(graph: Graph, holding: int) -> int:
    """How many steps most of the other stages, and the replicas of this one, have."""
    others = np.bincount(np.delete(graph.steps_of, holding), minlength=1)
    return len(others) - 1 - int(others[::-1].argmax())


def _never_applied(graph: Graph, late: Ints) -> Iterator[Faults]:
    """The stages, on each of their ranks, with gradients after their last step."""
    holding = graph.holding[late]
    numbers, extents = np.unique(holding, return_counts=True)
    stepping = graph.steps_of[numbers] > 0
    for rule, which in (
        (rules.STEP_BEFORE_GRADIENTS, stepping),
        (rules.GRADIENT_NEVER_APPLIED, ~stepping),
    ):
        yield Faults(
            rule=rule,
            keys=numbers[which],
            extents=extents[which],
            findings=(
                _unapplied(graph, number, late[holding == number].tolist())
                for number in numbers[which].tolist()
            ),
        )


def _unapplied(graph: Graph, number: int, gradients: list[int]) -> Finding:
    """The finding for a stage on a rank."""
    schedule, steps = graph.schedule, _steps_of(graph, number)
    add = _one_more_step(schedule, *schedule.holdings[number])
    if not steps:
        return Finding(rules.GRADIENT_NEVER_APPLIED.at(schedule, *gradients), otherwise=add)
    last = steps[-1]
    slides = [back(schedule, last, gradients[-1])]
    if len(gradients) == 1:
        slides.append(ahead(schedule, gradients[0], last))
    moves: Iterable[Change] = in_turn(slides)
    lacks = len(steps) < _usual(graph, number)
    return Finding(
        rules.STEP_BEFORE_GRADIENTS.at(schedule, last, *gradients, late=len(gradients)),
        chain((add,), moves) if lacks else moves,
        add if lacks else moved_beside(schedule, last, "after", gradients[-1]),
    )


def _one_more_step(schedule: Schedule, stage: int, rank: int) -> Add:
    """The change that adds a step after all that a stage must apply on a rank, and after its
    sums."""
    return after_stage(schedule, Action(_STEP, stage), rank, *_ENDS_WITH_A_STEP)


def _empty_steps(graph: Graph, gradients: Ints) -> Faults:
    # A replica may have run none of the step's microbatches; a collective gives it the sum.
    sums = graph.columns.where(_SUM)
    replicated = np.array([len(held) > 1 for held in graph.schedule.placement])
    filling = np.concatenate((gradients, sums[replicated[graph.columns.stage[sums]]]))
    filled = np.bincount(_round(graph, filling), minlength=int(graph.first_round[-1]))
    empty = graph.steps[filled[_round(graph, graph.steps)] == 0]
    return Faults(
        rule=rules.EMPTY_STEP,
        keys=graph.holding[empty],
        findings=(_empty(graph, place) for place in empty.tolist()),
    )


def _empty(graph: Graph, place: int) -> Finding:
    """The changes that remove an empty step. If its stage would then have no step, or fewer than
    other stages, the step gets something to apply instead."""
    schedule, columns, number = graph.schedule, graph.columns, int(graph.holding[place])
    out, moves = removal(schedule, place), anywhere(schedule, [place])
    finding = rules.EMPTY_STEP.at(schedule, place)
    if graph.steps_of[number] > (_usual(graph, number) or 1):
        return Finding(finding, chain((out,), moves), out)
    stage, rank = schedule.holdings[number]
    otherwise: Change = out
    turns = graph.turn
    if not (turns[graph.weight_gradients[stage]] == turns[place]).any():  # nor on other ranks
        own = graph.steps[columns.stage[graph.steps] == stage]
        otherwise = _removals(schedule, own[turns[own] == turns[place]].tolist())
    elif len(schedule.placement[stage]) > 1:
        last = last_of_stage(columns, stage, rank, *_ENDS_WITH_A_STEP)
        if columns.is_kind(_SUM)[last] and last > place:
            otherwise = moved_beside(schedule, place, "after", last)
        else:
            otherwise = beside(schedule, Action(_SUM, stage), "before", place)
    return Finding(finding, chain(moves, (otherwise, out)), otherwise)


def _equally_often(graph: Graph) -> Iterator[Faults]:
    """The replicas of a stage have the same number of steps."""
    schedule, many = graph.schedule, graph.steps_of.tolist()
    usual, first = Counter(many), 0
    for stage, held in enumerate(schedule.placement):
        counts = many[first : first + len(held)]
        fewest = min(counts)
        least = held[counts.index(fewest)]
        for number, steps in enumerate(counts, first):
            if steps > fewest:
                own = _steps_of(graph, number)
                add = _one_more_step(schedule, stage, least)
                out = _removals(schedule, own[fewest:])
                adds = usual[fewest] <= usual[steps] and steps - fewest == 1
                likely, other = (add, out) if adds else (out, add)
                finding = rules.UNEVEN_REPLICAS.at(
                    schedule, own[fewest], steps=steps, least=least, fewest=fewest
                )
                yield fault(
                    finding,
                    chain((likely, other), map(removal, [schedule] * steps, own)),
                    otherwise=likely,
                    key=number,
                    extent=steps - fewest,
                )
        first += len(held)


def _tied_groups(graph: Graph, ties: Ties) -> Iterator[Faults]:
    """The stages of a tie apply the same microbatches in their k-th steps."""
    turns = _turns(graph)
    for number, tie in enumerate(ties):
        for stage in tie[1:]:
            if (turns[stage] != turns[tie[0]]).any():
                places, facts = _first_difference(graph, stage, tie[0])
                grouped = [
                    change
                    for one, other in ((stage, tie[0]), (tie[0], stage))
                    if (change := _grouped_as(graph, one, turns[other]))
                ]
                merged = _merged(graph, (stage, tie[0]), **facts)
                yield fault(
                    rules.UNEVEN_STEPS.at(graph.schedule, *places, **facts),
                    chain(grouped, anywhere(graph.schedule, places), (merged,)),
                    otherwise=merged,
                    key=number * graph.schedule.stages + stage,
                    extent=int((turns[stage] != turns[tie[0]]).sum()),
                )


def _merged(
    graph: Graph,
    stages: tuple[int, int],
    step: int,
    applied: tuple[int, ...],
    expected: tuple[int, ...],
) -> Change:
    """The changes that remove a step from one of two stages, or from both, so that the next step
    applies its gradients. The step that applies a part of the other's goes first."""
    one, other = {*applied}, {*expected}
    merged = stages[:1] if one < other else stages[1:] if other < one else stages
    edits = []
    for stage in merged:
        own = graph.steps[graph.columns.stage[graph.steps] == stage]
        if graph.turn[own].max() > step:
            own = own[graph.turn[own] == step]
            edits += [removal(graph.schedule, place) for place in own.tolist()]
    return several(edits)


def _grouped_as(graph: Graph, stage: int, turns: Ints) -> Change | None:
    """The steps of a stage after the same microbatches as another stage's. `turns` names, by
    microbatch, the other stage's step. None if the order of the gradients does not allow it, or if
    they are summed before."""
    schedule, gradients = graph.schedule, graph.weight_gradients[stage]
    if graph.summed[stage] or len(schedule.placement[stage]) > 1:
        return None
    order = np.argsort(gradients)
    wanted = turns[order]
    if (np.diff(wanted) < 0).any():
        return None
    # A step comes after the last gradient that it applies, and before the first of the next one.
    ends = np.flatnonzero(np.append(np.diff(wanted) > 0, True))
    after = gradients[order][ends].tolist()
    before = [*gradients[order][ends[:-1] + 1].tolist(), len(graph.columns)]
    steps = graph.steps[graph.columns.stage[graph.steps] == stage].tolist()
    edits: list[Edit] = []
    for low, high in zip(after, before, strict=True):
        right = next((step for step in steps if low < step < high), None)
        if right is None:
            edits.append(beside(schedule, Action(_STEP, stage), "after", low))
        else:
            steps.remove(right)
    edits += (removal(schedule, step) for step in steps)
    return several(edits) if edits else None


def different_rates(schedule: Schedule) -> Iterator[Faults]:
    """One note for a correct schedule whose stages don't step after the same microbatches."""
    graph = graph_of(schedule)
    turns = _turns(graph)
    stages = np.flatnonzero((turns != turns[-1]).any(axis=1))
    if len(stages):
        places, facts = _first_difference(graph, int(stages[0]), schedule.stages - 1)
        differing = len(stages)
        yield fault(
            rules.DIFFERENT_RATES.at(
                schedule, *places, **facts, differing=differing, stages=schedule.stages
            ),
            extent=differing,
        )


def _turns(graph: Graph) -> Ints:
    """Which step of its stage applies each gradient, shape [stages, microbatches]."""
    return graph.turn[graph.weight_gradients]


def _first_difference(graph: Graph, stage: int, other: int) -> tuple[list[int], dict[str, Any]]:
    """The first step for which two stages have different microbatches: its places in both stages,
    its number, and both sets. Later differences follow from it."""
    both = _turns(graph)[[stage, other]]
    step = int(both.min(axis=0)[both[0] != both[1]].min())
    steps = graph.steps[graph.turn[graph.steps] == step]
    places = [int(steps[graph.columns.stage[steps] == of][0]) for of in (stage, other)]
    applied, expected = (tuple(np.flatnonzero(own == step).tolist()) for own in both)
    return places, {"step": step, "applied": applied, "expected": expected}
