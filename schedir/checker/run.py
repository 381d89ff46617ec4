"""Runs the rule families over a schedule, in the order in which they build on each other."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator
from itertools import chain, islice, repeat

import attrs
import numpy as np

from schedir.checker.communication import communication, unmatched_reduces
from schedir.checker.deadlock import clean_channels, deadlock, runs
from schedir.checker.diagnostics import Diagnostic, Location, Report
from schedir.checker.faults import Faults, Finding
from schedir.checker.lints import lints
from schedir.checker.memory import Limits, memory
from schedir.checker.ordering import ordering, without_steps
from schedir.checker.rules.communication import WaitCycle
from schedir.checker.rules.ordering import BackwardBeforeForward, InputNotReady, WeightBeforeInput
from schedir.checker.structure import structure
from schedir.checker.trials import Trials
from schedir.errors import ScheduleError
from schedir.ir import (
    COMMUNICATION,
    Schedule,
    Ties,
    collective_turns,
    expect_channel,
    expect_schedule,
    ties_of,
)
from schedir.passes import insert_communication

_DEFAULT = "edge"
# A rank's own list can't run with these, so the others' waiting for it would be an echo.
_OWN_LIST = (BackwardBeforeForward, WeightBeforeInput, InputNotReady)
# So many findings of one code say enough.
_MOST_OF_A_CODE = 1000


@attrs.frozen
class _Terms:
    """What a schedule is judged by."""

    channel: str
    limits: Limits
    ties: Ties


def check(
    schedule: Schedule,
    channel: str = _DEFAULT,
    *,
    max_delay: int | None = None,
    max_versions: int | None = None,
    max_activations: int | None = None,
    ties: Iterable[Iterable[int]] = (),
) -> Report:
    """Everything that is wrong with a schedule, errors judged under a channel model.

    Findings locate the schedule as it was given. Where it is compute-only and sound, its
    communication is inserted and proved as well. `max_delay` limits the updates between the
    version that a gradient is computed at and the one that it is applied to; `max_versions` the
    weight versions of a stage alive at once, the newest included; `max_activations` the (stage,
    microbatch) activations of a rank. `ties` are groups of stages that share parameters, whose
    gradients are summed before any of them steps: so the k-th OPTIM_STEPs of a group happen
    together. Raises ValueError for an unknown channel, a bad limit or a bad tie,
    TypeError for what is no Schedule.
    """
    expect_schedule(schedule)
    expect_channel(channel)
    limits = Limits(max_delay, max_versions, max_activations)
    terms = _Terms(channel, limits, ties_of(schedule, ties))
    found = list(_there(structure(schedule)))
    complete = None
    if not found:
        found, complete = _collected(_faults(schedule, terms))
    clean: tuple[str, ...] = ()
    if complete is not None:
        clean = clean_channels(complete, terms.ties)
        if channel not in clean:
            given = None if complete is schedule else schedule
            found += deadlock(complete, channel, clean, terms.ties, given=given)
        elif not _has_errors(found):
            found += (*without_steps(schedule), *_lints(schedule, complete, channel))
    return Report(channel, _said(schedule, terms, found), clean)


def check_compute(schedule: Schedule, channel: str = _DEFAULT) -> Report:
    """What is wrong with a schedule before its communication is looked at."""
    terms = _Terms(channel, Limits(), ())
    found = list(_there(structure(schedule)))
    if not found:
        found, _ = _collected(_compute(schedule, terms))
    return Report(channel, _said(schedule, terms, found))


_Search = Generator[Faults, None, Schedule | None]
"""Yields what is wrong with a schedule of sound structure; returns its complete form to look for
deadlock in, None where a wait has no meaning yet."""


def _there(found: Iterable[Faults]) -> Iterator[Faults]:
    return (faults for faults in found if faults.many)


def _collected(search: _Search) -> tuple[list[Faults], Schedule | None]:
    found = []
    while True:
        try:
            found.append(next(search))
        except StopIteration as end:
            return found, end.value


def _faults(schedule: Schedule, terms: _Terms) -> _Search:
    """All but deadlock, where the list has its communication."""
    complete = yield from _compute(schedule, terms)
    if complete is not None:
        for faults in _there(communication(complete)):
            complete = None
            yield faults
    return complete


def _compute(schedule: Schedule, terms: _Terms) -> _Search:
    """What is wrong with the compute. No complete form where communication can't be inserted, or
    where what its check would find were an echo."""
    waits = True
    for faults in _there(ordering(schedule)):
        waits = waits and not issubclass(faults.rule, _OWN_LIST)
        yield faults
    yield from _there(memory(schedule, terms.limits, terms.ties))
    if not waits or schedule.is_complete:
        return schedule if waits else None
    blocking = list(_there(unmatched_reduces(schedule)))
    if not blocking:
        try:
            complete = insert_communication(schedule)
        except ScheduleError:
            blocking = list(deadlock(schedule, _DEFAULT, (), terms.ties))
        else:
            # The collectives that the author has placed, and ties, are all that can block still.
            if terms.ties or any(len(places) > 1 for places in collective_turns(schedule)):
                blocking = list(deadlock(schedule, _DEFAULT, (), terms.ties))
    yield from blocking
    return None if blocking else complete


def _judge(schedule: Schedule, terms: _Terms, errors_only: bool) -> Iterator[Faults]:
    """What is wrong with a changed schedule, whose structure is known to be sound."""
    search = _faults(schedule, terms)
    right = True
    while True:
        try:
            faults = next(search)
        except StopIteration as end:
            complete = end.value
            break
        is_error = faults.rule.severity == "error"
        right = right and not is_error
        if is_error or not errors_only:
            yield faults
    if complete is None:
        return
    if not runs(complete, terms.channel, terms.ties):
        yield Faults(rule=WaitCycle, keys=np.zeros(1, np.int64), findings=())
    elif right and not errors_only:
        yield from _lints(schedule, complete, terms.channel)


def _lints(schedule: Schedule, complete: Schedule, channel: str) -> list[Faults]:
    found = list(lints(complete, channel))
    if complete is schedule:
        return found
    # Where schedir puts the communication is not for the author to fix.
    return [
        attrs.evolve(
            faults, findings=[Finding(_as_given(complete, x.diagnostic)) for x in faults.findings]
        )
        for faults in found
        if not any(_communicates(each.diagnostic) for each in faults.findings)
    ]


def _communicates(finding: Diagnostic) -> bool:
    return any(place.action.kind in COMMUNICATION for place in finding.locations)


def _as_given(complete: Schedule, finding: Diagnostic) -> Diagnostic:
    """The finding with its places counted without the communication that was inserted."""
    columns = complete.columns
    kept = ~columns.is_kind(*COMMUNICATION)

    def without(place: Location) -> Location:
        start = columns.starts[place.rank]
        index = int(kept[start : start + (place.index or 0)].sum())
        return attrs.evolve(place, index=index)

    return attrs.evolve(finding, locations=tuple(map(without, finding.locations)))


def _has_errors(found: list[Faults]) -> bool:
    return any(faults.rule.severity == "error" for faults in found)


def _said(schedule: Schedule, terms: _Terms, found: list[Faults]) -> tuple[Diagnostic, ...]:
    """The findings in words, by place: the first thousand of each code, each with the first change
    that fixes it, where one is known."""
    by_code: dict[str, list[Faults]] = {}
    for faults in found:
        by_code.setdefault(faults.rule.code, []).append(faults)
    trials = Trials(schedule, found, lambda changed, errors: _judge(changed, terms, errors))
    said: list[Diagnostic] = []
    # What is rare goes first: thousands of findings of one code leave no time to try for others.
    for several in sorted(by_code.values(), key=lambda several: sum(f.many for f in several)):
        first = sorted(_first(several), key=lambda each: _place(each[1].diagnostic))
        more = sum(faults.many for faults in several) - _MOST_OF_A_CODE
        first = first[:_MOST_OF_A_CODE]
        for number, (key, finding) in enumerate(first):
            share = -(-trials.left // (len(first) - number))
            change = trials.fix(finding, key, share)
            said.append(attrs.evolve(finding.diagnostic, change=change))
        if more > 0:
            said[-1] = attrs.evolve(said[-1], more=more)
    return tuple(sorted(said, key=_place))


def _first(several: list[Faults]) -> Iterator[tuple[int, Finding]]:
    """The first findings of each, with their keys."""
    for faults in several:
        keys = chain(faults.keys.tolist(), repeat(0))
        yield from islice(zip(keys, faults.findings, strict=False), _MOST_OF_A_CODE)


def _place(finding: Diagnostic) -> tuple[int, int, str, str]:
    """By place, then code: the order of the lists, and the same on every run."""
    place = finding.locations[0]
    index = sys.maxsize if place.index is None else place.index
    return place.rank, index, finding.code, finding.message
