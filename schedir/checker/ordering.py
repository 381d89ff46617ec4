"""S2xx: each rank's compute is in a sensible order, and each gradient is summed and applied
once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress
from typing import Any

import numpy as np

from schedir.checker import rules
from schedir.checker.diagnostics import Faults, Rule, fault
from schedir.graph.alive import HELD, LINKED, OTHERS, Fault, faults
from schedir.graph.compile import Graph, graph_of
from schedir.ir import HOMES, KINDS, SUMS, VALUES, Ints, Schedule, Ties


def ordering(schedule: Schedule, ties: Ties = ()) -> Iterator[Faults]:
    """The faults in the order of compute on each rank. Expects a sound structure."""
    yield from values(schedule)
    graph = graph_of(schedule)
    if len(graph.steps) or graph.summed.any():
        yield from _rounds(schedule, graph)
        yield from _tied_groups(graph, ties) if ties else ()


def without_steps(schedule: Schedule) -> Iterator[Faults]:
    """The note for a correct schedule that leaves the update to its caller."""
    graph = graph_of(schedule)
    if not len(graph.steps):
        yield fault(rules.NO_STEP.at(schedule, int(graph.weight_gradients.max())))


# Values.

_CLAIMS = {
    ("late", "input", "home", "compute"): rules.INPUT_NOT_READY,
    ("late", "output gradient", "compute", "compute"): rules.INPUT_NOT_READY,
    ("late", "ran", "home", "compute"): rules.BACKWARD_BEFORE_FORWARD,
    ("late", "output gradient", "home", "compute"): rules.BACKWARD_BEFORE_FORWARD,
    ("late", "saved", "home", "compute"): rules.BACKWARD_BEFORE_FORWARD,
    ("late", "deferred", "compute", "compute"): rules.WEIGHT_BEFORE_INPUT,
    ("late", "kept", "home", "compute"): rules.RECOMPUTE_BEFORE_FORWARD,
    ("late", "saved", "compute", "compute"): rules.BACKWARD_BEFORE_RECOMPUTE,
    ("late", "input", "receive", "compute"): rules.MISSING_RECEIVE,
    ("late", "output gradient", "receive", "compute"): rules.MISSING_RECEIVE,
    ("missing", "input", "", "compute"): rules.MISSING_RECEIVE,
    ("missing", "output gradient", "", "compute"): rules.MISSING_RECEIVE,
    ("late", "output", "home", "send"): rules.SEND_BEFORE_COMPUTE,
    ("late", "input gradient", "compute", "send"): rules.SEND_BEFORE_COMPUTE,
}
"""The rule for a fault, by the kind of fault and the value, its maker and its user."""
_GENERAL = {
    "late": rules.USED_TOO_EARLY,
    "gone": rules.USED_AFTER_ITS_END,
    "missing": rules.USED_AFTER_ITS_END,
    "twice": rules.USED_AFTER_ITS_END,
    "unended": rules.NEVER_ENDED,
}
"""The rules for faults that no row of _CLAIMS covers, so that every kind and value is judged."""
_OF_TRANSFERS = (rules.MISSING_RECEIVE, rules.SEND_BEFORE_COMPUTE)
_RULES = tuple(dict.fromkeys((*_CLAIMS.values(), *_GENERAL.values())))
_ROLE_OF = ["home" if kind in HOMES else kind.meaning.on for kind in KINDS]
_ROLES = ["", *dict.fromkeys(_ROLE_OF)]
_ROLE = np.array([_ROLES.index(role) for role in _ROLE_OF])


def values(schedule: Schedule, *, of_transfers: bool = False) -> Iterator[Faults]:
    """The faults of the values, rule by rule: against the rules that judge only complete lists, or
    against all others. Of several faults at one place the first is reported. Expects a sound
    structure."""
    kind = schedule.columns.kind
    found = [*_found(schedule, LINKED)]
    if not of_transfers:
        found += _found(schedule, OTHERS)
        sharded, named = graph_of(schedule).sharded, schedule.columns.version >= 0
        # A version that is named is another finding, whose echo these would be.
        if sharded.any() and not (sharded[schedule.columns.stage] & named).any():
            found += _found(schedule, HELD)
    if not found:
        return
    places, others = (
        np.concatenate([getattr(each, of) for each in found]) for of in ("places", "others")
    )
    of = np.repeat(np.arange(len(found)), [len(each.places) for each in found])
    # The rule for each group of faults, by the role of the other action.
    judged = []
    for each in found:
        rows = ((each.label, each.value, role, each.kind.meaning.on) for role in _ROLES)
        judged.append([_RULES.index(_CLAIMS.get(row, _GENERAL[each.label])) for row in rows])
    numbers = np.array(judged)[of, np.where(others < 0, 0, _ROLE[kind[others]])]
    labels, names = (np.array([getattr(f, of) for f in found]) for of in ("label", "value"))
    words = np.array([VALUES[name].word for name in names])
    for number, rule in enumerate(_RULES):
        if (rule in _OF_TRANSFERS) is of_transfers:
            own = np.flatnonzero(numbers == number)
            own = own[np.unique(places[own], return_index=True)[1]]
            yield rule.each(
                schedule,
                np.column_stack((places, others))[own],
                value=names[of[own]],
                word=words[of[own]],
                case=labels[of[own]],
            )


def _found(schedule: Schedule, names: frozenset[str]) -> list[Fault]:
    """The faults of the graph, computed once for each Schedule object."""
    return schedule.once(("faults", names), lambda: [*faults(graph_of(schedule), names)])


# Rounds.

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
        for places in (graph.weight_gradients.ravel(), graph.columns.where(*SUMS))
    )
    if graph.summed.any():
        yield from _summed_once(schedule, graph, gradients, sums)
    if len(graph.steps):
        yield from _applied_once(schedule, graph, gradients, sums)
    if len(graph.steps) and len(schedule.holdings) > schedule.stages:
        yield _more_often(schedule, graph)


def _summed_once(schedule: Schedule, graph: Graph, gradients: Ints, sums: Ints) -> Iterator[Faults]:
    """The sum of each round follows all its gradients, of which the replicas have some."""
    columns, size = schedule.columns, len(schedule.columns)
    rounds, places = np.divmod(sums, size)
    # A step needs the sum of its round. In a list without steps, the last gradient is left over.
    last = gradients[np.append(np.diff(gradients // size) > 0, True)] % size
    where = graph.steps if len(graph.steps) else np.sort(last)
    where = where[graph.summed[columns.stage[where]] & ~np.isin(_round(graph, where), rounds)]
    held = [schedule.placement[stage] for stage in columns.stage[where].tolist()]
    alone = np.where(graph.sharded[columns.stage[where]], "sharded", "alone")
    yield rules.STEP_WITHOUT_REDUCE.each(
        schedule,
        where,
        case=np.where([len(ranks) > 1 for ranks in held], "replicated", alone),
        held=held,
    )
    begin, here, end = np.searchsorted(gradients, [rounds * size, sums, rounds * size + size])
    late = end - here
    yield rules.REDUCE_BEFORE_GRADIENTS.each(
        schedule,
        np.column_stack((places, gradients[end - 1] % size))[late > 0],
        extents=late[late > 0],
        late=late[late > 0],
    )
    # A sum adds up what comes after the one before it.
    new = {*places[here > np.maximum(begin, np.append(0, here)[:-1])].tolist()}
    meetings = [p for p in graph.collectives if columns.is_kind(*SUMS)[p[0]]]
    turns = [tuple(graph.turn[[*p]].tolist()) for p in meetings]
    across = [len({*own}) > 1 for own in turns]
    empty = [new.isdisjoint(p) and not apart for p, apart in zip(meetings, across, strict=True)]
    yield rules.REDUCE_ACROSS_STEPS.each(
        schedule,
        [*compress(meetings, across)],
        steps=[*compress(turns, across)],
    )
    yield rules.EMPTY_REDUCE.each(schedule, [*compress(meetings, empty)])


def _applied_once(
    schedule: Schedule, graph: Graph, gradients: Ints, sums: Ints
) -> Iterator[Faults]:
    """Each gradient has a step after it, and each step has gradients."""
    size, filled = len(schedule.columns), np.zeros(graph.first_round[-1], np.bool_)
    filled[gradients // size] = True
    # A round after the last step of a stage on its rank has none.
    if filled[graph.first_round[1:] - 1].any():
        yield from _without_step(schedule, graph, gradients)
    # A replica may have run none of a step's microbatches; a collective gives it the sum.
    replicated = np.array([len(held) > 1 for held in schedule.placement])
    filled[sums[replicated[graph.columns.stage[sums % size]]] // size] = True
    yield rules.EMPTY_STEP.each(schedule, graph.steps[~filled[_round(graph, graph.steps)]])


def _without_step(schedule: Schedule, graph: Graph, gradients: Ints) -> Iterator[Faults]:
    """The gradients of each stage on each rank that come after its last step."""
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
            keys=numbers[which],
            extents=many[which],
            late=many[which],
        )


def _more_often(schedule: Schedule, graph: Graph) -> Faults:
    """The replicas with more steps than another one of their stage."""
    many, steps = graph.steps_of, graph.steps
    stage, rank = np.array(schedule.holdings).T
    fewest = np.minimum.reduceat(many, np.searchsorted(stage, np.arange(schedule.stages)))[stage]
    more, least = np.flatnonzero(many > fewest), np.flatnonzero(many == fewest)
    least = least[np.searchsorted(stage[least], stage[more])]
    return rules.UNEVEN_REPLICAS.each(
        schedule,
        [steps[graph.holding[steps] == number][[fewest[number]]] for number in more],
        extents=(many - fewest)[more],
        steps=many[more],
        least=rank[least],
        fewest=fewest[more],
    )


def _tied_groups(graph: Graph, ties: Ties) -> Iterator[Faults]:
    """The stages of a tie apply the same microbatches in their k-th steps."""
    turns = graph.turn[graph.weight_gradients]
    last = graph.steps_of[graph.holding[graph.weight_gradients]]
    if (turns >= last).any():  # an echo of gradients that are never applied
        return
    for number, tie in enumerate(ties):
        for stage in tie[1:]:
            if (turns[stage] != turns[tie[0]]).any():
                key = number * len(turns) + stage
                yield _apart(rules.UNEVEN_STEPS, graph, stage, tie[0], key)


def different_rates(schedule: Schedule) -> Iterator[Faults]:
    """One note for a correct schedule whose stages don't step after the same microbatches."""
    graph = graph_of(schedule)
    turns = graph.turn[graph.weight_gradients]
    stages = np.flatnonzero((turns != turns[-1]).any(axis=1)).tolist()
    if stages:
        facts = {"differing": len(stages), "stages": schedule.stages}
        yield _apart(rules.DIFFERENT_RATES, graph, stages[0], schedule.stages - 1, **facts)


def _apart(rule: Rule, graph: Graph, stage: int, other: int, key: int = 0, **facts: Any) -> Faults:
    """The fault that two stages have different microbatches, from the first step for which they do;
    later differences follow from it. As large as there are such microbatches."""
    both = graph.turn[graph.weight_gradients[[stage, other]]]
    differ = both[0] != both[1]
    step = int(both.min(axis=0)[differ].min())
    steps = graph.steps[graph.turn[graph.steps] == step]
    places = [steps[graph.columns.stage[steps] == of][0] for of in (stage, other)]
    applied, expected = (tuple(np.flatnonzero(own == step).tolist()) for own in both)
    facts |= {"step": step, "applied": applied, "expected": expected}
    return fault(rule.at(graph.schedule, *places, **facts), key=key, extent=int(differ.sum()))
