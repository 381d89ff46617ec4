"""Texts with holes, which a finding fills in with its own attributes once somebody reads them.

A hole names an attribute, `{stages}`, or an attribute of one, `{other.action.stage}`, as in any
format string. After a colon it may say in which form:

    {above:is|are}     the first word for one, the second for any other number
    {held:and}         0, 1 and 2
    {held:ranges}      0-3, 5
    {late:g}           as `format` has it
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from functools import cache
from operator import attrgetter
from typing import Any, TypeAlias

import attrs

# Ranges of numbers; more of them explain nothing.
_MOST_RANGES = 8

_Piece: TypeAlias = tuple[str, Callable[[Any], Any] | None, str]
"""What stands before a hole, what fills it (None at the end of the text), and in which form."""


@attrs.frozen
class Text:
    """A template, or several, as an attribute of a class: its instances have it filled in."""

    template: str | tuple[str, ...]

    def __get__(self, filler: object | None, owner: type) -> str | tuple[str, ...]:
        if filler is None:
            return self.template
        if isinstance(self.template, str):
            return fill(self.template, filler)
        return tuple(fill(each, filler) for each in self.template)


def fill(template: str, filler: object) -> str:
    """The template with its holes filled by attributes. Raises AttributeError for unknown ones."""
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
