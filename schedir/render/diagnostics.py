"""A report for a person (`full`, `concise`), for a program (`json`) and for GitHub's annotations.

Each takes the report and its subject: the name or file of the schedule, as the user gave it.
"""

from __future__ import annotations

from collections.abc import Iterator

from schedir.checker import CHANNELS, Diagnostic, Excerpt, Location, Report
from schedir.ir import printable
from schedir.render.findings import shown, source_of
from schedir.render.styled import Piece, plain, table

# A finding may concern every gradient of a stage; more places than these explain nothing.
_MOST_PLACES = 8
# The style of each severity, the gravest first.
_SEVERITIES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_GITHUB_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


def full(report: Report, subject: str) -> Iterator[Piece]:
    """Every finding with its places, its trace and its help, then a line that sums them up."""
    for each in shown(report.diagnostics):
        yield from _finding(each.diagnostic)
        yield Piece(f"   … {each.others}\n\n" if each.others else "\n")
    yield Piece(f"{printable(subject)}: {_summary(report)}\n")


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
    places = diagnostic.listed[:_MOST_PLACES]
    width = max(len(_place(location)) for location in places)
    for number, location in enumerate(places):
        source = location.source
        line = "" if source is None else f"      {source}"
        label = diagnostic.labels[number] if number < len(diagnostic.labels) else ""
        after = line + (f"   {label}" if label else "")
        place = _place(location).ljust(width) if after else _place(location)
        yield f"  {':::' if number else '-->'} {place}{after}"
    if len(diagnostic.listed) > _MOST_PLACES:
        yield f"  ::: and {len(diagnostic.listed) - _MOST_PLACES} more"


def _list(excerpt: Excerpt) -> str:
    """A piece of a list: `#3 … 1B0 [1SEND_GRAD0] [1RECV_ACT1] 1F1 …`, what is at fault in
    brackets."""
    tokens = [
        f"[{entry}]" if index in excerpt.marked else entry
        for index, entry in enumerate(excerpt.entries, excerpt.first)
    ]
    before = ["…"] if excerpt.first else []
    after = ["…"] if excerpt.first + len(tokens) < excerpt.total else []
    return " ".join([f"#{excerpt.first}", *before, *tokens, *after])


def concise(report: Report, subject: str) -> Iterator[Piece]:
    """One line for each finding."""
    for each in shown(report.diagnostics):
        diagnostic = each.diagnostic
        source = source_of(diagnostic)
        where = printable(subject) if source is None else str(source)
        what = f"{diagnostic.code} {diagnostic.name}"
        place = "".join(f": {_place(location)}" for location in diagnostic.locations[:1])
        yield Piece(f"{where}{place}: {what}: {diagnostic.headline}\n")
        if each.others:
            yield Piece(f"{where}: {what}: … {each.others}\n")


def as_json(report: Report) -> str:
    """The findings as data: the keys are a contract."""
    import json  # the other forms start without it

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
    result = {"ok": report.ok, "channel": report.channel, "diagnostics": diagnostics}
    return json.dumps(result, indent=2) + "\n"


def github(report: Report, subject: str) -> str:
    """Workflow commands, which GitHub shows beside the lines of a pull request.

    It shows few of them, so of those alike there are three.
    """
    lines = []
    for each in shown(report.diagnostics):
        diagnostic = each.diagnostic
        properties = []
        source = source_of(diagnostic)
        if source is not None:
            properties += [("file", source.file), ("line", str(source.line))]
        place = "".join(f"{_place(location)}: " for location in diagnostic.locations[:1])
        # A list of actions, unlike a generator, gives them no line, but it is a file.
        if not properties and subject.endswith((".sched", ".csv")):
            properties.append(("file", subject))
        properties.append(("title", f"{diagnostic.code} {diagnostic.name}"))
        written = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in properties)
        level = _GITHUB_LEVELS[diagnostic.severity]
        message = f"{place}{diagnostic.headline}" + (f"; {each.others}" if each.others else "")
        lines.append(f"::{level} {written}::{_escaped(message)}\n")
    return "".join(lines)


def _place(location: Location) -> str:
    """A location, said to be missing where it is."""
    return f"{location}{' (missing)' if location.index is None else ''}"


def _summary(report: Report) -> str:
    counts = list(_counts(report))
    clean = report.clean_channels
    if not report.ok or report.channel not in clean:
        return f"{', '.join(counts)} under {report.channel}"
    return ", ".join([f"clean under {report.channel}{_elsewhere(report)}", *counts])


def _elsewhere(report: Report) -> str:
    """Under which other models it is clean."""
    clean = report.clean_channels
    unclean = [channel for channel in CHANNELS if channel not in clean]
    if not unclean:
        return " and every other channel model"
    also = [channel for channel in clean if channel != report.channel]
    more = [("also", also), ("not", unclean)]
    parts = [f"{word}: {', '.join(channels)}" for word, channels in more if channels]
    return f" ({'; '.join(parts)})"


def _counts(report: Report) -> Iterator[str]:
    for severity in _SEVERITIES:
        many = sum(1 + d.more for d in report.diagnostics if d.severity == severity)
        if many:
            yield f"{many:,} {severity}{'s' if many > 1 else ''}"


def _escaped(text: str, more: str = "") -> str:
    """As GitHub's workflow commands want it; `more` are the characters special in a property."""
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return printable(text)
