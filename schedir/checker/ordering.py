"""S2xx: each rank's compute is in a sensible order, and each gradient is summed and applied
once."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, compress
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
from schedir.checker.diagnostics import Diagnostic, Faults, Finding, fault
from schedir.checker.values import mended, values
from schedir.graph.compile import Graph, graph_of
from schedir.ir import COMPLETES_GRADIENTS, KIND_INDEX, STEPS, SUMS, Action, Ints, Schedule, Ties

(_STEP,), (_SUM,) = STEPS, SUMS
# What a stage has on a rank, but for what it computes first: the last of it is a step.
_ENDS_WITH_A_STEP = (*COMPLETES_GRADIENTS, _SUM, _STEP)


def ordering(schedule: Schedule, ties: Ties = ()) -> Iterator[Faults]:
    """The faults in the order of compute on each rank. Expects a sound structure."""
    yield from values(schedule, mended)
    graph = graph_of(schedule)
    if len(graph.steps) or graph.summed.any():
        yield from _rounds(schedule, graph)
        yield from _tied_groups(graph, ties) if ties else ()


def without_steps(schedule: Schedule) -> Iterator[Faults]:
    """The note for a correct schedule that leaves the update to its caller."""
    graph = graph_of(schedule)
    if not len(graph.steps):
        yield fault(rules.NO_STEP.at(schedule, int(graph.weight_gradients.max())))


# A round lasts from one step of a stage on its rank to the next: its gradients come first, then
# their sum, which all replicas make, and then the step that applies them.


def _round(graph: Graph, places: Ints) -> Ints:
    """The number of each place's round."""
    rounds: Ints = graph.first_round[graph.holding[places]] + graph.turn[places]
    return rounds


def _rounds(schedule: Schedule, graph: Graph) -> Iterator[Faults]:
    """Every gradient is summed and applied once, and every sum and step has gradients."""
    size = len(graph.columns)
    # Each as one number, ascending by round, then place.
    gradients, sums = (
        np.sort(_round(graph, places) * size + places)
        for places in (graph.weight_gradients.ravel(), graph.columns.where(_SUM))
    )
    if graph.summed.any():
        yield from _summed_once(schedule, graph, gradients, sums)
    if len(graph.steps):
        yield from _applied_once(schedule, graph, gradients, sums)
        yield _more_often(schedule, graph)


def _summed_once(schedule: Schedule, graph: Graph, gradients: Ints, sums: Ints) -> Iterator[Faults]:
    """The sum of each round follows all its gradients, of which the replicas have some."""
    columns, size = schedule.columns, len(schedule.columns)
    rounds, places = np.divmod(sums, size)
    # A step needs the sum of its round. In a list without steps, the last gradient is left over.
    last = gradients[np.append(np.diff(gradients // size) > 0, True)] % size
    where = graph.steps if len(graph.steps) else np.sort(last)
    where = where[graph.summed[columns.stage[where]] & ~np.isin(_round(graph, where), rounds)]
    stages = columns.stage[where]
    yield rules.STEP_WITHOUT_REDUCE.each(
        schedule,
        where,
        _unsummed,
        held=[schedule.placement[stage] for stage in stages.tolist()],
        sharded=graph.sharded[stages],
    )
    begin, here, end = np.searchsorted(gradients, [rounds * size, sums, rounds * size + size])
    late = end - here
    yield rules.REDUCE_BEFORE_GRADIENTS.each(
        schedule,
        np.column_stack((places, gradients[end - 1] % size))[late > 0],
        _summed_early,
        extents=late[late > 0],
        late=late[late > 0],
    )
    # A sum adds up what comes after the one before it.
    new = {*places[here > np.maximum(begin, np.append(0, here)[:-1])].tolist()}
    meetings = [p for p in graph.collectives if columns.kind[p[0]] == KIND_INDEX[_SUM]]
    turns = [tuple(graph.turn[[*p]].tolist()) for p in meetings]
    across = [len({*own}) > 1 for own in turns]
    empty = [new.isdisjoint(p) and not apart for p, apart in zip(meetings, across, strict=True)]
    yield rules.REDUCE_ACROSS_STEPS.each(
        schedule,
        [*compress(meetings, across)],
        _across,
        steps=[*compress(turns, across)],
    )
    yield rules.EMPTY_REDUCE.each(schedule, [*compress(meetings, empty)], _empty_sum)


def _unsummed(schedule: Schedule, found: Diagnostic, place: int) -> Finding:
    side: Side = "before" if len(graph_of(schedule).steps) else "after"
    add = beside(schedule, Action(_SUM, found.action.stage), side, place)
    return Finding(found, chain(_summing(schedule, place), (add,)), add)


def _summing(schedule: Schedule, place: int) -> Iterator[Move]:
    """The changes that bring a sum before a step: moves of the step, or of the sum next to it."""
    columns = schedule.columns
    own = (columns.rank == columns.rank[place]) & (columns.stage == columns.stage[place])
    sums = np.flatnonzero(own & columns.is_kind(_SUM)).tolist()
    next_to = bisect(sums, place)
    if sums:
        yield from anywhere(schedule, (place, *sums[max(0, next_to - 1) : next_to + 1]))


def _summed_early(schedule: Schedule, found: Diagnostic, place: int, last: int) -> Finding:
    """The finding for a sum with gradients after it, up to the `last` one. A later sum of the round
    may cover them all."""
    columns, graph = schedule.columns, graph_of(schedule)
    later = np.arange(last, columns.starts[columns.rank[place] + 1])
    later = later[columns.is_kind(_SUM)[later] & (columns.stage[later] == columns.stage[place])]
    if (graph.turn[later] == graph.turn[place]).any():  # the early one is one too many
        alone = removal(schedule, place)
        return Finding(found, (alone, several(_everywhere(graph, place))), alone)
    slides = [back(schedule, place, last)]
    if found.facts["late"] == 1:
        slides.append(ahead(schedule, last, place))
    return Finding(found, in_turn(slides), moved_beside(schedule, place, "after", last))


def _everywhere(graph: Graph, place: int) -> Iterator[Edit]:
    """The change that removes a sum, and the sums on other ranks that it meets."""
    met = next((places for places in graph.collectives if place in places), (place,))
    yield from (removal(graph.schedule, each) for each in met)


def _empty_sum(schedule: Schedule, found: Diagnostic, *places: int) -> Finding:
    out, moves = _removals(schedule, places), anywhere(schedule, places)
    return Finding(found, chain((out,), moves), out)


def _removals(schedule: Schedule, places: Iterable[int]) -> Change:
    return several(removal(schedule, place) for place in places)


def _across(schedule: Schedule, found: Diagnostic, *places: int) -> Finding:
    """The changes that remove a sum that some ranks have in excess in an earlier round, or add one
    on the other ranks."""
    graph = graph_of(schedule)
    turns = graph.turn[[*places]]
    behind = np.array(places)[turns == turns.min()]
    further = np.array(places)[turns > turns.min()].tolist()
    many = np.bincount(_round(graph, graph.columns.where(_SUM)))
    changes: list[Change] = []
    if (many[_round(graph, behind)] > 1).all():
        changes.append(_removals(schedule, behind.tolist()))
    changes.append(several(_one_more_sum(graph, place, int(turns.min())) for place in further))
    return Finding(found, chain(changes, anywhere(schedule, places)), changes[0])


def _one_more_sum(graph: Graph, place: int, turn: int) -> Edit:
    """The change that adds a sum on the rank of a later one, before the step of a round."""
    step = _steps_of(graph, int(graph.holding[place]))[turn]
    return beside(graph.schedule, graph.columns.action(place), "before", step)


def _applied_once(
    schedule: Schedule, graph: Graph, gradients: Ints, sums: Ints
) -> Iterator[Faults]:
    """Each gradient has a step after it, and each step has gradients."""
    steps, size = graph.steps, len(schedule.columns)
    unapplied = gradients[np.isin(gradients // size, graph.first_round[1:] - 1)] % size
    numbers, firsts, many = np.unique(
        graph.holding[unapplied], return_index=True, return_counts=True
    )
    rows = np.split(unapplied, firsts[1:])
    last = np.full(len(graph.steps_of), -1)
    last[graph.holding[steps]] = steps  # of several the last assignment counts
    for rule, which in (
        (rules.STEP_BEFORE_GRADIENTS, last[numbers] >= 0),
        (rules.GRADIENT_NEVER_APPLIED, last[numbers] < 0),
    ):
        yield rule.each(
            schedule,
            [*map(np.append, last[numbers[which]], compress(rows, which))],
            _unapplied,
            keys=numbers[which],
            extents=many[which],
            late=many[which],
        )
    # A replica may have run none of a step's microbatches; a collective gives it the sum.
    replicated = np.array([len(held) > 1 for held in schedule.placement])
    shared = sums[replicated[graph.columns.stage[sums % size]]]
    filled = np.append(gradients, shared) // size
    empty = steps[~np.isin(_round(graph, steps), filled)]
    yield rules.EMPTY_STEP.each(schedule, empty, _empty)


def _steps_of(graph: Graph, holding: int) -> list[int]:
    """The places of the steps of a stage on a rank."""
    places: list[int] = graph.steps[graph.holding[graph.steps] == holding].tolist()
    return places


def _usual(graph: Graph, holding: int) -> int:
    """How many steps most of the other stages, and the replicas of this one, have."""
    others = np.bincount(np.delete(graph.steps_of, holding), minlength=1)
    return len(others) - 1 - int(others[::-1].argmax())


def _unapplied(schedule: Schedule, found: Diagnostic, *places: int) -> Finding:
    """The finding for a stage on a rank: its last step, if there is one, and the gradients after
    that."""
    graph = graph_of(schedule)
    number = int(graph.holding[places[0]])
    add = _one_more_step(schedule, *schedule.holdings[number])
    if not graph.steps_of[number]:
        return Finding(found, otherwise=add)
    last, *gradients = places
    slides = [back(schedule, last, gradients[-1])]
    if len(gradients) == 1:
        slides.append(ahead(schedule, gradients[0], last))
    moves: Iterable[Change] = in_turn(slides)
    lacks = graph.steps_of[number] < _usual(graph, number)
    return Finding(
        found,
        chain((add,), moves) if lacks else moves,
        add if lacks else moved_beside(schedule, last, "after", gradients[-1]),
    )


def _one_more_step(schedule: Schedule, stage: int, rank: int) -> Add:
    """The change that adds a step after all that a stage must apply on a rank, and after its
    sums."""
    return after_stage(schedule, Action(_STEP, stage), rank, *_ENDS_WITH_A_STEP)


def _empty(schedule: Schedule, finding: Diagnostic, place: int) -> Finding:
    """The changes that remove an empty step. If its stage would then have no step, or fewer than
    other stages, the step gets something to apply instead."""
    columns, graph = schedule.columns, graph_of(schedule)
    number = int(graph.holding[place])
    out, moves = removal(schedule, place), anywhere(schedule, [place])
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


def _more_often(schedule: Schedule, graph: Graph) -> Faults:
    """The replicas with more steps than another one of their stage."""
    many = graph.steps_of
    stage, rank = np.array(schedule.holdings).T
    fewest = np.minimum.reduceat(many, np.searchsorted(stage, np.arange(schedule.stages)))[stage]
    more, least = np.flatnonzero(many > fewest), np.flatnonzero(many == fewest)
    least = least[np.searchsorted(stage[least], stage[more])]
    return rules.UNEVEN_REPLICAS.each(
        schedule,
        [[_steps_of(graph, number)[fewest[number]]] for number in more.tolist()],
        _spare_step,
        extents=(many - fewest)[more],
        steps=many[more],
        least=rank[least],
        fewest=fewest[more],
    )


def _spare_step(schedule: Schedule, found: Diagnostic, place: int) -> Finding:
    """The changes that remove what is spare, or add a step on the other replica."""
    graph = graph_of(schedule)
    number = int(graph.holding[place])
    fewest, steps = found.facts["fewest"], found.facts["steps"]
    usual, own = Counter(graph.steps_of.tolist()), _steps_of(graph, number)
    add = _one_more_step(schedule, found.action.stage, found.facts["least"])
    out = _removals(schedule, own[fewest:])
    adds = usual[fewest] <= usual[steps] and steps - fewest == 1
    likely, other = (add, out) if adds else (out, add)
    return Finding(
        found, chain((likely, other), map(removal, [schedule] * steps, own)), otherwise=likely
    )


def _tied_groups(graph: Graph, ties: Ties) -> Iterator[Faults]:
    """The stages of a tie apply the same microbatches in their k-th steps."""
    turns = _turns(graph)
    last = graph.steps_of[graph.holding[graph.weight_gradients]]
    if (turns >= last).any():  # an echo of gradients that are never applied
        return
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
