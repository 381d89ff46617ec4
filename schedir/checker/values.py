"""Faults of the values in a list, by rule: each value is made before it is used, and ended."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from schedir.checker import rules
from schedir.checker.diagnostics import Faults, Finding, Rule
from schedir.graph.compile import graph_of
from schedir.graph.faults import HELD, LINKED, OTHERS, Fault, faults
from schedir.ir import (
    HOMES,
    KINDS,
    VALUES,
    Ints,
    Schedule,
)

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
    rows = zip(told.places.tolist(), told.others.tolist(), told.of.tolist(), strict=True)
    for place, other, number in rows:
        fault = told.faults[number]
        label = "missing" if fault.label == "gone" and other < 0 else fault.label
        places = (place,) if other < 0 else (place, other)
        word = VALUES[fault.value].word
        yield Finding(told.rule.at(schedule, *places, word=word, value=fault.value, label=label))
