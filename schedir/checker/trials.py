"""Which change fixes a fault: those that are proposed are tried, as far as the time for it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import attrs

from schedir.checker.changes import Batch, Change, LeaveOut, changed
from schedir.checker.diagnostics import Diagnostic
from schedir.checker.faults import Faults, Finding, Tally, nothing_new, tally, without
from schedir.ir import Schedule

# Trials judge whole lists. Together they may look at so many actions, where each costs as much as
# a few thousand more: a hundred trials on a list that a person reads, one on one of half a
# million actions.
_MOST_TOUCHED = 400_000
_OVERHEAD = 4000
# Of so few, none is for a fault that something is known to end anyway.
_FEW = 4

Judge = Callable[[Schedule, bool], Iterator[Faults]]
"""What is wrong with a changed schedule: the errors alone, or everything."""

Blocked = Callable[[Schedule], tuple[int, int]]
"""How much of a schedule can never run: less, the smaller."""


@attrs.define(eq=False, slots=False)
class Trials:
    """Tries changes of one schedule, of which it is known what is wrong, until its budget is spent.

    A change fixes a fault where that is gone, and nothing new, or more of anything, has come.
    """

    schedule: Schedule
    found: list[Faults]
    judge: Judge
    blocked: Blocked
    left: int = attrs.field(init=False)
    _few: bool = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        many = _MOST_TOUCHED // (len(self.schedule.columns) + _OVERHEAD)
        self.left, self._few = max(1, many), many <= _FEW

    def fix(self, finding: Finding, key: int, extent: int, most: int) -> Diagnostic:
        """The finding with the first change that fixes the fault, of at most so many that are
        tried; else with the one that ends it whatever comes of it, if there is one."""
        tried = self._tried(finding, key, extent, most)
        change = finding.otherwise if tried is None else tried
        if change is None and finding.blocks_less is not None:
            change = self._easing(finding.blocks_less())
        return attrs.evolve(finding.diagnostic, change=change, tried=tried is not None)

    def _tried(self, finding: Finding, key: int, extent: int, most: int) -> Change | None:
        most = min(most, self.left)
        if (not most or (self._few and finding.otherwise)) and not finding.of_communication:
            return None
        if not finding.changes and not finding.of_communication:
            return None
        errors_only = finding.diagnostic.severity == "error"
        known = self._errors if errors_only else self._everything
        allowed = without(known, finding.diagnostic.code, key, extent)
        tried = False
        for _, change in zip(range(most), finding.changes, strict=False):
            tried = True
            self.left -= 1
            if nothing_new(self.judge(changed(self.schedule, change), errors_only), allowed):
                return change
        if finding.blocks and nothing_new(self._batched, allowed):
            return Batch(tried)
        if finding.of_communication and nothing_new(self._without_communication, allowed):
            return LeaveOut(tried)
        return None

    def _easing(self, changes: Iterable[Change]) -> Change | None:
        """The first change after which less can never run: one of several knots is undone."""
        blocked = None
        for _, change in zip(range(self.left), changes, strict=False):
            self.left -= 1
            eased = changed(self.schedule, change)
            if nothing_new(self.judge(eased, True), self._errors):
                blocked = blocked or self.blocked(self.schedule)
                if self.blocked(eased) < blocked:
                    return change
        return None

    @cached_property
    def _everything(self) -> Tally:
        return tally(self.found)

    @cached_property
    def _errors(self) -> Tally:
        return tally(faults for faults in self.found if faults.rule.severity == "error")

    @cached_property
    def _batched(self) -> list[Faults]:
        return list(self.judge(changed(self.schedule, Batch()), True))

    @cached_property
    def _without_communication(self) -> list[Faults]:
        return list(self.judge(changed(self.schedule, LeaveOut()), True))
