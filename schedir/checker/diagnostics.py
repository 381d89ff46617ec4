"""What a check finds, as data; `render` draws it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Self

import attrs

from schedir.checker.changes import Change
from schedir.checker.templates import Text
from schedir.errors import ScheduleError
from schedir.ir import Action, Columns, Schedule, Source

Severity = Literal["error", "warning", "note"]


@attrs.frozen
class Location:
    """A place in the lists. `index` is None where the fault is that an action is missing.

    `action` is what stands there, or what is missing; `source` the line of Python that made it.
    `within` is the entry that it is a part of, in short, where that has several.
    """

    rank: int
    index: int | None
    action: Action
    source: Source | None = None
    within: str | None = None

    def __str__(self) -> str:
        place = "" if self.index is None else f" #{self.index}"
        within = "" if self.within is None else f" of {self.within}"
        return f"rank {self.rank}{place} {self.action}{within}"


def locate(schedule: Schedule, place: int) -> Location:
    """The location of a place in the schedule's columns."""
    columns = schedule.columns
    rank, index = columns.position(place)
    within = None
    if columns.joined[place] or columns.last[place] != place:
        within = in_short(columns, place)
    return Location(rank, index, columns.action(place), schedule.source_of(rank, index), within)


# Of a batch of more parts, the first few say what it is.
_MOST_PARTS, _FIRST_PARTS = 4, 2


def in_short(columns: Columns, place: int) -> str:
    """The entry of a place as text, cut where it is long."""
    first, last = int(columns.heads[columns.entry[place]]), int(columns.last[place])
    if first == last:
        return str(columns.action(first))
    many = last + 1 - first
    shown = many if many <= _MOST_PARTS else _FIRST_PARTS
    parts = [str(columns.action(part)) for part in range(first, first + shown)]
    return f"({';'.join(parts)}{f';… {many - shown:,} more' if many > shown else ''})"


def locations(schedule: Schedule, places: Iterable[int]) -> tuple[Location, ...]:
    """The locations of several places."""
    return tuple(locate(schedule, int(place)) for place in places)


@attrs.frozen
class Excerpt:
    """A piece of a rank's list, from `first` on, as text; `marked` are the indices of what is at
    fault.

    `total` is the length of the whole list.
    """

    rank: int
    first: int
    entries: tuple[str, ...]
    marked: frozenset[int]
    total: int


_TEXTS = ("message", "labels", "notes", "advice", "alternative")


@attrs.frozen(kw_only=True)
class Diagnostic:
    """One finding; each rule is a subclass, whose fields are what its texts are made of.

    A rule gives its texts (`message`, `labels`, `notes`, `advice`, `alternative`) as templates,
    which name attributes of the finding and are filled in when somebody reads them; or as
    properties, where something is computed. `code` is stable and never reused; `name` is the bad
    pattern's; `why`, `fix` and `example` (a whole `.sched` text that the rule rejects) are the
    texts of `schedir explain`, with the docstring for the meaning. The first of `locations` is the
    primary one.
    `change` ends the fault, if such a change is known; `tried` says that nothing new comes of it.
    `more` says how many findings of the same code a report leaves out after this one.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity] = "error"
    strict: ClassVar[bool] = True  # whether `schedir check --strict` fails for it
    why: ClassVar[str]
    fix: ClassVar[str]
    example: ClassVar[str]
    options: ClassVar[tuple[tuple[str, Any], ...]] = ()  # those of `check` that the example needs

    locations: tuple[Location, ...]
    change: Change | None = None
    tried: bool = False
    more: int = 0

    def __init_subclass__(cls) -> None:
        # Runs twice for each rule, as attrs makes the class anew for its slots.
        for name in _TEXTS:
            template = vars(cls).get(name)
            if isinstance(template, str | tuple):
                setattr(cls, name, Text(template))

    @classmethod
    def at(cls, schedule: Schedule, *places: int, **fields: Any) -> Self:
        """A finding at places in the schedule's columns, the primary one first."""
        return cls(locations=locations(schedule, places), **fields)

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        raise NotImplementedError

    @property
    def labels(self) -> tuple[str, ...]:
        """What each location has to do with it; may be shorter than the locations."""
        return ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What else there is to know."""
        return ()

    @property
    def advice(self) -> str | None:
        """What to do where no change is known to fix it."""
        return None

    @property
    def alternative(self) -> str | None:
        """What may be meant instead of the change: in what the lists do not say."""
        return None

    @property
    def help(self) -> str | None:
        """What to do."""
        if self.change is None:
            return self.advice
        return f"{self.change}{f', or {self.alternative}' if self.alternative else ''}"

    @property
    def headline(self) -> str:
        """The message, and how many findings are left out after this one."""
        return (
            f"{self.message}; and {self.more:,} more of {self.code}" if self.more else self.message
        )

    @property
    def listed(self) -> tuple[Location, ...]:
        """The locations to list, but for those that the trace shows."""
        return self.locations

    @property
    def trace(self) -> tuple[tuple[str, ...], ...]:
        """Rows of a table that shows how it comes about: a wait cycle, say."""
        return ()

    @property
    def excerpts(self) -> tuple[Excerpt, ...]:
        """The pieces of the lists that it is about."""
        return ()

    @property
    def rank(self) -> int:
        """The rank of the primary location."""
        return self.locations[0].rank

    @property
    def index(self) -> int | None:
        """The index of the primary location in its rank's list, None where it is missing."""
        return self.locations[0].index

    @property
    def action(self) -> Action:
        """What stands at the primary location, or is missing there."""
        return self.locations[0].action

    @property
    def other(self) -> Location:
        """The second location."""
        return self.locations[1]

    @property
    def last(self) -> Location:
        """The last location."""
        return self.locations[-1]

    @classmethod
    def meaning(cls) -> str:
        """What the rule rejects."""
        return " ".join((inspect.getdoc(cls) or "").split())


@attrs.frozen
class Report:
    """Every finding of a check, but that of thousands of one code the first are held, and the
    number of the others with the last of these.

    `channel` is the model that the errors were judged under; `clean_channels` are those, strictest
    first, under which the schedule runs to its end (empty where errors kept that from being known).
    `schedule` is the complete list that was proved, communication and all; None where there is an
    error.
    """

    channel: str
    diagnostics: tuple[Diagnostic, ...]
    clean_channels: tuple[str, ...] = ()
    schedule: Schedule | None = attrs.field(default=None, repr=False)

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
        if self.errors:
            raise self._error()

    def proved(self) -> Schedule:
        """`schedule`. Raises ScheduleError, with every diagnostic, where there is none."""
        if self.schedule is None:
            raise self._error()
        return self.schedule

    def _error(self) -> ScheduleError:
        first, *others = self.errors
        place = f" at {first.locations[0]}" if first.locations else ""
        number = len(others) + sum(error.more for error in self.errors)
        more = f" (and {number} more)" if number else ""
        return ScheduleError(
            f"{first.code} {first.name}: {first.message}{place}{more}", self.diagnostics
        )
