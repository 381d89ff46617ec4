"""Faults of the values in a list, by rule: each value is made before it is used, and ended."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import attrs
import numpy as np

from schedir.checker import rules
from schedir.checker.changes import (
    Add,
    Change,
    Side,
    added,
    ahead,
    anywhere,
    back,
    beside,
    in_turn,
    last_of_stage,
    moved_beside,
    removal,
)
from schedir.checker.diagnostics import Faults, Finding, Rule
from schedir.graph.compile import graph_of, pairs_of
from schedir.graph.faults import HELD, LINKED, OTHERS, Fault, faults
from schedir.ir import (
    COMMUNICATION,
    COMPUTE,
    HOMES,
    KINDS,
    READS_WEIGHTS,
    VALUES,
    Action,
    Ints,
    Kind,
    Schedule,
)
from schedir.ir.kinds import STAGE_WIDE, uses_of

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
_ROLES = np.array(["home" if kind in HOMES else kind.meaning.on for kind in KINDS])


@attrs.frozen(eq=False)
class Wrong:
    """The places that break a rule, ascending, and for each the other place that makes its value
    too late, ended it or made it before, -1 for none. `of` is the index of the fault in the graph.
    Shape [places]."""

    rule: Rule
    places: Ints
    others: Ints
    of: Ints
    faults: list[Fault]


def wrong(schedule: Schedule, *, of_transfers: bool = False) -> list[Wrong]:
    """The faults of the values, rule by rule, except for rules that judge only complete lists. Of
    several faults at one place the first is reported. Expects a sound structure."""
    kind = schedule.columns.kind
    found = [*_found(schedule, LINKED)]
    if not of_transfers:
        found += _found(schedule, OTHERS)
        sharded, named = graph_of(schedule).sharded, schedule.columns.version >= 0
        # A version that is named is another finding, whose echo these would be.
        if sharded.any() and not (sharded[schedule.columns.stage] & named).any():
            found += _found(schedule, HELD)
    rows: dict[Rule, list[tuple[Ints, Ints, Ints]]] = {}
    for number, fault in enumerate(found):
        roles = np.where(fault.others < 0, "", _ROLES[kind[fault.others]])
        for role in np.unique(roles):
            row = fault.label, fault.value, str(role), fault.kind.meaning.on
            own = np.flatnonzero(roles == role)
            columns = fault.places[own], fault.others[own], np.full(len(own), number)
            rows.setdefault(_CLAIMS.get(row, _GENERAL[fault.label]), []).append(columns)
    told = []
    for rule in _RULES:
        if rule in rows and (rule in _OF_TRANSFERS) is of_transfers:
            places, others, of = map(np.concatenate, zip(*rows[rule], strict=True))
            places, first = np.unique(places, return_index=True)
            told.append(Wrong(rule, places, others[first], of[first], found))
    return told


def _found(schedule: Schedule, names: frozenset[str]) -> list[Fault]:
    """The faults of the graph, computed once for each Schedule object."""
    known = schedule.memo.get((faults, names))
    if not isinstance(known, list):
        known = schedule.memo[faults, names] = [*faults(graph_of(schedule), names)]
    return known


def values(schedule: Schedule, told: Wrong) -> Faults:
    """The faults against a rule, and the changes that may fix them."""
    return Faults(
        rule=told.rule, keys=keys(schedule, told.places), findings=_findings(schedule, told)
    )


def keys(schedule: Schedule, places: Ints) -> Ints:
    """For each place the number of its kind, stage and microbatch."""
    columns = schedule.columns
    stage = columns.kind[places] * schedule.stages + columns.stage[places]
    numbers: Ints = stage * schedule.microbatches + columns.microbatch[places]
    return numbers


def _findings(schedule: Schedule, told: Wrong) -> Iterator[Finding]:
    computes = schedule.columns.is_kind(*COMPUTE)
    rows = zip(told.places.tolist(), told.others.tolist(), told.of.tolist(), strict=True)
    for place, other, number in rows:
        fault = told.faults[number]
        label = "missing" if fault.label == "gone" and other < 0 else fault.label
        places = (place,) if other < 0 else (place, other)
        word = VALUES[fault.value].word
        found = told.rule.at(schedule, *places, word=word, label=label)
        if label == "late":
            slides = back(schedule, place, other), ahead(schedule, other, place)
            moved = moved_beside(schedule, place, "after", other)
            communicates = fault.kind in COMMUNICATION
            yield Finding(found, in_turn(slides), moved, of_communication=communicates)
        else:
            # What makes or ends it and nobody lists is added; or what is one too many goes, but
            # for compute, of which nothing is.
            does = "end" if label == "unended" else "make"
            adds = [*_unlisted(schedule, place, does, fault.value)]
            spare = [p for p in (other, place)[label != "gone" :] if not computes[p]][:1]
            out = [removal(schedule, each) for each in spare]
            changes: Iterator[Change] = chain(adds, anywhere(schedule, places), out)
            # Weights that are not gathered, or not given up, are so once there is an action more.
            lacks = fault.value in HELD and (label == "unended" or computes[place])
            rest = adds if lacks and label != "gone" else out
            yield Finding(found, changes, rest[0] if rest else None)


def _unlisted(schedule: Schedule, place: int, does: str, value: str) -> Iterator[Add]:
    """The actions that would make or end a value of a place's stage and microbatch, and that nobody
    lists; those of a whole stage, before or after what uses the value."""
    action, listed = schedule.columns.action(place), pairs_of(schedule).listed
    rank = int(schedule.columns.rank[place])
    for kind in (kind for kind in Kind if uses_of(kind, does, value)):
        if kind in STAGE_WIDE:
            last = last_of_stage(schedule.columns, action.stage, rank, *READS_WEIGHTS)
            side: Side = "before" if does == "make" else "after"
            target = place if does == "make" else max(place, last)
            yield beside(schedule, Action(kind, action.stage), side, target)
        elif listed(kind, action.stage, action.microbatch or 0) < 0:
            yield added(schedule, attrs.evolve(action, kind=kind, version=None), rank)
