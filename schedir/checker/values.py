"""Faults of the values in a list, by rule: each value is made before it is used, and ended."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedir.checker import rules
from schedir.checker.diagnostics import Faults, Rule
from schedir.graph.compile import graph_of
from schedir.graph.faults import HELD, LINKED, OTHERS, Fault, faults
from schedir.ir import HOMES, KINDS, VALUES, Ints, Schedule

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
    found = [fault for fault in found if len(fault.places)]
    if not found:
        return
    rows: dict[Rule, list[tuple[Ints, Ints, Ints]]] = {}
    for number, fault in enumerate(found):
        roles = np.where(fault.others < 0, "", _ROLES[kind[fault.others]])
        for role in np.unique(roles):
            row = fault.label, fault.value, str(role), fault.kind.meaning.on
            own = np.flatnonzero(roles == role)
            columns = fault.places[own], fault.others[own], np.full(len(own), number)
            rows.setdefault(_CLAIMS.get(row, _GENERAL[fault.label]), []).append(columns)
    labels, names = (np.array([getattr(f, of) for f in found]) for of in ("label", "value"))
    words = np.array([VALUES[fault.value].word for fault in found])
    for rule in _RULES:
        if rule in rows and (rule in _OF_TRANSFERS) is of_transfers:
            places, others, of = map(np.concatenate, zip(*rows[rule], strict=True))
            places, first = np.unique(places, return_index=True)
            others, of = others[first], of[first]
            yield rule.each(
                schedule,
                np.column_stack((places, others)),
                value=names[of],
                word=words[of],
                label=np.where((labels[of] == "gone") & (others < 0), "missing", labels[of]),
            )


def _found(schedule: Schedule, names: frozenset[str]) -> list[Fault]:
    """The faults of the graph, computed once for each Schedule object."""
    return schedule.once(("faults", names), lambda: [*faults(graph_of(schedule), names)])
