"""The options of a writer: width, window of time, and looks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from schedir.display import rounded
from schedir.errors import SchedirError

if TYPE_CHECKING:
    from schedir.simulator import Timeline
    from schedir.simulator.steady_state import SteadyState

_LETTER = 7.2
"""The width of a letter of a picture's text, in pixels."""
_NARROWEST = 300


@attrs.frozen
class Page:
    """The options of a writer.

    `subject` is the schedule's name or file, as the user gave it. `width` and `height` are the
    size of the terminal in columns and lines; with a `width` of None nothing is folded. With `fit`
    the whole drawing has at most `width` columns, and with `screen` at most `height` lines.
    `against` is a second timeline for the same time axis. `memory` asks for memory curves. `steady`
    is the steady state of a schedule, and `full` the timeline that shows it. Times from `start` to
    `end` are drawn, in the unit of the time axis; an `end` of None is the end of the timeline. The
    `title` of a picture is the schedule's shape if it is None, and absent if it is "". `breadth` is
    the width of a picture, "16cm" or a number of letters. `greyscale` is for print.
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
    """The window of time that a page shows, in the unit of the timelines.

    Raises SchedirError if the window is empty.
    """
    last = max(line.makespan for line in timelines if line is not None)
    end = last if page.end is None else min(page.end, last)
    if not 0 <= page.start < end and last:
        until = "the end" if page.end is None else rounded(page.end)
        raise SchedirError(
            f"there is nothing to draw from {rounded(page.start)} to {until}: the timeline goes "
            f"from 0 to {rounded(last)}"
        )
    return page.start, end


def pixels(breadth: str | float | None) -> float | None:
    """The width of a picture in pixels, from the user's words. Raises SchedirError."""
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
