"""The findings of a check, as data; `render` prints them."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import numpy as np

from schedir.display import Displayed, rounded
from schedir.errors import ScheduleError
from schedir.ir import Action, Columns, Ints, Schedule, Source

Severity = Literal["error", "warning", "note"]


@attrs.frozen
class Location:
    """A place in the lists. `index` is None if the fault is a missing action.

    `action` is the action at the place, or the missing one. `source` is the line of Python that
    made it. `within` is the entry that contains the action, in short, if the entry has several
    actions.
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
    within = in_short(columns, place) if columns.shared[place] else None
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
    """A piece of a rank's list as text, from the index `first` on. `marked` are the indices of the
    entries at fault.

    `total` is the length of the whole list.
    """

    rank: int
    first: int
    entries: tuple[str, ...]
    marked: frozenset[int]
    total: int


Text: TypeAlias = "str | Mapping[str, str] | Callable[[Diagnostic], str]"
"""The text of a finding: a template (`fill`), one for each `case` (a fact of the finding), or a
function if something is computed."""

Texts: TypeAlias = "tuple[Text, ...] | Callable[[Diagnostic], Iterable[str]]"


def _whole(example: str) -> str:
    """A whole `.sched` text, from its lines without the head."""
    lines = "schedir 1", "name example", *example.strip().split("\n")
    return "".join(f"{' '.join(line.split())}\n" for line in lines)


@attrs.frozen
class Rule:
    """A bad pattern: what a check says about it, and what `schedir explain` says about it.

    `code` is stable and never reused. `name` names the bad pattern. `strict` says whether `schedir
    check --strict` fails for it. `meaning` is what the rule rejects. `example` is a whole `.sched`
    text that it rejects, given without its first two lines, with the `options` of `check` that the
    example needs.

    A finding's texts are made when somebody reads them. There is one of the `labels` for each
    location, or fewer. `advice` is the help line if no known change removes the fault;
    `after_change` is added to the help line if one does. `trace` makes the rows of a table that
    shows how the fault comes about, such as a wait cycle. The first `listed` locations are listed
    beside that table, by default all.
    """

    code: str
    name: str
    meaning: str
    why: str
    fix: str
    example: str = attrs.field(converter=_whole)
    message: Text

    severity: Severity = "error"
    strict: bool = True
    options: tuple[tuple[str, Any], ...] = ()
    labels: Texts = ()
    notes: Texts = ()
    advice: Text | None = None
    after_change: Text = ""
    listed: int | None = None
    trace: Callable[[Diagnostic], Iterable[tuple[str, ...]]] | None = None

    def __repr__(self) -> str:
        return f"<Rule {self.code} {self.name}>"

    def __hash__(self) -> int:
        return hash(self.code)

    def at(self, schedule: Schedule, *places: int, **facts: Any) -> Diagnostic:
        """A finding at places in the schedule's columns, the primary one first."""
        return Diagnostic(self, locations(schedule, places), facts)

    def each(
        self,
        schedule: Schedule,
        rows: Ints | Sequence[Sequence[int] | Ints],
        *,
        keys: Ints | None = None,
        extents: Ints | None = None,
        **facts: Any,
    ) -> Faults:
        """A fault at each row of places, the primary one first; -1 stands for no place.

        A fact that is an array or a list has one item for each row. By default the `keys` are the
        kind, stage, rank and microbatch of the primary place.
        """
        if not len(rows):
            return Faults(rule=self, keys=_NONE, findings=())
        if isinstance(rows, np.ndarray):
            rows = np.column_stack([rows])
            first = rows[:, 0]
        else:
            first = np.array([row[0] for row in rows], np.int64)
        keys = _numbers(schedule, first) if keys is None else keys
        extents = np.ones_like(keys) if extents is None else extents
        lists = {
            name: fact.tolist() if isinstance(fact, np.ndarray) else fact
            for name, fact in facts.items()
            if isinstance(fact, np.ndarray | list)
        }

        def findings() -> Iterator[Finding]:
            numbers = keys.tolist(), extents.tolist()
            for row, key, extent, *own in zip(rows, *numbers, *lists.values(), strict=True):
                places = [int(place) for place in row if place >= 0]
                own_facts = {**facts, **dict(zip(lists, own, strict=True))}
                yield Finding(self.at(schedule, *places, **own_facts), key, extent)

        return Faults(
            rule=self,
            keys=keys,
            extents=extents,
            findings=findings(),
        )


_NONE = np.zeros(0, np.int64)


def _numbers(schedule: Schedule, places: Ints) -> Ints:
    """For each place the number of its kind, stage, rank and microbatch."""
    columns = schedule.columns
    numbers: Ints = columns.kind[places] * schedule.stages + columns.stage[places]
    numbers = numbers * schedule.ranks + columns.rank[places]
    return numbers * schedule.microbatches + columns.microbatch[places]


@attrs.frozen
class Diagnostic:
    """One finding: the rule that rejects the schedule, the places, and what to do.

    The `rule` has the texts, which are filled in with the `facts`. Attributes of both can be read
    from the finding, as in `finding.why`. The first of the `locations` is the primary one. `change`
    is a change that removes the fault, if one is known; `tried` says that the change causes no new
    finding. `more` says how many findings of the same code the report leaves out after this one.

    >>> import schedir
    >>> schedule = schedir.Schedule.of("mine", [0], ["0F0 0B0 0B0"])
    >>> finding = schedir.check(schedule).diagnostics[0]
    >>> finding.code, finding.message, str(finding.locations[0])
    ('S104', '0B0 is listed twice', 'rank 0 #2 0B0')
    >>> finding.help
    'remove 0B0 at rank 0 #2'
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
        """The code of the rule, such as S301."""
        return self.rule.code

    @property
    def name(self) -> str:
        """The name of the bad pattern, such as wait-cycle."""
        return self.rule.name

    @property
    def severity(self) -> Severity:
        """One of "error", "warning" and "note"."""
        return self.rule.severity

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        return self._said(self.rule.message)

    @property
    def labels(self) -> tuple[str, ...]:
        """What each location has to do with the fault; there may be fewer labels than locations."""
        return self._all_said(self.rule.labels)

    @property
    def notes(self) -> tuple[str, ...]:
        """Further facts, one line each."""
        return self._all_said(self.rule.notes)

    @property
    def help(self) -> str | None:
        """What to do, None if no advice is known."""
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
        """The locations to list beside the trace."""
        return self.locations[: self.rule.listed]

    @property
    def trace(self) -> tuple[tuple[str, ...], ...]:
        """The rows of a table that shows how the fault comes about, such as a wait cycle."""
        return () if self.rule.trace is None else tuple(self.rule.trace(self))

    @property
    def excerpts(self) -> tuple[Excerpt, ...]:
        """The pieces of the lists that show the fault."""
        found: tuple[Excerpt, ...] = self.facts.get("excerpts", ())
        return found

    @property
    def rank(self) -> int:
        """The rank of the primary location."""
        return self.locations[0].rank

    @property
    def index(self) -> int | None:
        """The index of the primary location in its rank's list, None if the action is missing."""
        return self.locations[0].index

    @property
    def action(self) -> Action:
        """The action at the primary location, or the action that is missing there."""
        return self.locations[0].action

    @property
    def other(self) -> Location:
        """The second location."""
        return self.locations[1]

    def _said(self, text: Text) -> str:
        if callable(text):
            return text(self)
        return fill(text if isinstance(text, str) else text[self.facts["case"]], self)

    def _all_said(self, texts: Texts) -> tuple[str, ...]:
        return tuple(filter(None, texts(self) if callable(texts) else map(self._said, texts)))


# Changes: entries are moved, reordered, added, removed or rewritten, sends and receives joined into
# batches, or left out for schedir to insert. The text of a change is the help line that a user
# reads; following it to the letter makes exactly that change.

Side = Literal["before", "after"]
Verb = Literal["move", "post"]


@attrs.frozen
class Move:
    """Move the entry at `index` of a rank's list, with all its parts, before or after the entry at
    `target`."""

    rank: int
    index: int
    side: Side
    target: int
    verb: Verb = "move"

    def __str__(self) -> str:
        return (
            f"{self.verb} rank {self.rank} #{self.index} {self.side} rank {self.rank} "
            f"#{self.target}"
        )


@attrs.frozen
class Reorder:
    """Put the entries at `indices` of a rank's list into that order, in the places that they occupy
    now."""

    rank: int
    indices: tuple[int, ...]

    def __str__(self) -> str:
        if len(self.indices) == 2:
            high, low = self.indices
            return f"swap rank {self.rank} #{low} and rank {self.rank} #{high}"
        slots = " ".join(f"#{index}" for index in sorted(self.indices))
        order = " ".join(f"#{index}" for index in self.indices)
        return f"list rank {self.rank} {slots} in the order {order}"


@attrs.frozen
class Add:
    """Put an action into a rank's list, before or after the entry at `target`; None if the list is
    empty."""

    action: Action
    rank: int
    side: Side
    target: int | None

    def __str__(self) -> str:
        if self.target is None:
            return f"add {self.action} to rank {self.rank}"
        return f"add {self.action} {self.side} rank {self.rank} #{self.target}"


@attrs.frozen
class Remove:
    """Take an action out of a rank's list; the other parts of its entry stay."""

    action: Action
    rank: int
    index: int

    def __str__(self) -> str:
        return f"remove {self.action} at rank {self.rank} #{self.index}"


@attrs.frozen
class Write:
    """Write an action in place of another one."""

    action: Action
    old: Action
    rank: int
    index: int

    def __str__(self) -> str:
        return f"write {self.action} in place of {self.old} at rank {self.rank} #{self.index}"


@attrs.frozen
class Several:
    """Several changes, one after the other. `several` orders them so that no change renumbers an
    entry that a later one names."""

    changes: tuple[Add | Remove | Write, ...]

    def __str__(self) -> str:
        return ", and ".join(map(str, self.changes))


@attrs.frozen
class AsSent:
    """Reorder what a rank receives from another rank into the order in which that rank sends it."""

    source: int
    target: int

    def __str__(self) -> str:
        return (
            f"order rank {self.target}'s receives from rank {self.source} as rank {self.source} "
            "sends them"
        )


@attrs.frozen
class Batch:
    """Join the sends and receives of a rank that block each other. `tried` says whether moves were
    tried before."""

    tried: bool = False

    def __str__(self) -> str:
        return (
            f"{_after_moves(self.tried)}post the sends and receives that block each other as "
            "batches, as schedir.batch_communication does"
        )


@attrs.frozen
class LeaveOut:
    """Leave the communication out; schedir inserts it. `tried` means the same as in Batch."""

    tried: bool = False

    def __str__(self) -> str:
        return f"{_after_moves(self.tried)}leave the communication out, and schedir inserts it"


def _after_moves(tried: bool) -> str:
    return "none of the moves tried fixes it; " if tried else ""


Edit: TypeAlias = Add | Remove | Write
Change: TypeAlias = Move | Reorder | Edit | Several | AsSent | Batch | LeaveOut


@attrs.frozen(eq=False)
class Finding:
    """A fault in words, with its `key` and `extent` (`Faults`).

    `changes` are the change that ends it whatever else is wrong, None if none is known, and those
    to try, likely ones first; None if they follow from the locations.
    """

    diagnostic: Diagnostic
    key: int = 0
    extent: int = 0
    changes: tuple[Change | None, Iterable[Change]] | None = None


@attrs.frozen(eq=False, kw_only=True, slots=False)
class Faults:
    """Faults against one rule, ordered by place: a list of a million actions can have a million. So
    they are found and compared as arrays, and put into words only when somebody reads them.

    `keys` identify what each fault is about, by numbers that stay the same when a change is made.
    `extents` say how much is wrong there. Faults with the same key add up. `findings` are made on
    demand, and `many` is their number.
    """

    rule: Rule
    keys: Ints
    findings: Iterable[Finding]
    extents: Ints = attrs.field(
        default=attrs.Factory(lambda faults: np.ones_like(faults.keys), takes_self=True)
    )
    many: int = attrs.field(default=attrs.Factory(lambda faults: len(faults.keys), takes_self=True))

    @cached_property
    def tally(self) -> Tally:
        """How much is wrong, by key."""
        counted: Tally = Counter()
        for key, extent in zip(self.keys.tolist(), self.extents.tolist(), strict=False):
            counted[self.rule.code, key] += extent
        return counted


Tally: TypeAlias = Counter[tuple[str, int]]


def fault(diagnostic: Diagnostic, *, key: int = 0, extent: int = 1) -> Faults:
    """A single fault."""
    return Faults(
        rule=diagnostic.rule,
        keys=np.array([key]),
        extents=np.array([extent]),
        findings=(Finding(diagnostic, key, extent),),
    )


@attrs.frozen(repr=False)
class Report(Displayed):
    """Every finding of a check. Of one code, at most the first 4000 findings are kept; the last of
    them counts the rest (`Diagnostic.more`).

    `channel` is the channel model that the errors were judged under. `clean_channels` are the
    models under which the schedule runs to its end, strictest first; empty if errors prevented the
    analysis. `schedule` is the complete list that was proved, communication included; None if there
    is an error.

    >>> import schedir
    >>> report = schedir.check(schedir.build("1f1b", ranks=2, microbatches=2))
    >>> report.ok, report.diagnostics
    (True, ())
    >>> report.clean_channels
    ('host', 'rank', 'pair', 'edge', 'direction', 'async')
    """

    channel: str
    diagnostics: tuple[Diagnostic, ...]
    clean_channels: tuple[str, ...] = ()
    schedule: Schedule | None = None

    @property
    def ok(self) -> bool:
        """True if there is no error; warnings and notes are allowed."""
        return not self.errors

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The findings of severity error."""
        return tuple(d for d in self.diagnostics if d.severity == "error")

    def raise_if_errors(self) -> None:
        """Raise ScheduleError, with every diagnostic, if there is an error."""
        if self.errors:
            raise self._error()

    def proved(self) -> Schedule:
        """`schedule`. Raises ScheduleError, with every diagnostic, if it is None."""
        if self.schedule is None:
            raise self._error()
        return self.schedule

    def _error(self) -> ScheduleError:
        first, *others = self.errors
        at = first.locations[0] if first.locations else None
        place = f" at {at}" if at else ""
        if at and at.source:
            place += f" ({at.source})"
        number = len(others) + sum(error.more for error in self.errors)
        more = f" (and {number} more)" if number else ""
        return ScheduleError(
            f"{first.code} {first.name}: {first.message}{place}{more}", self.diagnostics
        )


# Ranges of numbers; more of them explain nothing.
_MOST_RANGES = 8


def fill(template: str, filler: object) -> str:
    """The template with its holes filled by attributes. Raises AttributeError for unknown ones.

    A hole names an attribute, `{stages}`, or an attribute of one, `{other.action.stage}`, as in any
    format string. After a colon it may say in which form:

        {above:is|are}     the first word for one, the second for any other number
        {held:and}         0, 1 and 2
        {held:ranges}      0-3, 5
        {late:g}           a number in few digits
        {share:.0%}        as `format` has it
    """
    return "".join(
        literal if name is None else literal + _form(attrgetter(name)(filler), form or "")
        for literal, name, form, _ in string.Formatter().parse(template)
    )


def _form(value: Any, form: str) -> str:
    if "|" in form:
        one, several = form.split("|")
        return one if value == 1 else several
    if form == "and":
        return joined(value)
    if form == "ranges":
        return ranges(value)
    if form == "g":
        return rounded(value)
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
