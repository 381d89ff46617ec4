"""What a writer wants to know beside what it writes: the width, the times, the looks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from schedir.errors import SchedirError

if TYPE_CHECKING:
    from schedir.simulator import Timeline
    from schedir.simulator.steady_state import SteadyState

_CM, _COLUMN = 96 / 2.54, 7.2
"""Pixels; a column is as wide as a letter of a picture's text."""
_NARROWEST, _WIDEST = 8 * _CM, 1000 * _CM


def _pixels(width: str | float | None) -> float | None:
    """A width as the user says it, in pixels."""
    if width is None:
        return None
    text = str(width)
    try:
        found = float(text.removesuffix("cm")) * (_CM if text.endswith("cm") else _COLUMN)
    except ValueError:
        found = math.nan
    if not _NARROWEST <= found <= _WIDEST:
        least, most = (round(limit / _CM) for limit in (_NARROWEST, _WIDEST))
        raise ValueError(
            f"the width of a picture is {least}cm to {most}cm, or as many columns, not {text!r}"
        )
    return found


@attrs.frozen
class Picture:
    """How a picture looks: `title` is what stands above it, None for the schedule's shape, "" for
    nothing; `width` is that of all, None for what its labels need; `greyscale` is for print."""

    title: str | None = None
    width: float | None = attrs.field(default=None, converter=_pixels)
    greyscale: bool = False


@attrs.frozen
class Page:
    """What a writer may want to know beside what it writes.

    `subject` is the schedule's name or file, as the user gave it. `width` and `height` are those
    of the terminal, in columns and lines; `width` is None where nothing is to be folded. With
    `fit` the whole of a drawing is to be as narrow, and with `screen` as low.
    `against` is a second timeline, for the same time axis; `memory` asks for curves of it. `steady`
    is the steady state of a schedule, which the timeline `full` shows. Drawn is what runs from
    `start` to `end`, in the unit of the time axis; None for the end of all.
    """

    subject: str = ""
    width: int | None = None
    height: int = 24
    fit: bool = False
    screen: bool = False
    against: Timeline | None = None
    memory: bool = False
    steady: SteadyState | None = None
    full: Timeline | None = None
    picture: Picture = Picture()
    start: float = 0
    end: float | None = None


def window_of(page: Page, *timelines: Timeline | None) -> tuple[float, float]:
    """The times that a page is to show, of timelines in the unit that they are read in.

    Raises SchedirError where nothing lies between them.
    """
    last = max(line.makespan for line in timelines if line is not None)
    end = last if page.end is None else min(page.end, last)
    if not (0 <= page.start < end or page.start == end == 0):
        until = "the end" if page.end is None else f"{page.end:g}"
        raise SchedirError(
            f"nothing is to be seen from {page.start:g} to {until}: the timeline goes from 0 to "
            f"{last:g}"
        )
    return page.start, end
