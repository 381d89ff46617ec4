"""Runs the families of rules over a schedule, in the order in which they build on each other."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, cached_property, partial
from itertools import chain, islice

import attrs

from schedir.checker.communication import collectives, communication
from schedir.checker.deadlock import blocked, clean_channels, deadlock
from schedir.checker.diagnostics import (
    Batch,
    Change,
    Diagnostic,
    Faults,
    Finding,
    LeaveOut,
    Report,
    Tally,
)
from schedir.checker.lints import Pricing, lints
from schedir.checker.memory import Terms, memory
from schedir.checker.ordering import different_rates, ordering, without_steps
from schedir.checker.repairs import changed, repairs
from schedir.checker.rules import (
    BACKWARD_BEFORE_FORWARD,
    EMPTY_STEP,
    GRADIENT_NEVER_APPLIED,
    INPUT_NOT_READY,
    STEP_BEFORE_GRADIENTS,
    UNEVEN_STEPS,
    WAIT_CYCLE,
    WEIGHT_BEFORE_INPUT,
)
from schedir.checker.structure import structure
from schedir.errors import UnsoundError
from schedir.graph.alive import HeldUntil
from schedir.graph.compile import graph_of
from schedir.ir import (
    CHANNELS,
    COMMUNICATION,
    DEFAULT_CHANNEL,
    Schedule,
    Ties,
    channel_model,
    expect_schedule,
    ties_of,
)
from schedir.passes import insert_communication

# What blocks in a list without communication blocks under every model: under this one too.
_WEAKEST = CHANNELS[-1]
# A rank's own list can't run with these, so the others' waiting for it would be an echo.
_OWN_LIST = (BACKWARD_BEFORE_FORWARD, WEIGHT_BEFORE_INPUT, INPUT_NOT_READY)
# Steps that are wrong have tied stages wait for each other's wrong ones: as good as untied.
_WRONG_STEPS = (STEP_BEFORE_GRADIENTS, GRADIENT_NEVER_APPLIED, EMPTY_STEP, UNEVEN_STEPS)
# The key under which a right schedule remembers its complete form, by ties; None for itself.
_COMPLETE = "complete form"
# So many findings of one code say enough.
_MOST_OF_A_CODE = 4000
# Trials judge whole lists. Together they may look at so many actions, where each costs as much as
# a few thousand more: a hundred trials on a list that a person reads, one on one of half a
# million actions.
_MOST_TOUCHED = 400_000
_OVERHEAD = 4000
# Of the few on a longer list, none is for a fault that something is known to end anyway.
_LONG = 76_000


def check(
    schedule: Schedule,
    channel: str = DEFAULT_CHANNEL,
    *,
    max_delay: int | None = None,
    max_versions: int | None = None,
    max_activations: int | None = None,
    held_until: HeldUntil = "W",
    ties: Iterable[Iterable[int]] = (),
    costs: Pricing | None = None,
) -> Report:
    """Find everything that is wrong with a schedule.

    Errors are judged under a channel model, by default `rank`, which NCCL can be relied on for.
    `report.clean_channels` names every model under which the schedule runs.

    Findings locate the schedule as you gave it. If it is compute-only and sound, its communication
    is inserted and proved too; `report.schedule` is the list that was proved. `max_delay` limits
    the number of updates between the weight version that a gradient is computed at and the version
    that it is applied to. `max_versions` limits the weight versions of a stage that are alive at
    once, the newest included. `max_activations` limits the (stage, microbatch) activations that a
    rank holds. `held_until` is "W" if an activation counts until its B or W, or "I" if it counts
    until its B or I, after which only the tensors that W needs are left. `ties` are groups of
    stages that share parameters. Their gradients are summed before any of them steps, so the k-th
    OPTIM_STEPs of a group happen together. `costs`, a CostModel, say what makes a step longer
    (S5xx), by default the textbook's.

    Raises ValueError for an unknown channel, a bad limit or a bad tie, TypeError for anything that
    is not a Schedule or a CostModel, and SchedirError if the costs lack a stage or a link.

    >>> import schedir
    >>> schedule = schedir.Schedule.of("mine", [0], ["0F0 0B0 0OPTIM_STEP 0OPTIM_STEP"])
    >>> print(schedir.check(schedule))
    error[S206]: stage 0 has accumulated no gradient since its last OPTIM_STEP  (empty-step)
      --> rank 0 #3 0OPTIM_STEP
       = help: remove 0OPTIM_STEP at rank 0 #3
    <BLANKLINE>
    the schedule: 1 error under rank
    """
    expect_schedule(schedule)
    if costs is not None and not isinstance(costs, Pricing):
        raise TypeError(f"costs must be a CostModel, not {costs!r}")
    tied = ties_of(schedule, ties)
    terms = Terms(max_delay, max_versions, max_activations, held_until, tied)
    return _report(schedule, channel, terms, costs)


def prove(
    schedule: Schedule, channel: str = DEFAULT_CHANNEL, *, ties: Iterable[Iterable[int]] = ()
) -> Report:
    """`check` without advice: for the complete schedule, `report.schedule`, or the errors.

    The result is stored with that Schedule object and its complete form, and `check` uses it too.
    Raises what `check` raises.
    """
    expect_schedule(schedule)
    return _report(schedule, channel, Terms(ties=ties_of(schedule, ties)), advise=False)


def sound(schedule: Schedule) -> Schedule | None:
    """The complete form of a schedule, None if it has an error other than a deadlock under the
    default channel model. `prove` names the error, and says whether the schedule blocks.

    This is for callers that run the schedule to its end anyway, and so see whether it blocks.
    """
    if (_COMPLETE, ()) in schedule.memo:
        return schedule.memo[_COMPLETE, ()] or schedule
    found, complete = _judged(schedule, Terms())
    return None if _errors(found) else complete


def _report(
    schedule: Schedule,
    channel: str,
    terms: Terms,
    costs: Pricing | None = None,
    *,
    advise: bool = True,
) -> Report:
    """The errors; if there are none and `advise` is set, the warnings and notes."""
    channel = channel_model(channel)
    found, complete = _judged(schedule, terms, channel)
    ties = _ties_that_hold(terms.ties, found)
    clean: tuple[str, ...] = ()
    if complete is not None:
        clean = complete.once(("clean channels", ties), partial(clean_channels, complete, ties))
        if channel not in clean:
            given = None if complete is schedule else schedule
            found += deadlock(complete, channel, clean, ties, given=given)
    proved = None if _errors(found) else complete
    if proved is not None and advise:
        found += without_steps(schedule)
        found += different_rates(schedule)
        found += lints(schedule, proved, channel, terms.ties, costs)
    diagnostics = _diagnostics(schedule, channel, terms, found)
    return Report(channel, diagnostics, clean, proved)


def _judged(
    schedule: Schedule, terms: Terms, channel: str = DEFAULT_CHANNEL
) -> tuple[list[Faults], Schedule | None]:
    """The faults of a schedule, deadlock excepted, and its complete form, in which to look for
    deadlocks. That is None if some wait has no meaning yet. It is stored with the schedule if there
    is no error under any channel model."""
    key = _COMPLETE, terms.ties
    if key in schedule.memo:
        # Limits may be others now, and notes name places in this very list.
        return _present(memory(schedule, terms)), schedule.memo[key] or schedule
    found = _present(structure(schedule))
    if found:
        return found, None
    found = _present(chain(ordering(schedule, terms.ties), memory(schedule, terms)))
    blocking, complete = _completed(schedule, terms.ties, found, channel)
    found += blocking
    wrong = complete is None or _errors(found) or len(graph_of(complete).transfers.swapped)
    if complete is not None and not wrong:
        # Both have the same compute, and the communication is the complete one's; that does not
        # remember itself, so that memory is freed as soon as nobody has it.
        schedule.memo[key], complete.memo[key] = complete, None
    return found, complete


def _ties_that_hold(ties: Ties, found: Iterable[Faults]) -> Ties:
    """The ties that ranks wait for: none if steps are wrong, because waiting for a wrong step is an
    echo."""
    return () if any(faults.rule in _WRONG_STEPS for faults in found) else ties


def _present(found: Iterable[Faults]) -> list[Faults]:
    return [faults for faults in found if faults.many]


def _completed(
    schedule: Schedule, ties: Ties, found: list[Faults], channel: str
) -> tuple[list[Faults], Schedule | None]:
    """The faults of a schedule's communication, and its complete form, given the faults found in
    its compute. There is no complete form if some wait has no meaning yet, or would only echo an
    error."""
    if any(faults.rule in _OWN_LIST for faults in found):
        return [], None
    complete = schedule
    if not schedule.is_complete:
        blocking = _present(collectives(schedule))
        ties = _ties_that_hold(ties, found)
        try:
            if not blocking:
                complete = insert_communication(schedule)
        except UnsoundError:
            return [*deadlock(schedule, _WEAKEST, (), ties)], None
        # The collectives that the author has placed, and ties, are all that can block still.
        if ties or any(len(places) > 1 for places in graph_of(schedule).collectives):
            blocking = blocking or [*deadlock(schedule, _WEAKEST, (), ties)]
        if blocking:
            return blocking, None
    blocking = _present(communication(complete, channel))
    return blocking, None if blocking else complete


def _trial(schedule: Schedule, channel: str, terms: Terms) -> list[Faults]:
    """The errors of a changed schedule."""
    found, complete = _judged(schedule, terms, channel)
    if complete is not None:
        found += deadlock(complete, channel, CHANNELS, _ties_that_hold(terms.ties, found))
    return _errors(found)


def _blocked(schedule: Schedule, channel: str) -> tuple[int, int]:
    """How many actions can never run: of the compute alone, if that blocks, and of the complete
    list."""
    if not schedule.is_complete:
        alone = blocked(schedule, _WEAKEST)
        if alone:
            return alone, 0
        schedule = insert_communication(schedule)
    return 0, blocked(schedule, channel)


def _errors(found: Iterable[Faults]) -> list[Faults]:
    return [faults for faults in found if faults.rule.severity == "error"]


def _diagnostics(
    schedule: Schedule, channel: str, terms: Terms, found: list[Faults]
) -> tuple[Diagnostic, ...]:
    """The findings, sorted by place: the first ones of each code, each with the first change that
    fixes it, if one is known."""
    by_code: dict[str, list[Faults]] = {}
    for faults in found:
        by_code.setdefault(faults.rule.code, []).append(faults)
    trials = _Trials(schedule, channel, terms, found)
    diagnostics: list[Diagnostic] = []
    # What is rare goes first: thousands of findings of one code leave no time to try for others.
    for several in sorted(by_code.values(), key=lambda several: sum(f.many for f in several)):
        findings = chain.from_iterable(islice(f.findings, _MOST_OF_A_CODE) for f in several)
        first = sorted(findings, key=lambda each: _place(each.diagnostic))[:_MOST_OF_A_CODE]
        more = sum(faults.many for faults in several) - _MOST_OF_A_CODE
        for number, finding in enumerate(first):
            share = -(-trials.left // (len(first) - number))
            diagnostics.append(trials.fix(finding, share))
        if more > 0:
            diagnostics[-1] = attrs.evolve(diagnostics[-1], more=more)
    return tuple(sorted(diagnostics, key=_place))


@attrs.define(eq=False, slots=False)
class _Trials:
    """Tries changes of a schedule, in which some faults are `found`, until its budget is spent.

    A change fixes a fault if the fault is gone, and nothing new, or more of anything, has appeared.
    `left` is how many more changes may be tried.
    """

    schedule: Schedule
    channel: str
    terms: Terms
    found: list[Faults]
    left: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.left = max(1, _MOST_TOUCHED // (len(self.schedule.columns) + _OVERHEAD))

    def fix(self, finding: Finding, most: int) -> Diagnostic:
        """The finding with the first change that ends the fault, after at most `most` trials.
        Otherwise, the finding with the change that ends it in any case, if there is one; or that
        undoes one of several deadlocks, after which fewer actions are blocked."""
        found = finding.diagnostic
        if found.severity != "error":  # a lint has tried its change
            return found
        sure, changes = finding.changes or repairs(self.schedule, found)
        deadlocked = found.rule is WAIT_CYCLE
        about = (found.code, finding.key), finding.extent
        communicates = (
            bool(changes)
            and len(found.locations) > 1
            and any(each.action.kind in COMMUNICATION for each in found.locations)
            and not found.facts.get("inserted")
        )
        if sure and not communicates and len(self.schedule.columns) > _LONG:
            most = 0
        tried, eases = False, None
        for change in islice(changes, most):
            tried = True
            self.left -= 1
            if self._nothing_new(change, *about):
                return attrs.evolve(found, change=change, tried=True)
            if deadlocked and not (self.terms.ties or eases) and self._nothing_new(change):
                before, after = (
                    _blocked(each, self.channel)
                    for each in (self.schedule, changed(self.schedule, change))
                )
                eases = change if after < before else None
        wholes: list[type[Batch | LeaveOut]] = [*[Batch] * deadlocked, LeaveOut]
        for whole in wholes * communicates:
            if self._nothing_new(whole(), *about):
                return attrs.evolve(found, change=whole(tried), tried=True)
        return attrs.evolve(found, change=sure or eases or found.change)

    def _nothing_new(
        self, change: Change, fixed: tuple[str, int] = ("", 0), extent: int = 0
    ) -> bool:
        """True if every error after a change is known, none has grown, and the one to fix has
        shrunk by `extent`."""
        return all(
            many <= self._known[about] - extent * (about == fixed)
            for faults in self._after(change)
            for about, many in faults.tally.items()
        )

    @cached_property
    def _known(self) -> Tally:
        return sum((faults.tally for faults in _errors(self.found)), start=Counter())

    @cached_property
    def _after(self) -> Callable[[Change], list[Faults]]:
        """The errors after a change."""
        return cache(
            lambda change: _trial(changed(self.schedule, change), self.channel, self.terms)
        )


def _place(finding: Diagnostic) -> tuple[int, int, str, str]:
    """The sort key of a finding: place, then code. It gives the same order on every run."""
    place = finding.locations[0]
    index = sys.maxsize if place.index is None else place.index
    return place.rank, index, finding.code, finding.message
