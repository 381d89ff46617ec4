"""What a check finds, as data; `render` draws it."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs

from schedir.checker.changes import Change
from schedir.display import Displayed
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


Text: TypeAlias = "str | Callable[[Diagnostic], str]"
"""What is said of a finding: a template (`fill`), or a function where something is computed."""

Texts: TypeAlias = "tuple[str, ...] | Callable[[Diagnostic], Iterable[str]]"


@attrs.frozen(kw_only=True)
class Rule:
    """A bad pattern: what a check says where it finds it, and what `schedir explain` says of it.

    `code` is stable and never reused; `name` is the bad pattern's. `strict` says whether `schedir
    check --strict` fails for it. `meaning` is what the rule rejects, and `example` a whole `.sched`
    text that it rejects, with the `options` of `check` that this needs.

    A finding's texts are made when somebody reads them. `labels` are one for each location, or
    fewer; `advice` is what to do where no change is known that ends the fault, `after_change` what
    to add where one is. `trace` makes rows of a table that shows how it comes about, a wait cycle
    say; the first `listed` locations are listed beside that, all by default.
    """

    code: str
    name: str
    severity: Severity = "error"
    strict: bool = True

    meaning: str
    why: str
    fix: str
    example: str
    options: tuple[tuple[str, Any], ...] = ()

    message: Text
    labels: Texts = ()
    notes: Texts = ()
    advice: Text | None = None
    after_change: Text = ""
    listed: int | None = None
    trace: Callable[[Diagnostic], Iterable[tuple[str, ...]]] | None = None

    def __repr__(self) -> str:
        return f"<Rule {self.code} {self.name}>"

    def at(self, schedule: Schedule, *places: int, **facts: Any) -> Diagnostic:
        """A finding at places in the schedule's columns, the primary one first."""
        return Diagnostic(self, locations(schedule, places), facts)


@attrs.frozen
class Diagnostic:
    """One finding: which rule rejects what, where, and what to do.

    The `rule` has the texts, which are made of the `facts`; both are read as attributes too, as in
    `finding.why`. The first of `locations` is the primary one. `change` ends the fault, if such a
    change is known; `tried` says that nothing new comes of it. `more` says how many findings of the
    same code a report leaves out after this one.
    """

    rule: Rule
    locations: tuple[Location, ...]
    facts: Mapping[str, Any] = attrs.field(factory=dict, hash=False)
    change: Change | None = None
    tried: bool = False
    more: int = 0

    if not TYPE_CHECKING:  # a misspelt name of ours is an error

        def __getattr__(self, name: str) -> Any:
            return self.facts[name] if name in self.facts else getattr(self.rule, name)

    @property
    def code(self) -> str:
        """The rule's: S301, say."""
        return self.rule.code

    @property
    def name(self) -> str:
        """The bad pattern's: wait-cycle, say."""
        return self.rule.name

    @property
    def severity(self) -> Severity:
        """Whether it is an error, a warning or a note."""
        return self.rule.severity

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        return self._said(self.rule.message)

    @property
    def labels(self) -> tuple[str, ...]:
        """What each location has to do with it; may be shorter than the locations."""
        return self._all_said(self.rule.labels)

    @property
    def notes(self) -> tuple[str, ...]:
        """What else there is to know."""
        return self._all_said(self.rule.notes)

    @property
    def help(self) -> str | None:
        """What to do."""
        if self.change is not None:
            return f"{self.change}{self._said(self.rule.after_change)}"
        return None if self.rule.advice is None else self._said(self.rule.advice)

    @property
    def headline(self) -> str:
        """The message, and how many findings are left out after this one."""
        return (
            f"{self.message}; and {self.more:,} more of {self.code}" if self.more else self.message
        )

    @property
    def listed(self) -> tuple[Location, ...]:
        """The locations to list, but for those that the trace shows."""
        return self.locations[: self.rule.listed]

    @property
    def trace(self) -> tuple[tuple[str, ...], ...]:
        """Rows of a table that shows how it comes about: a wait cycle, say."""
        return () if self.rule.trace is None else tuple(self.rule.trace(self))

    @property
    def excerpts(self) -> tuple[Excerpt, ...]:
        """The pieces of the lists that it is about."""
        found: tuple[Excerpt, ...] = self.facts.get("excerpts", ())
        return found

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

    def _said(self, text: Text) -> str:
        return text(self) if callable(text) else fill(text, self)

    def _all_said(self, texts: Texts) -> tuple[str, ...]:
        return tuple(texts(self) if callable(texts) else (fill(each, self) for each in texts))


@attrs.frozen(repr=False)
class Report(Displayed):
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
    schedule: Schedule | None = None

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


# Ranges of numbers; more of them explain nothing.
_MOST_RANGES = 8

_Piece: TypeAlias = tuple[str, Callable[[Any], Any] | None, str]
"""What stands before a hole, what fills it (None at the end of the text), and in which form."""


def fill(template: str, filler: object) -> str:
    """The template with its holes filled by attributes. Raises AttributeError for unknown ones.

    A hole names an attribute, `{stages}`, or an attribute of one, `{other.action.stage}`, as in any
    format string. After a colon it may say in which form:

        {above:is|are}     the first word for one, the second for any other number
        {held:and}         0, 1 and 2
        {held:ranges}      0-3, 5
        {late:g}           as `format` has it
    """
    return "".join(
        literal if read is None else literal + _form(read(filler), form)
        for literal, read, form in _pieces(template)
    )


@cache
def _pieces(template: str) -> tuple[_Piece, ...]:
    return tuple(
        (literal, None if name is None else attrgetter(name), form or "")
        for literal, name, form, _ in string.Formatter().parse(template)
    )


def _form(value: Any, form: str) -> str:
    if not form:
        return str(value)
    if "|" in form:
        one, several = form.split("|")
        return one if value == 1 else several
    if form == "and":
        return joined(value)
    if form == "ranges":
        return ranges(value)
    try:
        return format(value, form)
    except ValueError:
        forms = "one|several, and, ranges, and Python's own"
        raise ValueError(f"{form!r} is no form of {value!r}; there are {forms}") from None


def joined(items: Iterable[object]) -> str:
    """One or more items: `0, 1 and 2`."""
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: `0-3, 5`, and how many more there are."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs[:_MOST_RANGES]
    ]
    more = sum(map(len, runs[_MOST_RANGES:]))
    return (", ".join(words) or "none") + (f", … and {more} more" if more else "")
