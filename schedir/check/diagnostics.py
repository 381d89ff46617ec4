"""What a check finds, as data; `render` draws it."""

from __future__ import annotations

from typing import Literal

import attrs

from schedir.errors import ScheduleError
from schedir.ir import Action, Schedule, Source

Severity = Literal["error", "warning", "note"]


@attrs.frozen
class Location:
    """A place in the lists. `index` is None where the fault is that an action is missing.

    `action` is what stands there, or what is missing; `source` the line of Python behind it.
    """

    rank: int
    index: int | None
    action: Action
    source: Source | None = None

    def __str__(self) -> str:
        place = "" if self.index is None else f" #{self.index}"
        return f"rank {self.rank}{place} {self.action}"


def locate(schedule: Schedule, rank: int, index: int) -> Location:
    """The location of `actions[rank][index]`."""
    action = schedule.actions[rank][index]
    return Location(rank, index, action, schedule.source_of(rank, index))


@attrs.frozen
class Diagnostic:
    """One finding. The first of `locations` is the primary one.

    `code` is stable and never reused; `name` is the bad pattern's. `trace` holds the lines of a
    wait cycle, empty for other findings.
    """

    code: str
    name: str
    severity: Severity
    message: str
    locations: tuple[Location, ...]
    notes: tuple[str, ...] = ()
    help: str | None = None
    trace: tuple[tuple[str, str, str], ...] = ()


@attrs.frozen
class Report:
    """Every finding of a check.

    `channel` is the model that the errors were judged under; `clean_channels` are those, strictest
    first, under which the schedule runs to its end (empty where errors kept that from being known).
    """

    channel: str
    diagnostics: tuple[Diagnostic, ...]
    clean_channels: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True where there is no error; warnings and notes are allowed."""
        return not self.errors

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The findings of severity error."""
        return tuple(d for d in self.diagnostics if d.severity == "error")

    def raise_if_errors(self) -> None:
        """Raise ScheduleError, with every diagnostic, where there is an error."""
        errors = self.errors
        if errors:
            first = errors[0]
            place = f" at {first.locations[0]}" if first.locations else ""
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            raise ScheduleError(
                f"{first.code} {first.name}: {first.message}{place}{more}", self.diagnostics
            )
