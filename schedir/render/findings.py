"""Which findings a person is shown: of those alike three, for one wrong line can make thousands."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import attrs

from schedir.checker import Diagnostic
from schedir.ir import Source

_MOST_ALIKE = 3
_Likeness: TypeAlias = tuple[str, Source]


@attrs.frozen
class Shown:
    """A finding that is shown; `others` says how many like it are not, or nothing."""

    diagnostic: Diagnostic
    others: str = ""


def shown(diagnostics: Iterable[Diagnostic]) -> Iterator[Shown]:
    """The findings to show, in order: the first three of the same code and line of Python.

    Findings of lists that no generator wrote have no such line, and are shown one by one.
    """
    diagnostics = tuple(diagnostics)
    alike: dict[_Likeness, list[Diagnostic]] = defaultdict(list)
    for diagnostic in diagnostics:
        source = source_of(diagnostic)
        if source is not None:
            alike[diagnostic.code, source].append(diagnostic)
    lines = Counter(code for code, _ in alike)
    turns: Counter[_Likeness] = Counter()
    for diagnostic in diagnostics:
        source = source_of(diagnostic)
        if source is None:
            yield Shown(diagnostic)
            continue
        likeness = (diagnostic.code, source)
        turns[likeness] += 1
        hidden = alike[likeness][_MOST_ALIKE:]
        if turns[likeness] < _MOST_ALIKE or not hidden:
            yield Shown(diagnostic)
        elif turns[likeness] == _MOST_ALIKE:
            yield Shown(diagnostic, _others(hidden, only_line=lines[diagnostic.code] == 1))


def source_of(diagnostic: Diagnostic) -> Source | None:
    """The line of Python to look at: what is missing has none, so it may be another location's."""
    return next((place.source for place in diagnostic.locations if place.source is not None), None)


def _others(hidden: list[Diagnostic], only_line: bool) -> str:
    """How many are not shown; those that the report itself leaves out are counted by code."""
    beyond = sum(diagnostic.more for diagnostic in hidden)
    if only_line or not beyond:
        return f"and {len(hidden) + beyond:,} more like it"
    return f"and {len(hidden):,} more like it, and {beyond:,} more of {hidden[0].code}"
