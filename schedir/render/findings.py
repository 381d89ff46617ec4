"""Which findings a person is shown: of those alike three, for one wrong line can make thousands."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import attrs

from schedir.checker import Diagnostic
from schedir.ir import Source

_MOST_ALIKE = 3
_MOST_WITHOUT_SOURCE = 1000
_Likeness: TypeAlias = tuple[str, Source | None]


@attrs.frozen
class Shown:
    """A finding that is shown; `others` says how many like it are not, or nothing."""

    diagnostic: Diagnostic
    others: str = ""


def shown(diagnostics: Iterable[Diagnostic]) -> Iterator[Shown]:
    """The findings to show, in order: the first three of the same code and line of Python.

    Findings of lists that no generator wrote have no such line: each is another mistake, so the
    first thousand of a code are shown.
    """
    diagnostics = tuple(diagnostics)
    alike: dict[_Likeness, list[Diagnostic]] = defaultdict(list)
    for diagnostic in diagnostics:
        alike[diagnostic.code, source_of(diagnostic)].append(diagnostic)
    lines = Counter(code for code, _ in alike)
    turns: Counter[_Likeness] = Counter()
    for diagnostic in diagnostics:
        likeness = code, source = diagnostic.code, source_of(diagnostic)
        most = _MOST_WITHOUT_SOURCE if source is None else _MOST_ALIKE
        turns[likeness] += 1
        if turns[likeness] < most or len(alike[likeness]) <= most:
            yield Shown(diagnostic)
        elif turns[likeness] == most:
            hidden = alike[likeness][most:]
            yield Shown(diagnostic, _others(hidden, only_line=lines[code] == 1))


def source_of(diagnostic: Diagnostic) -> Source | None:
    """The line of Python to look at: what is missing has none, so it may be another location's."""
    return next((place.source for place in diagnostic.locations if place.source is not None), None)


def _others(hidden: list[Diagnostic], only_line: bool) -> str:
    """How many are not shown; those that the report itself leaves out are counted by code."""
    beyond = sum(diagnostic.more for diagnostic in hidden)
    if only_line or not beyond:
        return f"and {len(hidden) + beyond:,} more like it"
    return f"and {len(hidden):,} more like it, and {beyond:,} more of {hidden[0].code}"
