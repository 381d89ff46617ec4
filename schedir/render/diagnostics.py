"""A report for a person (`full`, `concise`), for a program (`report_data`) and for GitHub's
annotations.

Each takes the report and its subject, the schedule's name or file as the user gave it.
`explanation` prints the meaning of a rule.
"""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, TypeAlias

from schedir.checker import CHANNELS, Diagnostic, Excerpt, Location, Report, Rule, check
from schedir.ir import Source, loads, printable
from schedir.render.text import Piece, as_json, plain, table

# The most similar findings to show, because one wrong line can make thousands; and the most places
# of one finding, because a finding on every gradient of a stage has more than help anybody.
_FEW, _MOST_PLACES = 3, 8
# The style of each severity, the worst first.
_SEVERITIES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_GITHUB_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}
_WIDTH = 80


_Likeness: TypeAlias = tuple[str, Source | tuple[tuple[int, int], ...]]


def full(report: Report, subject: str) -> Iterator[Piece]:
    """Every finding with its places, trace and help, and then a line with the verdict."""
    for diagnostic, others in _shown(report):
        yield from _finding(diagnostic)
        yield Piece(f"   … {others}\n\n" if others else "\n")
    yield Piece(f"{printable(subject)}: {summary(report)}\n")


def finding(diagnostic: Diagnostic) -> str:
    """One finding in full."""
    return plain(_finding(diagnostic))


def _finding(diagnostic: Diagnostic) -> Iterator[Piece]:
    yield Piece(f"{diagnostic.severity}[{diagnostic.code}]", _SEVERITIES[diagnostic.severity])
    yield Piece(": ")
    yield Piece(diagnostic.headline, "bold")
    lines = [f"  ({diagnostic.name})", *_places(diagnostic)]
    if diagnostic.trace:
        lines += [f"   | {row}" for row in table(diagnostic.trace).splitlines()]
    if diagnostic.excerpts:
        rows = [(f"rank {excerpt.rank}", _list(excerpt)) for excerpt in diagnostic.excerpts]
        lines += ["   |", *(f"   | {row}" for row in table(rows).splitlines())]
    lines += [f"   = note: {note}" for note in diagnostic.notes]
    if diagnostic.help is not None:
        lines.append(f"   = help: {diagnostic.help}")
    yield Piece("\n".join(lines) + "\n")


def _places(diagnostic: Diagnostic) -> Iterator[str]:
    """The places, each with its line of Python and its label."""
    places = diagnostic.listed
    if len(places) > _MOST_PLACES:
        places = places[:_FEW]
    width = max(len(_place(location)) for location in places)
    for location, label, mark in zip_longest(places, diagnostic.labels[: len(places)], ["-->"]):
        after = f"      {location.source}" if location.source else ""
        after += f"   {label}" if label else ""
        yield f"  {mark or ':::'} {_place(location):{width if after else 0}}{after}"
    if len(diagnostic.listed) > len(places):
        yield f"  ::: and {len(diagnostic.listed) - len(places)} more"


def _list(excerpt: Excerpt) -> str:
    """A piece of a list with the fault in brackets: `#3 … 1B0 [1SEND_GRAD0] [1RECV_ACT1] 1F1 …`."""
    tokens = [
        f"[{entry}]" if index in excerpt.marked else entry
        for index, entry in enumerate(excerpt.entries, excerpt.first)
    ]
    before = ["…"] if excerpt.first else []
    after = ["…"] if excerpt.first + len(tokens) < excerpt.total else []
    return " ".join([f"#{excerpt.first}", *before, *tokens, *after])


def _shown(report: Report) -> Iterator[tuple[Diagnostic, str]]:
    """The findings to show, in order: the first few of similar ones, the last of these with the
    number that is not shown."""
    alike: dict[_Likeness, list[Diagnostic]] = defaultdict(list)
    for diagnostic in report.diagnostics:
        alike[_likeness(diagnostic)].append(diagnostic)
    kinds = Counter(code for code, _ in alike)
    turns: Counter[_Likeness] = Counter()
    for diagnostic in report.diagnostics:
        likeness = code, _ = _likeness(diagnostic)
        hidden = alike[likeness][_FEW:]
        turns[likeness] += 1
        if turns[likeness] == _FEW and hidden:
            yield diagnostic, _others(hidden, only_kind=kinds[code] == 1)
        elif turns[likeness] <= _FEW:
            yield diagnostic, ""


def _likeness(diagnostic: Diagnostic) -> _Likeness:
    """What similar findings share: the code, and the line of Python that made the actions, or, in a
    list that no generator wrote, the rank and stage."""
    place = tuple((each.rank, each.action.stage) for each in diagnostic.locations[:1])
    return diagnostic.code, _source_of(diagnostic) or place


def _source_of(diagnostic: Diagnostic) -> Source | None:
    """The line of Python to look at: the first that a location has. A missing action has none."""
    return next((place.source for place in diagnostic.locations if place.source is not None), None)


def _others(hidden: list[Diagnostic], only_kind: bool) -> str:
    """The number of findings that are not shown, with those that the report itself leaves out."""
    beyond = sum(diagnostic.more for diagnostic in hidden)
    if only_kind or not beyond:
        return f"and {len(hidden) + beyond:,} more like it"
    return f"and {len(hidden):,} more like it, and {beyond:,} more of {hidden[0].code}"


def concise(report: Report, subject: str) -> Iterator[Piece]:
    """One line for each finding."""
    for diagnostic, others in _shown(report):
        source = _source_of(diagnostic)
        where = printable(subject) if source is None else str(source)
        what = f"{diagnostic.code} {diagnostic.name}"
        place = "".join(f": {_place(location)}" for location in diagnostic.locations[:1])
        yield Piece(f"{where}{place}: {what}: {diagnostic.headline}\n")
        if others:
            yield Piece(f"{where}: {what}: … {others}\n")


def report_data(report: Report) -> dict[str, Any]:
    """The findings as JSON. The keys are a contract."""
    diagnostics = [
        {
            "code": diagnostic.code,
            "name": diagnostic.name,
            "severity": diagnostic.severity,
            "message": diagnostic.headline,
            "locations": [
                {"rank": place.rank, "index": place.index, "action": str(place.action)}
                for place in diagnostic.locations
            ],
        }
        for diagnostic in report.diagnostics
    ]
    return {"ok": report.ok, "channel": report.channel, "diagnostics": diagnostics}


def github(report: Report, subject: str) -> Iterator[Piece]:
    """Workflow commands, which GitHub shows beside the lines of a pull request.

    GitHub shows few of them, so there are at most three similar ones.
    """
    for diagnostic, others in _shown(report):
        properties = {}
        source = _source_of(diagnostic)
        if source is not None:
            properties = {"file": source.file, "line": str(source.line)}
        # A list of actions has no line of Python, but it is a file.
        elif subject.endswith((".sched", ".csv")):
            properties = {"file": subject}
        properties["title"] = f"{diagnostic.code} {diagnostic.name}"
        written = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in properties.items())
        place = "".join(f"{_place(location)}: " for location in diagnostic.locations[:1])
        message = f"{place}{diagnostic.headline}" + (f"; {others}" if others else "")
        level = _GITHUB_LEVELS[diagnostic.severity]
        yield Piece(f"::{level} {written}::{_escaped(message)}\n")


FORMATS: Mapping[str, Callable[[Report, str], Iterable[Piece]]] = {
    "text": full,
    "concise": concise,
    "json": lambda report, subject: [Piece(as_json(report_data(report)))],
    "github": github,
}
"""The formats of `schedir check` by name."""


def _escaped(text: str, more: str = "") -> str:
    """A text for GitHub's workflow commands; `more` are characters to escape in a property."""
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return printable(text)


def _place(location: Location) -> str:
    """A location, marked as missing if it is."""
    return f"{location}{' (missing)' if location.index is None else ''}"


def summary(report: Report) -> str:
    """The numbers of findings, and the channel models under which the schedule is clean."""
    many: Counter[str] = Counter()
    for each in report.diagnostics:
        many[each.severity] += 1 + each.more
    found = [f"{many[s]:,} {s}{'s' * (many[s] > 1)}" for s in _SEVERITIES if many[s]]
    clean = report.clean_channels
    if not report.ok or report.channel not in clean:
        return f"{', '.join(found)} under {report.channel}"
    unclean = [channel for channel in CHANNELS if channel not in clean]
    also = [channel for channel in clean if channel != report.channel]
    parts = [
        f"{word}: {', '.join(some)}" for word, some in (("also", also), ("not", unclean)) if some
    ]
    elsewhere = f" ({'; '.join(parts)})" if unclean else " and every other channel model"
    return ", ".join([f"clean under {report.channel}{elsewhere}", *found])


def explanation(rule: Rule) -> str:
    """A rule's meaning, why it matters, how to fix it, and an example with the finding that `check`
    prints for it."""
    report = check(loads(rule.example), **dict(rule.options))
    found = "\n".join(map(finding, report.diagnostics))
    paragraphs = (
        f"{rule.severity}[{rule.code}]: {rule.name}",
        _fill(rule.meaning),
        _fill(f"Why: {rule.why}"),
        _fill(f"Fix: {rule.fix}"),
        "Example:",
        textwrap.indent(rule.example, "    ") + f"\n`schedir check{command_options(rule)}` says:",
        textwrap.indent(found, "    "),
    )
    return "\n\n".join(paragraphs).rstrip("\n") + "\n"


def _fill(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False)  # do not break options


def command_options(rule: Rule) -> str:
    """The options of `schedir check` that the rule's example needs."""
    found = ""
    for name, value in rule.options:
        if name == "ties":
            found += "".join(f" --tie {','.join(map(str, tie))}" for tie in value)
        else:
            found += f" --{name.replace('_', '-')} {value}"
    return found
