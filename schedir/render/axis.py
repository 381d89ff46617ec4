"""The time axis of a drawing: the column of each time, the ticks, and the cuts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import attrs

from schedir.render.palette import LEFT_OUT
from schedir.render.text import number

_BETWEEN_TICKS = 8
_LARGEST = 1e280
CUT_WIDTH = 2
"""The columns that mark a cut."""


def finite(scale: float) -> float:
    """The scale; if actions take almost no time, the largest that times can be multiplied by."""
    return min(scale, _LARGEST)


@attrs.frozen
class Cut:
    """Columns `left` to `right` (exclusive), counted before any cut, that are not drawn.

    `note` stands on the ruler in their place, and `meaning` in the legend.
    """

    left: int
    right: int
    note: str
    meaning: str


# Not slotted, because cached properties need a __dict__.
@attrs.frozen(slots=False)
class Axis:
    """An axis of `scale` columns per unit of time up to `makespan`; `cuts` ascend."""

    scale: float = attrs.field(converter=finite)
    makespan: float
    cuts: tuple[Cut, ...] = ()

    @cached_property
    def columns(self) -> int:
        """The number of drawn columns."""
        return self.end - sum(cut.right - cut.left - CUT_WIDTH for cut in self.cuts)

    @cached_property
    def tick(self) -> float:
        """The time between two ticks: 1, 2 or 5 times a power of ten."""
        return round_step(_BETWEEN_TICKS / self.scale)

    @property
    def end(self) -> int:
        """The number of columns before any cut."""
        return self.column(self.makespan)

    def column(self, time: float) -> int:
        """The column of a time, before any cut."""
        return nearest(time * self.scale)

    def time(self, column: int) -> str:
        """The time of a column; ticks and the end of the axis keep their exact time."""
        if column == self.end:
            return number(self.makespan)
        time = column / self.scale
        tick = round(time / self.tick) * self.tick
        return number(tick if self.column(tick) == column else time)

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """The columns between the cuts: first, end, and how far they move to the left."""
        first, moved = 0, 0
        for cut in self.cuts:
            yield first, cut.left, moved
            first = cut.right
            moved += cut.right - cut.left - CUT_WIDTH
        yield first, self.end, moved

    def ticks(self, left: int, right: int) -> Iterator[tuple[int, str]]:
        """The ticks on the drawn columns `left` to `right` (exclusive), with their times."""
        for first, end, moved in self.parts():
            first, end = max(first, left + moved), min(end, right + moved)
            for time in ticks(first / self.scale, end / self.scale, self.tick):
                if first <= self.column(time) < end:
                    yield self.column(time) - moved, number(time)

    def notes(self) -> Iterator[tuple[int, str]]:
        """The drawn column of each cut, and the note that stands there."""
        for (_, end, moved), cut in zip(self.parts(), self.cuts, strict=False):
            yield end - moved, f"{LEFT_OUT} {cut.note} {LEFT_OUT}"


def nearest(value: float) -> int:
    """The nearest whole number, halves up (`round` rounds every second half down)."""
    return math.floor(value + 0.5)


def ticks(start: float, end: float, step: float) -> list[float]:
    """The multiples of a step between two times."""
    first, last = math.ceil(start / step * (1 - 1e-9)), math.floor(end / step * (1 + 1e-9))
    return [turn * step for turn in range(first, last + 1)]


def round_step(least: float) -> float:
    """The smallest number that is 1, 2 or 5 times a power of ten, and at least `least`."""
    power: float = 10 ** math.floor(math.log10(least))
    step = next(step for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))
    return step * power
