"""What a writer wants to know beside what it writes: the width, the times, the looks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from schedir.errors import SchedirError

if TYPE_CHECKING:
    from schedir.simulator import Timeline
    from schedir.simulator.steady_state import SteadyState

_LETTER = 7.2
"""How wide a letter of a picture's text is, in pixels."""
_NARROWEST = 300


@attrs.frozen
class Page:
    """What a writer may want to know beside what it writes.

    `subject` is the schedule's name or file, as the user gave it. `width` and `height` are those
    of the terminal, in columns and lines; `width` is None where nothing is to be folded. With
    `fit` the whole of a drawing is to be as narrow, and with `screen` as low.
    `against` is a second timeline, for the same time axis; `memory` asks for curves of it. `steady`
    is the steady state of a schedule, which the timeline `full` shows. Drawn is what runs from
    `start` to `end`, in the unit of the time axis; None for the end of all. Of a picture `title`
    stands above it, None for the schedule's shape and "" for nothing; `breadth` is that of all of
    it, "16cm" or a number of letters; `greyscale` is for print.
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
    start: float = 0
    end: float | None = None
    title: str | None = None
    breadth: str | float | None = None
    greyscale: bool = False


def window_of(page: Page, *timelines: Timeline | None) -> tuple[float, float]:
    """The times that a page is to show, of timelines in the unit that they are read in.

    Raises SchedirError where nothing lies between them.
    """
    last = max(line.makespan for line in timelines if line is not None)
    end = last if page.end is None else min(page.end, last)
    if not 0 <= page.start < end and last:
        until = "the end" if page.end is None else f"{page.end:g}"
        raise SchedirError(
            f"nothing is to be seen from {page.start:g} to {until}: the timeline goes from 0 to "
            f"{last:g}"
        )
    return page.start, end


def pixels(breadth: str | float | None) -> float | None:
    """The breadth of a picture as the user says it, in pixels. Raises SchedirError for none."""
    if breadth is None:
        return None
    text = str(breadth)
    try:
        found = float(text.removesuffix("cm")) * (96 / 2.54 if text.endswith("cm") else _LETTER)
    except ValueError:
        found = 0
    if not _NARROWEST <= found < math.inf:
        raise SchedirError(f"a picture is at least 8cm wide, or 42 letters, not {text}")
    return found
