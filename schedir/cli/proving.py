"""From a target to what a command draws or writes: a proved list, or what is wrong with it."""

from __future__ import annotations

from schedir.checker import CHANNELS, Report, prove
from schedir.ir import Schedule


class RefusedError(Exception):
    """What `subject` names has errors, which are in the `report`: a command can't go on."""

    def __init__(self, report: Report, subject: str) -> None:
        super().__init__(subject)
        self.report = report
        self.subject = subject


def proved(schedule: Schedule, subject: str) -> Schedule:
    """The complete form of a schedule that runs on some transport. Raises RefusedError."""
    report = prove(schedule, CHANNELS[-1])  # what runs anywhere can be drawn
    if report.schedule is None:
        raise RefusedError(report, subject)
    return report.schedule
