"""How schedir's objects show themselves, and the formats in which a timeline is written to a file.

repr        <Schedule 1f1b: 4 ranks, 4 stages, 8 microbatches, 68 actions>
str         what the command prints into a pipe
notebook    the picture where there is one, else that text and its tables as HTML
rich        the text as it is on a terminal

A renderer is imported only when it draws, so that commands start fast and a `repr` is quick.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, singledispatch, wraps
from html import escape
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from schedir.checker import CHANNELS, Report, prove
from schedir.display import DisplayedComparison, DisplayedSearch, DisplayedTimeline
from schedir.errors import SchedirError
from schedir.ir import COMPUTE, Kind, Schedule, dumps, printable
from schedir.render.captions import caption, makespan, readable, title, window_of, with_unit
from schedir.render.diagnostics import full, summary
from schedir.render.text import Block, Piece, Screen, Table, count, plain, rich_of, screen_of, write

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from schedir.simulator import Timeline


def drawn(
    timeline: Timeline,
    screen: Screen,
    *,
    against: Timeline | None = None,
    start: float = 0,
    end: float | None = None,
) -> Iterable[Block]:
    """The timeline in text: its overview on a screen that has a height, or else every action. Of a
    part, from `start` to `end`, every action is drawn on any screen."""
    from schedir.render.terminal_timeline import overview_blocks, timeline_blocks

    lines = readable(timeline, against)
    if screen.width is None or screen.height is None or start or end is not None:
        return timeline_blocks(lines, screen.width, screen.fit, window_of(lines, start, end))
    return overview_blocks(lines, screen.width, screen.height)


@attrs.frozen
class View:
    """How an object is shown: the `line` between the brackets of its `repr`, and its `blocks` on a
    screen, of a window of time if it has times. `timeline` is what a notebook draws, or None."""

    line: str
    blocks: Callable[..., Iterable[Block]]
    timeline: Callable[[], Timeline] | None = None


@singledispatch
def view_of(value: Any) -> View:
    """The view of an object; one of a class that is not registered here has its `str`."""
    return View(str(value), lambda screen, **window: [Piece(str(value))])


@view_of.register
def _(schedule: Schedule) -> View:
    def timeline() -> Timeline:
        """At the default costs, as in `schedir show`. Raises SchedirError."""
        from schedir.simulator import simulate

        return simulate(prove(schedule, CHANNELS[-1]).proved())

    def blocks(screen: Screen, **window: Any) -> Iterable[Block]:
        try:
            simulated = timeline()
        except SchedirError:
            return [Piece(dumps(schedule))]
        return drawn(simulated, screen, **window)

    actions = count(len(schedule.columns), "action")
    return View(f"{title(schedule)}, {actions}", blocks, timeline)


@view_of.register(DisplayedTimeline)
def _(timeline: Any) -> View:
    line = f"{title(timeline.schedule)}; {caption(timeline)}, makespan {makespan(timeline)}"
    return View(line, partial(drawn, timeline), lambda: timeline)


@view_of.register
def _(report: Report) -> View:
    subject = "the schedule" if report.schedule is None else report.schedule.name
    return View(summary(report), lambda screen, **window: full(report, subject))


@view_of.register(DisplayedComparison)
def _(comparison: Any) -> View:
    def blocks(screen: Screen, **window: Any) -> Iterable[Block]:
        from schedir.render.tables import comparison_blocks

        return comparison_blocks(comparison, screen.width)

    best = comparison.best
    chosen = "none can be chosen" if best is None else f"{printable(best.target)} is the best"
    return View(f"{count(len(comparison.rows), 'schedule')}, {chosen}", blocks)


@view_of.register(DisplayedSearch)
def _(found: Any) -> View:
    def blocks(screen: Screen, **window: Any) -> Iterable[Block]:
        from schedir.render.tables import found_text

        return [Piece(found_text(found))]

    value = with_unit(found.value, found.timeline.unit)
    above = f"{found.distance:.2%} above the lower bound"
    return View(f"{found.schedule.name}: {found.objective} {value}, {above}", blocks)


def line(value: object) -> str:
    """The object in one line."""
    return f"<{type(value).__name__} {view_of(value).line}>"


def text(value: object) -> str:
    """The text that the command prints into a pipe."""
    return plain(_blocks(value, Screen())).rstrip("\n")


def _blocks(value: object, screen: Screen) -> list[Block]:
    """The blocks of an object, or the reason why there are none."""
    try:
        return list(view_of(value).blocks(screen))
    except SchedirError as error:
        return [Piece(f"{line(value)}: {error}")]


def show(value: object, width: int | None, start: float = 0, end: float | None = None) -> None:
    """Print the object as its command does."""
    screen = screen_of(sys.stdout) if width is None else Screen(width, fit=True)
    write(view_of(value).blocks(screen, start=start, end=end), sys.stdout)


@attrs.frozen
class Renderable:
    """The object for rich, as wide as the console."""

    value: object

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        return rich_of(_blocks(self.value, Screen(options.max_width, console.height)))


def shown_html(value: object) -> str:
    """The object for a notebook."""
    with suppress(SchedirError):  # the text says why there is no picture
        if (timeline := view_of(value).timeline) is not None:
            return timeline().svg()
    return "".join(
        "".join(map(_table, group)) if kind is Table else f"<pre>{escape(plain(group))}</pre>"
        for kind, group in groupby(_blocks(value, Screen()), type)
    )


def _table(table: Any) -> str:
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows)
    return f"<table><tr>{'</tr><tr>'.join(rows)}</tr></table>"


@attrs.frozen
class Written:
    """The content of a file, text or `data`, and a sentence for each thing that it leaves out."""

    blocks: Iterable[Block]
    left_out: Iterable[str] = ()
    data: bytes | None = None

    @property
    def content(self) -> str | bytes:
        """The whole content at once."""
        return plain(self.blocks) if self.data is None else self.data


def svg(
    timeline: Timeline,
    *,
    against: Timeline | None = None,
    memory: bool = False,
    title: str | None = None,
    width: str | float | None = None,
    greyscale: bool = False,
    start: float = 0,
    end: float | None = None,
) -> Written:
    """A picture; the arguments are those of `display.Looks`."""
    from schedir.render.palette import grey
    from schedir.render.svg import svg_blocks

    pieces = svg_blocks(
        timeline, against, memory=memory, heading=title, breadth=width, start=start, end=end
    )
    left_out = _left_out([timeline, against], COMPUTE)
    return Written(map(grey, pieces) if greyscale else pieces, left_out)


_SIDE = re.compile(r'(?<=dth="|ght=")[.0-9]+')


def _converted(form: str, scale: float) -> Callable[..., Written]:
    """A function that writes the picture of `svg` in another format, with `scale` of its units to a
    pixel."""

    @wraps(svg)
    def write(timeline: Timeline, **looks: Any) -> Written:
        try:
            convert = getattr(import_module("vl_convert"), f"svg_to_{form}")
        except ImportError:
            raise SchedirError(
                f"{form} needs vl-convert-python: pip install 'schedir[pictures]'"
            ) from None
        picture = svg(timeline, **looks)
        scaled = _SIDE.sub(lambda side: str(float(side[0]) * scale), plain(picture.blocks), 2)
        return Written((), picture.left_out, convert(scaled))

    return write


def perfetto(timeline: Timeline, *, against: Timeline | None = None) -> Written:
    """A trace for Perfetto, with the memory of each rank."""
    from schedir.render.perfetto import trace_events

    return Written(trace_events(timeline, against), _left_out([timeline, against], Kind))


def html(timeline: Timeline, *, against: Timeline | None = None, memory: bool = False) -> Written:
    """A page; with `memory` it opens with the memory curves."""
    from schedir.render.html import html_page

    return Written([Piece(html_page(timeline, against, memory=memory))])


TIMELINES: Mapping[str, Callable[..., Written]] = {
    "svg": svg,
    "png": _converted("png", 2),
    "pdf": _converted("pdf", 0.75),
    "perfetto": perfetto,
    "html": html,
}
"""The formats by name."""


def _left_out(lines: Sequence[Timeline | None], kinds: Iterable[Kind]) -> Iterator[str]:
    """A sentence for each timeline with actions of these kinds whose times are unknown: pictures
    leave them out."""
    for line in filter(None, lines):
        columns = line.schedule.columns
        asked = columns.is_kind(*kinds)
        without = np.flatnonzero(asked & ~line.known)
        if len(without):
            rank, index = columns.position(int(without[0]))
            yield (
                f"{len(without)} of {asked.sum()} actions are left out because their times are "
                f"unknown: rank {rank} #{index} {columns.action(int(without[0]))}"
                + (" is the first" if len(without) > 1 else "")
            )
