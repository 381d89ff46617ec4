"""How schedir's objects show themselves: a view of each class of `schedir.display`.

repr        <Schedule 1f1b: 4 ranks, 4 stages, 8 microbatches, 68 actions>
str         what the command prints into a pipe
notebook    the picture where there is one, else that text and its tables as HTML
rich        the text as it is on a terminal

A view imports what it needs only when it is drawn, so that a `repr` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial, singledispatch
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

import attrs

from schedir.checker import CHANNELS, Report, prove
from schedir.display import DisplayedComparison, DisplayedSearch, DisplayedTimeline
from schedir.errors import SchedirError
from schedir.ir import Schedule, dumps, printable
from schedir.render.captions import caption, makespan, title, with_unit
from schedir.render.diagnostics import full, summary
from schedir.render.outputs import drawn
from schedir.render.text import Block, Piece, Screen, Table, count, plain, rich_of, screen_of, write

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from schedir.simulator import Timeline


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
    screen = screen_of(sys.stdout) if width is None else Screen(width)
    write(view_of(value).blocks(screen, start=start, end=end), sys.stdout)


@attrs.frozen
class Renderable:
    """The object for rich, as wide as the console."""

    value: object

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        return rich_of(_blocks(self.value, Screen(options.max_width, console.height)))


def html(value: object) -> str:
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
