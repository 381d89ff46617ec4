"""Runs the rule families over a schedule, in the order in which they build on each other."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

import attrs

from schedir.check.channels import CHANNELS
from schedir.check.communication import communication, unmatched_reduces
from schedir.check.deadlock import clean_channels, deadlock, runs
from schedir.check.diagnostics import Diagnostic, Location, Report, moved
from schedir.check.lints import lints
from schedir.check.memory import Limits, memory
from schedir.check.ordering import ordering
from schedir.check.rules.ordering import BackwardBeforeForward, InputNotReady, WeightBeforeInput
from schedir.check.structure import structure
from schedir.errors import ScheduleError
from schedir.ir import COMMUNICATION, Schedule, Ties, collective_turns, ties_of
from schedir.passes import insert_communication

_DEFAULT = "edge"
# Each move that is proposed has been tried, which costs a check; so many are.
_MOST_TRIALS = 12
# A rank's own list can't run with these, so the others' waiting for it would be an echo.
_OWN_LIST = (BackwardBeforeForward, WeightBeforeInput, InputNotReady)


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
    together. Raises ValueError for an unknown channel, a bad limit or a bad tie.
    """
    if channel not in CHANNELS:
        raise ValueError(f"unknown channel model {channel!r}; known: {', '.join(CHANNELS)}")
    limits = Limits(max_delay, max_versions, max_activations)
    terms = _Terms(channel, limits, ties_of(schedule, ties))
    found, complete = _findings(schedule, terms)
    clean: tuple[str, ...] = ()
    if complete is not None:
        clean = clean_channels(complete, terms.ties)
        if channel not in clean:
            inserted = complete is not schedule
            found += deadlock(complete, channel, clean, terms.ties, inserted=inserted)
        elif not _errors(found):
            found += _lints(schedule, complete, channel)
    return Report(channel, _sorted(_mended(schedule, terms, found)), clean)


def check_compute(schedule: Schedule, channel: str = _DEFAULT) -> Report:
    """What is wrong with a schedule before its communication is looked at."""
    terms = _Terms(channel, Limits(), ())
    found, _ = _compute(schedule, terms)
    return Report(channel, _sorted(_mended(schedule, terms, found)))


def _findings(schedule: Schedule, terms: _Terms) -> tuple[list[Diagnostic], Schedule | None]:
    """What is wrong with a schedule but for deadlock, and its complete form to look for that in;
    None where a wait has no meaning yet."""
    found, complete = _compute(schedule, terms)
    if complete is not None:
        mismatched = list(communication(complete))
        if mismatched:
            return found + mismatched, None
    return found, complete


def _compute(schedule: Schedule, terms: _Terms) -> tuple[list[Diagnostic], Schedule | None]:
    """What is wrong with the compute, and the schedule with its communication; None where that
    can't be inserted, or where what its check would find were an echo."""
    found = list(structure(schedule))
    if found:
        return found, None
    found += ordering(schedule)
    found += memory(schedule, terms.limits, terms.ties)
    if any(isinstance(finding, _OWN_LIST) for finding in found):
        return found, None
    if schedule.is_complete:
        return found, schedule
    blocking = list(unmatched_reduces(schedule))
    if not blocking:
        try:
            complete = insert_communication(schedule)
        except ScheduleError:
            blocking = list(deadlock(schedule, _DEFAULT, (), terms.ties))
        else:
            # The collectives that the author has placed, and ties, are all that can block still.
            if terms.ties or any(len(places) > 1 for places in collective_turns(schedule)):
                blocking = list(deadlock(schedule, _DEFAULT, (), terms.ties))
    return (found + blocking, None) if blocking else (found, complete)


def _lints(schedule: Schedule, complete: Schedule, channel: str) -> list[Diagnostic]:
    found = list(lints(complete, channel))
    if complete is schedule:
        return found
    # Where schedir puts the communication is not for the author to mend.
    own = [d for d in found if all(p.action.kind not in COMMUNICATION for p in d.locations)]
    return [_as_given(complete, each) for each in own]


def _as_given(complete: Schedule, finding: Diagnostic) -> Diagnostic:
    """The finding with its places counted without the communication that was inserted."""
    columns = complete.columns
    kept = ~columns.is_kind(*COMMUNICATION)

    def without(place: Location) -> Location:
        start = columns.starts[place.rank]
        index = int(kept[start : start + (place.index or 0)].sum())
        return attrs.evolve(place, index=index)

    return attrs.evolve(finding, locations=tuple(map(without, finding.locations)), moves=())


def _mended(schedule: Schedule, terms: _Terms, found: list[Diagnostic]) -> list[Diagnostic]:
    """The findings with the first of their moves that mends them and brings nothing new."""
    everything = Counter(map(_said, found))
    errors = Counter(map(_said, _errors(found)))
    trials = 0
    mended = []
    for finding in found:
        best = None
        if finding.moves and trials < _MOST_TRIALS:
            errors_only = finding.severity == "error"
            allowed = (errors if errors_only else everything) - Counter([_said(finding)])
            for change in finding.moves:
                trials += 1
                if _mends(moved(schedule, change), terms, errors_only, allowed):
                    best = change
                    break
        mended.append(attrs.evolve(finding, moves=() if best is None else (best,)))
    return mended


def _mends(
    changed: Schedule,
    terms: _Terms,
    errors_only: bool,
    allowed: Counter[tuple[str, str]],
) -> bool:
    """Whether a changed schedule has nothing wrong but what is allowed."""
    found, complete = _findings(changed, terms)
    if complete is not None and not runs(complete, terms.channel, terms.ties):
        return False
    if errors_only:
        found = _errors(found)
    elif complete is not None and not _errors(found):
        found += _lints(changed, complete, terms.channel)
    return Counter(map(_said, found)) <= allowed


def _said(finding: Diagnostic) -> tuple[str, str]:
    return finding.code, finding.message


def _errors(found: list[Diagnostic]) -> list[Diagnostic]:
    return [finding for finding in found if finding.severity == "error"]


def _sorted(found: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """By place, then code: the order of the lists, and the same on every run."""

    def key(finding: Diagnostic) -> tuple[int, int, str, str]:
        place = finding.locations[0]
        index = sys.maxsize if place.index is None else place.index
        return (place.rank, index, finding.code, finding.message)

    return tuple(sorted(found, key=key))
