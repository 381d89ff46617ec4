"""Runs the rule families over a schedule, in the order in which they build on each other."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from schedir.check.channels import CHANNELS
from schedir.check.communication import communication
from schedir.check.deadlock import clean_channels, deadlock
from schedir.check.diagnostics import Diagnostic, Report
from schedir.check.ordering import ordering
from schedir.check.rules import (
    BACKWARD_BEFORE_FORWARD,
    INPUT_NOT_READY,
    WAIT_CYCLE,
    WEIGHT_BEFORE_INPUT,
)
from schedir.check.structure import structure
from schedir.check.weights import weights
from schedir.ir import Schedule
from schedir.passes import insert_communication

_DEFAULT = "edge"


def check(schedule: Schedule, channel: str = _DEFAULT) -> Report:
    """Everything that is wrong with a schedule, errors judged under a channel model.

    Findings locate the schedule as it was given. Where it is compute-only and sound, its
    communication is inserted and proved as well. Raises ValueError for an unknown channel.
    """
    if channel not in CHANNELS:
        raise ValueError(f"unknown channel model {channel!r}; known: {', '.join(CHANNELS)}")
    report = check_compute(schedule, channel)
    found = list(report.diagnostics)
    if _hides_the_rest(found) or (not schedule.is_complete and _blocks(found)):
        return report  # what follows would only echo that, or can't be completed
    complete = insert_communication(schedule)
    mismatched = list(communication(complete))
    found += mismatched
    clean: tuple[str, ...] = ()
    if not mismatched:
        # A wait cycle is only defined where every send has its receive.
        clean = clean_channels(complete)
        if channel not in clean:
            found += deadlock(complete, channel, clean)
    return Report(channel, _sorted(found), clean)


def check_compute(schedule: Schedule, channel: str = _DEFAULT) -> Report:
    """What is wrong with a schedule before its communication is looked at."""
    found = list(structure(schedule))
    if not found:
        found += ordering(schedule)
        found += weights(schedule)
        if not schedule.is_complete and not _hides_the_rest(found):
            found += deadlock(schedule, channel, ())
    return Report(channel, _sorted(found))


def _hides_the_rest(found: list[Diagnostic]) -> bool:
    """Whether a rank's own list can't run, so that the others' waiting for it would be an echo."""
    own = (BACKWARD_BEFORE_FORWARD.code, WEIGHT_BEFORE_INPUT.code, INPUT_NOT_READY.code)
    return any(finding.code.startswith("S1") or finding.code in own for finding in found)


def _blocks(found: list[Diagnostic]) -> bool:
    return any(finding.code == WAIT_CYCLE.code for finding in found)


def _sorted(found: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """By place, then code: the order of the lists, and the same on every run."""

    def key(finding: Diagnostic) -> tuple[int, int, str, str]:
        place = finding.locations[0]
        index = sys.maxsize if place.index is None else place.index
        return (place.rank, index, finding.code, finding.message)

    return tuple(sorted(found, key=key))
