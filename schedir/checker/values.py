"""Faults of the values in a list, by rule: each value is made before it is used, and ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from schedir.checker.diagnostics import Diagnostic, Faults, Finding, Rule
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


def values(
    schedule: Schedule, help: Callable[..., Finding], *, of_transfers: bool = False
) -> Iterator[Faults]:
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
                help,
                value=names[of],
                word=words[of],
                label=np.where((labels[of] == "gone") & (others < 0), "missing", labels[of]),
            )


def _found(schedule: Schedule, names: frozenset[str]) -> list[Fault]:
    """The faults of the graph, computed once for each Schedule object."""
    return schedule.once(("faults", names), lambda: [*faults(graph_of(schedule), names)])


def mended(schedule: Schedule, found: Diagnostic, place: int, other: int = -1) -> Finding:
    """The changes that may fix a fault of a value; `other` is the place that makes the value too
    late, ended it or made it before."""
    label, value = found.facts["label"], found.facts["value"]
    if label == "late":
        slides = back(schedule, place, other), ahead(schedule, other, place)
        moved = moved_beside(schedule, place, "after", other)
        communicates = found.action.kind in COMMUNICATION
        return Finding(found, in_turn(slides), moved, of_communication=communicates)
    # What makes or ends it and nobody lists is added; or what is one too many goes, but for
    # compute, of which nothing is.
    adds = [*_unlisted(schedule, place, "end" if label == "unended" else "make", value)]
    places = (place,) if other < 0 else (place, other)
    computes = schedule.columns.is_kind(*COMPUTE)
    spare = places[::-1] if label == "gone" else (place,)
    out = [removal(schedule, each) for each in spare if not computes[each]][:1]
    changes: Iterator[Change] = chain(adds, anywhere(schedule, places), out)
    # Weights that are not gathered, or not given up, are so once there is an action more.
    lacks = value in HELD and (label == "unended" or computes[place])
    rest = adds if lacks and label != "gone" else out
    return Finding(found, changes, rest[0] if rest else None)


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
